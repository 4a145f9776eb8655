"""Which of several machines this one is, and where their trainer ranks meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.surface import TOKEN_VARIABLE, token_from_environment
from grpo_async.processes.addresses import interface_of, own_address_towards, resolve_host
from grpo_async.utils.loopback import is_loopback

NODE_RANK_VARIABLE = "GRPO_ASYNC_NODE_RANK"
"""Rank of this machine, where `--node-rank` is not given; the launcher sets it for its trainer."""
_OF_SLURM = "SLURM_NODEID"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """This machine among those that train. With one machine nothing but the defaults.

    `address` and `store_port` are node 0's: where the store of the trainer's ranks listens. `own_address` is this machine's in
    the same network. `socket_names` are the variables that bind gloo and NCCL to its interface; what the user has set stays.
    """

    rank: int = 0
    count: int = 1
    address: str = ""
    store_port: int = 0
    own_address: str = ""
    socket_names: Mapping[str, str] | None = None

    @property
    def is_alone(self) -> bool:
        return self.count == 1


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
        (f"${_OF_SLURM}", environment.get(_OF_SLURM)),
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


def leading_address(config: ExperimentConfig) -> str:
    """The address that node 0 listens on.

    Raises:
        ConfigError: `launch.rdzv` names a host that is not known, or that other machines take for themselves.
    """
    host, _ = config.launch.meeting_point
    address = resolve_host(host, "launch.rdzv")
    if is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            f"launch.rdzv: {host} is {address} on this machine (see /etc/hosts), where no other machine can come; name the "
            "address in the network that the machines share"
        )
    return address


def address_towards_leader(config: ExperimentConfig) -> tuple[str, str]:
    """Node 0's address, and this machine's own in the same network.

    Raises:
        ConfigError: the host of `launch.rdzv` is not known, or no route leads there.
    """
    host, port = config.launch.meeting_point
    address = resolve_host(host, "launch.rdzv")
    return address, own_address_towards(address, port, "launch.rdzv")


def socket_names(own_address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make gloo and NCCL listen on the interface with `own_address` only; without those that are set already."""
    name = interface_of(own_address)
    if name is None:
        return {}
    return {variable: name for variable in _INTERFACES if not environment.get(variable)}
