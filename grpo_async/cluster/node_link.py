"""The end of a machine that follows: joins node 0, agrees with it on what is run, and hears when to start and to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ValidationError

from grpo_async import __version__
from grpo_async.cluster.node_channel import LostError, NodeChannel, connect, new_secret, request_admission
from grpo_async.cluster.nodes import shared_token
from grpo_async.config import ExperimentConfig
from grpo_async.config.differences import differences
from grpo_async.errors import ConfigError, DeadlineError
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.run_directory import RunDir, attempt_config, write_atomically

_RETRY_S = 1.0  # node 0 may come later; a refused connection costs nothing
_CONNECT_S = 10.0


def _versions() -> dict[str, str]:
    """Of what all machines compute with: they make pieces of one computation."""
    return {"grpo_async": __version__, **{name: version(name) for name in ("torch", "transformers")}}


class Offer(BaseModel):
    """What node 0 writes into the folder of the attempt, beside the configuration, for the machines that join."""

    secret: str
    """That of the handshake: a machine that finds it here has the same run directory as node 0."""
    versions: Mapping[str, str]
    assignment: Assignment
    """Node 0's."""

    @staticmethod
    def path(attempt: Path) -> Path:
        return attempt / "nodes.json"

    @classmethod
    def leave(cls, assignment: Assignment) -> str:
        """Write the offer of node 0; returns its secret."""
        offer = cls(secret=new_secret(), versions=_versions(), assignment=assignment)
        write_atomically(cls.path(assignment.attempt_dir), offer.model_dump_json())
        return offer.secret

    @classmethod
    def read(cls, attempt: Path, secret: str, config: ExperimentConfig) -> Offer:
        """The offer, when this machine can take part in its run.

        Raises:
            ConfigError: it cannot: the run directory is not shared, or the configuration or the versions differ.
        """
        import yaml

        from grpo_async.config.loader import dump_config

        not_shared = ConfigError(
            f"run.dir: {attempt.parents[1]} is not the folder of node 0; every rank writes its part of a checkpoint, so it must "
            "be on a file system that all machines share, under the same path"
        )
        try:
            offer = cls.model_validate_json(cls.path(attempt).read_text(encoding="utf-8"))
            its_config = attempt_config(attempt).read_text(encoding="utf-8")
        except (OSError, ValidationError) as error:
            raise not_shared from error
        if offer.secret != secret:
            raise not_shared
        own_config, own_versions = dump_config(config), _versions()
        if own_config != its_config:
            listed = [f"  {each}" for each in differences([yaml.safe_load(its_config), yaml.safe_load(own_config)])]
            raise ConfigError("\n".join(["its configuration is not that of node 0 (node 0 -> here):", *listed]))
        if own_versions != offer.versions:
            others = [
                f"{name} {offer.versions.get(name)} -> {found}"
                for name, found in own_versions.items()
                if found != offer.versions.get(name)
            ]
            raise ConfigError(f"other versions are installed than on node 0 (node 0 -> here): {', '.join(others)}")
        return offer


class NodeLink:
    """A machine that has joined; see `join`.

    Attributes:
        attempt: folder of the attempt's logs.
        started: node 0 says that all machines are there.
        ended: the run is over: `exit_code` and `error` are node 0's, or that it is gone.
    """

    def __init__(self, channel: NodeChannel, attempt: Path, offer: Offer) -> None:
        self.attempt = attempt
        self.offer = offer
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.exit_code: int | None = None
        self.error: str | None = None
        self._channel = channel
        self._listening = asyncio.ensure_future(self._listen())
        channel.send("ready")

    def signal(self, number: signal.Signals) -> None:
        """Tell node 0 that this machine is to stop."""
        self._channel.send("signal", name=number.name)

    def exited(self, status: int, error: str | None) -> None:
        """Tell node 0 how the trainer of this machine ended."""
        self._channel.send("exited", status=status, error=error)

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()
        await self._listening

    async def _listen(self) -> None:
        while not self.ended.is_set():
            try:
                message = await self._channel.receive()
            except LostError as error:
                self.error = f"node 0 is gone ({error}): its launcher was killed, or the machine or the network failed"
                self.ended.set()
                return
            match message:
                case {"kind": "start"}:
                    self.started.set()
                case {"kind": "end", "exit_code": int(code)}:
                    said = message.get("error")
                    self.exit_code, self.error = code, None if said is None else str(said)
                    self.ended.set()
                case _:
                    continue  # a newer node 0 may say more


async def join(
    config: ExperimentConfig,
    node: Node,
    run_dir: RunDir,
    *,
    interrupted: asyncio.Event,
    on_wait: Callable[[], None],
) -> NodeLink | None:
    """Come to node 0, which may not be there yet, and check that both mean the same run. None when `interrupted` was set first.

    Args:
        on_wait: called once when node 0 is not there yet.

    Raises:
        DeadlineError: nobody was there within `launch.rdzv_timeout_s`.
        ConfigError: node 0 does not admit this machine, or has another configuration, version or run directory.
    """
    channel = await _reach(config, node, interrupted, on_wait)
    if channel is None:
        return None
    link: NodeLink | None = None
    try:
        host = socket.gethostname()
        name, secret = await request_admission(channel, shared_token(), rank=node.rank, host=host)  # within HANDSHAKE_S
        attempt = run_dir.logs / name
        link = NodeLink(channel, attempt, Offer.read(attempt, secret, config))
    except LostError as error:
        raise ConfigError(f"launch.rdzv: node 0 ({node.address}) does not admit this machine: {error}") from error
    except ConfigError as error:
        channel.send("refused", reason=str(error))
        raise ConfigError(f"this machine cannot take part as node {node.rank}: {error}") from error
    finally:
        if link is None:
            await channel.close()
    return link


async def _reach(
    config: ExperimentConfig, node: Node, interrupted: asyncio.Event, on_wait: Callable[[], None]
) -> NodeChannel | None:
    timeout_s, port = config.launch.rdzv_timeout_s, config.launch.meeting_point[1]
    last: OSError | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while not interrupted.is_set():
                try:
                    return await connect(node.address, port, _CONNECT_S)
                except OSError as error:
                    if last is None:
                        on_wait()
                    last = error
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), _RETRY_S)
            return None
    except TimeoutError as error:
        raise DeadlineError(
            f"node 0 to listen at {config.launch.rdzv} (launch.rdzv)",
            waited_s=timeout_s,
            setting="launch.rdzv_timeout_s",
            hint=f"It is where `grpo-async train CONFIG --node-rank 0` runs; the last attempt: {last}",
        ) from error
