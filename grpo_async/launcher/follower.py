"""The launcher of a machine that follows (node rank >= 1): torchrun with its ranks, started and ended as node 0 says.

waits for   node 0 to be there, then all machines; then the first of: trainer exit, node 0's word, a signal
outcome     node 0's exit code; 1 when the trainer here fails or node 0 is gone; 130 or 143 after a signal, which node 0 is
            told: it stops the run with a checkpoint, on every machine
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from grpo_async.cluster.node_link import NodeLink, join
from grpo_async.cluster.nodes import following_node, shared_token
from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.launcher.child import KILL_TIMEOUT_S, Child, ending_children
from grpo_async.launcher.liveness import Liveness
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, ProcessPlan, plan_processes
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import GRACE_S, Signals, end_children, first_of
from grpo_async.launcher.supervisor import RunOutcome
from grpo_async.processes import machine as machine_module
from grpo_async.processes.failures import explain
from grpo_async.run_directory import RunDir

_MARGIN_S = 60.0  # for node 0 to end its servers and to say how the run went


class Follower:
    """One run, as this machine takes part in it. The run directory is node 0's; here only logs are added to it.

    Args:
        rank: of this machine.
        amend: changes the plan before it is carried out.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: RunDir,
        output: Output,
        *,
        rank: int,
        amend: Callable[[ProcessPlan], ProcessPlan],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._say = output.say
        self._amend = amend
        self._token = shared_token()
        self._node = following_node(config, rank)
        self._signals = Signals()
        self._end_timeout_s = config.launch.stop_timeout_s + _MARGIN_S

    async def run(self) -> RunOutcome:
        """Join, train, end. Call it from the main thread.

        Raises:
            ConfigError: node 0 does not admit this machine.
            DeadlineError: node 0 did not come.
        """
        with self._signals.installed(), private_folder() as private:
            link = await join(
                self._config,
                self._node,
                self._run_dir,
                interrupted=self._signals.arrived,
                on_wait=lambda: self._say(f"waiting for node 0 at {self._config.launch.rdzv}"),
            )  # within launch.rdzv_timeout_s
            if link is None:
                return self._stopped("before node 0 had come")
            try:
                return await self._follow(link, private)
            finally:
                await link.close()

    async def _follow(self, link: NodeLink, private: Path) -> RunOutcome:
        plan = self._amend(self._plan(link, private))
        self._say(f"{plan.describe()}\nnode {self._node.rank} has joined node 0 ({self._node.address})")
        await first_of(self._signals, [], [link.started, link.ended])
        if self._signals.first is not None:
            link.signal(self._signals.first)
            return self._stopped("before the trainer had started")
        if link.ended.is_set():
            return self._ended(link)
        liveness = Liveness(plan.assignment, self._config.launch.heartbeat_timeout_s, self._say)
        async with ending_children(link.attempt, self._say) as children, liveness:
            trainer = await children.spawn(plan.trainer)
            self._say(f"node {self._node.rank} trains; log: {trainer.log}")
            return await self._watch(link, trainer, liveness)

    async def _watch(self, link: NodeLink, trainer: Child, liveness: Liveness) -> RunOutcome:
        await first_of(self._signals, [trainer], [link.ended, liveness.frozen])
        if self._signals.first is not None and trainer.is_running:
            return await self._stop(link, trainer, liveness)
        if liveness.frozen.is_set() and trainer.is_running:
            trainer.kill()
            await asyncio.wait([trainer.exited], timeout=KILL_TIMEOUT_S)
        elif trainer.is_running:  # node 0 says that the run is over
            if link.exit_code in (None, 1):  # it failed, and what has failed does not end by itself
                await end_children(self._signals, [trainer])
            else:
                await first_of(self._signals, [trainer], timeout_s=GRACE_S)
            return self._ended(link)
        return await self._finish(link, trainer, liveness)

    async def _stop(self, link: NodeLink, trainer: Child, liveness: Liveness) -> RunOutcome:
        assert self._signals.first is not None
        self._signals.arrived.clear()
        link.signal(self._signals.first)
        self._say(
            f"{self._signals.first.name}: node 0 stops the run with a checkpoint (a second signal ends this machine at once)"
        )
        await first_of(self._signals, [trainer], [link.ended], timeout_s=self._end_timeout_s)
        if trainer.is_running and not self._signals.arrived.is_set():  # node 0 has killed its own, or is gone
            await end_children(self._signals, [trainer])
        elif not trainer.is_running:
            await self._finish(link, trainer, liveness)
        return RunOutcome(exit_code=self._signals.exit_code, error=link.error)

    async def _finish(self, link: NodeLink, trainer: Child, liveness: Liveness) -> RunOutcome:
        """The trainer has ended by itself: tell node 0, and hear how the run went."""
        status = trainer.exited.result()
        cause = None
        if status != 0:
            cause = liveness.failure or explain(link.attempt, liveness.failures) or trainer.describe_end()
        link.exited(status, cause)
        await first_of(self._signals, [], [link.ended], timeout_s=self._end_timeout_s)
        outcome = self._ended(link)
        if status != 0 and outcome.exit_code == 0:
            return RunOutcome(exit_code=1, error=cause)
        return outcome

    def _ended(self, link: NodeLink) -> RunOutcome:
        if link.exit_code is None:
            return RunOutcome(exit_code=1, error=link.error or "node 0 did not say how the run went")
        if link.error is None:
            self._say("the run is over; its summary is on node 0")
        error = None if link.error is None else f"node 0 has ended the run: {link.error}"
        return RunOutcome(exit_code=link.exit_code, error=error)

    def _stopped(self, when: str) -> RunOutcome:
        assert self._signals.first is not None
        return RunOutcome(exit_code=self._signals.exit_code, error=f"{self._signals.first.name} {when}")

    def _plan(self, link: NodeLink, private: Path) -> ProcessPlan:
        given = link.offer.assignment
        node = self._node.model_copy(update={"store_port": given.node.store_port})
        own = {"run_dir": self._run_dir, "attempt_dir": link.attempt, "private": private, "node": node}
        return plan_processes(
            self._config,
            engine=SERVERS_ELSEWHERE,
            assignment=given.model_copy(update=own),
            machine=machine_module.inspect(),
            token=self._token,
        )
