"""The rollout worker, on one asyncio loop:

    run: table.admit -> prompt -> _run_group: produce -> score -> table.score -> (the trainer's thread) source.take

However a group ends, `close_group` closes it in the table (`buffer.group_table`: its states) and gives it to the store.

Invariant: every group that is started is closed exactly once, whatever fails, and stored once with its status.
A rollout that fails is dropped: its group continues with the others, at least two. A group that fails is dropped alone. Only when
every group fails for a while does the run stop, with the cause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from grpo_async.buffer.group import OpenGroup
from grpo_async.buffer.group_table import GroupTable
from grpo_async.buffer.ledger import totals_for_resume
from grpo_async.buffer.resume import GroupSnapshot, ResumeState
from grpo_async.buffer.sample_buffer import SampleBuffer
from grpo_async.config.sections import RolloutSection
from grpo_async.data.stream import PromptStream
from grpo_async.errors import FatalRolloutError, NothingToLearnError, RunError, message_of
from grpo_async.findings.messages import equal_rewards
from grpo_async.records import GroupStatus, RolloutGroup, RolloutStatus, ScoredGroup, TokenStats
from grpo_async.rollout.group import ErrorLog, GroupProducer
from grpo_async.scoring.advantages import has_zero_variance, scored_rewards
from grpo_async.scoring.scorer import Scorer
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.tracking.timeline import SHORTEST_WAIT_S, record
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.text import backticked, count

_MIN_FAILED_GROUPS = 8


class _TooStaleError(Exception):
    """Every step from now on would drop the group."""


class RolloutWorker:
    """Its methods run on the worker's loop, except those that say that they are thread-safe."""

    def __init__(
        self,
        *,
        section: RolloutSection,
        seed: int,
        stream: PromptStream,
        producer: GroupProducer,
        errors: ErrorLog,
        scorer: Scorer,
        store: RolloutStore,
        num_steps: int,
        resume: ResumeState | None = None,
        version: int = 0,
    ) -> None:
        self._section = section
        self._seed = seed
        # consecutive failures of groups after which the run stops; an error that fails several groups at once counts once
        self._max_failures = max(_MIN_FAILED_GROUPS, 2 * section.groups_per_step)
        self._max_without_signal = section.max_rounds_without_signal * section.groups_per_step
        self.stream = stream
        self._producer = producer
        self.errors = errors
        self.scorer = scorer
        self.table = GroupTable(
            None if resume is None else resume.ledger,
            groups_per_step=section.groups_per_step,
            max_staleness=section.max_staleness,
            version=version,
            last_version=num_steps,
        )
        self.buffer = SampleBuffer(
            self.table,
            on_drop=lambda scored, status, step: self.close_group(scored.group, status, scored=scored, step=step),
            next_step=version + 1,
            last_step=num_steps,
        )
        self._store = store
        self._last_failure: Exception | None = None
        # a synchronous run generates an open turn again from its seed, as a run without the interruption: on a CPU the same bits
        self._keeps_open_turns = section.max_staleness > 0
        self._failures_in_a_row = 0
        self._without_signal_in_a_row = 0
        self._again: dict[int, GroupSnapshot | None] = {}  # prompts of the checkpoint, not started again yet
        if resume is not None:
            self._restore(resume)

    def _restore(self, resume: ResumeState) -> None:
        """Queue the finished groups of the checkpoint. The prompts of those that are too stale by now are issued again, like
        those of the groups that were in progress."""
        queued = [scored for scored in resume.queued if not self.table.is_stale(scored.oldest_version)]
        for scored in queued:
            self.table.restore(scored)
        for dropped in resume.dropped:
            self.buffer.record_dropped(dropped)
        in_progress = {group.group_id: group for group in resume.in_progress}
        ids = sorted({*resume.outstanding} - {scored.group_id for scored in queued})
        self._again = {group_id: in_progress.get(group_id) for group_id in ids}

    @property
    def _outstanding(self) -> list[int]:
        """Prompts that were issued and are not closed, or were cancelled; ascending."""
        return sorted({*self.table.unfinished, *self._again})

    @property
    def epoch(self) -> float:
        """Prompts that are closed, in epochs. Thread-safe."""
        return self.stream.epoch(len(self._outstanding))

    async def run(self) -> None:
        """Start groups while there are prompts.

        Consumes: prompts. Waits for: a free place. Unblocked by: weight pushes, closed groups. Its cancellation cancels every
        group.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while self._again or not self.stream.is_at_end:
                    began = time.time()
                    await self.table.admit()
                    waited_until = time.time()
                    if waited_until - began >= SHORTEST_WAIT_S:  # enough is queued, or too many steps ahead
                        record("wait for the trainer", began, waited_until)
                    group = self._start()
                    group.task = tasks.create_task(self._run_group(group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        else:
            self.buffer.end()
        finally:
            self._drop_not_running()

    def _drop_not_running(self) -> None:
        """Close the groups whose tasks were cancelled before they began, also where one cannot be stored."""
        for group in self.table.started():
            try:
                self._drop_unscored(group, GroupStatus.STALE if group.is_too_stale else GroupStatus.CANCELLED)
            except RunError as error:
                self.errors.note("group", error)

    def _start(self) -> OpenGroup:
        """Open the group of the next prompt: one of the checkpoint first, with what it held of it unless that is too stale."""
        snapshot = None
        if self._again:
            group_id = next(iter(self._again))
            prompt, snapshot = self.stream.prompt(group_id), self._again[group_id]
        else:
            prompt = self.stream.next()
            group_id = prompt.prompt_id
        group = OpenGroup(
            name=f"g{group_id}",
            prompt=prompt,
            size=prompt.group_size or self._section.group_size,
            seed=seed_of(self._seed, group_id),
            served_version=lambda: self.table.version,
            on_tokens=partial(self.table.generated, group_id),
        )
        self.table.start(group)
        self._again.pop(group_id, None)
        if snapshot is not None and not self.table.is_stale(snapshot.oldest_version):
            group.restore(snapshot.rollouts, keeps_open_turns=self._keeps_open_turns)
        return group

    async def _run_group(self, group: OpenGroup) -> None:
        group_id = group.group_id
        try:
            group.is_running = True
            if group.is_too_stale:  # restored from a checkpoint, and too stale since
                raise _TooStaleError
            scored = await self._make(group)
            self._failures_in_a_row = 0
            if scored is not None:
                self.stream.observe(group_id, scored.rewards)
            if scored is None:
                self._drop_unscored(group, GroupStatus.FILTERED)
            elif not scored.samples and self._section.zero_variance == "resample":
                step = self.buffer.record_dropped(scored)
                self.close_group(scored.group, GroupStatus.FILTERED, scored=scored, step=step)
            else:  # one without samples is filtered by its step
                self.table.score(scored)
            self._check_signal(scored)
        except NothingToLearnError:
            raise
        except FatalRolloutError as error:
            self._drop_unscored(group, GroupStatus.FAILED, error)
            raise
        except _TooStaleError:
            self._drop_unscored(group, GroupStatus.STALE)
        except asyncio.CancelledError:
            if not self.table.is_open(group_id):
                raise
            self._drop_unscored(group, GroupStatus.STALE if group.is_too_stale else GroupStatus.CANCELLED)
            if not group.is_too_stale:
                raise
        except Exception as error:
            if not self.table.is_open(group_id):
                raise  # the group was closed, but storing it failed: the run must end
            self.errors.note("group", error)
            self._drop_unscored(group, GroupStatus.FAILED, error)
            if error is not self._last_failure:  # one failed call of a rollout function fails all of its groups
                self._failures_in_a_row += 1
            self._last_failure = error
            if self._failures_in_a_row >= self._max_failures:
                raise RunError(
                    f"{self._failures_in_a_row} consecutive failures and no group succeeded; the last one: {error}"
                ) from error

    async def _make(self, group: OpenGroup) -> ScoredGroup | None:
        """Generate and score. None where fewer than two rollouts sampled a token: the prompt is too long, or the environment
        done."""
        async with self._producer.produce(group):
            if self.table.will_be_stale(group.group_id):  # of a producer that reports its tokens only at the end
                raise _TooStaleError
            num_failed = 0
            for index, completion in enumerate(group.completions):
                is_failed = completion.status is RolloutStatus.FAILED
                num_failed += is_failed
                # the completion of an agent's rollout lacks the tokens of its cancelled calls
                kept = 0 if is_failed else completion.num_sampled_tokens
                lost = group.num_tokens.get(index, 0) - kept
                self.table.drop_tokens(group.group_id, max(0, lost))
            record = group.record
            if len(record.trainable) >= 2:
                return await self.scorer.score(record, environments=group.environments)
        if group.size - num_failed >= 2:
            return None
        reasons = "; ".join(sorted({c.error for c in record.completions if c.error}))
        raise RunError(f"{len(record.trainable)} of {group.size} rollouts survived: {reasons}")

    def _check_signal(self, scored: ScoredGroup | None) -> None:
        """Raise NothingToLearnError when too many consecutive groups had no signal. None: nothing was sampled."""
        if scored is not None and scored.samples:
            self._without_signal_in_a_row = 0
            return
        self._without_signal_in_a_row += 1
        if self._without_signal_in_a_row < self._max_without_signal:
            rounds, rest = divmod(self._without_signal_in_a_row, self._section.groups_per_step)
            if not rest and rounds & (rounds - 1) == 0:  # 1, 2, 4, 8
                number = count(self._without_signal_in_a_row, "group")
                self.errors.tell(
                    f"{number} in a row had nothing to learn from; of the last one {why_no_signal(scored)}"
                )
            return
        raise NothingToLearnError(
            f"training was stopped: {self._without_signal_in_a_row} groups in a row had nothing to learn from\n"
            f"of the last one {why_no_signal(scored)}\n"
            "`grpo-async inspect-rollouts` shows what was generated; to wait longer, raise rollout.max_rounds_without_signal "
            f"({self._section.max_rounds_without_signal} rounds of rollout.groups_per_step = {self._section.groups_per_step})"
        )

    def _drop_unscored(self, group: OpenGroup, status: GroupStatus, error: Exception | None = None) -> None:
        """`error`: why the group failed; the store has it with each rollout that did not fail by itself."""
        is_seen, record = status in (GroupStatus.FILTERED, GroupStatus.STALE), group.record
        if error is not None:
            completions = [
                each if each.error else replace(each, error=message_of(error)) for each in record.completions
            ]
            record = replace(record, completions=completions)
        self.close_group(record, status, step=self.buffer.step if is_seen else None)

    def close_group(
        self,
        group: RolloutGroup,
        status: GroupStatus,
        *,
        scored: ScoredGroup | None = None,
        step: int | None = None,
        stats: Mapping[str, TokenStats] | None = None,
    ) -> None:
        """Give a group its final status, in the table and in the store. Thread-safe. `step`: the optimizer step that used or
        dropped it, and whose metrics see its rewards; `stats`: of its trained tokens, by rollout id."""
        self.table.close(group.group_id, status)
        self._store.append(group, status, step, scored=scored, stats=stats)

    def resume_state(self) -> ResumeState:
        """The rollout side at this instant: nothing is issued or finished meanwhile on the loop, nor taken by who waits for
        this."""
        in_progress = [
            group.snapshot() for group in self.table.started() if group.task is not None and not group.is_too_stale
        ]
        in_progress += [group for group in self._again.values() if group is not None]  # not begun again yet
        outstanding, dropped = self._outstanding, self.buffer.dropped()
        return ResumeState(
            data=self.stream.state({*outstanding, *(scored.group_id for scored in dropped)}),
            outstanding=outstanding,
            ledger=totals_for_resume(self.table.ledger()),
            queued=self.table.queued(),
            in_progress=sorted((group for group in in_progress if group.rollouts), key=lambda group: group.group_id),
            dropped=dropped,
            next_seq=self._store.position(),
            failures=self.errors.counts,
        )

    def on_version(self, version: int) -> None:
        """The servers serve `version`: cancel the groups that would be dropped as stale when they are done."""
        self.table.advance(version)
        self.scorer.set_step(version, self.epoch)
        for group in self.table.started():
            if group.task is not None and self.table.will_be_stale(group.group_id):
                group.is_too_stale = True
                if group.is_running:  # a task cancelled before it begins never runs, so it would close nothing
                    group.task.cancel()


def why_no_signal(scored: ScoredGroup | None) -> str:
    """Say why a group had nothing to train; None: fewer than two of its rollouts sampled a token."""
    if scored is None:
        return (
            "fewer than two rollouts sampled a token: its prompt is too long, or its environment was done immediately"
        )
    rewards = scored_rewards(scored.rewards)
    if len(rewards) < 2:
        return "fewer than two completions were scored"
    if not has_zero_variance(scored.rewards):
        if not all(completion.truncated for completion in scored.group.trainable):
            return "no reward differs on its own, or they cancel out (advantage.rewards: normalize_each)"
        return (
            "all completions were truncated, and rollout.overlong is mask: rollout.max_completion_tokens may be too low"
        )
    completions = scored.group.trainable
    parts = [part.items() for part in scored.reward_parts]
    names = backticked(dict.fromkeys(name for part in parts for name, value in part if value is not None))
    texts = {tuple(token for turn in each.all_turns for token in turn.output_ids.tolist()) for each in completions}
    if all(completion.truncated for completion in completions):
        why = "all completions were cut off (rollout.max_completion_tokens)"
    elif len(texts) == 1:
        why = "all completions are the same text (rollout.temperature is too low, or the policy has collapsed)"
    elif rewards[0] > 0.0:
        why = f"the completions differ, and {names} gave all of them the same"
    else:
        why = f"the completions differ, and {names} gave none of them anything"
    return equal_rewards(rewards[0], why)
