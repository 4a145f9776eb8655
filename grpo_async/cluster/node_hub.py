"""Node 0's end of the launchers' channel: waits for the other machines, tells them to start and to end, notices when one is lost.

waits for   every other machine to join, `launch.rdzv_timeout_s` long; then it only watches
trouble     set as soon as the run cannot go on: a machine is gone, its trainer has failed, its configuration is another
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from grpo_async.cluster.node_channel import LINE_LIMIT, LostError, NodeChannel, admit
from grpo_async.cluster.node_link import Offer
from grpo_async.cluster.nodes import shared_token
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.processes.assignment import Assignment
from grpo_async.utils.safe_text import plain

_READY_S = 60.0  # for a machine to compare a configuration and to look at a folder


@dataclass(slots=True)
class _Node:
    rank: int
    host: str
    channel: NodeChannel
    is_ready: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Its trainer has ended, or it is gone."""

    @property
    def name(self) -> str:
        return f"node {self.rank} ({plain(self.host)})"


class NodeHub:
    """Use as an async context manager: listens while it is open.

    Args:
        assignment: node 0's.
        note: gets lines for the user.
        on_signal: told when the launcher of another machine gets a signal: the run is to stop as if it had come here.

    Attributes:
        all_ready: every machine is there and has the same configuration.
        trouble: the run cannot go on; `failure` says why.
        failed_node: name of the machine that `failure` is about.
        has_lost_a_node: `failure` is that a machine is gone, which explains every failure of a rank.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        assignment: Assignment,
        *,
        note: Callable[[str], None],
        on_signal: Callable[[signal.Signals], None],
    ) -> None:
        self._rdzv = config.launch.rdzv
        self._port = config.launch.meeting_point[1]
        self._assignment = assignment
        self._token = shared_token()
        self._note = note
        self._on_signal = on_signal
        self._nodes: dict[int, _Node] = {}
        self._serving: dict[asyncio.Task[None], NodeChannel] = {}
        self._is_over = False
        self.all_ready = asyncio.Event()
        self.trouble = asyncio.Event()
        self.failure: str | None = None
        self.failed_node: str | None = None
        self.has_lost_a_node = False

    async def __aenter__(self) -> Self:
        self._secret = Offer.leave(self._assignment)
        try:
            address = self._assignment.node.address
            self._server = await asyncio.start_server(self._serve, address, self._port, limit=LINE_LIMIT)
        except OSError as error:
            raise ConfigError(
                f"launch.rdzv: {self._rdzv} cannot be bound on this machine, which is node 0 ({error}); name an address of this "
                "machine, and a port that no other run uses"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        self._server.close()
        # which ends the tasks that read them
        await asyncio.gather(*(channel.close() for channel in self._serving.values()))
        await asyncio.gather(*self._serving)

    @property
    def missing(self) -> list[int]:
        """Ranks of the machines that are not there, or not ready."""
        ready = {rank for rank, node in self._nodes.items() if node.is_ready}
        return [rank for rank in range(1, self._assignment.node.count) if rank not in ready]

    def describe_missing(self) -> str:
        """ "node 2" or "nodes 1 and 2"."""
        *most, last = map(str, self.missing)
        return f"nodes {', '.join(most)} and {last}" if most else f"node {last}"

    def start(self) -> None:
        """Let every machine start its trainer."""
        self._send("start")

    async def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until the trainer of every machine has ended or the machine is gone, `timeout_s` at most."""
        if self._nodes:
            ends = [asyncio.ensure_future(node.ended.wait()) for node in self._nodes.values()]
            _, waiting = await asyncio.wait(ends, timeout=timeout_s)
            for task in waiting:
                task.cancel()

    def end(self, exit_code: int, error: str | None) -> None:
        """Tell every machine that the run is over, and how it went."""
        self._is_over = True
        self._send("end", exit_code=exit_code, error=error)

    def _send(self, kind: str, **content: Any) -> None:
        for node in self._nodes.values():
            node.channel.send(kind, **content)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        channel = self._serving[task] = NodeChannel(reader, writer)
        try:
            node = await self._admit(channel)
            if node is not None:
                await self._listen_to(node)
        finally:
            await channel.close()
            del self._serving[task]

    async def _admit(self, channel: NodeChannel) -> _Node | None:
        offered = {"attempt": self._assignment.attempt_dir.name, "secret": self._secret}
        try:
            rank, host = await admit(channel, self._token, **offered, refuse=self._refuse)  # within HANDSHAKE_S
        except LostError as error:
            self._note(f"{channel.peer} wanted to join the run and may not: {plain(str(error))}")
            return None
        node = self._nodes[rank] = _Node(rank=rank, host=host, channel=channel)
        try:
            async with asyncio.timeout(_READY_S):
                answer = await channel.receive()
        except (LostError, TimeoutError) as error:
            answer = {"kind": "refused", "reason": str(error) or f"it was not ready within {_READY_S:.0f} s"}
        if answer["kind"] != "ready":
            self._fail(node, f"{node.name} cannot take part: {plain(str(answer.get('reason')))}")
            return None
        node.is_ready = True
        left = f"; still missing: {self.describe_missing()}" if self.missing else ""
        self._note(f"{node.name} is here, from {channel.peer}{left}")
        if not self.missing:
            self.all_ready.set()
        return node

    def _refuse(self, rank: object) -> str | None:
        count = self._assignment.node.count
        if not isinstance(rank, int) or not 0 < rank < count:
            return f"--node-rank {rank} is none of 1 to {count - 1} (launch.nodes: {count})"
        return f"node {rank} is here already: {self._nodes[rank].name}" if rank in self._nodes else None

    async def _listen_to(self, node: _Node) -> None:
        while True:
            try:
                message = await node.channel.receive()
            except LostError as error:
                node.ended.set()
                if not self._is_over:
                    self.has_lost_a_node = True
                    self._fail(
                        node,
                        f"{node.name} is gone ({error}): its launcher was killed, or the machine or the network failed",
                    )
                return
            match message:
                case {"kind": "signal", "name": str(name)} if name in signal.Signals.__members__:
                    self._note(f"{node.name} got {name}")
                    self._on_signal(signal.Signals[name])
                case {"kind": "exited", "status": int(status)}:
                    node.ended.set()
                    if status != 0:
                        self._fail(node, f"the trainer of {node.name} failed: {plain(str(message.get('error')))}")
                case _:
                    self._note(f"{node.name} sent a message that nobody knows: {str(message)[:200]!r}")

    def _fail(self, node: _Node, reason: str) -> None:
        if self.failure is None:  # what comes after the first is a consequence
            self.failure, self.failed_node = reason, node.name
        self.trouble.set()
