"""Which of several machines this one is, and where they meet: the options of the command say it, else variables of its environment.

    --node-rank K, --master-addr HOST      by hand
    NODE_RANK or GROUP_RANK, NNODES        set by torchrun and other launchers, with MASTER_ADDR and MASTER_PORT
    SLURM_NODEID                           a task of `srun`: node 0 is the first machine of the step
    JOB_COMPLETION_INDEX                   a pod of a Kubernetes Indexed Job with a headless service: node 0 is the pod JOB-0

The first source that gives a rank wins. `launch.rdzv` goes before every other rendezvous address but --master-addr.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.processes.addresses import interface_of, resolve_host
from grpo_async.processes.assignment import Node
from grpo_async.utils.network import WILDCARDS, binding_error, check_host, host_and_port, is_loopback
from grpo_async.utils.text import count

DEFAULT_PORT = 29400
"""Port of the rendezvous, where no other is given; torchrun's."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_RENDEZVOUS = "the rendezvous address (launch.rdzv, --master-addr, $MASTER_ADDR)"


_COUNTS = {"NODE_RANK": "NNODES", "GROUP_RANK": "NNODES", "SLURM_NODEID": "SLURM_NNODES", "JOB_COMPLETION_INDEX": ""}
"""Variables that have the rank of this machine, and with each the one that has the number of machines."""


def _first_machine(rank_variable: str, environment: Mapping[str, str]) -> str:
    """Host of node 0, by the scheduler that has set the rank; "" where it does not say."""
    if rank_variable == "SLURM_NODEID":
        return first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "")
    if rank_variable == "JOB_COMPLETION_INDEX":
        # "job-3.service.space.svc.cluster.local" -> "job-0.service.space.svc.cluster.local"; a pod without a service has no domain
        own, _, domain = socket.getfqdn().partition(".")
        return f"{own.rpartition('-')[0]}-0.{domain}" if domain else ""
    return ""


def find_node(
    config: ExperimentConfig,
    *,
    node_rank: int | None = None,
    master_addr: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Node:
    """This machine in the run. `address` is what node 0 is called there, which may be a host name: `leading_node` and
    rendezvous.join look it up.

    Args:
        node_rank: --node-rank.
        master_addr: --master-addr, HOST or HOST:PORT.

    Raises:
        ConfigError: the rank or the address is not known, the rank is none of this run, or another number of machines was started
            than `launch.nodes` says.
    """
    nodes = config.launch.nodes
    if nodes.count == 1 and not node_rank:
        return Node()  # a job script may set the variables for something else
    source = next((name for name in _COUNTS if environment.get(name)), "") if node_rank is None else ""
    rank = _rank(config, f"${source}" if source else "--node-rank", environment[source] if source else node_rank)
    said = environment.get(_COUNTS[source]) if source else None
    if said and said != str(nodes.count):
        raise ConfigError(
            f"launch.nodes: {_described(config)}, and ${_COUNTS[source]} is {said}; start the command on as many machines as "
            "launch.nodes has"
        )
    if master_addr is not None:
        host, port = _host_and_port(master_addr)
    elif config.launch.rdzv is not None:
        host, port = config.launch.rendezvous_address
    else:
        host = environment.get("MASTER_ADDR") or _first_machine(source, environment)
        port = _port(environment.get("MASTER_PORT") or str(DEFAULT_PORT))
    if not host:
        raise ConfigError(
            f"launch.nodes: {_described(config)}, and no rendezvous address is set; set launch.rdzv to HOST:PORT of the machine "
            "with node rank 0, give --master-addr, or set $MASTER_ADDR"
        )
    try:
        check_host(host)
    except ValueError as error:
        raise ConfigError(f"{_RENDEZVOUS}: {error}") from error
    return Node(rank=rank, num_train=nodes.train, num_infer=nodes.infer, address=host, port=port)


def _rank(config: ExperimentConfig, name: str, given: str | int | None) -> int:
    """`given` as the rank of a machine of this run; `name` says where it is from."""
    text, count = str(given), config.launch.nodes.count
    if given is None:
        raise ConfigError(
            f"launch.nodes: {_described(config)}, and this machine's rank is not set; add --node-rank K (0 leads, those "
            "that train come first), or start it by Slurm, Kubernetes or with $NODE_RANK"
        )
    if not text.isdecimal() or int(text) >= count:
        raise ConfigError(
            f"{name}: {text!r} is not a machine of this run; launch.nodes: {_described(config)}, so it is 0 to {count - 1}"
        )
    return int(text)


def _described(config: ExperimentConfig) -> str:
    nodes = config.launch.nodes
    return f"{count(nodes.train, 'machine')} to train" + (f" and {nodes.infer} to serve" if nodes.infer else "")


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        host, port = host_and_port(text)
    except ValueError as error:
        raise ConfigError(f"--master-addr: {text!r} is neither HOST nor HOST:PORT") from error
    if port == 0:
        raise ConfigError(f"--master-addr: {text!r} has port 0, which is no port to meet at (1 to 65535)")
    return host, port or DEFAULT_PORT


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        raise ConfigError(f"$MASTER_PORT: {text!r} is not a port (1 to 65535)")
    return int(text)


def first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: "node[01-04,7],gpu3" -> "node01"; "rack[1-2]n[3,5]" -> "rack1n3"."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else nodes


def leading_node(node: Node) -> Node:
    """This machine as node 0, before anything is written.

    Raises:
        ConfigError: the rendezvous address is a host that is not known, one that other machines take for themselves, that of all
            networks, or one where this machine cannot listen.
    """
    if node.is_alone:
        return node
    address = resolve_host(node.address, _RENDEZVOUS)
    if is_loopback(address) and not is_loopback(node.address):
        raise ConfigError(
            f"{_RENDEZVOUS}: {node.address} is {address} on this machine (see /etc/hosts), where no other machine can come; "
            "name the address in the network that the machines share"
        )
    if address in WILDCARDS:
        raise ConfigError(
            f"{_RENDEZVOUS}: {node.address} would listen on every network; name the address of node 0 in the one that the machines "
            "share"
        )
    node = node.model_copy(update={"address": address, "own_address": address})
    if (error := binding_error(address, node.port)) is not None:
        raise cannot_listen(node, error) from error
    return node


def cannot_listen(node: Node, error: OSError) -> ConfigError:
    """The error of node 0 when it cannot open the store at its address."""
    return ConfigError(
        f"{_RENDEZVOUS}: {node.endpoint} cannot be bound on this machine, which is node 0 ({error}); name an address of this "
        "machine and a port that nothing uses"
    )


def socket_names(own_address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make gloo and NCCL listen on the interface with `own_address` only; without those that are set already."""
    name = interface_of(own_address)
    if name is None:
        return {}
    return {variable: name for variable in _INTERFACES if not environment.get(variable)}
