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

Thread-safe: the rollout thread admits, starts and generates; both it and the trainer's thread close.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_async.records import LEDGER_STATUSES, GroupStatus


@dataclass(slots=True)
class _OpenGroup:
    status: GroupStatus = GroupStatus.IN_FLIGHT
    tokens: int = 0


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
        self._changed: asyncio.Event | None = None
        self._lock = threading.RLock()
        self._open: dict[int, _OpenGroup] = {}
        totals = totals or {"groups": {}, "tokens": {}}
        self._groups: Counter[str] = Counter(totals["groups"])
        self._tokens: Counter[str] = Counter(totals["tokens"])

    @property
    def version(self) -> int:
        """The policy version that the servers serve."""
        return self._version

    @property
    def capacity(self) -> int:
        """Groups that may be started right now."""
        steps = min(self._version + self._max_staleness + 1, self._last_version) - self._first_version
        with self._lock:
            return steps * self._groups_per_step - len(self._open) - self._num_taken

    async def admit(self) -> None:
        """Wait for a free place, which the next `start` takes. Unblocked by `close_group` and `advance`."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._changed = asyncio.Event()
            if self.capacity > 0:
                return
            await self._changed.wait()  # cancelled with the run

    def advance(self, version: int) -> None:
        """The server serves `version` from now on."""
        with self._lock:
            self._version = max(self._version, version)
        self._wake()

    def _wake(self) -> None:
        loop, changed = self._loop, self._changed
        if loop is not None and changed is not None and not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    def start(self, group_id: int) -> None:
        with self._lock:
            if group_id in self._open:
                raise ValueError(f"group {group_id} was started twice")
            self._open[group_id] = _OpenGroup()
            self._groups["started"] += 1

    def generated(self, group_id: int, num_tokens: int) -> None:
        """Tokens arrived for a group. Late arrivals for a closed group are not counted at all."""
        with self._lock:
            group = self._open.get(group_id)
            if group is not None:
                group.tokens += num_tokens
                self._tokens["started"] += num_tokens

    def drop_tokens(self, group_id: int, num_tokens: int) -> None:
        """Move tokens (of a failed rollout, or of a call that was cancelled or is not trained) out of their group, which continues
        with the others."""
        with self._lock:
            self._open[group_id].tokens -= num_tokens
            self._tokens[GroupStatus.FAILED] += num_tokens

    def queue(self, group_id: int) -> None:
        with self._lock:
            self._open[group_id].status = GroupStatus.QUEUED

    def close_group(self, group_id: int, status: GroupStatus, *, was_taken: bool = False) -> None:
        """Give a group its final status. `was_taken`: a step took it; otherwise its place is free at once."""
        if not status.is_final:
            raise ValueError(f"{status} is not a final status")
        with self._lock:
            group = self._open.pop(group_id)
            self._groups[status] += 1
            self._tokens[status] += group.tokens
            self._num_taken += was_taken
        self._wake()

    def is_open(self, group_id: int) -> bool:
        with self._lock:
            return group_id in self._open

    @property
    def num_events(self) -> int:
        """A counter that grows while anything moves: tokens arrive, groups are started or closed."""
        with self._lock:
            return self._tokens["started"] + self._groups["started"] + sum(self._groups[s] for s in LEDGER_STATUSES)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{"groups": {"started": n, "trained": n, ...}, "tokens": {...}}, taken at one instant."""
        with self._lock:
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
