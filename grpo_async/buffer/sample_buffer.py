"""The queue between the rollout thread and the trainer's main thread, which blocks on it. The ledger's admission bounds its size.

It receives ScoredGroups by `add` and hands them out by `take`, in the order in which they were started.
Hard staleness: a group is handed out only if  trainer_version - oldest version among its trained tokens <= max_staleness;
an older group is dropped whole, counted as stale, and its place is free again.
`reserve` predicts what the next `take` will hand out, so that it can be packed while a step trains. It stays queued until then.

Each step also reports the scored groups that were dropped since the step before, as stale or filtered: `record_dropped` keeps them
until `take_dropped`, and returns which step that will be, so that metrics and rollout store agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from grpo_async.errors import DeadlineError
from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline, Track

HEARTBEAT_S = 20.0
"""Interval between two heartbeats of rank 0 while it waits: the other ranks wait for its commands with a deadline."""
OnDrop = Callable[[ScoredGroup, GroupStatus, int | None], None]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How long `take` may wait, and what it does meanwhile.

    Attributes:
        timeout_s: training.queue_timeout_s, the longest wait without `progress()` changing.
        progress: a counter that grows while generation is alive (generated tokens).
        heartbeat: called about every `heartbeat_s` seconds of waiting.
        on_change: called after `wake`, in the waiting thread.
        describe: the current state, for the error.
    """

    timeout_s: float
    progress: Callable[[], int]
    heartbeat: Callable[[], None] = _nothing
    on_change: Callable[[], None] = _nothing
    heartbeat_s: float = HEARTBEAT_S
    describe: Callable[[], str] = str


class BufferInterrupted(Exception):
    """`take` was woken because the run is to stop."""


class SampleBuffer:
    """See the module's docstring.

    Args:
        max_staleness: in optimizer steps.
        on_drop: called (in the taking thread) with each group that is dropped, its status (stale, or filtered where no group of a
            round had anything to train), and the step.
        next_step, last_step: the step that is taken next, and the last of the run.
        timeline: records a span for each group, from `add` until it is taken.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        on_drop: OnDrop,
        next_step: int = 1,
        last_step: int | None = None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._tracks = timeline.slots("queue")
        self._since: dict[int, tuple[float, Track]] = {}  # by group id: when it was added, and its track
        self._max_staleness = max_staleness
        self._on_drop = on_drop
        self._step = next_step
        self._last_step = last_step
        self._groups: list[ScoredGroup] = []
        self._reserved: set[int] = set()  # group ids
        self._dropped: list[ScoredGroup] = []
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self._has_ended = False
        self._interrupted = False
        self._woken = False

    def __len__(self) -> int:
        with self._condition:
            return len(self._groups)

    def is_stale(self, oldest_version: int | None, version: int) -> bool:
        """Whether no step after `version` may use a group whose oldest token is of `oldest_version` (None: it has no tokens)."""
        return oldest_version is not None and version - oldest_version > self._max_staleness

    def add(self, *groups: ScoredGroup) -> None:
        """Queue scored groups: a new one, or those of a checkpoint."""
        for group in groups:
            self._since[group.group_id] = time.time(), self._tracks.take()
        with self._condition:
            self._groups.extend(groups)
            self._condition.notify_all()

    def queued(self) -> list[ScoredGroup]:
        """The queued groups, in the order of their ids; they stay queued."""
        with self._condition:
            return self._in_order()

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
        """The groups dropped since the last `take_dropped`, which will still return them."""
        with self._condition:
            return list(self._dropped)

    def take_dropped(self) -> list[ScoredGroup]:
        """The groups dropped since the last call. A step was taken: groups dropped from now on belong to the next one."""
        with self._condition:
            self._step += 1
            dropped, self._dropped = self._dropped, []
            return dropped

    def reserve(self, num_groups: int, *, trainer_version: int) -> list[ScoredGroup]:
        """The groups that a `take` with the same arguments will hand out, unless one that arrives meanwhile was started earlier and
        would be too stale for the step after. They stay queued. [] while too few are queued, or none of them has samples.
        """
        with self._condition:
            usable = [group for group in self._in_order() if not self.is_stale(group.oldest_version, trainer_version)]
            reserved = usable[:num_groups]
            if len(reserved) < num_groups or not any(group.samples for group in reserved):
                reserved = []
            self._reserved = {group.group_id for group in reserved}
            return reserved

    def take(self, num_groups: int, *, trainer_version: int, watch: Watch) -> list[ScoredGroup]:
        """Block until `num_groups` groups, at least one of them with samples, can be handed out: the reserved ones, or those
        that were started first. Sorted by group id. After `end`: as many as there are, and [] when there is nothing more to train.

        Raises:
            DeadlineError: nothing moved for `watch.timeout_s` seconds.
            BufferInterrupted: `interrupt` was called.
            BaseException: the error given to `fail`.

        On each of these errors, the groups taken so far are queued again, so a checkpoint that is written then has them.
        """
        taken: list[ScoredGroup] = []
        while True:
            try:
                popped = self._pop(num_groups - len(taken), trainer_version, watch)
            except BaseException:
                with self._condition:
                    self._groups.extend(taken)
                raise
            if self._nothing_is_left([*taken, *popped], trainer_version):
                self._last_step = self._step - 1
            taken += self._drop_stale(popped, trainer_version)
            if popped and len(taken) < num_groups:
                continue
            if any(group.samples for group in taken):
                for group in taken:
                    self._end_span(group, step=trainer_version + 1)
                self._reserved = set()
                return sorted(taken, key=lambda group: group.group_id)
            for group in taken:  # a whole round without samples: take the next one
                self._end_span(group, status=str(GroupStatus.FILTERED))
                self._on_drop(group, GroupStatus.FILTERED, self.record_dropped(group))
            if not popped:
                return []
            taken = []

    def _pop(self, limit: int, trainer_version: int, watch: Watch) -> list[ScoredGroup]:
        """Pop at least one group; none after `end`, when nothing is left."""
        seen = watch.progress()
        last_change = last_heartbeat = time.monotonic()
        while True:
            with self._condition:
                popped = self._pop_now(limit, trainer_version)
                if popped or self._has_ended:
                    return popped
                left = last_change + watch.timeout_s - time.monotonic()
                if not self._woken:
                    self._condition.wait(timeout=max(0.0, min(left, watch.heartbeat_s)))
                woken, self._woken = self._woken, False
                popped = [] if woken else self._pop_now(limit, trainer_version)
            if popped:
                return popped
            if woken:
                watch.on_change()
                continue
            now, progress = time.monotonic(), watch.progress()
            if progress != seen:
                seen, last_change = progress, now
            elif now - last_change >= watch.timeout_s:
                raise DeadlineError(
                    f"samples for step {trainer_version + 1}; no token was generated meanwhile ({watch.describe()})",
                    waited_s=watch.timeout_s,
                    setting="training.queue_timeout_s",
                    hint="With groups in flight the server or a reward function hangs; look into the servers' logs.",
                )
            if now - last_heartbeat >= watch.heartbeat_s:
                watch.heartbeat()
                last_heartbeat = now

    def _in_order(self) -> list[ScoredGroup]:
        """Queued groups in the order in which they were started: the first would be the next to become stale."""
        return sorted(self._groups, key=lambda scored: scored.group_id)

    def _pop_now(self, limit: int, trainer_version: int) -> list[ScoredGroup]:
        """Up to `limit` groups without waiting: the reserved ones, or those that were started first. The caller holds the lock."""
        if self._failure is not None:
            raise self._failure
        if self._interrupted:
            raise BufferInterrupted

        def waits(group: ScoredGroup) -> bool:
            """Whether a group waits behind the reserved ones. A stale group does not: it must be popped to be dropped."""
            is_reserved = group.group_id in self._reserved
            return not is_reserved and not self.is_stale(group.oldest_version, trainer_version)

        groups = self._in_order()
        if self._reserved:
            waiting = [group for group in groups[:limit] if waits(group)]
            if not any(self.is_stale(group.oldest_version, trainer_version + 1) for group in waiting):
                groups.sort(key=waits)
        popped, self._groups = groups[:limit], groups[limit:]
        return popped

    def _nothing_is_left(self, popped: list[ScoredGroup], trainer_version: int) -> bool:
        """Whether the data is at its end, and neither `popped` nor the queue has anything to train."""
        with self._condition:
            return self._has_ended and not any(
                group.samples and not self.is_stale(group.oldest_version, trainer_version)
                for group in (*popped, *self._groups)
            )

    def _drop_stale(self, groups: list[ScoredGroup], trainer_version: int) -> list[ScoredGroup]:
        fresh = []
        for group in groups:
            if self.is_stale(group.oldest_version, trainer_version):
                self._end_span(group, status=str(GroupStatus.STALE))
                self._on_drop(group, GroupStatus.STALE, self.record_dropped(group))
            else:
                fresh.append(group)
        return fresh

    def drain(self) -> list[ScoredGroup]:
        """Remove and return everything queued (at the end of a run)."""
        with self._condition:
            groups, self._groups = self._groups, []
        for group in groups:
            self._end_span(group)
        return groups

    def _end_span(self, scored: ScoredGroup, **details: object) -> None:
        """A group leaves the queue: add the span that began with `add` to the timeline."""
        began, track = self._since.pop(scored.group_id)
        track.add("queued", began, time.time(), group=scored.group.name, **details)
        self._tracks.release(track)

    def fail(self, error: BaseException) -> None:
        """Make the current and every later `take` raise `error`. The first failure wins."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def wake(self) -> None:
        """Make the current `take`, or the next one that waits, call its `on_change`."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def end(self) -> None:
        """Nothing more will be added: the data is at its end."""
        with self._condition:
            self._has_ended = True
            self._condition.notify_all()

    def interrupt(self) -> None:
        """Make the current and every later `take` raise BufferInterrupted."""
        with self._condition:
            self._interrupted = True
            self._condition.notify_all()
