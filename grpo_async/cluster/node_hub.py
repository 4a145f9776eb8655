"""Node 0's end of the launchers' channel: waits for the other machines, tells them to begin and to end, notices what they lose.

waits for   every other machine to join, `launch.rdzv_timeout_s` long; then only watches
trouble     set as soon as the run cannot go on: a machine has gone, its trainer has failed, its configuration is another
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from grpo_async.cluster.node_channel import LostError, NodeChannel, admit, open_server
from grpo_async.errors import ConfigError
from grpo_async.processes.wording import plain

_FLUSH_S = 5.0
_READY_S = 60.0  # a machine compares a configuration and looks at a folder


class HubListener(Protocol):
    """Who is told what the other machines do."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def remote_signal(self, number: signal.Signals) -> None:
        """The launcher of another machine got a signal; the run is to stop as if it had come here."""


@dataclass(slots=True)
class _Node:
    rank: int
    host: str
    channel: NodeChannel
    is_ready: bool = False
    exit_status: int | None = None
    """Of its trainer."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Its trainer has ended, or it is gone."""

    @property
    def name(self) -> str:
        return f"node {self.rank} ({plain(self.host)})"


class NodeHub:
    """Use as an async context manager: listens while it is open.

    Args:
        address: of this machine, where it listens; `port` that of `launch.rdzv`.
        offer: what every machine is told when it joins.

    Attributes:
        all_ready: every machine is there and has the same configuration.
        trouble: the run cannot go on; `failure` says why.
    """

    def __init__(
        self, address: str, port: int, *, count: int, token: str, offer: Mapping[str, Any], listener: HubListener
    ) -> None:
        self._address, self._port, self._count = address, port, count
        self._token = token
        self._offer = offer
        self._listener = listener
        self._nodes: dict[int, _Node] = {}
        self._channels: set[NodeChannel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self.all_ready = asyncio.Event()
        self.trouble = asyncio.Event()
        self.failure: str | None = None
        self.failed_node: str | None = None
        """The machine that `failure` is about, in words."""
        self.has_lost_a_node = False
        """Whether `failure` is that a machine is gone, which explains every failure of a rank."""

    async def __aenter__(self) -> Self:
        where = f"launch.rdzv: {self._address}:{self._port}"
        try:
            self._server = await open_server(self._serve, self._address, self._port)
        except OSError as error:
            raise ConfigError(
                f"{where} cannot be bound on this machine, which is node 0 ({error}); name an address of this machine, and a "
                "port that no other run uses"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        self._server.close()
        for channel in self._channels:
            channel.close()  # ends the task that reads it
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FLUSH_S)

    @property
    def missing(self) -> list[int]:
        """Ranks of the machines that are not there, or not ready."""
        return [rank for rank in range(1, self._count) if rank not in self._nodes or not self._nodes[rank].is_ready]

    def describe_missing(self) -> str:
        """ "node 2" or "nodes 1 and 2"."""
        names = [str(rank) for rank in self.missing]
        return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names[:-1])} and {names[-1]}"

    def begin(self) -> None:
        """Let every machine start its trainer."""
        for node in self._nodes.values():
            node.channel.send("start")

    async def settle(self, timeout_s: float) -> None:
        """Wait until the trainer of every machine has ended or the machine is gone, `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                for node in self._nodes.values():
                    await node.settled.wait()
        except TimeoutError:
            return

    async def end(self, exit_code: int, error: str | None) -> None:
        """Tell every machine that the run is over, and how it went."""
        self._is_over = True
        for node in self._nodes.values():
            node.channel.send("end", exit_code=exit_code, error=error)
        await asyncio.gather(*(node.channel.flush(_FLUSH_S) for node in self._nodes.values()))  # within _FLUSH_S

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        channel = NodeChannel(reader, writer)
        self._channels.add(channel)
        try:
            node = await self._admit(channel)
            if node is not None:
                await self._listen_to(node)
        finally:
            channel.close()
            self._channels.discard(channel)
            self._tasks.discard(task)

    async def _admit(self, channel: NodeChannel) -> _Node | None:
        try:
            rank, host = await admit(channel, self._token, self._offer, refuse=self._refuse)  # within HANDSHAKE_S
        except LostError as error:
            self._listener.note(f"{channel.peer} wanted to join the run and may not: {plain(str(error))}")
            return None
        node = self._nodes[rank] = _Node(rank=rank, host=host, channel=channel)
        try:
            answer = await channel.receive(_READY_S)
        except LostError as error:
            answer = {"kind": "refused", "reason": str(error)}
        if answer["kind"] != "ready":
            self._fail(node, f"{node.name} cannot take part: {plain(str(answer.get('reason')))}")
            return None
        node.is_ready = True
        channel.beat()
        left = f"; still missing: {self.describe_missing()}" if self.missing else ""
        self._listener.note(f"{node.name} is here, from {channel.peer}{left}")
        if not self.missing:
            self.all_ready.set()
        return node

    def _refuse(self, rank: object) -> str | None:
        if not isinstance(rank, int) or not 0 < rank < self._count:
            return f"--node-rank {rank} is none of 1 to {self._count - 1} (launch.nodes: {self._count})"
        return f"node {rank} is here already: {self._nodes[rank].name}" if rank in self._nodes else None

    async def _listen_to(self, node: _Node) -> None:
        while True:
            try:
                message = await node.channel.receive()
            except LostError as error:
                node.settled.set()
                if not self._is_over:
                    self.has_lost_a_node = True
                    self._fail(
                        node,
                        f"{node.name} is gone ({error}): its launcher was killed, or the machine or the network failed",
                    )
                return
            match message:
                case {"kind": "signal", "name": str(name)} if name in signal.Signals.__members__:
                    self._listener.note(f"{node.name} got {name}")
                    self._listener.remote_signal(signal.Signals[name])
                case {"kind": "exited", "status": int(status)}:
                    node.exit_status = status
                    node.settled.set()
                    if status != 0:
                        self._fail(node, f"the trainer of {node.name} failed: {plain(str(message.get('error')))}")
                case _:
                    self._listener.note(f"{node.name} sent a message that nobody knows: {str(message)[:200]!r}")

    def _fail(self, node: _Node, reason: str) -> None:
        if self.failure is None:  # what comes after the first is a consequence
            self.failure, self.failed_node = reason, node.name
        self.trouble.set()
