"""The ledger: every started group, and every token sampled for it, is counted in exactly one place.

    started = trained + filtered + stale + failed + cancelled + queued + in flight       (groups and tokens)

Worked example: a group starts, samples 40 tokens, one rollout with 10 of them fails, the others are trained:
groups {started 1, trained 1}; tokens {started 40, failed 10, trained 30}.

Admission limits how far generation runs ahead of training, so that little becomes stale:

    groups open, or taken by a step <= (server_version + max_staleness + 1) x groups_per_step

counted from the start of the run. Groups that a step takes, to train or to filter them, stay counted: the version that the
step makes admits the next ones. Groups that no step takes (failed, stale, cancelled, filtered before) free their place at once;
otherwise admission would deadlock. With max_staleness 0 this is synchronous GRPO.
Worked example: 4 groups per step, max_staleness 1: 8 groups start at version 0; one fails -> 1 more; version 1 -> 4 more.

A group is *due* at the last step that may train on its oldest token. Where groups of several steps are admitted at once (at the
start, after a push of several steps) the earlier ones are due earlier, or the first of these steps would get the short ones:
above, groups 0 to 3 are due at step 1, 4 to 7 at step 2, and the four of version 1 at step 3.

Thread-safe: the rollout thread admits, starts and generates; both it and the trainer's thread close. `changed` is the one lock of
ledger and queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_async.records import LEDGER_STATUSES, GroupStatus

_RECENT_STEPS = 8
_MIN_PATIENCE_S = 30.0


@dataclass(slots=True)
class _OpenGroup:
    """`spare_steps`: it is due so many steps before the last one that may use it; below 0: at none."""

    spare_steps: int
    began: float
    status: GroupStatus = GroupStatus.IN_FLIGHT
    tokens: int = 0
    oldest_version: int | None = None


class Ledger:
    """Counts groups and tokens by status, and admits new groups.

    Args:
        totals: totals of a snapshot to resume from, without open groups.
        groups_per_step: groups that one optimizer step consumes.
        max_staleness: in optimizer steps.
        version: policy version at the start (after a resume: the step of the checkpoint).
        last_version: version after the last optimizer step; nothing is admitted that no step could consume.
    """

    def __init__(
        self,
        totals: Mapping[str, Mapping[str, int]] | None = None,
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
        self._num_taken = 0  # by steps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admits: asyncio.Event | None = None
        self.changed = threading.Condition()
        """Notified when a group leaves the making: scored and queued, or closed."""
        self._durations_s: deque[float] = deque(maxlen=_RECENT_STEPS * groups_per_step)  # of groups that left it
        self._open: dict[int, _OpenGroup] = {}
        totals = totals or {"groups": {}, "tokens": {}}
        self._groups: Counter[str] = Counter(totals["groups"])
        self._tokens: Counter[str] = Counter(totals["tokens"])
        self._stale_before = self._groups[GroupStatus.STALE], self._tokens[GroupStatus.STALE]

    @property
    def version(self) -> int:
        """The policy version that the servers serve."""
        return self._version

    @property
    def capacity(self) -> int:
        """Groups that may be started right now."""
        with self.changed:
            steps = min(self._last_step, self._last_version) - self._first_version
            return steps * self._groups_per_step - len(self._open) - self._num_taken

    @property
    def _last_step(self) -> int:
        """The last step that may train on a token sampled now."""
        return self._version + self._max_staleness + 1

    def is_stale(self, oldest_version: int | None, version: int | None = None) -> bool:
        """Whether no step after `version` (default: the served one) may use a group whose oldest token is of `oldest_version`
        (None: it has no tokens)."""
        version = self._version if version is None else version
        return oldest_version is not None and version - oldest_version > self._max_staleness

    def is_bound_stale(self, group_id: int) -> bool:
        """Whether no step after the served version may use an open group, because of the tokens that it has so far."""
        with self.changed:
            return self.is_stale(self._open[group_id].oldest_version)

    def due(self, step: int) -> dict[int, int]:
        """The groups in the making for which `step` keeps a place, due at it or before: the last step that may use each, by id."""
        with self.changed:
            last_steps = {
                group_id: group.oldest_version + self._max_staleness + 1
                for group_id, group in self._open.items()
                if group.status is GroupStatus.IN_FLIGHT and group.oldest_version is not None
            }
            return {i: last for i, last in last_steps.items() if 0 <= last - step <= self._open[i].spare_steps}

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

    async def admit(self) -> None:
        """Wait for a free place, which the next `start` takes. Unblocked by `close_group` and `advance`."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._admits = asyncio.Event()
            if self.capacity > 0:
                return
            await self._admits.wait()  # cancelled with the run

    def advance(self, version: int) -> None:
        """The server serves `version` from now on."""
        with self.changed:
            self._version = max(self._version, version)
        self._wake()

    def _wake(self) -> None:
        loop, admits = self._loop, self._admits
        if loop is not None and admits is not None and not loop.is_closed():
            loop.call_soon_threadsafe(admits.set)

    def start(self, group_id: int) -> None:
        with self.changed:
            if group_id in self._open:
                raise ValueError(f"group {group_id} was started twice")
            not_admitted = max(0, self._last_step - self._last_version)  # steps after the end of the run
            free = max(0, self.capacity - 1) // self._groups_per_step
            self._open[group_id] = _OpenGroup(not_admitted + free, began=time.monotonic())
            self._groups["started"] += 1

    def generated(self, group_id: int, num_tokens: int, version: int | None = None) -> None:
        """Tokens arrived for a group, the oldest sampled by `version`. Late arrivals for a closed group are not counted at all."""
        with self.changed:
            group = self._open.get(group_id)
            if group is not None:
                group.tokens += num_tokens
                self._tokens["started"] += num_tokens
                if version is not None and (group.oldest_version is None or version < group.oldest_version):
                    group.oldest_version = version

    def drop_tokens(self, group_id: int, num_tokens: int) -> None:
        """Move tokens (of a failed rollout, or of a call that was cancelled or is not trained) out of their group, which continues
        with the others."""
        with self.changed:
            self._open[group_id].tokens -= num_tokens
            self._tokens[GroupStatus.FAILED] += num_tokens

    def queue(self, group_id: int) -> None:
        with self.changed:
            group = self._open[group_id]
            group.status = GroupStatus.QUEUED
            self._durations_s.append(time.monotonic() - group.began)

    def close_group(self, group_id: int, status: GroupStatus, *, was_taken: bool = False) -> None:
        """Give a group its final status. `was_taken`: a step took it; otherwise its place is free at once."""
        if not status.is_final:
            raise ValueError(f"{status} is not a final status")
        with self.changed:
            group = self._open.pop(group_id)
            if group.status is GroupStatus.IN_FLIGHT and status is not GroupStatus.FAILED:
                self._durations_s.append(time.monotonic() - group.began)
            self._groups[status] += 1
            self._tokens[status] += group.tokens
            self._num_taken += was_taken
            self.changed.notify_all()
        self._wake()

    def take_stale(self) -> tuple[int, int]:
        """Groups dropped as stale since the last call, and their tokens."""
        with self.changed:
            (groups, tokens), now = (
                self._stale_before,
                (self._groups[GroupStatus.STALE], self._tokens[GroupStatus.STALE]),
            )
            self._stale_before = now
            return now[0] - groups, now[1] - tokens

    def is_open(self, group_id: int) -> bool:
        with self.changed:
            return group_id in self._open

    @property
    def num_events(self) -> int:
        """A counter that grows while anything moves: tokens arrive, groups are started or closed."""
        with self.changed:
            return self._tokens["started"] + self._groups["started"] + sum(self._groups[s] for s in LEDGER_STATUSES)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{"groups": {"started": n, "trained": n, ...}, "tokens": {...}}, taken at one instant."""
        with self.changed:
            groups = {status.value: self._groups[status] for status in LEDGER_STATUSES}
            tokens = {status.value: self._tokens[status] for status in LEDGER_STATUSES}
            for group in self._open.values():
                groups[group.status.value] += 1
                tokens[group.status.value] += group.tokens
            return {
                "groups": {"started": self._groups["started"], **groups},
                "tokens": {"started": self._tokens["started"], **tokens},
            }


def is_balanced(snapshot: dict[str, dict[str, int]]) -> bool:
    """Whether the equation above holds, in groups and in tokens."""
    return all(
        counts["started"] == sum(counts[status.value] for status in LEDGER_STATUSES) for counts in snapshot.values()
    )


def totals_for_resume(snapshot: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """A snapshot without the open groups: a resumed run restores them, with the tokens that it still has, and counts them
    again. Each group counts once, so the resumed run's ledger equals that of a run that was never interrupted.

    started 10 = trained 7 + queued 2 + in flight 1  ->  started 7 = trained 7
    """
    totals = {}
    for kind, counts in snapshot.items():
        still_open = counts[GroupStatus.QUEUED.value] + counts[GroupStatus.IN_FLIGHT.value]
        totals[kind] = {
            **counts,
            "started": counts["started"] - still_open,
            GroupStatus.QUEUED.value: 0,
            GroupStatus.IN_FLIGHT.value: 0,
        }
    return totals
