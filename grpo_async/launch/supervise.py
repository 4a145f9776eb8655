"""Runs a plan to its end: starts the children, shows what they report, and leaves no process behind however it ends.

    waits for   the first of: trainer exit, loss of the servers (launch.servers restarts them), a missed deadline
                (launch.watcher), a signal; every later wait has a deadline
    outcome     trainer exits 0 with a summary -> 0; anything ends too early -> 1, with who, how and the end of its log;
                SIGINT -> 130, SIGTERM, SIGHUP, SIGQUIT -> 143, after a checkpoint when the trainer manages in time
    machines    of several (launch.ray), this is the one with rank 0; another that trains and is lost ends the run

The first failure wins: what dies after it is a consequence and not reported. Afterward everything that was started,
and everything that those started, is ended: SIGTERM with a grace period, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.findings.messages import read_equal_rewards
from grpo_async.launch.children import Child, Children, end, first_of
from grpo_async.launch.control import ControlServer
from grpo_async.launch.plan import ProcessPlan
from grpo_async.launch.servers import Servers
from grpo_async.launch.signals import Signals
from grpo_async.launch.watcher import Watcher

if TYPE_CHECKING:
    from grpo_async.launch.ray import RayNodes

_NODES_TIMEOUT_S = 60.0
"""For the other nodes to say how their ranks ended, or for Ray to miss one, which takes half a minute."""
_LAST_MESSAGES_TIMEOUT_S = 60.0  # of a trainer that has ended; on a busy machine they are read late


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. `error` is for the user, several lines; `summary` is the content of summary.json; `has_lost_a_node` says why
    it failed."""

    exit_code: int
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    has_lost_a_node: bool = False


def supervise(
    config: ExperimentConfig, plan: ProcessPlan, display: Display, nodes: RayNodes | None = None
) -> RunOutcome:
    """Start the processes of `plan`, and end them; `display` shows what they report. Call it from a thread that lives as long
    as the process (the children's death signal), the main one for signals.

    Args:
        nodes: the other nodes of a run on several.
    """
    with display:
        return asyncio.run(Supervisor(config, plan, display, nodes).run())


class Supervisor:
    """One run of one plan."""

    _trainer: Child

    def __init__(self, config: ExperimentConfig, plan: ProcessPlan, display: Display, nodes: RayNodes | None) -> None:
        self._config = config
        self._plan = plan
        self._assignment = plan.assignment
        self._display = display
        self._nodes = nodes
        self._signals = Signals()
        self._children = Children(self._assignment.attempt_dir, display.warning)
        self._watcher = Watcher(self._assignment, config, display.warning)
        self._control = ControlServer(self._assignment.control_socket, self._on_message, display.warning)
        names, spawn = [spec.name for spec in plan.servers], self._spawn_server
        if nodes is not None:
            nodes.assignment = plan.assignment
            names, spawn = nodes.server_names, nodes.spawn_server
        tell_trainer = partial(self._control.send, "server_event")
        self._servers = Servers(config.inference, names, spawn, display, tell_trainer)
        self._summary: Mapping[str, Any] | None = None

    async def run(self) -> RunOutcome:
        """Start, watch, end."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._signals.installed())
            for context in (self._children, self._watcher, self._control, self._servers.running()):
                await stack.enter_async_context(context)
            assert self._plan.trainer is not None
            self._trainer = await self._children.spawn(self._plan.trainer)
            if self._nodes is not None:
                await stack.enter_async_context(self._nodes.training(self._signals, self._watcher, self._display))
            return await self._supervise()

    async def _spawn_server(self, index: int, num_restarts: int) -> Child:
        return await self._children.spawn(self._plan.servers[index], num_restarts=num_restarts)

    async def _wait(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait until the trainer ends, one of `events` is set or a signal arrives. Without `timeout_s` as long as the run takes:
        the trainer has deadlines for everything that it waits for."""
        await first_of([self._trainer], [self._signals.arrived, *events], timeout_s)

    async def _supervise(self) -> RunOutcome:
        watcher, servers, nodes = self._watcher, self._servers, self._nodes
        await self._wait(servers.lost, watcher.trouble, *([] if nodes is None else [nodes.trouble]))
        if (lost := watcher.lost_run_dir()) is not None:
            await self._end_trainer("the run directory is gone")
            return RunOutcome(exit_code=1, error=lost)
        if self._signals.arrived.is_set() and self._trainer.is_running:
            return await self._stop()
        has_ended_well = not self._trainer.is_running and self._trainer.exited.result() == 0
        if nodes is not None and nodes.trouble.is_set() and not has_ended_well:
            await self._end_trainer("another machine has failed")  # the ranks of this one cannot even save
            await nodes.wait_for_ends(_NODES_TIMEOUT_S)
            return self._failed(self._nodes_failure(nodes))
        if watcher.failure is not None and self._trainer.is_running:
            await self._end_trainer("the trainer does not go on", saves=watcher.can_save)
            watcher.keep_stacks()
            return self._failed(watcher.failure)
        if servers.failure is not None and not has_ended_well:
            # both at once: lost servers end the trainer, never the other way round
            await self._end_trainer("no server is left", saves=servers.has_served)
            return self._failed(servers.failure)
        return await self._finish(exit_code=0)

    async def _end_trainer(self, why: str, *, saves: bool = False) -> None:
        """`saves`: ask it first to save the steps that it has made."""
        self._display.phase(f"{why}: stopping the trainer")
        if saves:
            self._control.send("stop")
            await self._wait(timeout_s=self._config.launch.stop_timeout_s)
        await end([self._trainer], self._signals)

    async def _stop(self) -> RunOutcome:
        signals, timeout_s = self._signals, self._config.launch.stop_timeout_s
        assert signals.first is not None
        signals.arrived.clear()
        if not self._control.has_connected:  # nothing has been trained, so there is nothing to save
            error = f"{signals.first.name} before the trainer had started"
            return RunOutcome(exit_code=signals.exit_code, error=error)
        self._control.send("stop")
        self._display.phase("stopping")
        what = ": finishing the step and saving a checkpoint" if self._assignment.purpose == "train" else ""
        self._display.note(f"stopping{what} (press Ctrl-C again to stop immediately)")
        self._servers.stop_restarting()
        await self._wait(timeout_s=timeout_s)
        if not self._trainer.is_running:
            return await self._finish(exit_code=signals.exit_code)
        is_second = signals.arrived.is_set()
        reason = "a second signal" if is_second else f"it did not stop within launch.stop_timeout_s: {timeout_s:g} s"
        reason = "; ".join(filter(None, [reason, self._watcher.silent()]))
        error = f"{signals.first.name}: the trainer was killed ({reason})\n{self._how_to_continue()}"
        return RunOutcome(exit_code=signals.exit_code, error=error)

    async def _finish(self, *, exit_code: int) -> RunOutcome:
        """The trainer has ended by itself; end the servers and say how it went."""
        await self._control.read_the_rest(_LAST_MESSAGES_TIMEOUT_S)
        if self._nodes is not None:  # it may have failed only because another machine's has
            await self._nodes.wait_for_ends(_NODES_TIMEOUT_S)
        status, lost = self._trainer.exited.result(), self._watcher.lost_run_dir()
        outcome = RunOutcome(exit_code=exit_code, summary=self._summary)
        if lost is not None:
            outcome = RunOutcome(exit_code=1, error=lost)
        elif status != 0 or (self._summary is None and exit_code == 0):  # stopped before the first step, it has none
            outcome = self._failed(self._trainer_failure(status))
        await self._servers.end(self._signals)
        return outcome

    def _trainer_failure(self, status: int) -> str:
        trainer = self._trainer
        if status == 0:
            return f"the {trainer.name} ended without a summary\n{trainer.describe_end()}"
        if self._nodes is not None and self._nodes.has_lost_a_node:
            return self._nodes_failure(self._nodes)
        cause = "\nafter that ".join(filter(None, [self._watcher.silent(), self._explain()]))
        if not cause or status < 0:
            return "\n".join(filter(None, [cause, f"the {trainer.describe_end()}"]))
        return f"{cause}\nlog: {trainer.log}"

    def _nodes_failure(self, nodes: RayNodes) -> str:
        assert nodes.failure is not None
        return (None if nodes.has_lost_a_node else self._explain()) or nodes.failure

    def _explain(self) -> str | None:
        """Which rank failed first, on any machine."""
        cause = self._watcher.explain()
        if cause is None:
            return None
        node = cause.rank // self._config.launch.num_trainer_ranks  # of each machine
        return cause.text if self._nodes is None or node == 0 else f"{cause.text}\non {self._nodes.name_of(node)}"

    def _failed(self, what: str) -> RunOutcome:
        # where all rewards are equal, a resume of the same run would end in the same way
        how = "" if read_equal_rewards(what) is not None else self._how_to_continue()
        has_lost_a_node = self._nodes is not None and self._nodes.has_lost_a_node
        return RunOutcome(exit_code=1, error="\n".join(filter(None, [what, how])), has_lost_a_node=has_lost_a_node)

    def _how_to_continue(self) -> str:
        if self._assignment.purpose != "train":
            return ""
        run_dir = self._assignment.run_dir
        steps = run_dir.checkpoint_steps()
        if not steps:
            clean = " with --clean" if run_dir.has_steps() else ""
            return f"there is no checkpoint yet; the same command{clean} begins again"
        command = shlex.join(["grpo-async", "train", str(run_dir.config), "--resume", "latest"])
        return f"the newest checkpoint is step {steps[-1]}; continue with: {command}"

    def _on_message(self, message: Mapping[str, Any]) -> None:
        content = {name: value for name, value in message.items() if name != "kind"}
        match message["kind"]:
            case "phase" | "step" | "evaluation" | "servers" | "note" | "warning" | "example" | "preflight" as kind:
                self._display.show(kind, **content)
            case "server_serving" | "restart_server":
                self._servers.receive(message)
            case "summary":
                self._summary = content["summary"]
            case _:
                self._display.warning(f"the trainer sent an unknown message: {str(message)[:200]}")
