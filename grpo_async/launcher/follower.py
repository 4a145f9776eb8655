"""The launcher of a machine that node 0 leads (node rank >= 1): its part of the trainer, its servers, or both.

waits for   node 0 to be there, then all machines (cluster.rendezvous); then the first of: trainer exit, loss of the servers before
            they served, the end that node 0 sends, a signal. A server that dies is started again here.
outcome     node 0's exit code; 1 when the trainer here fails or node 0 is gone; 130 or 143 after a signal, which node 0 is
            told: it stops the run with a checkpoint, on every machine
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from grpo_async.cluster.launcher_store import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, LauncherStore, Message
from grpo_async.cluster.rendezvous import JoinedRun, join
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display, View
from grpo_async.display.output import Output
from grpo_async.errors import RunError, message_of
from grpo_async.launcher.hub import exchange
from grpo_async.launcher.local import GRACE_S, LocalProcesses
from grpo_async.launcher.plan import ProcessPlan, plan_processes
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import exit_on_signals
from grpo_async.launcher.supervisor import RunOutcome
from grpo_async.processes.assignment import Node
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.concurrency import in_background

_MARGIN_S = 60.0  # for node 0 to end its servers and to say how the run went


def follow(
    config: ExperimentConfig,
    run_dir: RunDir,
    output: Output,
    *,
    node: Node,
    engine: EngineChoice,
    notes: Sequence[str],
) -> RunOutcome:
    """Take part in a run, as machine `node.rank`. Its directory is node 0's; here only logs are added to it. Call it from the main
    thread.

    Args:
        engine: of the servers here; SERVERS_ELSEWHERE where this machine only trains.
        notes: shown with the plan of this machine.

    Raises:
        ConfigError, DeadlineError, RunError: see rendezvous.join; or the processes here cannot be planned or started.
    """
    with exit_on_signals(), private_folder() as private:
        joined = join(config, node, run_dir, engine=engine, say=output.say)
        assignment = joined.assignment.model_copy(update={"private_dir": private})
        try:
            plan = plan_processes(config, engine=engine, assignment=assignment, token=joined.token, notes=notes)
            output.say(plan.describe())
            display = output.display(
                run_name=config.run.name, max_steps=config.num_steps, run_dir=run_dir, lines_only=True
            )
            display.views.append(_Relay(joined.launchers))
            with display:
                return asyncio.run(Follower(config, joined, plan, display).run())
        except BaseException as error:  # a signal, too: node 0 would wait for this machine
            with suppress(RuntimeError, RunError):  # node 0 is gone
                joined.launchers.post(0, "refused", reason=message_of(error))
                joined.launchers.exchange()
            raise


class _Relay(View):
    """Shows the notes and warnings of this machine on node 0."""

    def __init__(self, launchers: LauncherStore) -> None:
        self._launchers = launchers

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in ("note", "warning"):
            self._launchers.post(0, event, **fields)


class Follower:
    """One run, as this machine takes part in it."""

    def __init__(self, config: ExperimentConfig, joined: JoinedRun, plan: ProcessPlan, display: Display) -> None:
        self._launchers = joined.launchers
        self._trains = plan.trainer is not None
        self._display = display
        tell_trainer = partial(self._launchers.post, 0, "server_event")
        self._local = LocalProcesses(config, plan, display, tell_trainer=tell_trainer)
        self._ended = asyncio.Event()  # the run is over
        self._exit_code: int | None = None  # node 0's; None: it is gone
        self._error: str | None = None
        self._end_timeout_s = config.launch.stop_timeout_s + _MARGIN_S

    async def run(self) -> RunOutcome:
        """Start what is planned here, watch, end."""
        async with self._local as local:
            try:
                async with in_background(self._listen(), name="listen to node 0"):
                    await local.start()
                    await local.wait(self._ended, local.lost_servers, local.watcher.trouble)
                    outcome = await self._end()
                    await local.end_servers()
                return outcome
            finally:
                with suppress(RuntimeError, RunError, TimeoutError):  # node 0 has gone, or does not answer
                    await exchange(self._launchers, within_s=GRACE_S)

    async def _end(self) -> RunOutcome:
        """Whatever has happened here, node 0 decides."""
        local = self._local
        if local.signals.arrived.is_set() and not self._ended.is_set() and (local.is_training or not self._trains):
            return await self._pass_on_signal()
        if local.lost_servers.is_set() and not self._ended.is_set():
            self._launchers.post(0, "failed", error=str(local.server_failure))
            await local.wait(self._ended, timeout_s=self._end_timeout_s)
        if local.watcher.trouble.is_set() and local.is_training:
            await local.kill_trainer()
        if not self._trains:
            return self._outcome()
        if not local.is_training:
            return await self._report_exit()
        if self._exit_code in (None, 1):  # the run has failed, and what has failed does not end by itself
            await local.end_trainer()
        else:
            await local.wait(timeout_s=GRACE_S)
        return self._outcome()

    async def _pass_on_signal(self) -> RunOutcome:
        local, signals = self._local, self._local.signals
        assert signals.first is not None
        signals.arrived.clear()
        self._launchers.post(0, "signal", name=signals.first.name)
        self._display.note(
            f"{signals.first.name}: node 0 stops the run with a checkpoint (a second signal stops this machine immediately)"
        )
        await local.wait(self._ended, timeout_s=self._end_timeout_s)
        if local.is_training and not signals.arrived.is_set():  # node 0 has killed its own, or is gone
            await local.end_trainer()
        elif self._trains and not local.is_training:
            await self._report_exit()
        return RunOutcome(exit_code=signals.exit_code, error=self._error)

    async def _report_exit(self) -> RunOutcome:
        """The trainer has ended: tell node 0, and wait for how the run went."""
        trainer, watcher = self._local.trainer, self._local.watcher
        status, error = trainer.exited.result(), None
        if status != 0:
            cause = watcher.explain()
            error = watcher.failure or (trainer.describe_end() if cause is None else cause.text)
        reports = [asdict(each) for each in watcher.reports]
        self._launchers.post(0, "exited", status=status, error=error, reports=reports)
        await self._local.wait(self._ended, for_trainer=False, timeout_s=self._end_timeout_s)
        outcome = self._outcome()
        return RunOutcome(exit_code=1, error=error) if status != 0 and outcome.exit_code == 0 else outcome

    def _outcome(self) -> RunOutcome:
        if self._exit_code is None:
            return RunOutcome(exit_code=1, error=self._error or "node 0 did not say how the run went")
        if self._error is None:
            self._display.note("the run is over; its summary is on node 0")
        error = None if self._error is None else f"node 0 has ended the run: {self._error}"
        return RunOutcome(exit_code=self._exit_code, error=error)

    async def _listen(self) -> None:
        """Take what node 0 says, until the run is over or node 0 is gone."""
        while not self._ended.is_set():
            try:
                for message in await exchange(self._launchers):
                    self._take(message)
                if self._launchers.silent([0]):
                    raise TimeoutError(f"it has sent no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s")
            except (RunError, RuntimeError, TimeoutError) as error:
                self._error = f"node 0 is gone ({error}): its launcher was killed, or the machine or the network failed"
                self._ended.set()
            await asyncio.sleep(HEARTBEAT_S)

    def _take(self, message: Message) -> None:
        match message:
            case {"kind": "end", "exit_code": int(code)}:
                said = message.get("error")
                self._exit_code, self._error = code, None if said is None else str(said)
                self._ended.set()
            case {"kind": "server_serving" | "restart_server", "index": int()}:
                self._local.receive(message)
            case _:
                self._display.unknown_message("node 0", message)
