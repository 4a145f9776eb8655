"""Events of a run: read from events.jsonl, sorted by track, and summed up as who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline_file import ATTEMPT, DROPPED, LOST, Event, parse_event, read_events

ORDER = ("run", "trainer", "rollout", "weights", "queue", "scoring", "evaluation", "checkpoint", "server")
"""Tracks from top to bottom; others follow by name."""

_STEP = "step"
_STEP_BYTES = b'"name":"step"'
_TRAINER_WORK = (
    "wait for samples",
    "train",
    "wait for the push",
    "close groups",
    "copy checkpoint",
    "log",
)


# -- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What was read from events.jsonl: its events in the order of their starts, the steps of the run, and what is missing."""

    events: Sequence[Event]
    steps: Mapping[int, Event]
    """The span of each optimizer step; that of the last attempt which made it."""
    num_attempts: int
    notes: Sequence[str]


def load_events(path: Path, *, newest_steps: int | None = None) -> Events:
    """Read a timeline.

    Args:
        newest_steps: only what touches the time of that many of the newest; all that there is while no step is finished.

    Raises:
        ConfigError: there is no timeline.
    """
    try:
        steps, low = _read_steps(path), 0.0
        if newest_steps is not None and steps:
            low = min(steps[step].start for step in sorted(steps)[-newest_steps:])
        events = [event for event in read_events(path) if event.end >= low]
    except OSError as error:
        raise ConfigError(
            f"cannot read the timeline {path}: {error.strerror}; a run writes one from its first step on"
        ) from error
    notes = []
    for event in events:
        if event.name == DROPPED:
            notes.append("the oldest events were dropped to keep the file small")
        elif event.name == LOST:
            notes.append(f"{event.details.get('events', '?')} events could not be written")
    events.sort(key=lambda event: (event.start, -event.end))
    attempts = sum(event.name == ATTEMPT and event.start == event.end for event in events)
    return Events(events=events, steps=steps, num_attempts=attempts, notes=notes)


def _read_steps(path: Path) -> dict[int, Event]:
    steps = {}
    with path.open("rb") as file:
        for line in file:
            event = parse_event(line) if _STEP_BYTES in line else None
            if event is not None and event.name == _STEP and isinstance(number := event.details.get("step"), int):
                steps[number] = event
    return steps


# -- tracks


def track_group(track: str) -> str:
    """ "rollout/3" -> "rollout"."""
    return track.partition("/")[0]


def track_order(track: str) -> tuple[int, str, int, str]:
    """Sorts tracks as Perfetto shows them: by `ORDER`, then by slot."""
    group, _, slot = track.partition("/")
    place = ORDER.index(group) if group in ORDER else len(ORDER)
    number = -1 if not slot else int(slot) if slot.isdecimal() and slot.isascii() else 1 << 30
    return place, group, number, slot


def by_track(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each track by their starts, outer ones before those inside them; the tracks in the order of `track_order`.
    A recorder gives a track to one thing at a time: any two spans of a track nest or lie apart."""
    tracks: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        tracks[event.track].append(event)
    return {track: tracks[track] for track in sorted(tracks, key=track_order)}


# -- who waited for whom

Intervals = list[tuple[float, float]]
"""Apart from each other, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Who was busy and who waited, in seconds.

    Attributes:
        wall_s: length of the time that is looked at, without the pauses between attempts.
        trainer_waits_s: for samples.
        trainer_waits_generating_s: of it, while requests were generated.
        generation_idle_s: no request was at a server.
        generation_idle_by: of it, what the trainer did meanwhile.
        both_s: training and generating at once.
        mean_in_flight: requests at a server, over the time in which there were any.
    """

    wall_s: float
    trainer_waits_s: float
    trainer_waits_generating_s: float
    generation_idle_s: float
    generation_idle_by: Mapping[str, float]
    both_s: float
    mean_in_flight: float

    @property
    def rows(self) -> list[tuple[str, float]]:
        """Who waited for whom, as every view says it: (what, seconds). A dash before a part of the row above it; parts of less than
        a hundredth of the time are left out."""
        worth_a_row = sorted(self.generation_idle_by.items(), key=lambda each: -each[1])
        return [
            ("the trainer waited for samples", self.trainer_waits_s),
            ("– of it, while requests were generated", self.trainer_waits_generating_s),
            ("no request was at a server", self.generation_idle_s),
            *((f"– of it, during the trainer's “{name}”", s) for name, s in worth_a_row if s >= 0.01 * self.wall_s),
            ("training and generating at once", self.both_s),
        ]


def usage(events: Sequence[Event]) -> Usage | None:
    """Who was busy, and who waited for whom, from the start of the first step to the end of the last (without steps: over all
    events). None without a span of any length.

    Worked example: the trainer waits 3 of 10 s, and requests are generated in 2 of those 3 -> `wall_s` 10, `trainer_waits_s` 3,
    `trainer_waits_generating_s` 2.
    """
    spans = [event for event in events if event.end > event.start]
    if not spans:
        return None
    steps = [event for event in spans if event.name == _STEP and track_group(event.track) == "trainer"]
    start = min(event.start for event in steps or spans)
    end = max(event.end for event in steps or spans)
    named: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in spans:
        low, high = max(event.start, start), min(event.end, end)
        if high > low:
            cut = Event(event.name, event.track, low, high, event.details)
            named[track_group(event.track), event.name].append(cut)

    def ran(track: str, name: str) -> Intervals:
        return union(named.get((track, name), ()))

    wall = subtract([(start, end)], _pauses(events))
    generating, waiting = ran("rollout", "generate"), ran("trainer", "wait for samples")
    idle = subtract(wall, generating)
    idle_by = {name: overlap(idle, ran("trainer", name)) for name in _TRAINER_WORK}
    in_flight_s = sum(event.duration_s for event in named.get(("rollout", "generate"), ()))
    return Usage(
        wall_s=seconds(wall),
        trainer_waits_s=seconds(waiting),
        trainer_waits_generating_s=overlap(waiting, generating),
        generation_idle_s=seconds(idle),
        generation_idle_by={name: part for name, part in idle_by.items() if part > 0.0},
        both_s=overlap(ran("trainer", "train"), generating),
        mean_in_flight=in_flight_s / seconds(generating) if generating else 0.0,
    )


def _pauses(events: Sequence[Event]) -> Intervals:
    """From the last event of each attempt to the beginning of the next one."""
    pauses = []
    for begin in sorted(event.start for event in events if event.name == ATTEMPT and event.start == event.end):
        last = max((event.end for event in events if event.start < begin), default=begin)
        if last < begin:
            pauses.append((last, begin))
    return pauses


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
    return seconds(first) - seconds(subtract(first, second))


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
