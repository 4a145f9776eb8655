"""The table of all open groups: what state each is in, how old its tokens are, who may still use it, and who may start.

    start -> STARTED -> score -> SCORED <-> RESERVED -> take -> TAKEN -> close(status)
                |                   |                             |
                '-> close(failed,   '-> close(stale,              '-> trained, filtered, failed:
                    stale, ...)         filtered, cancelled)          the next version admits others

    admission: groups that are open + groups that steps have taken <= (served version + max_staleness + 1) x groups_per_step

Groups that no step takes free their place at once. 4 groups per step, max_staleness 1: 8 start at version 0; one fails -> 1 more;
version 1 -> 4 more. A group is *due* at the last step that may train on its oldest token; of those that were admitted at once the
earlier ones are due earlier: groups 0 to 3 at step 1, 4 to 7 at step 2, the four of version 1 at step 3. One lock, `changed`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from grpo_async.buffer.group import GroupState, OpenGroup
from grpo_async.buffer.ledger import Counts
from grpo_async.records import LEDGER_STATUSES, GroupStatus, ScoredGroup
from grpo_async.tracking.timeline import record

_RECENT_STEPS = 8
_MIN_PATIENCE_S = 30.0


class GroupTable:
    """See the module's docstring. `totals`: the ledger of a checkpoint to resume from; `last_version`: that after the last step,
    beyond which nothing is admitted."""

    def __init__(
        self,
        totals: Counts | None = None,
        *,
        groups_per_step: int,
        max_staleness: int,
        version: int,
        last_version: int,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._version = self._first_version = version
        self._last_version = last_version
        self._num_taken = 0  # that were taken by steps and are closed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admits: asyncio.Event | None = None
        self.changed = threading.Condition()
        """The lock; notified when a group is scored or closed."""
        self._durations_s: deque[float] = deque(maxlen=_RECENT_STEPS * groups_per_step)  # from start to score or close
        self._open: dict[int, OpenGroup] = {}
        self._cancelled: set[int] = set()
        totals = totals or {"groups": {}, "tokens": {}}
        self._groups: Counter[str] = Counter(totals["groups"])
        self._tokens: Counter[str] = Counter(totals["tokens"])
        self._stale_rollouts = self._stale_tokens = 0  # since `take_stale`

    # ---- versions ----

    @property
    def version(self) -> int:
        return self._version

    def advance(self, version: int) -> None:
        with self.changed:
            self._version = max(self._version, version)
        self._wake()

    def is_stale(self, oldest_version: int | None, version: int | None = None) -> bool:
        """Whether no step after `version` (default: the served one) may use a group whose oldest token is of
        `oldest_version` (None: it has no tokens)."""
        version = self._version if version is None else version
        return oldest_version is not None and version - oldest_version > self._max_staleness

    def will_be_stale(self, group_id: int) -> bool:
        """Whether no step after the served version may use an open group, because of the tokens that it has so far."""
        with self.changed:
            return self.is_stale(self._open[group_id].oldest_version)

    @property
    def _last_step(self) -> int:
        return self._version + self._max_staleness + 1

    # ---- admission ----

    @property
    def capacity(self) -> int:
        with self.changed:
            steps = min(self._last_step, self._last_version) - self._first_version
            return steps * self._groups_per_step - len(self._open) - self._num_taken

    async def admit(self) -> None:
        """Wait for a free place, which the next `start` takes. Unblocked by `close` and `advance`."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._admits = asyncio.Event()
            if self.capacity > 0:
                return
            await self._admits.wait()  # cancelled with the run

    def _wake(self) -> None:
        loop, admits = self._loop, self._admits
        if loop is not None and admits is not None and not loop.is_closed():
            loop.call_soon_threadsafe(admits.set)

    def start(self, group: OpenGroup) -> None:
        with self.changed:
            if group.group_id in self._open:
                raise ValueError(f"group {group.group_id} was started twice")
            not_admitted = max(0, self._last_step - self._last_version)  # steps after the end of the run
            free = max(0, self.capacity - 1) // self._groups_per_step
            group.spare_steps = not_admitted + free
            self._open[group.group_id] = group
            self._groups["started"] += 1

    def restore(self, scored: ScoredGroup) -> None:
        with self.changed:
            self.start(OpenGroup(prompt=scored.group.prompt, size=len(scored.group.completions)))
            self.generated(scored.group_id, sum(each.num_sampled_tokens for each in scored.group.trainable))
            self.score(scored)

    # ---- in the making ----

    def generated(self, group_id: int, num_tokens: int, version: int | None = None) -> None:
        """Tokens arrived for a group, the oldest sampled by `version`. Late arrivals for a closed group are not counted."""
        with self.changed:
            if (group := self._open.get(group_id)) is not None:
                group.tokens += num_tokens
                self._tokens["started"] += num_tokens
                if version is not None and (group.oldest_version is None or version < group.oldest_version):
                    group.oldest_version = version

    def drop_tokens(self, group_id: int, num_tokens: int) -> None:
        """Move tokens (of a failed rollout, or of a call that was cancelled or is not trained) out of their group, which
        continues with the others."""
        with self.changed:
            self._open[group_id].tokens -= num_tokens
            self._tokens[GroupStatus.FAILED] += num_tokens

    def started(self) -> list[OpenGroup]:
        """The groups that are being generated or scored, in the order in which they were started."""
        with self.changed:
            return [group for group in self._open.values() if group.state is GroupState.STARTED]

    def due(self, step: int) -> dict[int, int]:
        """The groups in the making for which `step` keeps a place, due at it or before: the last step that may use each, by id."""
        due = {}
        for group in self.started():
            if group.oldest_version is not None:
                last = group.oldest_version + self._max_staleness + 1
                if 0 <= last - step <= group.spare_steps:
                    due[group.group_id] = last
        return due

    def release_places(self, step: int) -> None:
        """Keep no place for the groups that are due at `step`, except in the last step that may use them, if that is later."""
        with self.changed:
            for group_id, last in self.due(step).items():
                self._open[group_id].spare_steps = 0 if last > step else -1

    @property
    def patience_s(self) -> float:
        """How long a step that others could fill waits for groups that are due: as long as the slowest of the recent groups took,
        at least 30 s."""
        with self.changed:
            return max([_MIN_PATIENCE_S, *self._durations_s])

    # ---- scored ----

    def score(self, scored: ScoredGroup) -> None:
        with self.changed:
            group = self._open[scored.group_id]
            self._end_making(group)
            group.state, group.scored, group.scored_at = GroupState.SCORED, scored, time.time()
            group.oldest_version = scored.oldest_version  # of the tokens that may be trained
            self.changed.notify_all()

    def _end_making(self, group: OpenGroup) -> None:
        if group.state is GroupState.STARTED:
            self._durations_s.append(time.monotonic() - group.began)

    def queued(self) -> list[ScoredGroup]:
        """The groups that wait for their step, by id: in the order in which they were started."""
        with self.changed:
            waiting = (GroupState.SCORED, GroupState.RESERVED)
            queued = [g.scored for g in self._open.values() if g.state in waiting and g.scored is not None]
            return sorted(queued, key=lambda scored: scored.group_id)

    def mark(self, groups: Sequence[ScoredGroup], state: GroupState) -> None:
        """RESERVED: these, and no others, are packed for the next step. TAKEN: a step has them."""
        with self.changed:
            for group in self._open.values():
                if group.state is GroupState.RESERVED:
                    group.state = GroupState.SCORED
            for scored in groups:
                group = self._open[scored.group_id]
                group.state = state
                if state is GroupState.TAKEN:
                    record("queued", group.scored_at, time.time(), group=scored.group.name)

    def is_reserved(self, group_id: int) -> bool:
        with self.changed:
            return self._open[group_id].state is GroupState.RESERVED

    # ---- closed ----

    def close(self, group_id: int, status: GroupStatus) -> None:
        """Give a group its final status. Its place is free at once, unless a step took it."""
        if not status.is_final:
            raise ValueError(f"{status} is not a final status")
        with self.changed:
            group = self._open.pop(group_id)
            if status is GroupStatus.CANCELLED:
                self._cancelled.add(group_id)
            if status is not GroupStatus.FAILED:
                self._end_making(group)
            if group.scored is not None and group.state is not GroupState.TAKEN:
                record("queued", group.scored_at, time.time(), group=group.scored.group.name, status=str(status))
            self._groups[status] += 1
            self._tokens[status] += group.tokens
            if status is GroupStatus.STALE:
                self._stale_rollouts += group.size
                self._stale_tokens += group.tokens
            self._num_taken += group.state is GroupState.TAKEN
            self.changed.notify_all()
        self._wake()

    def is_open(self, group_id: int) -> bool:
        with self.changed:
            return group_id in self._open

    @property
    def unfinished(self) -> set[int]:
        """Ids of the groups that a resume issues again: those that are open, or were cancelled by the end of the run."""
        with self.changed:
            return {*self._open, *self._cancelled}

    # ---- counts ----

    def take_stale(self) -> tuple[int, int]:
        """The rollouts of the groups that became stale since the last call, and their tokens."""
        with self.changed:
            stale = self._stale_rollouts, self._stale_tokens
            self._stale_rollouts = self._stale_tokens = 0
            return stale

    @property
    def num_events(self) -> int:
        """A counter that grows while anything moves: tokens arrive, groups are started or closed."""
        with self.changed:
            return self._tokens["started"] + self._groups["started"] + sum(self._groups[s] for s in LEDGER_STATUSES)

    def ledger(self) -> dict[str, dict[str, int]]:
        with self.changed:
            groups = {status.value: self._groups[status] for status in LEDGER_STATUSES}
            tokens = {status.value: self._tokens[status] for status in LEDGER_STATUSES}
            for group in self._open.values():
                is_making = group.state is GroupState.STARTED
                status = GroupStatus.IN_FLIGHT if is_making else GroupStatus.QUEUED
                groups[status.value] += 1
                tokens[status.value] += group.tokens
            return {
                "groups": {"started": self._groups["started"], **groups},
                "tokens": {"started": self._tokens["started"], **tokens},
            }
