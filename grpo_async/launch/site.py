"""What a run has on one machine: its processes, the channel to those of the trainer, the watcher of their signs of life.

On a Ray cluster (launch.ray) each node has one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.launch.children import Child, Children
from grpo_async.launch.plan import ProcessPlan, own_urls, plan_processes
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlServer
from grpo_async.processes.heartbeat import Watcher
from grpo_async.processes.machine import free_ports
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.concurrency import in_background

_LAST_MESSAGES_TIMEOUT_S = 60.0  # of a trainer that has ended; on a busy machine they are read late


class LocalSite:
    """This machine (a supervise.Site). `plan` is made by `lay_out`, or given."""

    _children: Children
    _control: ControlServer

    def __init__(self, config: ExperimentConfig, plan: ProcessPlan | None = None) -> None:
        self._config = config
        self.plan = plan

    def lay_out(
        self, engine: EngineChoice, assignment: Assignment, token: str | None, notes: Sequence[str]
    ) -> ProcessPlan:
        config, inference = self._config, self._config.inference
        ports = free_ports(inference.host, 0 if inference.urls else inference.max_replicas)
        assignment = assignment.model_copy(update={"server_urls": own_urls(config, inference.host, ports)})
        self.plan = plan_processes(config, engine=engine, assignment=assignment, token=token, notes=notes)
        return self.plan

    @property
    def server_names(self) -> Sequence[str]:
        assert self.plan is not None
        return [spec.name for spec in self.plan.servers]

    @asynccontextmanager
    async def running(
        self, receive: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None]
    ) -> AsyncIterator[None]:
        plan = self.plan
        assert plan is not None
        folder, private_dir = plan.assignment.attempt_dir, plan.assignment.private_dir
        log = folder / (plan.trainer or plan.servers[0]).log_name

        def fail(text: str, is_back: bool) -> None:
            receive({"kind": "silent", "text": text, "is_back": is_back})

        def take(message: Mapping[str, Any]) -> None:
            (watcher.see if message["kind"] == "alive" else receive)(message)

        watcher = Watcher(self._config.launch.heartbeat_timeout_s, log, fail, warn)
        self._children = Children(folder, private_dir, warn)
        self._control = ControlServer(plan.assignment.control_socket, take, warn)
        async with self._children, self._control, in_background(watcher.watch(), name="watcher"):
            yield

    async def spawn_server(self, index: int, num_restarts: int) -> Child:
        assert self.plan is not None
        return await self._children.spawn(self.plan.servers[index], num_restarts=num_restarts)

    async def spawn_trainers(self) -> Sequence[Child]:
        assert self.plan is not None
        assert self.plan.trainer is not None
        return [await self._children.spawn(self.plan.trainer)]

    def send(self, kind: str, **content: Any) -> None:
        self._control.send(kind, **content)

    async def read_the_rest(self) -> None:
        await self._control.read_the_rest(_LAST_MESSAGES_TIMEOUT_S)
