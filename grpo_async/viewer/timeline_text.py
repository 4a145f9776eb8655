"""Who waited for whom, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.timeline_data import EventFile
from grpo_async.viewer.timeline_usage import NameUsage, Usage, usage

_MOST_NAMES = 12
_NAME_WIDTH = 34
_FRAMES = ("run", "server")  # lanes that are always busy
_SHOWN_DETAILS = ("step", "version", "group", "rollout")


def summary(file: EventFile) -> str:
    """Some paragraphs of plain text, at most 79 wide."""
    found = usage(file.events)
    if found is None:
        return "the timeline has no span yet"
    names = [each for each in found.names if each.lane not in _FRAMES and (each.lane, each.name) != ("trainer", "step")]
    lines = [*_head(file, found), "", *_waiting(found), "", *_busy(found), "", *_table(names[:_MOST_NAMES])]
    if found.waits:
        lines += ["", "longest waits", *_longest(file, found)]
    lines += [f"note: {note}" for note in file.notes]
    return "\n".join(lines)


def _head(file: EventFile, found: Usage) -> list[str]:
    steps = f"steps {min(file.steps)} to {max(file.steps)}" if file.steps else "no step yet"
    attempts = f", {file.num_attempts} attempts" if file.num_attempts > 1 else ""
    return [f"{len(file.events)} events over {_duration(found.wall_s)}, {steps}{attempts}"]


def _waiting(found: Usage) -> list[str]:
    wall = found.wall_s
    lines = ["who waited for whom"]
    share = _share(found.trainer_waits_generating_s, found.trainer_waits_s)
    during = f", {share} of it while generating" if found.trainer_waits_s > 0 else ""
    lines.append(f"  trainer waited for samples      {_of(found.trainer_waits_s, wall)}{during}")
    lines.append(f"  no request was generated for    {_of(found.generation_idle_s, wall)}")
    lines += [
        f"    while the trainer: {name:<18}  {_of(spent, wall)}"
        for name, spent in sorted(found.generation_idle_by.items(), key=lambda each: -each[1])
    ]
    lines.append(f"  training and generating at once {_of(found.both_s, wall)}")
    return lines


def _busy(found: Usage) -> list[str]:
    wall = found.wall_s
    rows = [
        ("trainer", "trainer"), ("gpu", "trainer GPU"), ("generation", "generation"), ("scoring", "scoring"),
        ("weights", "weight pushes"), ("checkpoint", "writing checkpoints"), ("evaluation", "evaluation"),
    ]  # fmt: skip
    lines = ["busy"]
    for lane, title in rows:
        if lane in found.lanes:
            more = f", {found.mean_in_flight:.1f} requests at once" if lane == "generation" else ""
            lines.append(f"  {title:<31} {_of(found.lanes[lane], wall)}{more}")
    return lines


def _table(names: Sequence[NameUsage]) -> list[str]:
    lines = [f"{'where the time went':<{_NAME_WIDTH}}{'count':>8}{'total':>11}{'mean':>11}{'longest':>11}"]
    for each in names:
        title = one_line(f"{each.lane}: {each.name}", _NAME_WIDTH - 3)
        times = "".join(f"{_duration(value):>11}" for value in (each.total_s, each.mean_s, each.longest_s))
        lines.append(f"  {title:<{_NAME_WIDTH - 2}}{each.count:>8}{times}")
    return lines


def _longest(file: EventFile, found: Usage) -> list[str]:
    zero = file.events[0].start
    lines = []
    for event in found.waits:
        details = ", ".join(f"{name} {event.details[name]}" for name in _SHOWN_DETAILS if name in event.details)
        where = f"{event.lane}, {details}" if details else event.lane
        lines.append(
            f"  {one_line(event.name, 22):<22} {_duration(event.duration_s):>8}  at {_duration(event.start - zero):>8}  "
            f"{one_line(where, 34)}"
        )
    return lines


def _of(part_s: float, wall_s: float) -> str:
    return f"{_share(part_s, wall_s):>4}  {_duration(part_s):>8}"


def _share(part: float, whole: float) -> str:
    return f"{100.0 * part / whole:.0f}%" if whole > 0 else "0%"


def _duration(duration_s: float) -> str:
    """3661 -> "1:01:01", 75 -> "1:15", 2.5 -> "2.50 s", 0.0042 -> "4.2 ms"."""
    if duration_s >= 60.0:
        minutes, rest = divmod(round(duration_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    if duration_s >= 0.1:
        return f"{duration_s:.2f} s"
    return f"{1000.0 * duration_s:.1f} ms"
