"""The trainer's side of the table of groups: its main thread blocks in `take` until a step can be filled.

`take` hands out scored groups: first those that no later step may use, then in the order of their start. Hard staleness: only if
trainer_version - oldest version among its trained tokens <= max_staleness; an older group is dropped whole, counted as stale.

A step keeps places for groups in the making that are due at it (`GroupTable.due`); otherwise the slow ones, with the longest
completions, would be dropped. A place is free when its group fails or is filtered, and all are after `GroupTable.patience_s`.
`reserve` predicts what the next `take` will hand out. `record_dropped` keeps groups that were scored and dropped until
`take_dropped`, so that metrics and rollout store agree on their step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_async.buffer.group import GroupState
from grpo_async.buffer.group_table import GroupTable
from grpo_async.errors import DeadlineError
from grpo_async.records import GroupStatus, ScoredGroup

HEARTBEAT_S = 20.0
"""The longest that `take` blocks: the other ranks wait with a deadline for a sign of life of rank 0."""
OnDrop = Callable[[ScoredGroup, GroupStatus, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How long a step may wait for its groups: at most `timeout_s` without a change of `progress()`, which grows while tokens come.
    `describe` gives the state for the error."""

    timeout_s: float
    progress: Callable[[], int]
    describe: Callable[[], str] = str


@dataclass(slots=True, kw_only=True)
class _Wait:
    """The wait of one step, over all calls of `take`."""

    seen: int  # progress
    changed_at: float  # when progress was last seen to change
    kept_until: float = math.inf  # how long places are kept for groups that are due


class SampleBuffer:
    """See the module's docstring. `on_drop` closes each group that is dropped; called in the taking thread."""

    def __init__(self, table: GroupTable, *, on_drop: OnDrop, next_step: int = 1, last_step: int | None = None) -> None:
        self._table = table
        self._on_drop = on_drop
        self._step = next_step
        self._last_step = last_step
        self._dropped: list[ScoredGroup] = []
        self._condition = table.changed
        self._failure: BaseException | None = None
        self._has_ended = False
        self._interrupted = False
        self._woken = False
        self._wait: _Wait | None = None

    @property
    def step(self) -> int | None:
        """The next step to be taken, which reports what is dropped now. None: no further one will be taken."""
        with self._condition:
            return self._step if self._last_step is None or self._step <= self._last_step else None

    def record_dropped(self, scored: ScoredGroup) -> int | None:
        """Keep a group that was scored but will not be handed out. Returns the step whose metrics include its rewards; None:
        no further step will be taken."""
        with self._condition:
            self._dropped.append(scored)
            return self.step

    def dropped(self) -> list[ScoredGroup]:
        with self._condition:
            return list(self._dropped)

    def take_dropped(self) -> list[ScoredGroup]:
        """The groups dropped since the last call. A step was taken: groups dropped from now on belong to the next one."""
        with self._condition:
            self._step += 1
            dropped, self._dropped = self._dropped, []
            return dropped

    def reserve(self, num_groups: int, *, trainer_version: int) -> list[ScoredGroup]:
        """The groups that a `take` with the same arguments will hand out, unless one that is due at its step arrives or begins to
        be made meanwhile. [] while `take` would wait, or when none of them has samples."""
        with self._condition:
            self._table.mark([], GroupState.RESERVED)
            reserved = self._round(self._fresh(trainer_version), num_groups, trainer_version)
            if len(reserved) < num_groups or not any(group.samples for group in reserved):
                return []
            self._table.mark(reserved, GroupState.RESERVED)
            return reserved

    def take(
        self, num_groups: int, *, trainer_version: int, watch: Watch, wait_s: float = HEARTBEAT_S
    ) -> list[ScoredGroup] | None:
        """Wait until `num_groups` groups, at least one of them with samples, can be handed out, sorted by id. After `end`: as
        many as there are, and [] when there is nothing more to train. None: not yet; `wait_s` seconds are over, or `wake` or
        `interrupt` was called. Then call it again: the limits of the wait count on. After an error all groups are still queued,
        for a checkpoint. Raises DeadlineError when nothing moved for `watch.timeout_s`, and the error given to `fail`."""
        began = time.monotonic()
        wait = self._wait = self._wait or _Wait(seen=watch.progress(), changed_at=began)
        while True:
            with self._condition:
                if self._failure is not None:
                    raise self._failure
                if self._interrupted:
                    return None
                dropped, status, ready = self._pick(num_groups, trainer_version)
                if not dropped and (ready or self._has_ended):
                    self._wait = None
                    return ready
                if not dropped:
                    now = time.monotonic()
                    if len(self._table.queued()) >= num_groups:  # others could fill the step
                        wait.kept_until = min(wait.kept_until, now + self._table.patience_s)
                    if now >= wait.kept_until:
                        self._table.release_places(trainer_version + 1)
                        continue
                    until = min(wait.changed_at + watch.timeout_s, began + wait_s, wait.kept_until)
                    if not self._woken:
                        self._condition.wait(timeout=max(0.0, until - now))
                    woken, self._woken = self._woken, False
            if dropped:
                for group in dropped:
                    self._on_drop(group, status, self.record_dropped(group))
                if status is GroupStatus.FILTERED:
                    wait.kept_until = math.inf  # it is another round that others could fill
                continue
            if woken:
                return None
            now, progress = time.monotonic(), watch.progress()
            if progress != wait.seen:
                wait.seen, wait.changed_at = progress, now
            elif now - wait.changed_at >= watch.timeout_s:
                if wait.kept_until == math.inf:
                    raise DeadlineError(
                        f"samples for step {trainer_version + 1}; no token was generated meanwhile ({watch.describe()})",
                        waited_s=watch.timeout_s,
                        setting="training.queue_timeout_s",
                        hint="With groups in flight the server or a reward function hangs; look into the servers' logs.",
                    )
                wait.kept_until = now
            if now - began >= wait_s:
                return None

    def _pick(self, num_groups: int, trainer_version: int) -> tuple[list[ScoredGroup], GroupStatus, list[ScoredGroup]]:
        """Without waiting: groups to drop and as what, or else the groups of the step, if it can be filled. The caller holds the
        lock."""
        fresh = self._fresh(trainer_version)
        ready = self._round(fresh, num_groups, trainer_version)
        if self._has_ended and not any(group.samples for group in fresh):
            self._last_step = self._step - 1  # nothing is left to train
        last_id = ready[-1].group_id if len(ready) == num_groups else math.inf
        keep = {group.group_id for group in fresh}
        stale = [group for group in self._table.queued() if group.group_id not in keep and group.group_id < last_id]
        if stale:
            return stale, GroupStatus.STALE, []
        if not any(group.samples for group in ready):
            return ready, GroupStatus.FILTERED, []  # a whole round without samples: the next one is taken
        self._table.mark(ready, GroupState.TAKEN)
        return [], GroupStatus.FILTERED, ready

    def _round(self, fresh: Sequence[ScoredGroup], num_groups: int, trainer_version: int) -> list[ScoredGroup]:
        """The groups of a step, sorted by id; [] while it has to wait. The caller holds the lock."""
        step = trainer_version + 1
        places: list[tuple[tuple[bool, bool, bool, int], ScoredGroup | None]] = [
            ((last > step, True, True, group_id), None) for group_id, last in self._table.due(step).items()
        ]
        for group in fresh:
            is_last = self._table.is_stale(group.oldest_version, step)
            is_reserved = self._table.is_reserved(group.group_id)
            places.append(((not is_last, not is_last, not is_reserved, group.group_id), group))
        places = sorted(places, key=lambda place: place[0])[:num_groups]
        ready = [group for _, group in places if group is not None]
        is_full = len(ready) == num_groups or self._has_ended
        return sorted(ready, key=lambda group: group.group_id) if is_full else []

    def _fresh(self, trainer_version: int) -> list[ScoredGroup]:
        queued = self._table.queued()
        return [group for group in queued if not self._table.is_stale(group.oldest_version, trainer_version)]

    def fail(self, error: BaseException) -> None:
        """Make the current and every later `take` raise `error`. The first failure wins."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def wake(self) -> None:
        """Make the current `take`, or the next one that waits, return None."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def end(self) -> None:
        with self._condition:
            self._has_ended = True
            self._condition.notify_all()

    def interrupt(self) -> None:
        """Make the current and every later `take` return None."""
        with self._condition:
            self._interrupted = True
            self._condition.notify_all()
