"""Events as something to draw: which lanes there are, which span lies inside which, and what to leave out from far away. Pure.

events of lane rollout/0:  rollout 0-10, generate 0-4, tools 4-6, generate 6-10
rows:                      depth 0: rollout; depth 1: generate, tools, generate
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline_file import ATTEMPT, DROPPED, LOST, Event, parse_event, read_events

ORDER = (
    "run", "trainer", "gpu", "rollout", "tools", "weights", "queue", "scoring", "evaluation", "checkpoint", "server",
)  # fmt: skip
"""Lanes from top to bottom; others follow by name."""
TITLES: Mapping[str, str] = {
    "gpu": "trainer GPU",
    "weights": "weight push",
    "queue": "scored groups in the queue",
    "rollout": "rollouts",
    "evaluation": "evaluation",
    "server": "inference servers",
}
"""Of lanes whose name alone says too little."""

_STEP = "step"
_STEP_MARK = b'"name":"step"'


def lane_group(lane: str) -> str:
    """ "rollout/3" -> "rollout"."""
    return lane.partition("/")[0]


def lane_order(lane: str) -> tuple[int, str, int, str]:
    """Sorts lanes as they are drawn: by `ORDER`, then by slot."""
    group, _, slot = lane.partition("/")
    place = ORDER.index(group) if group in ORDER else len(ORDER)
    number = -1 if not slot else int(slot) if slot.isdecimal() and slot.isascii() else 1 << 30
    return place, group, number, slot


@dataclass(frozen=True, slots=True)
class Placed:
    """A span in its row: `depth` 0 lies in no other span of the row."""

    event: Event
    depth: int


@dataclass(slots=True)
class Row:
    """Spans that nest: any two lie inside each other or apart. In the order of their starts, outer ones first."""

    lane: str
    spans: list[Placed] = field(default_factory=list)


def lay_out(events: Iterable[Event]) -> list[Row]:
    """One row for each lane, in the order of `lane_order`. What overlaps without nesting gets a further row of the same lane, which
    happens only where a recorder gave one lane to two at once."""
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        lanes[event.lane].append(event)
    rows = []
    for lane in sorted(lanes, key=lane_order):
        rows += _rows(lane, sorted(lanes[lane], key=lambda event: (event.start, -event.end)))
    return rows


def _rows(lane: str, events: Sequence[Event]) -> list[Row]:
    rows: list[Row] = []
    open_spans: list[list[Event]] = []  # of each row: those that go on, the outermost first
    for event in events:
        for row, stack in zip(rows, open_spans, strict=True):  # noqa: B007 - the one that was found
            while stack and stack[-1].end <= event.start and stack[-1] is not event:
                stack.pop()
            if not stack or event.end <= stack[-1].end:
                break
        else:
            row, stack = Row(lane), []
            rows.append(row)
            open_spans.append(stack)
        row.spans.append(Placed(event, len(stack)))
        stack.append(event)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A window for `static/timeline.js`, as JSON by `as_dict`. Times are unix seconds; `first` and `last` are those of the whole
    timeline. `num_merged` spans stand in others that say `count`."""

    start: float
    end: float
    first: float
    last: float
    spans: Sequence[Mapping[str, Any]]
    num_merged: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "end": self.end,
            "first": self.first,
            "last": self.last,
            "spans": list(self.spans),
            "num_merged": self.num_merged,
        }


def drawing(
    events: Sequence[Event], *, start: float | None = None, end: float | None = None, columns: int = 1500
) -> Drawing | None:
    """The spans that touch a window, at the level of detail of a drawing that is `columns` wide; None without events.

    In each row, neighbours that are narrower than a column and less than a column apart become one span, which has the name of the
    most of them, their number as `count`, and the time that they fill as `busy_s`. So a row has at most about two spans a column,
    however many there are: 100,000 spans in 200 rows at 1500 columns are drawn as those that can be told apart.
    """
    if not events:
        return None
    first, last = min(event.start for event in events), max(event.end for event in events)
    low = first if start is None else start
    high = max(low, last if end is None else end)
    width = (high - low) / max(1, columns)
    rows = lay_out(event for event in events if event.end >= low and event.start <= high)
    spans: list[dict[str, Any]] = []
    num_merged = 0
    for row in rows:
        levels: dict[int, list[Event]] = defaultdict(list)
        for placed in row.spans:
            levels[placed.depth].append(placed.event)
        for depth, level in sorted(levels.items()):
            for block in _blocks(level, width):
                spans.append(_span(block, depth))
                num_merged += len(block) - 1
    return Drawing(start=low, end=high, first=first, last=last, spans=spans, num_merged=num_merged)


def _blocks(events: Sequence[Event], width: float) -> list[list[Event]]:
    """Neighbours to be drawn as one. Instants stay: each is a mark."""
    blocks: list[list[Event]] = []
    for event in events:
        is_short = 0.0 < event.duration_s < width
        before = blocks[-1] if blocks else None
        if is_short and before is not None and _joins(before, event, width):
            before.append(event)
        else:
            blocks.append([event])
    return blocks


def _joins(block: Sequence[Event], event: Event, width: float) -> bool:
    is_short = 0.0 < block[-1].duration_s < width
    return is_short and event.start - block[-1].end < width and event.end - block[0].start < 4 * width


def _span(block: Sequence[Event], depth: int) -> dict[str, Any]:
    first = block[0]
    span: dict[str, Any] = {"lane": first.lane, "depth": depth, "start": first.start, "end": block[-1].end}
    if len(block) == 1:
        return {**span, "name": first.name, "details": first.details}
    names: dict[str, float] = defaultdict(float)
    for event in block:
        names[event.name] += event.duration_s
    return {
        **span,
        "name": max(names, key=lambda name: names[name]),
        "count": len(block),
        "busy_s": sum(names.values()),
        "details": {},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFile:
    """What was read of events.jsonl: its events in the order of their starts, the steps of the run, and what is missing."""

    events: Sequence[Event]
    steps: Mapping[int, Event]
    """The span of each optimizer step; that of the last attempt which made it."""
    num_attempts: int
    notes: Sequence[str]


def load_events(
    path: Path, *, first_step: int | None = None, last_step: int | None = None, newest_steps: int | None = None
) -> EventFile:
    """Read a timeline; with steps, only what touches the time from the begin of the first to the end of the last of them.

    Args:
        newest_steps: instead of `first_step`: that many of the newest; all that there is while no step is finished.

    Raises:
        ConfigError: there is no timeline, or it has no such step; the message says which it has.
    """
    try:
        steps = _read_steps(path)
        if newest_steps is not None and steps:
            first_step = sorted(steps)[-newest_steps:][0]
        low, high = _window(path, steps, first_step, last_step)
        events = [event for event in read_events(path) if event.end >= low and event.start <= high]
    except OSError as error:
        raise ConfigError(
            f"cannot read the timeline {path}: {error.strerror}; `record.timeline.enabled` writes one while a run goes on"
        ) from error
    notes = []
    for event in events:
        if event.name == DROPPED:
            notes.append(f"the first {event.details.get('events', '?')} events were dropped: record.timeline.max_mb")
        elif event.name == LOST:
            notes.append(f"{event.details.get('events', '?')} events could not be written")
    events.sort(key=lambda event: (event.start, -event.end))
    attempts = sum(event.name == ATTEMPT and event.start == event.end for event in events)
    return EventFile(events=events, steps=steps, num_attempts=attempts, notes=notes)


def _read_steps(path: Path) -> dict[int, Event]:
    steps = {}
    with path.open("rb") as file:
        for line in file:
            event = parse_event(line) if _STEP_MARK in line else None
            if event is not None and event.name == _STEP and isinstance(number := event.details.get("step"), int):
                steps[number] = event
    return steps


def _window(path: Path, steps: Mapping[int, Event], first: int | None, last: int | None) -> tuple[float, float]:
    if first is None and last is None:
        return 0.0, float("inf")
    if not steps:
        raise ConfigError(f"{path} has no finished step yet: leave out --from and --to")
    wanted = [step for step in steps if (first is None or step >= first) and (last is None or step <= last)]
    if not wanted:
        asked = f"{'' if first is None else first}..{'' if last is None else last}"
        raise ConfigError(f"{path} has no step in {asked}; it has {min(steps)} to {max(steps)}")
    return min(steps[step].start for step in wanted), max(steps[step].end for step in wanted)
