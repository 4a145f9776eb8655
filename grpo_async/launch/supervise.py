"""Runs a plan to its end: starts the children, shows what they report, and leaves no process behind however it ends.

    waits for   the first of: trainer exit, loss of the servers (launch.node restarts them), a signal; every later wait
                has a deadline
    outcome     trainer exits 0 with a summary -> 0; anything ends too early -> 1, with who, how and the end of its log;
                SIGINT -> 130, SIGTERM, SIGHUP, SIGQUIT -> 143, after a checkpoint when the trainer manages in time
                preflight only: 0 when no check failed, else 1
    machines    of several (launch.ray), this is the one with rank 0; another that trains and is lost ends the run

The first failure wins: what dies after it is a consequence and not reported. Afterward everything that was started,
and everything that those started, is ended: SIGTERM with a grace period, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_async.checks.report import Check
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.display.progress import Example
from grpo_async.findings.messages import read_equal_rewards
from grpo_async.launch.control import ControlServer
from grpo_async.launch.node import NodeProcesses
from grpo_async.launch.plan import ProcessPlan

if TYPE_CHECKING:
    from grpo_async.launch.nodes import RayNodes

_NODES_TIMEOUT_S = (
    60.0  # for the other nodes to say how their ranks ended, or for Ray to miss one, which takes half a minute
)
_LAST_MESSAGES_TIMEOUT_S = 60.0  # of a trainer that has ended; on a busy machine they are read late


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. `error` is for the user, several lines; `summary` is the content of summary.json; `checks` are those
    of the preflight, None when they were not made; `has_lost_a_node` says why it failed."""

    exit_code: int
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    checks: Sequence[Check] | None = None
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

    def __init__(self, config: ExperimentConfig, plan: ProcessPlan, display: Display, nodes: RayNodes | None) -> None:
        self._config = config
        self._assignment = plan.assignment
        self._display = display
        self._control = ControlServer(self._assignment.control_socket, self._on_message, display.warning)
        self._local = NodeProcesses(config, plan, display, tell_trainer=partial(self._control.send, "server_event"))
        self._nodes = nodes
        self._summary: Mapping[str, Any] | None = None
        self._checks: list[Check] | None = None

    async def run(self) -> RunOutcome:
        """Start, watch, end."""
        async with self._local, self._control:
            if self._nodes is None:
                return await self._supervise()
            async with self._nodes.running(self._local, self._assignment):
                return await self._supervise()

    async def _supervise(self) -> RunOutcome:
        local, watcher, nodes = self._local, self._local.watcher, self._nodes
        await local.start()
        ends = [local.lost_servers, watcher.trouble, *([] if nodes is None else [nodes.trouble])]
        await local.wait(*ends)
        if (lost := watcher.lost_run_dir()) is not None:
            await self._end_trainer("the run directory is gone")
            return RunOutcome(exit_code=1, error=lost)
        if local.signals.arrived.is_set() and local.is_training:
            return await self._stop()
        has_ended_well = not local.is_training and local.trainer.exited.result() == 0
        if nodes is not None and nodes.trouble.is_set() and not has_ended_well:
            await self._end_trainer("another machine has failed")  # the ranks of this one cannot even save
            await nodes.wait_for_ends(_NODES_TIMEOUT_S)
            return self._failed(self._nodes_failure(nodes))
        if watcher.failure is not None and local.is_training:
            await self._end_trainer("the trainer does not go on", saves=watcher.can_save)
            watcher.keep_stacks()
            return self._failed(watcher.failure)
        if local.server_failure is not None and not has_ended_well:
            # both at once: lost servers end the trainer, never the other way round
            await self._end_trainer("no server is left", saves=local.have_served)
            return self._failed(local.server_failure)
        return await self._finish(exit_code=0)

    async def _end_trainer(self, why: str, *, saves: bool = False) -> None:
        """`saves`: ask it first to save the steps that it has made."""
        self._display.phase(f"{why}: stopping the trainer")
        if saves:
            self._control.send("stop")
            await self._local.wait(timeout_s=self._config.launch.stop_timeout_s)
        await self._local.end_trainer()

    async def _stop(self) -> RunOutcome:
        local, timeout_s = self._local, self._config.launch.stop_timeout_s
        signals = local.signals
        assert signals.first is not None
        signals.arrived.clear()
        if not self._control.has_connected:  # nothing has been trained, so there is nothing to save
            error = f"{signals.first.name} before the trainer had started"
            return RunOutcome(exit_code=signals.exit_code, error=error)
        self._control.send("stop")
        self._display.phase("stopping")
        what = ": finishing the step and saving a checkpoint" if self._assignment.purpose == "train" else ""
        self._display.note(f"stopping{what} (press Ctrl-C again to stop immediately)")
        local.stopping.set()
        await local.wait(timeout_s=timeout_s)
        if not local.is_training:
            return await self._finish(exit_code=signals.exit_code)
        is_second = signals.arrived.is_set()
        reason = "a second signal" if is_second else f"it did not stop within launch.stop_timeout_s: {timeout_s:g} s"
        reason = "; ".join(filter(None, [reason, local.watcher.silent()]))
        error = f"{signals.first.name}: the trainer was killed ({reason})\n{self._how_to_continue()}"
        return RunOutcome(exit_code=signals.exit_code, error=error)

    async def _finish(self, *, exit_code: int) -> RunOutcome:
        """The trainer has ended by itself; end the servers and say how it went."""
        await self._control.read_the_rest(_LAST_MESSAGES_TIMEOUT_S)
        if self._nodes is not None and self._local.trainer.exited.result() != 0:
            await self._nodes.wait_for_ends(_NODES_TIMEOUT_S)  # it may have failed only because another machine's has
        outcome = self._judge(exit_code)
        if (lost := self._local.watcher.lost_run_dir()) is not None:
            outcome = RunOutcome(exit_code=1, error=lost)
        await self._local.end_servers()
        return outcome

    def _judge(self, exit_code: int) -> RunOutcome:
        status = self._local.trainer.exited.result()
        # stopped before the first step, it has nothing to sum up
        lacks_summary = self._summary is None and exit_code == 0
        if status != 0 or lacks_summary:
            return self._failed(self._trainer_failure(status))
        return RunOutcome(exit_code=exit_code, summary=self._summary, checks=self._checks)

    def _trainer_failure(self, status: int) -> str:
        trainer = self._local.trainer
        if status == 0:
            return f"the {trainer.name} ended without a summary\n{trainer.describe_end()}"
        if self._nodes is not None and self._nodes.has_lost_a_node:
            return self._nodes_failure(self._nodes)
        cause = "\nafter that ".join(filter(None, [self._local.watcher.silent(), self._explain()]))
        if not cause or status < 0:
            return "\n".join(filter(None, [cause, f"the {trainer.describe_end()}"]))
        return f"{cause}\nlog: {trainer.log}"

    def _nodes_failure(self, nodes: RayNodes) -> str:
        assert nodes.failure is not None
        return (None if nodes.has_lost_a_node else self._explain()) or nodes.failure

    def _explain(self) -> str | None:
        """Which rank failed first, on any machine."""
        cause = self._local.watcher.explain()
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
        match message:
            case {"kind": "phase", "name": str(name)}:
                self._display.phase(name)
            case {"kind": "step", "step": int(step), "max_steps": int(max_steps), "metrics": dict(metrics)}:
                self._display.step(step, max_steps, metrics)
            case {"kind": "example", "step": int(), "prompt": str(), "completions": list()}:
                self._display.example(Example.of(message))
            case {"kind": "evaluation", "when": str(when), "metrics": dict(metrics)}:
                self._display.evaluation(when, metrics)
            case {"kind": "preflight", "checks": list(checks)}:
                self._checks = [Check(**check) for check in checks]
                self._display.preflight(self._checks)
            case {"kind": "servers", "servers": list(servers)}:
                self._display.servers([server for server in servers if isinstance(server, dict)])
            case {"kind": "note", "text": str(text)}:
                self._display.note(text)
            case {"kind": "warning", "text": str(text)}:
                self._display.warning(text)
            case {"kind": "server_serving" | "restart_server", "index": int(index)}:
                if not self._local.receive(message) and self._nodes is not None:
                    self._nodes.tell_server(index, message)
            case {"kind": "summary", "summary": dict(summary)}:
                self._summary = summary
            case _:
                self._display.unknown_message("the trainer", message)
