"""Who was busy, and who waited for whom, from the events of a run. Pure.

All shares are of the time from the begin of the first step to the end of the last (without steps: of all events). Worked example:
the trainer waits 3 of 10 s, and requests are generated in 2 of those 3 -> trainer waits 30%, of which 67% while generation runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_async.tracking.timeline_file import Event
from grpo_async.viewer.timeline_data import lane_group

Intervals = list[tuple[float, float]]
"""Apart from each other, ascending."""

_WAITS = ("wait for", "queued")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameUsage:
    """All spans of one name in one group of lanes; seconds."""

    lane: str
    name: str
    count: int
    total_s: float
    longest_s: float

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Seconds, if not said otherwise.

    Attributes:
        wall_s: length of the time that is looked at.
        lanes: seconds in which something ran, by group of lanes; "generation" is requests at a server.
        trainer_waits_s: for samples.
        trainer_waits_generating_s: of it, while requests were generated.
        generation_idle_s: no request was at a server.
        generation_idle_by: of it, what the trainer did meanwhile.
        both_s: training and generating at once.
        mean_in_flight: requests at a server, over the time in which there were any.
        names: by total time, the largest first.
        waits: the longest spans that are waits.
    """

    wall_s: float
    lanes: Mapping[str, float]
    trainer_waits_s: float
    trainer_waits_generating_s: float
    generation_idle_s: float
    generation_idle_by: Mapping[str, float]
    both_s: float
    mean_in_flight: float
    names: Sequence[NameUsage]
    waits: Sequence[Event]


def usage(events: Sequence[Event], *, num_waits: int = 5) -> Usage | None:
    """None without a span of any length."""
    steps = [event for event in events if event.name == "step" and lane_group(event.lane) == "trainer"]
    spans = [event for event in events if event.end > event.start]
    if not spans:
        return None
    start = min(event.start for event in steps or spans)
    end = max(event.end for event in steps or spans)
    clipped = [cut for event in spans if (cut := _clip(event, start, end)) is not None]
    wall = [(start, end)]
    generating = union(event for event in clipped if _is(event, "rollout", "generate"))
    training = union(event for event in clipped if _is(event, "trainer", "train"))
    waiting = union(event for event in clipped if _is(event, "trainer", "wait for samples"))
    working = subtract(union(event for event in clipped if _is(event, "trainer", None)), waiting)
    idle = subtract(wall, generating)
    lanes = {lane: seconds(union(each)) for lane, each in _by_lane(clipped).items()}
    lanes["trainer"] = seconds(working)
    lanes["generation"] = seconds(generating)
    doings = ("wait for samples", "train", "push", "settle", "copy checkpoint", "log")
    idle_by = {}
    for name in doings:
        part = overlap(idle, union(event for event in clipped if _is(event, "trainer", name)))
        if part > 0.0:
            idle_by[name] = part
    in_flight_s = sum(event.duration_s for event in clipped if _is(event, "rollout", "generate"))
    waits = [event for event in clipped if event.name.startswith(_WAITS)]
    return Usage(
        wall_s=end - start,
        lanes=lanes,
        trainer_waits_s=seconds(waiting),
        trainer_waits_generating_s=overlap(waiting, generating),
        generation_idle_s=seconds(idle),
        generation_idle_by=idle_by,
        both_s=overlap(training, generating),
        mean_in_flight=in_flight_s / seconds(generating) if generating else 0.0,
        names=_names(clipped),
        waits=sorted(waits, key=lambda event: -event.duration_s)[:num_waits],
    )


def _is(event: Event, group: str, name: str | None) -> bool:
    if lane_group(event.lane) != group:
        return False
    return event.name != "step" if name is None else event.name == name


def _clip(event: Event, start: float, end: float) -> Event | None:
    low, high = max(event.start, start), min(event.end, end)
    return Event(event.name, event.lane, low, high, event.details) if high > low else None


def _by_lane(events: Iterable[Event]) -> dict[str, list[Event]]:
    groups: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        groups[lane_group(event.lane)].append(event)
    return groups


def _names(events: Iterable[Event]) -> list[NameUsage]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        found[lane_group(event.lane), event.name].append(event.duration_s)
    names = [
        NameUsage(lane=lane, name=name, count=len(each), total_s=sum(each), longest_s=max(each))
        for (lane, name), each in found.items()
    ]
    return sorted(names, key=lambda each: -each.total_s)


def union(events: Iterable[Event]) -> Intervals:
    """When at least one ran. 0-2, 1-3, 5-6 -> 0-3, 5-6."""
    merged: Intervals = []
    for start, end in sorted((event.start, event.end) for event in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def seconds(intervals: Intervals) -> float:
    """Their length."""
    return sum(end - start for start, end in intervals)


def overlap(first: Intervals, second: Intervals) -> float:
    """Seconds that are in both. 0-3 and 2-5 -> 1."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def subtract(whole: Intervals, part: Intervals) -> Intervals:
    """What is in `whole` only. 0-10 without 2-3, 9-12 -> 0-2, 3-9."""
    left: Intervals = []
    j = 0
    for start, end in whole:
        while j < len(part) and part[j][1] <= start:
            j += 1
        k = j
        while k < len(part) and part[k][0] < end:
            if part[k][0] > start:
                left.append((start, part[k][0]))
            start = max(start, part[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left
