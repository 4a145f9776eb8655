"""Runs a plan to its end: starts the children, shows what they report, and leaves no process behind however it ends.

    waits for   the first of: trainer exit, loss of the servers (server_keeper restarts them), a signal; every later wait
                has a deadline
    outcome     trainer exits 0 with a summary -> 0; anything ends too early -> 1, with who, how and its last words;
                SIGINT -> 130, SIGTERM and SIGHUP -> 143, after a checkpoint when the trainer manages in time
                preflight only: 0 when no check failed, else 1
    machines    of several, this one leads (node 0): it begins when all are there, and a machine that is lost ends the run

The first failure wins: what dies after it is a consequence and not reported. Afterwards everything that was started,
and everything that those started, is ended: SIGTERM with a grace, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from grpo_async.checks.report import Check, Status
from grpo_async.cluster.node_hub import HubListener, NodeHub
from grpo_async.display.display import Display
from grpo_async.errors import DeadlineError
from grpo_async.launcher.child import Child
from grpo_async.launcher.liveness import Liveness
from grpo_async.launcher.plan import ProcessPlan, ProcessSpec
from grpo_async.launcher.run_dir_watch import RunDirWatch
from grpo_async.launcher.server_keeper import RestartRules, ServerKeepers
from grpo_async.launcher.signals import Signals, end_children, first_of
from grpo_async.launcher.tree import ProcessTree, adopting_orphans
from grpo_async.processes.control import ControlServer
from grpo_async.processes.failures import explain

_SETTLE_S = 10.0  # for the other machines to say how their ranks ended
_KILL_TIMEOUT_S = 10.0  # for SIGKILL to take effect
_DRAIN_TIMEOUT_S = 5.0  # for the last messages of a trainer that has ended
_KEEPER_TIMEOUT_S = 25.0  # for a restart that is under way to come to a point where it can be left


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `error` is for the user, several lines; `summary` is the content of summary.json; `checks` are those
    of the preflight, None when they were not made."""

    exit_code: int
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    checks: Sequence[Check] | None = None


class Supervisor:
    """One run of one plan. `stop_timeout_s` is the trainer's time to checkpoint after the first signal.

    Args:
        heartbeat_timeout_s: see Liveness.
        make_hub: of several machines, this is node 0: the channel to the others; they have `rdzv_timeout_s` to come.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        display: Display,
        *,
        stop_timeout_s: float,
        heartbeat_timeout_s: float,
        restarts: RestartRules,
        make_hub: Callable[[HubListener], NodeHub] | None = None,
        rdzv_timeout_s: float = 600.0,
    ) -> None:
        self._plan = plan
        self._display = display
        self._stop_timeout_s = stop_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._restarts = restarts
        self._children: list[Child] = []
        self._summary: Mapping[str, Any] | None = None
        self._checks: list[Check] | None = None
        self._reported_failure: str | None = None
        self._hub = None if make_hub is None else make_hub(self)
        self._rdzv_timeout_s = rdzv_timeout_s

    async def run(self) -> Outcome:
        """Start, watch, end. Call it from the main thread (signals; the children's death signal)."""
        self._signals = Signals()
        with self._signals.installed(), adopting_orphans():
            tree = ProcessTree()
            self._servers = ServerKeepers(
                self._plan.servers,
                self._display,
                tell_trainer=lambda *event: self._control.send_server_event(*event),  # opened below
                spawn=self._spawn,
                tree=tree,
                rules=self._restarts,
            )
            try:
                given, warn = self._plan.assignment, self._display.warning
                self._liveness = Liveness(
                    given.heartbeat_socket, timeout_s=self._heartbeat_timeout_s, logs=given.attempt_dir, warn=warn
                )
                self._run_dir_watch = RunDirWatch(given.run_dir.root)
                self._config_text = given.run_dir.config.read_text(encoding="utf-8")
                listening = ControlServer(given.control_socket, self._on_message, warn)
                async with listening as control, self._liveness, self._run_dir_watch:
                    self._control = control
                    return await self._supervise_with_nodes(control)
            finally:
                await self._servers.abandon(_KILL_TIMEOUT_S)
                for process in await tree.kill(_KILL_TIMEOUT_S):
                    self._display.warning(f"process {process.pid} does not end even by SIGKILL (stuck in the kernel)")
                if self._children:
                    await asyncio.wait([child.exited for child in self._children], timeout=_KILL_TIMEOUT_S)

    async def _supervise_with_nodes(self, control: ControlServer) -> Outcome:
        """`_supervise`, and what comes of it is told to the other machines, if there are any."""
        if self._hub is None:
            return await self._supervise(control)
        async with self._hub as hub:
            outcome = Outcome(exit_code=1, error="its launcher failed")
            try:
                outcome = await self._supervise(control)
            finally:
                await hub.end(outcome.exit_code, outcome.error)
            return outcome

    async def _supervise(self, control: ControlServer) -> Outcome:
        servers = self._servers
        await servers.start()
        if self._hub is not None:
            early = await self._gather_nodes(self._hub)
            if early is not None:
                return early
        trainer = await self._spawn(self._plan.trainer)
        ends = [servers.lost_all, self._liveness.frozen, self._run_dir_watch.lost, *self._hub_events]
        await first_of(self._signals, [trainer], ends)
        if self._run_dir_watch.failure is not None:
            return await self._lose_run_dir(self._run_dir_watch.failure, control, trainer)
        if self._signals.arrived.is_set() and trainer.is_running:
            return await self._stop(control, trainer)
        has_ended_well = not trainer.is_running and trainer.exited.result() == 0
        if self._hub is not None and self._hub.trouble.is_set() and not has_ended_well:
            return await self._lose_nodes(self._hub, trainer)
        if self._liveness.frozen.is_set() and trainer.is_running:
            return await self._end_frozen(control, trainer)
        servers.raise_errors()
        if servers.failure is not None and (trainer.is_running or trainer.exited.result() != 0):
            # both at once: lost servers end the trainer, never the other way round
            self._display.phase("no server is left: ending the trainer")
            if servers.have_served:  # the trainer saves the steps that it has made
                control.request_stop("no server is left")
                await first_of(self._signals, [trainer], timeout_s=self._stop_timeout_s)
            await end_children(self._signals, [trainer])
            return self._failed(servers.failure)
        return await self._finish(control, trainer, exit_code=0)

    async def _end_frozen(self, control: ControlServer, trainer: Child) -> Outcome:
        assert self._liveness.failure is not None
        self._display.phase("a process of the trainer is frozen: ending the trainer")
        if self._liveness.may_save:
            control.request_stop("a process of the trainer was frozen")
            await first_of(self._signals, [trainer], timeout_s=self._stop_timeout_s)
        await end_children(self._signals, [trainer])
        return self._failed(self._liveness.failure)

    async def _lose_run_dir(self, failure: str, control: ControlServer, trainer: Child) -> Outcome:
        """The weights are all that is left: they are saved in a directory made anew, where nobody has put another one."""
        if trainer.is_running and self._run_dir_watch.is_free:
            given = self._plan.assignment
            given.run_dir.create(self._config_text)
            given.attempt_dir.mkdir(parents=True, exist_ok=True)
            self._display.phase("the run directory is gone: saving in a new one")
            control.request_stop("the run directory is gone")
            await first_of(self._signals, [trainer], timeout_s=self._stop_timeout_s)
            failure += "; it was made anew, for what could still be saved"
        await end_children(self._signals, [trainer])
        return self._failed(failure)

    @property
    def _hub_events(self) -> list[asyncio.Event]:
        return [] if self._hub is None else [self._hub.trouble]

    async def _gather_nodes(self, hub: NodeHub) -> Outcome | None:
        """Wait until every machine is there; an outcome when it does not come to that."""
        servers = self._servers
        self._display.phase(f"waiting for {hub.describe_missing()}")
        events = [hub.all_ready, hub.trouble, servers.lost_all]
        await first_of(self._signals, [], events, timeout_s=self._rdzv_timeout_s)
        if self._signals.first is not None:
            name = self._signals.first.name
            return Outcome(exit_code=self._signals.exit_code, error=f"{name} before the trainer had begun")
        if hub.failure is not None:
            return self._failed(hub.failure)
        servers.raise_errors()
        if servers.failure is not None:
            return self._failed(servers.failure)
        if not hub.all_ready.is_set():
            error = DeadlineError(
                f"{hub.describe_missing()} to join",
                waited_s=self._rdzv_timeout_s,
                setting="launch.rdzv_timeout_s",
                hint="On each machine: grpo-async train CONFIG --node-rank K, with the same $GRPO_ASYNC_TOKEN.",
            )
            return self._failed(str(error))
        hub.begin()
        return None

    async def _lose_nodes(self, hub: NodeHub, trainer: Child) -> Outcome:
        """The ranks of another machine are gone: those of this one cannot even save."""
        self._display.phase("another machine has failed: ending the trainer")
        await end_children(self._signals, [trainer])
        await hub.settle(_SETTLE_S)
        return self._failed(self._nodes_failure(hub))

    def _nodes_failure(self, hub: NodeHub) -> str:
        assert hub.failure is not None
        if hub.has_lost_a_node:
            return hub.failure
        words = explain(self._plan.assignment.attempt_dir, self._liveness.failures)
        return hub.failure if words is None else f"{words}\nreported by {hub.failed_node}"

    async def _spawn(self, spec: ProcessSpec, life: int = 0) -> Child:
        child = await Child.spawn(spec, self._plan.assignment.attempt_dir, life=life)
        self._children.append(child)
        return child

    async def _stop(self, control: ControlServer, trainer: Child) -> Outcome:
        signals = self._signals
        assert signals.first is not None
        code, name = signals.exit_code, signals.first.name
        signals.arrived.clear()
        if not control.has_connected:  # nothing has been trained, so there is nothing to save
            return Outcome(exit_code=code, error=f"{name} before the trainer had begun")
        control.request_stop(name)
        self._display.phase("stopping")
        self._display.note("stopping: finishing the step and saving a checkpoint (press Ctrl-C again to end at once)")
        stopping = asyncio.create_task(self._servers.stop(_KEEPER_TIMEOUT_S))  # a server that ends now is no loss
        try:
            await first_of(self._signals, [trainer], timeout_s=self._stop_timeout_s)
        finally:
            stopping.cancel()
            await asyncio.wait([stopping], timeout=_KILL_TIMEOUT_S)
        if not trainer.is_running:
            return await self._finish(control, trainer, exit_code=code)
        reason = (
            "a second signal"
            if signals.arrived.is_set()
            else f"it did not end within launch.stop_timeout_s: {self._stop_timeout_s:g} s"
        )
        reason = "; ".join(filter(None, [reason, self._liveness.silent()]))
        return Outcome(exit_code=code, error=f"{name}: the trainer was killed ({reason})\n{self._how_to_continue()}")

    async def _finish(self, control: ControlServer, trainer: Child, *, exit_code: int) -> Outcome:
        """The trainer has ended by itself; end the servers and say how it went."""
        await control.drain(_DRAIN_TIMEOUT_S)
        if self._hub is not None and trainer.exited.result() != 0:
            await self._hub.settle(_SETTLE_S)  # it may have failed only because another machine's has
        outcome = self._judge(trainer, exit_code)
        if self._run_dir_watch.failure is not None and outcome.exit_code == 0:
            outcome = self._failed(self._run_dir_watch.failure)
        await self._servers.stop(_KEEPER_TIMEOUT_S)
        await end_children(self._signals, self._servers.running)
        return outcome

    def _judge(self, trainer: Child, exit_code: int) -> Outcome:
        status = trainer.exited.result()
        if self._plan.assignment.preflight_only and self._checks is not None and exit_code == 0:
            failed = [check.name for check in self._checks if check.status == "fail"]
            if failed:
                words = f"preflight: {len(failed)} of {len(self._checks)} checks failed: {', '.join(failed)}"
                return Outcome(exit_code=1, error=words, checks=self._checks)
            if status == 0:
                return Outcome(exit_code=0, checks=self._checks)
        # stopped before the first step, it has nothing to sum up
        lacks_summary = self._summary is None and exit_code == 0
        if status != 0 or lacks_summary:
            return self._failed(self._trainer_failure(trainer))
        return Outcome(exit_code=exit_code, summary=self._summary, checks=self._checks)

    def _trainer_failure(self, trainer: Child) -> str:
        status = trainer.exited.result()
        if status == 0:
            result = "the result of its checks" if self._plan.assignment.preflight_only else "a summary"
            return f"the trainer ended without {result}\n{trainer.describe_end()}"
        if self._hub is not None and self._hub.has_lost_a_node:
            return self._nodes_failure(self._hub)
        words = explain(self._plan.assignment.attempt_dir, self._liveness.failures) or self._reported_failure
        words = "\nafter that ".join(filter(None, [self._liveness.silent(), words])) or None
        if words is None or status < 0:
            return "\n".join(filter(None, [words, f"the {trainer.describe_end()}"]))
        return f"{words}\nlog: {trainer.log}"

    def _failed(self, what: str) -> Outcome:
        return Outcome(exit_code=1, error="\n".join(filter(None, [what, self._how_to_continue()])))

    def _how_to_continue(self) -> str:
        if self._plan.assignment.preflight_only:
            return ""
        run_dir = self._plan.assignment.run_dir
        steps = run_dir.checkpoint_steps()
        if not steps:
            trained = run_dir.metrics.exists() and run_dir.metrics.stat().st_size > 0
            return f"there is no checkpoint yet; the same command{' with --clean' if trained else ''} begins again"
        return f"the newest checkpoint is step {steps[-1]}; go on with: grpo-async train {run_dir.config} --resume auto"

    def remote_signal(self, number: signal.Signals) -> None:
        """See HubListener."""
        self._signals.take_remote(number)

    def note(self, text: str) -> None:
        """See HubListener."""
        self._display.note(text)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"kind": "phase", "name": str(name)}:
                self._display.phase(name)
            case {"kind": "step", "step": int(step), "max_steps": int(max_steps), "metrics": dict(metrics)}:
                self._display.step(step, max_steps, metrics)
            case {"kind": "evaluation", "when": str(when), "metrics": dict(metrics)}:
                self._display.evaluation(when, metrics)
            case {"kind": "preflight", "checks": list(checks)}:
                self._checks = [_read_check(check) for check in checks]
                self._display.preflight(self._checks)
            case {"kind": "servers", "servers": list(servers)}:
                self._display.servers([server for server in servers if isinstance(server, dict)])
            case {"kind": "note", "text": str(text)}:
                self._display.note(text)
            case {"kind": "warning", "text": str(text)}:
                self._display.warning(text)
            case {"kind": "server_serving", "index": int(index)}:
                self._servers.serves(index, message.get("life"))
            case {"kind": "restart_server", "index": int(index), "reason": str(reason)}:
                self._servers.ask_restart(index, reason, message.get("life"))
            case {"kind": "summary", "summary": dict(summary)}:
                self._summary = summary
            case {"kind": "failed", "rank": rank, "error": error}:
                self._reported_failure = f"trainer rank {rank} failed: {error}"
            case _:
                self._display.warning(f"the trainer sent a message that nobody knows: {str(dict(message))[:200]}")


def _read_check(content: Any) -> Check:
    fields = content if isinstance(content, dict) else {}
    status = fields.get("status")
    return Check(
        name=str(fields.get("name", "?")),
        status=cast(Status, status) if status in get_args(Status) else "fail",
        detail=str(fields.get("detail", content)),
    )
