"""The ledger: every started group, and every token sampled for it, is counted in exactly one place.

    started = trained + filtered + stale + failed + cancelled + queued + in flight       (groups and tokens)

A snapshot of `GroupTable`. A group samples 40 tokens, one rollout with 10 of them fails, the others are trained:
{"groups": {"started": 1, "trained": 1}, "tokens": {"started": 40, "failed": 10, "trained": 30}}"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_async.records import LEDGER_STATUSES, GroupStatus

Counts = Mapping[str, Mapping[str, int]]


def is_balanced(ledger: Counts) -> bool:
    return all(
        counts["started"] == sum(counts[status.value] for status in LEDGER_STATUSES) for counts in ledger.values()
    )


def totals_for_resume(ledger: Counts) -> dict[str, dict[str, int]]:
    """A ledger without the open groups: a resumed run restores them, and counts them again.

    started 10 = trained 7 + queued 2 + in flight 1  ->  started 7 = trained 7"""
    totals = {}
    for kind, counts in ledger.items():
        still_open = counts[GroupStatus.QUEUED.value] + counts[GroupStatus.IN_FLIGHT.value]
        totals[kind] = {
            **counts,
            "started": counts["started"] - still_open,
            GroupStatus.QUEUED.value: 0,
            GroupStatus.IN_FLIGHT.value: 0,
        }
    return totals
