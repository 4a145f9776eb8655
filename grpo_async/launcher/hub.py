"""Node 0 during the run: receives what the other machines send, forwards what concerns their servers, notices when one is lost.

    node K -> node 0   "note", "warning": for the user
                       "server_event": index, event, detail, num_restarts; for the trainer (processes.control)
                       "signal": it is to stop; "failed": its servers, before they served
                       "refused": why its launcher could not begin, or has failed
                       "exited": status and error of its trainer, and what its ranks reported
    node 0 -> node K   "restart_server", "server_serving": of the trainer; "start", "end"

A machine that trains and is lost ends the run. When one is lost that only serves, the run continues without its servers.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from grpo_async.cluster.launcher_store import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, LauncherStore, Message
from grpo_async.cluster.rendezvous import NodeInfo, deliver_last_messages
from grpo_async.errors import RunError
from grpo_async.launcher.local import LocalProcesses
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.heartbeat import from_json
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.safe_text import plain

_SHORT_TIMEOUT_S = 8.0
"""Heartbeat timeout once something has failed: a lost machine, which may be the cause, should be found quickly."""


async def exchange(launchers: LauncherStore, *, within_s: float = HEARTBEAT_TIMEOUT_S) -> list[Message]:
    """One exchange, off the event loop.

    Raises:
        RunError: a message is not of this run.
        RuntimeError: the store is gone.
        TimeoutError: it does not answer.
    """
    async with asyncio.timeout(within_s):
        return await asyncio.wrap_future(in_thread(launchers.exchange, name="launcher-store"))


class NodeHub:
    """The other machines of a run that has started.

    Args:
        local: the processes of node 0. Its signals get those of the others, its watcher what their ranks reported.

    Attributes:
        trouble: set as soon as the run cannot continue because of another machine; `failure` says why.
        has_lost_a_node: `failure` is that a machine is gone, which explains every failure of a rank.
    """

    def __init__(
        self, launchers: LauncherStore, nodes: Sequence[NodeInfo], assignment: Assignment, local: LocalProcesses
    ) -> None:
        self._launchers = launchers
        self._nodes = {node.rank: node for node in nodes}
        self._assignment = assignment
        self._local = local
        self._display = local.display
        self._ended: set[int] = set()  # their trainer has ended, or they are gone
        self._gone: set[int] = set()
        self._limit_s = HEARTBEAT_TIMEOUT_S
        self._changed = asyncio.Event()
        self.trouble = asyncio.Event()
        self.failure: str | None = None
        self.has_lost_a_node = False

    def start(self) -> None:
        """Let every machine start its processes."""
        for rank in self._nodes:
            self._launchers.post(rank, "start", assignment=self._assignment.model_dump(mode="json"))

    def name_of(self, rank: int) -> str:
        """Name of the machine `rank`, for messages."""
        return self._nodes[rank].name

    async def watch(self) -> None:
        """Receive messages of the others until cancelled."""
        while True:
            try:
                messages = await exchange(self._launchers)
            except (RunError, RuntimeError, TimeoutError) as error:
                self._fail(f"the store of the launchers does not work anymore: {error}")
                return
            for message in messages:
                self._take(message)
            for rank in self._launchers.silent([r for r in self._nodes if r not in self._gone], self._limit_s):
                node = self._nodes[rank]
                self._lose(node, f"{node.name} is gone: its launcher was killed, or the machine or the network failed")
            await asyncio.sleep(HEARTBEAT_S)

    def tell_server(self, index: int, message: Mapping[str, Any]) -> None:
        """Pass on what the trainer says of a server on another machine."""
        for node in self._nodes.values():
            if self._assignment.server_urls[index] in node.urls:
                self._launchers.post(node.rank, **message)

    async def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until the trainer of every machine has ended or the machine is gone, `timeout_s` at most."""
        self._limit_s = _SHORT_TIMEOUT_S
        trains = set(filter(self._assignment.node.trains_on, self._nodes))
        try:
            async with asyncio.timeout(timeout_s):
                while not trains <= self._ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    async def end(self, exit_code: int, error: str | None) -> None:
        """Tell every machine that the run is over and how it went; call it when nothing watches anymore."""
        for rank in self._nodes:
            self._launchers.post(rank, "end", exit_code=exit_code, error=error)
        left = range(1, self._assignment.node.count)
        await asyncio.wrap_future(in_thread(partial(deliver_last_messages, self._launchers, left), name="send-end"))

    def _take(self, message: Message) -> None:
        node = self._nodes[int(message["from"])]
        match message:
            case {"kind": "note", "text": str(text)}:
                self._display.note(f"{node.name}: {text}")
            case {"kind": "warning", "text": str(text)}:
                self._display.warning(f"{node.name}: {text}")
            case {"kind": "server_event", "index": int(index), "event": str(event)}:
                self._local.tell_trainer(
                    index=index, event=event, detail=message["detail"], num_restarts=message["num_restarts"]
                )
                if event == "given_up":
                    self._local.give_up([index], f"server {index} of {node.name}: {message['detail']}")
            case {"kind": "signal", "name": str(name)} if name in signal.Signals.__members__:
                self._display.note(f"{node.name} got {name}")
                self._local.signals.take_remote(signal.Signals[name])
            case {"kind": "exited", "status": int(status)}:
                self._note_end(node)
                self._local.watcher.reports += map(from_json, message["reports"])
                if status != 0:
                    self._fail(f"the trainer of {node.name} failed: {plain(str(message.get('error')))}")
            case {"kind": "failed", "error": str(error)}:
                self._local.lose_servers(f"on {node.name} {plain(error)}")
            case {"kind": "refused", "reason": str(reason)}:
                self._lose(node, f"{node.name} has left the run: {plain(reason)}")
            case _:
                self._display.unknown_message(node.name, message)

    def _lose(self, node: NodeInfo, why: str) -> None:
        self._gone.add(node.rank)
        self._note_end(node)
        if self._assignment.node.trains_on(node.rank):
            self.has_lost_a_node = True
            self._fail(why)
            return
        lost = [index for index, url in enumerate(self._assignment.server_urls) if url in node.urls]
        for index in lost:
            self._local.tell_trainer(index=index, event="given_up", detail=why, num_restarts=0)
        self._local.give_up(lost, why)

    def _note_end(self, node: NodeInfo) -> None:
        self._ended.add(node.rank)
        self._changed.set()

    def _fail(self, reason: str) -> None:
        if self.failure is None:  # what comes after the first is a consequence
            self.failure = reason
        self.trouble.set()
        self._changed.set()
