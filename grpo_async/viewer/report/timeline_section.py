"""The section with the timeline of the last steps, drawn by static/timeline.js, and who waited for whom in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.findings import percent
from grpo_async.viewer.report.markup import Markup, element, joined, table
from grpo_async.viewer.report.run_data import RunData
from grpo_async.viewer.report.sections import missing, section
from grpo_async.viewer.timeline_data import drawing, load_events
from grpo_async.viewer.timeline_usage import Usage, usage

_LAST_STEPS = 5
_COLUMNS = 1000
_MOST_SPANS = 20_000
_WORTH_A_LINE = 0.01  # of the time of these steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePart:
    """The section, and the data of the drawing; None where there is nothing to draw."""

    content: Markup
    data: dict[str, Any] | None = None


def timeline_part(runs: Sequence[RunData]) -> TimelinePart:
    """Of the first run: several timelines have no time in common."""
    run = runs[0]
    if not run.run_dir.events.is_file():
        return TimelinePart(
            content=_section(missing("There is no timeline (events.jsonl): record.timeline.enabled writes one."))
        )
    try:
        found = load_events(run.run_dir.events, newest_steps=_LAST_STEPS)
    except ConfigError as error:
        return TimelinePart(content=_section(missing(str(error))))
    steps = sorted(found.steps)[-_LAST_STEPS:]
    start = min((found.steps[step].start for step in steps), default=None)
    end = max((found.steps[step].end for step in steps), default=None)
    drawn = None
    for columns in (_COLUMNS, _COLUMNS // 4, _COLUMNS // 16):
        drawn = drawing(found.events, start=start, end=end, columns=columns)
        if drawn is None or len(drawn.spans) <= _MOST_SPANS:
            break
    if drawn is None:
        return TimelinePart(content=_section(missing("The timeline has no events.")))
    which = f"Steps {steps[0]} to {steps[-1]}" if steps else "No step was finished; all that there is"
    of = f" of {run.label}" if len(runs) > 1 else ""
    used = usage(found.events)
    content = _section(
        element(
            "p",
            f"{which}{of}. All of it, for Perfetto: ",
            element("code", f"grpo-async trace {run.run_dir.root}"),
            class_="note",
        ),
        element("div", element("div", id="timeline-place"), class_="card"),
        [element("p", note, class_="note") for note in found.notes],
        None if used is None else _used(used),
    )
    return TimelinePart(content=content, data=drawn.as_dict())


def _section(*content: Any) -> Markup:
    return section("timeline", "Timeline", joined(*content))


def _used(used: Usage) -> Markup | None:
    """Where the time of these steps went."""
    if used.wall_s <= 0.0:
        return None
    rows: list[tuple[str, float]] = [
        ("the trainer waited for samples", used.trainer_waits_s),
        ("– of it, while requests were generated", used.trainer_waits_generating_s),
        ("no request was at a server", used.generation_idle_s),
        *(
            (f"– of it, during the trainer's “{what}”", seconds)
            for what, seconds in used.generation_idle_by.items()
            if seconds >= _WORTH_A_LINE * used.wall_s
        ),
        ("training and generating at once", used.both_s),
    ]
    return table(
        ["who waited for whom", "seconds", "share"],
        [[name, f"{seconds:.2f}", percent(seconds / used.wall_s)] for name, seconds in rows],
    )
