"""The end of a machine that follows: joins node 0, agrees with it on what is run, and hears when to begin and to end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from grpo_async import __version__
from grpo_async.cluster.node_channel import LostError, NodeChannel, RefusedError, apply, connect
from grpo_async.config import ExperimentConfig
from grpo_async.config.differences import differences
from grpo_async.errors import ConfigError, DeadlineError
from grpo_async.inference.surface import TransportKind
from grpo_async.rundir import RunDir, write_atomically

_RETRY_S = 1.0  # node 0 may come later; a refused connection costs nothing
_CONNECT_S = 10.0
_FLUSH_S = 5.0
_MARK = "nodes.json"
_PACKAGES = ("torch", "transformers")  # pieces of one computation: their versions must not differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What node 0 tells every machine that joins."""

    config: str
    """The resolved configuration; the others have to come to the same one by themselves."""
    versions: Mapping[str, str]
    attempt: str
    """Name of the attempt's folder in the run directory."""
    mark: str
    """What the file nodes.json in that folder holds: seen by a machine, it has the same run directory."""
    store_port: int
    server_urls: tuple[str, ...]
    transport: TransportKind
    resume_step: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Offer:
        return cls(**{**content, "server_urls": tuple(content["server_urls"])})


def own_versions() -> dict[str, str]:
    """Versions of what all machines compute with."""
    return {"grpo_async": __version__, **{name: version(name) for name in _PACKAGES}}


def leave_mark(attempt: Path, mark: str) -> None:
    """Write what the other machines look for."""
    write_atomically(attempt / _MARK, json.dumps({"mark": mark}))


def objection(offer: Offer, config: ExperimentConfig, run_dir: RunDir) -> str | None:
    """Why this machine cannot take part in the run of `offer`, or None. Looks at the run directory."""
    import yaml

    from grpo_async.config.loader import dump_config

    own = dump_config(config)
    if own != offer.config:
        listed = [f"  {each}" for each in differences([yaml.safe_load(offer.config), yaml.safe_load(own)])]
        return "\n".join(["its configuration is not that of node 0 (node 0 -> here):", *listed])
    if (versions := own_versions()) != offer.versions:
        listed = [
            f"{name} {offer.versions.get(name)} -> {found}"
            for name, found in versions.items()
            if offer.versions.get(name) != found
        ]
        return f"other versions are installed than on node 0 (node 0 -> here): {', '.join(listed)}"
    path = run_dir.logs / offer.attempt / _MARK
    try:
        seen = json.loads(path.read_text(encoding="utf-8")).get("mark")
    except (OSError, ValueError):
        seen = None
    if seen != offer.mark:
        return (
            f"run.dir: {run_dir.root} is not the folder of node 0; every rank writes its part of a checkpoint, so it must be on a "
            "file system that all machines share, under the same path"
        )
    return None


class NodeLink:
    """A machine that has joined. Use `join` as an async context manager, then `listen` as a task.

    Attributes:
        started: node 0 says that all machines are there.
        ended: the run is over: `exit_code` and `error` are node 0's, or that it is gone.
    """

    def __init__(self, channel: NodeChannel, offer: Offer) -> None:
        self.offer = offer
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.exit_code: int | None = None
        self.error: str | None = None
        self._channel = channel
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def join(
        cls,
        config: ExperimentConfig,
        *,
        address: str,
        rank: int,
        token: str,
        run_dir: RunDir,
        interrupted: asyncio.Event,
        on_wait: Callable[[], None],
    ) -> Self | None:
        """Come to node 0, which may not be there yet, and look whether both mean the same run. None when a signal came first.

        Args:
            on_wait: called once when node 0 is not there yet.

        Raises:
            DeadlineError: nobody was there within `launch.rdzv_timeout_s`.
            ConfigError: node 0 does not take this machine, or has another configuration, version or run directory.
        """
        channel = await cls._reach(config, address, interrupted, on_wait)
        if channel is None:
            return None
        try:
            answer = await apply(channel, token, rank=rank, host=socket.gethostname())  # within HANDSHAKE_S
            offer = Offer.from_json(answer)
            reason = objection(offer, config, run_dir)
            if reason is not None:
                channel.send("refused", reason=reason)
                await channel.flush(_FLUSH_S)
                raise ConfigError(f"this machine cannot take part as node {rank}: {reason}")
        except RefusedError as error:
            channel.close()
            raise ConfigError(f"node 0 ({address}) does not take this machine: {error}") from error
        except LostError as error:
            channel.close()
            raise ConfigError(f"launch.rdzv: node 0 ({address}) did not let this machine join: {error}") from error
        except ConfigError:
            channel.close()
            raise
        link = cls(channel, offer)
        channel.send("ready")
        channel.beat()
        link._listening = asyncio.ensure_future(link._listen())
        return link

    @classmethod
    async def _reach(
        cls, config: ExperimentConfig, address: str, interrupted: asyncio.Event, on_wait: Callable[[], None]
    ) -> NodeChannel | None:
        loop = asyncio.get_running_loop()
        timeout_s = config.launch.rdzv_timeout_s
        ends_at = loop.time() + timeout_s
        _, port = config.launch.meeting_point
        has_waited = False
        while loop.time() < ends_at:
            try:
                return await connect(address, port, _CONNECT_S)
            except OSError as error:
                last = error
            if not has_waited:
                on_wait()
                has_waited = True
            try:
                async with asyncio.timeout(min(_RETRY_S, max(0.0, ends_at - loop.time()))):
                    await interrupted.wait()  # for _RETRY_S; the loop ends after launch.rdzv_timeout_s
                    return None
            except TimeoutError:
                continue
        raise DeadlineError(
            f"node 0 to listen at {config.launch.rdzv} (launch.rdzv)",
            waited_s=timeout_s,
            setting="launch.rdzv_timeout_s",
            hint=f"It is where `grpo-async train CONFIG --node-rank 0` runs; the last attempt: {last}",
        )

    def signal(self, number: signal.Signals) -> None:
        """Tell node 0 that this machine is to stop."""
        self._channel.send("signal", name=number.name)

    def exited(self, status: int, error: str | None) -> None:
        """Tell node 0 how the trainer of this machine ended."""
        self._channel.send("exited", status=status, error=error)

    async def close(self) -> None:
        """Hang up."""
        await self._channel.flush(_FLUSH_S)
        self._channel.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

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
                    words = message.get("error")
                    self.exit_code, self.error = code, None if words is None else str(words)
                    self.ended.set()
                case _:
                    continue  # a newer node 0 may say more
