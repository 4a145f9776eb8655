"""Which of several machines this one is, and where their trainer ranks meet."""

from __future__ import annotations

import os
from collections.abc import Mapping

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.api import TOKEN_VARIABLE, token_from_environment
from grpo_async.processes.addresses import interface_of, reachable_address, resolve_host
from grpo_async.processes.assignment import Node
from grpo_async.processes.machine import check_can_listen, free_ports
from grpo_async.utils.network import is_loopback

NODE_RANK_VARIABLE = "GRPO_ASYNC_NODE_RANK"
"""Rank of this machine, where `--node-rank` is not given."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_node_rank(config: ExperimentConfig, given: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Rank of this machine: `--node-rank`, else $GRPO_ASYNC_NODE_RANK, else $SLURM_NODEID; 0 where there is one machine only.

    Raises:
        ConfigError: it is not known, or no rank of this run.
    """
    count = config.launch.nodes
    if given is None and count == 1:
        return 0  # a job script may set the variables for something else
    for name, text in (
        ("--node-rank", None if given is None else str(given)),
        (f"${NODE_RANK_VARIABLE}", environment.get(NODE_RANK_VARIABLE)),
        ("$SLURM_NODEID", environment.get("SLURM_NODEID")),
    ):
        if text is None:
            continue
        if not text.isdecimal() or int(text) >= count:
            raise ConfigError(
                f"{name}: {text!r} is no machine of this run; launch.nodes: {count}, so it is 0 to {count - 1}"
            )
        return int(text)
    raise ConfigError(
        f"launch.nodes: {count} machines train, and it is not said which of them this one is; add --node-rank K (0 leads), or "
        f"set ${NODE_RANK_VARIABLE}"
    )


def shared_token() -> str:
    """The secret by which the machines of a run know each other, which is that of the servers, too.

    Raises:
        ConfigError: it is not set.
    """
    token = token_from_environment()
    if token is None:
        raise ConfigError(
            f"launch.nodes: the machines know each other by ${TOKEN_VARIABLE}, which is not set; set the same secret on all of "
            "them, such as the output of `openssl rand -hex 32`"
        )
    return token


def leading_node(config: ExperimentConfig) -> Node:
    """This machine as node 0, before anything is written.

    Raises:
        ConfigError: `launch.rdzv` names a host that is not known, that other machines take for themselves, or where this
            machine cannot listen; or there is no common token.
    """
    if config.launch.nodes == 1:
        return Node()
    shared_token()
    host, port = config.launch.meeting_point
    address = resolve_host(host, "launch.rdzv")
    if is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            f"launch.rdzv: {host} is {address} on this machine (see /etc/hosts), where no other machine can come; name the "
            "address in the network that the machines share"
        )
    check_can_listen(address, port, "launch.rdzv")
    return Node(count=config.launch.nodes, address=address, store_port=free_ports(address, 1)[0], own_address=address)


def following_node(config: ExperimentConfig, rank: int) -> Node:
    """This machine as node `rank`; `store_port` is for node 0 to say.

    Raises:
        ConfigError: the host of `launch.rdzv` is not known, or no route leads there.
    """
    host, port = config.launch.meeting_point
    address = resolve_host(host, "launch.rdzv")
    own_address = reachable_address(address, port, "launch.rdzv")
    return Node(rank=rank, count=config.launch.nodes, address=address, own_address=own_address)


def socket_names(own_address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make gloo and NCCL listen on the interface with `own_address` only; without those that are set already."""
    name = interface_of(own_address)
    if name is None:
        return {}
    return {variable: name for variable in _INTERFACES if not environment.get(variable)}
