"""What a run has on one machine: its processes, the channel to those of the trainer, the watcher of their signs of life.

On a Ray cluster (launch.ray) each node has one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.launch.children import Child, Children
from grpo_async.launch.control import ControlServer
from grpo_async.launch.plan import ProcessPlan
from grpo_async.launch.watcher import Watcher
from grpo_async.utils.concurrency import in_background

_LAST_MESSAGES_TIMEOUT_S = 60.0  # of a trainer that has ended; on a busy machine they are read late


class LocalSite:
    """The processes of `plan`.

    Args:
        receive: gets every message of the trainer (processes.control) but for signs of life, and {"kind": "silent", "text": ...,
            "is_back": ...} when there are none.
        warn: gets sentences for the user.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        plan: ProcessPlan,
        receive: Callable[[Mapping[str, Any]], None],
        warn: Callable[[str], None],
    ) -> None:
        assignment = plan.assignment
        self.server_names = [spec.name for spec in plan.servers]
        self._plan = plan
        self._receive = receive
        self._children = Children(assignment.attempt_dir, assignment.private_dir, warn)
        self._control = ControlServer(assignment.control_socket, self._take, warn)
        self._watcher = Watcher(
            config.launch.heartbeat_timeout_s,
            assignment.attempt_dir / (plan.trainer or plan.servers[0]).log_name,
            lambda text, is_back: receive({"kind": "silent", "text": text, "is_back": is_back}),
            warn,
        )
        self.send = self._control.send

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Processes may be started while the context is open; it ends them."""
        async with self._children, self._control, in_background(self._watcher.watch(), name="watcher"):
            yield

    async def spawn_server(self, index: int, num_restarts: int) -> Child:
        """Start a server. `index`: among those of the plan."""
        return await self._children.spawn(self._plan.servers[index], num_restarts=num_restarts)

    async def spawn_trainers(self) -> Sequence[Child]:
        """Start torchrun with its ranks."""
        assert self._plan.trainer is not None
        return [await self._children.spawn(self._plan.trainer)]

    async def read_the_rest(self) -> None:
        """Wait until all that ended processes have said was received."""
        await self._control.read_the_rest(_LAST_MESSAGES_TIMEOUT_S)

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "alive":
            self._watcher.see(message)
        else:
            self._receive(message)
