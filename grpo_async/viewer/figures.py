"""Numbers, spans and statuses as every view writes them."""

from __future__ import annotations

from grpo_async.records import GroupStatus, RolloutStatus

STATUS_STYLES: dict[str, str] = {
    GroupStatus.TRAINED: "green",
    GroupStatus.FILTERED: "yellow",
    GroupStatus.STALE: "magenta",
    GroupStatus.FAILED: "red",
    GroupStatus.CANCELLED: "dim",
    GroupStatus.EVALUATED: "cyan",
    RolloutStatus.FINISHED: "green",
    RolloutStatus.TRUNCATED: "yellow",
}
"""Style of a group's or a rollout's status, as rich and textual spell it."""


def number(value: float | None, digits: int = 3) -> str:
    """0.25 -> '0.250'; None -> '-'."""
    return "-" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """0.25 -> '+0.250'; None -> '-'."""
    return "-" if value is None else f"{value:+.{digits}f}"


def whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def count(number_of: int, noun: str) -> str:
    """1, 'group' -> '1 group'; 3000, 'group' -> '3,000 groups'."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def span(first: int | None, last: int | None) -> str:
    """2, 2 -> '2'; 2, 3 -> '2-3'; None -> '-'."""
    if first is None or last is None:
        return "-"
    return str(first) if first == last else f"{first}-{last}"


def share(part: int, total: int) -> str:
    """1 of 4 -> '25%'; of nothing -> '-'."""
    return "-" if total == 0 else f"{part / total:.0%}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
