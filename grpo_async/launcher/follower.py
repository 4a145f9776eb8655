"""The launcher of a machine that node 0 leads (node rank >= 1): its part of the trainer, its servers, or both.

waits for   node 0 to be there, then all machines (cluster.rendezvous); then the first of: trainer exit, loss of the servers before
            they served, node 0's word, a signal. A server that dies is started again here.
outcome     node 0's exit code; 1 when the trainer here fails or node 0 is gone; 130 or 143 after a signal, which node 0 is
            told: it stops the run with a checkpoint, on every machine
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from grpo_async.cluster.launcher_store import HEARTBEAT_S, LauncherStore, Message
from grpo_async.cluster.node_hub import exchange
from grpo_async.cluster.nodes import Rendezvous
from grpo_async.cluster.rendezvous import JoinedRun, NodeInfo, join
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display, View
from grpo_async.display.output import Output
from grpo_async.errors import RunError
from grpo_async.launcher.child import KILL_TIMEOUT_S, Child, ending_children
from grpo_async.launcher.liveness import Liveness
from grpo_async.launcher.plan import ProcessPlan, first_server, own_urls, plan_processes
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import GRACE_S, Signals, end_children, first_of, unwinding
from grpo_async.launcher.spawned_servers import SpawnedServers
from grpo_async.launcher.supervisor import RunOutcome
from grpo_async.processes import machine as machine_module
from grpo_async.processes.assignment import Node
from grpo_async.processes.failures import explain
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.text import clipped

_MARGIN_S = 60.0  # for node 0 to end its servers and to say how the run went


def follow(
    config: ExperimentConfig,
    run_dir: RunDir,
    output: Output,
    *,
    rendezvous: Rendezvous,
    engine: EngineChoice,
    amend: Callable[[ProcessPlan], ProcessPlan],
) -> RunOutcome:
    """Take part in a run, as machine `rendezvous.rank`. Its directory is node 0's; here only logs are added to it. Call it from
    the main thread.

    Args:
        engine: of the servers here; SERVERS_ELSEWHERE where this machine only trains.
        amend: changes the plan before it is carried out.

    Raises:
        ConfigError, DeadlineError, RunError: see rendezvous.join.
    """

    def member(node: Node) -> NodeInfo:
        urls = own_urls(config, node.own_address) if node.serves else ()
        return NodeInfo(
            rank=node.rank, host=socket.gethostname(), urls=urls, engine=engine.engine, on_gpu=engine.on_gpu
        )

    with unwinding(), private_folder() as private:
        joined = join(config, rendezvous, run_dir, member=member, say=output.say)
        plan = amend(_plan(config, joined, run_dir, private, engine))
        output.say(plan.describe())
        display = output.display(run_name=config.run.name, max_steps=config.num_steps, run_dir=run_dir, lines_only=True)
        display.views.append(_Relay(joined.launchers))
        with display:
            return asyncio.run(Follower(config, joined, plan, display).run())


def _plan(
    config: ExperimentConfig, joined: JoinedRun, run_dir: RunDir, private: Path, engine: EngineChoice
) -> ProcessPlan:
    attempt = run_dir.logs / joined.assignment.attempt_dir.name
    own = {"run_dir": run_dir, "attempt_dir": attempt, "private": private, "node": joined.node}
    return plan_processes(
        config,
        engine=engine,
        assignment=joined.assignment.model_copy(update=own),
        machine=machine_module.inspect(),
        token=joined.token,
    )


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
        self._config = config
        self._launchers = joined.launchers
        self._plan = plan
        self._display = display
        self._signals = Signals()
        self._ended = asyncio.Event()  # the run is over
        self._exit_code: int | None = None  # node 0's; None: it is gone
        self._error: str | None = None
        self._end_timeout_s = config.launch.stop_timeout_s + _MARGIN_S

    async def run(self) -> RunOutcome:
        """Start what is planned here, watch, end."""
        attempt = self._plan.assignment.attempt_dir
        with self._signals.installed():
            async with AsyncExitStack() as stack:
                children = await stack.enter_async_context(ending_children(attempt, self._display.warning))
                first = first_server(self._config, self._plan.assignment.node) if self._plan.servers else 0
                self._servers = SpawnedServers(
                    self._plan.servers,
                    self._display,
                    tell_trainer=self._tell_trainer,
                    children=children,
                    max_restarts=self._config.inference.max_restarts,
                    delay_s=self._config.inference.restart_delay_s,
                    first=first,
                    total=self._config.num_servers,
                )
                stack.push_async_callback(self._servers.abandon, KILL_TIMEOUT_S)
                listening = asyncio.create_task(self._listen(), name="listen to node 0")
                try:
                    return await self._work(children.spawn, stack)
                finally:
                    listening.cancel()
                    with suppress(asyncio.CancelledError):
                        await listening
                    with suppress(RuntimeError, RunError, TimeoutError):  # node 0 has gone, or does not answer
                        await exchange(self._launchers, within_s=GRACE_S)

    async def _work(self, spawn: Callable[..., Any], stack: AsyncExitStack) -> RunOutcome:
        await self._servers.start()
        if self._plan.trainer is None:
            await first_of(self._signals, [], [self._ended, self._servers.lost_all])
            return await self._end_serving()
        liveness = Liveness(self._plan.assignment, self._config.launch.heartbeat_timeout_s, self._display.warning)
        await stack.enter_async_context(liveness)
        trainer: Child = await spawn(self._plan.trainer)
        await first_of(self._signals, [trainer], [self._ended, self._servers.lost_all, liveness.frozen])
        outcome = await self._watch(trainer, liveness)
        await self._end_servers()
        return outcome

    async def _end_serving(self) -> RunOutcome:
        """Of a machine without a trainer: node 0 has the last word."""
        if self._signals.first is not None and not self._ended.is_set():
            return await self._pass_on_signal([])
        if self._servers.lost_all.is_set():
            await self._tell_of_lost_servers()
        await self._end_servers()
        return self._outcome()

    async def _watch(self, trainer: Child, liveness: Liveness) -> RunOutcome:
        if self._signals.first is not None and trainer.is_running:
            return await self._pass_on_signal([trainer], liveness)
        if self._servers.lost_all.is_set() and trainer.is_running and not self._ended.is_set():
            await self._tell_of_lost_servers([trainer])
        if liveness.frozen.is_set() and trainer.is_running:
            trainer.kill()
            await asyncio.wait([trainer.exited], timeout=KILL_TIMEOUT_S)
        elif trainer.is_running:  # node 0 says that the run is over
            if self._exit_code in (None, 1):  # it failed, and what has failed does not end by itself
                await end_children(self._signals, [trainer])
            else:
                await first_of(self._signals, [trainer], timeout_s=GRACE_S)
            return self._outcome()
        return await self._finish(trainer, liveness)

    async def _tell_of_lost_servers(self, children: list[Child] | None = None) -> None:
        self._servers.raise_errors()
        self._launchers.post(0, "failed", error=str(self._servers.failure))
        await first_of(self._signals, children or [], [self._ended], timeout_s=self._end_timeout_s)

    async def _pass_on_signal(self, children: list[Child], liveness: Liveness | None = None) -> RunOutcome:
        assert self._signals.first is not None
        self._signals.arrived.clear()
        self._launchers.post(0, "signal", name=self._signals.first.name)
        self._display.note(
            f"{self._signals.first.name}: node 0 stops the run with a checkpoint (a second signal stops this machine immediately)"
        )
        await first_of(self._signals, children, [self._ended], timeout_s=self._end_timeout_s)
        for trainer in children:
            if trainer.is_running and not self._signals.arrived.is_set():  # node 0 has killed its own, or is gone
                await end_children(self._signals, [trainer])
            elif not trainer.is_running and liveness is not None:
                await self._finish(trainer, liveness)
        await self._end_servers()
        return RunOutcome(exit_code=self._signals.exit_code, error=self._error)

    async def _finish(self, trainer: Child, liveness: Liveness) -> RunOutcome:
        """The trainer has ended by itself: tell node 0, and wait for how the run went."""
        status = trainer.exited.result()
        cause = None
        if status != 0:
            attempt = self._plan.assignment.attempt_dir
            failed = explain(attempt, liveness.failures)
            cause = liveness.failure or (trainer.describe_end() if failed is None else failed.text)
        self._launchers.post(0, "exited", status=status, error=cause)
        await first_of(self._signals, [], [self._ended], timeout_s=self._end_timeout_s)
        outcome = self._outcome()
        if status != 0 and outcome.exit_code == 0:
            return RunOutcome(exit_code=1, error=cause)
        return outcome

    async def _end_servers(self) -> None:
        await self._servers.stop(GRACE_S)
        await end_children(self._signals, self._servers.running)

    def _outcome(self) -> RunOutcome:
        if self._exit_code is None:
            return RunOutcome(exit_code=1, error=self._error or "node 0 did not say how the run went")
        if self._error is None:
            self._display.note("the run is over; its summary is on node 0")
        error = None if self._error is None else f"node 0 has ended the run: {self._error}"
        return RunOutcome(exit_code=self._exit_code, error=error)

    def _tell_trainer(self, index: int, event: str, detail: str, incarnation: int) -> None:
        self._launchers.post(0, "server_event", index=index, event=event, detail=detail, incarnation=incarnation)

    async def _listen(self) -> None:
        """What node 0 says, until it says that the run is over, or is gone."""
        while not self._ended.is_set():
            try:
                for message in await exchange(self._launchers):
                    self._take(message)
                if self._launchers.silent([0]):
                    raise TimeoutError("it has sent no heartbeat for a minute")
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
                self._servers.receive(message)
            case _:
                self._display.warning(f"node 0 sent an unknown message: {clipped(str(dict(message)), 200)}")
