"""How the machines of a run come together before anything is started on them: node 0 gathers (`gather`), the others `join`."""

from __future__ import annotations

import contextlib
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from grpo_async import __version__
from grpo_async.cluster.launcher_store import (
    HEARTBEAT_S,
    PREFIX,
    STORE_TIMEOUT_S,
    ForgedError,
    LauncherStore,
    read_signed,
)
from grpo_async.cluster.nodes import cannot_listen
from grpo_async.config import ExperimentConfig
from grpo_async.config.base import EngineName
from grpo_async.config.diff import differences
from grpo_async.config.loader import read_values
from grpo_async.errors import ConfigError, DeadlineError, Problems, RunError, message_of
from grpo_async.processes.addresses import own_urls
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.run_directory import RunDir, attempt_config, attempt_number
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.safe_text import plain

_RUN = "run"
_CONNECT_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 10.0  # for the others to read that the run is over


class NodeInfo(BaseModel):
    """A machine that is ready, and the servers that it is about to start."""

    rank: int
    host: str
    urls: tuple[str, ...] = ()
    engine: Literal[EngineName, "external"] = "external"
    on_gpu: bool = False
    """Whether its servers work on GPUs."""

    @classmethod
    def of(cls, config: ExperimentConfig, node: Node, engine: EngineChoice) -> NodeInfo:
        """This machine, which starts its servers soon: one for each of `inference.replicas`, unless others run them."""
        urls = own_urls(config, node.own_address) if node.serves else ()
        return cls(rank=node.rank, host=platform.node(), urls=urls, engine=engine.engine, on_gpu=engine.on_gpu)

    @property
    def name(self) -> str:
        """For messages: "node 2 (gpu-7)"."""
        return f"node {self.rank} ({plain(self.host)})"


def versions() -> dict[str, str]:
    """Versions that must be equal on all machines."""
    return {"grpo_async": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def _ticks(ends_at: float) -> Iterator[None]:
    """Yield every HEARTBEAT_S until `ends_at`, at least once: no wait of the store notices a signal."""
    yield
    while time.monotonic() <= ends_at:
        time.sleep(HEARTBEAT_S)
        yield


# ---- node 0 ----


@contextlib.contextmanager
def hosting(node: Node, token: str) -> Iterator[LauncherStore]:
    """Open the store of a run; when something raises inside, the machines that have joined are told.

    Raises:
        ConfigError: this machine cannot listen there.
    """
    try:
        launchers = LauncherStore.open(node.address, node.port, token, count=node.count)
    except OSError as error:
        raise cannot_listen(node, error) from error
    try:
        yield launchers
    except BaseException as error:
        for rank in range(1, node.count):
            launchers.post(rank, "end", exit_code=1, error=f"node 0 could not begin: {message_of(error)}")
        deliver_last_messages(launchers, range(1, node.count))
        raise


def deliver_last_messages(launchers: LauncherStore, ranks: range) -> None:
    """Wait until the others have read the last message to them, or are gone: the store ends with this process."""
    with contextlib.suppress(ForgedError):
        for _ in _ticks(time.monotonic() + _END_TIMEOUT_S):
            launchers.exchange()
            gone = launchers.silent(ranks, longer_than_s=5.0)
            if all(launchers.has_read(rank) or rank in gone for rank in ranks):
                return


def gather(
    launchers: LauncherStore,
    config: ExperimentConfig,
    assignment: Assignment,
    own: NodeInfo,
    say: Callable[[str], None],
) -> list[NodeInfo]:
    """Wait until every machine is ready; returns the others, in the order of their ranks.

    Args:
        assignment: node 0's, as far as it is known.
        own: node 0.

    Raises:
        DeadlineError: not all came within `launch.rdzv_timeout_s`.
        RunError: one cannot take part, is gone again, or serves in another way.
    """
    timeout_s, count = config.launch.rdzv_timeout_s, assignment.node.count
    launchers.put(_RUN, {"attempt": attempt_number(assignment.attempt_dir), "versions": versions()})
    ready: dict[int, NodeInfo] = {}
    missing = list(range(1, count))
    say(f"waiting for {_nodes(missing)} at {assignment.node.endpoint}")
    for _ in _ticks(time.monotonic() + timeout_s):
        for message in launchers.exchange():
            sender = NodeInfo.model_validate(message["node"])
            if message["kind"] == "refused":
                raise RunError(f"{sender.name} cannot take part: {plain(str(message['reason']))}")
            ready[sender.rank] = sender
            missing = [rank for rank in missing if rank != sender.rank]
            say(f"{sender.name} has joined{f'; still missing: {_nodes(missing)}' if missing else ''}")
        if gone := launchers.silent(list(ready)):
            raise RunError(
                f"{ready[gone[0]].name} was lost while others were joining: its launcher, the machine or the network failed"
            )
        if not missing:
            break
    else:
        raise DeadlineError(
            f"{_nodes(missing)} to join",
            waited_s=timeout_s,
            setting="launch.rdzv_timeout_s",
            hint="On each machine: grpo-async train CONFIG, started by the scheduler or with --node-rank K.",
        )
    found = [ready[rank] for rank in sorted(ready)]
    serving = [node for node in (own, *found) if node.urls]
    if len({(node.engine, node.on_gpu) for node in serving}) > 1:
        several = "; ".join(f"{m.name}: {m.engine}{' on GPUs' if m.on_gpu else ''}" for m in serving)
        raise RunError(f"the machines serve with different engines or devices ({several}); set inference.engine")
    return found


def _nodes(ranks: Any) -> str:
    """ "node 2" or "nodes 1 and 2"."""
    *most, last = map(str, ranks)
    return f"nodes {', '.join(most)} and {last}" if most else f"node {last}"


# ---- the others ----


class JoinedRun(NamedTuple):
    """This machine in the run of node 0. `assignment` is node 0's, with `node`, `run_dir` and `attempt_dir` of this machine."""

    launchers: LauncherStore
    token: str
    assignment: Assignment


def join(
    config: ExperimentConfig, node: Node, run_dir: RunDir, *, engine: EngineChoice, say: Callable[[str], None]
) -> JoinedRun:
    """Connect to node 0, which may not have started yet, check that both have the same run, and wait until all have joined.

    Args:
        node: this machine; `address` may be a host name.
        engine: of the servers here.

    Raises:
        DeadlineError: node 0, or another machine, did not come within `launch.rdzv_timeout_s`.
        ConfigError: this machine cannot take part: another run, configuration or version, or a rank that is taken.
        RunError: node 0 has ended the run, or is gone.
    """
    from torch.distributed import PrefixStore, TCPStore

    ends_at = time.monotonic() + config.launch.rdzv_timeout_s
    where = node.endpoint
    address, own_address = _reach(config, node, ends_at, say)
    node = node.model_copy(update={"address": address, "own_address": own_address})
    try:
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        store = TCPStore(address, node.port, timeout=timeout, wait_for_workers=False, is_master=False)
        token, run = _read_run(PrefixStore(PREFIX, store), run_dir, where, ends_at)
        launchers = LauncherStore(store, token, rank=node.rank, count=node.count)
        if not launchers.claim():
            raise ConfigError(f"node {node.rank} has joined already; each machine needs its own --node-rank")
        own = NodeInfo(rank=node.rank, host=platform.node())
        try:
            attempt_dir = run_dir.attempt(run["attempt"])
            _compare(config, attempt_dir, run["versions"])
            own = NodeInfo.of(config, node, engine)
            launchers.post(0, "ready", node=own.model_dump())
            say(f"node {node.rank} has joined node 0 ({address}), and waits for the others")
            assignment = _wait_for_start(launchers, ends_at, config)
        except BaseException as error:  # a signal, too: node 0 would wait for this machine
            with contextlib.suppress(RuntimeError):  # node 0 is gone
                launchers.post(0, "refused", node=own.model_dump(), reason=message_of(error))
                launchers.exchange()
            if isinstance(error, ConfigError):
                raise ConfigError(f"this machine cannot take part as node {node.rank}: {error}") from error
            raise
    except RuntimeError as error:  # of the store; our own errors are not RuntimeErrors
        raise RunError(f"node 0 ({address}) is gone: its launcher has ended ({error})") from error
    own_places = {"run_dir": run_dir, "attempt_dir": attempt_dir, "node": node}
    return JoinedRun(launchers, token, assignment.model_copy(update=own_places))


def _reach(config: ExperimentConfig, node: Node, ends_at: float, say: Callable[[str], None]) -> tuple[str, str]:
    """Address of node 0, and of this machine in the same network, as soon as node 0 listens. A host name that does not resolve may
    be that of a pod which has not started yet."""
    last: OSError | None = None
    for _ in _ticks(ends_at):
        try:
            with socket.create_connection((node.address, node.port), timeout=_CONNECT_TIMEOUT_S) as connection:
                return str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError as error:
            if last is None:
                say(f"waiting for node 0 at {node.endpoint}")
            last = error
    raise DeadlineError(
        f"node 0 to listen at {node.endpoint}",
        waited_s=config.launch.rdzv_timeout_s,
        setting="launch.rdzv_timeout_s",
        hint=f"It is the machine with node rank 0 of the same command; the last attempt: {last}",
    ) from last


def _read_run(store: Any, run_dir: RunDir, where: str, ends_at: float) -> tuple[str, dict[str, Any]]:
    """The token of the run, and what node 0 has put there. The file may take a while to be seen through a network file system."""
    for _ in _ticks(ends_at):
        if store.check([_RUN]) and run_dir.token.is_file():
            token = run_dir.token.read_text(encoding="utf-8")
            with contextlib.suppress(ForgedError):
                return token, read_signed(token, _RUN, store.get(_RUN))
    raise ConfigError(
        f"run.dir: {run_dir.root} has no token of the run that node 0 at {where} has begun; "
        "it must be on a file system that all machines share, under the same path, and no other run may use that address"
    )


def _compare(config: ExperimentConfig, attempt: Path, its_versions: Mapping[str, str]) -> None:
    """Raises ConfigError: this machine has other versions than node 0 (which may have other settings), or another configuration."""
    others = [
        f"{name} {its_versions.get(name)} -> {found}"
        for name, found in versions().items()
        if found != its_versions.get(name)
    ]
    if others:
        raise ConfigError(f"other versions are installed than on node 0 (node 0 -> here): {', '.join(others)}")
    problems = Problems()
    its_config, own_config = read_values(attempt_config(attempt), problems), config.model_dump(mode="json")
    problems.raise_if_any()
    if own_config != its_config:
        listed = [f"  {each}" for each in differences([its_config, own_config])]
        raise ConfigError("\n".join(["its configuration is not that of node 0 (node 0 -> here):", *listed]))


def _wait_for_start(launchers: LauncherStore, ends_at: float, config: ExperimentConfig) -> Assignment:
    for _ in _ticks(ends_at):
        for message in launchers.exchange():
            match message:
                case {"kind": "start", "assignment": dict(assignment)}:
                    return Assignment.model_validate(assignment)
                case {"kind": "end"}:
                    raise RunError(f"node 0 has ended the run: {plain(str(message.get('error')))}")
        if launchers.silent([0]):
            raise RunError("node 0 is gone: the machine or the network failed")
    raise DeadlineError(
        "all machines to join node 0",
        waited_s=config.launch.rdzv_timeout_s,
        setting="launch.rdzv_timeout_s",
        hint="Node 0 says which ones are missing.",
    )
