"""What every metric is: its unit, how several values of it become one, and a sentence.

The names are those of metrics.jsonl; `{...}` in a pattern stands for one or more parts of a name. The first pattern that fits
holds. A metric that matches no pattern (a reward function's own `log_metric`) is a mean without a unit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "min": min,
    "max": max,
    "sum": sum,  # of a count or an amount of each step
    "last": lambda values: values[-1],  # of a running total, or a state
}
"""How the values of several steps become one."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric. `unit` is "" for pure numbers, "fraction" for 0 to 1; `reduction` is one of REDUCTIONS."""

    name: str
    help: str
    unit: str = ""
    reduction: str = "mean"
    is_known: bool = True


def describe(name: str) -> MetricInfo:
    """The entry of a metric: describe("rewards/length/mean").help -> "mean of the reward `length`"."""
    for pattern, entry in _compiled():
        match = pattern.fullmatch(name)
        if match:
            return replace(entry, name=name, help=entry.help.format(**match.groupdict()))
    return MetricInfo(name, "logged by the user's code, or unknown to this version", is_known=False)


@cache
def _compiled() -> list[tuple[re.Pattern[str], MetricInfo]]:
    """ "rewards/{name}/mean" fits rewards/a/mean and rewards/a/b/mean."""
    return [(re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(entry.name))), entry) for entry in CATALOG]


CATALOG = tuple(
    MetricInfo(name, *described)
    for name, described in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
)
"""Every metric of this version: catalog.json has a help text for each, its unit and how it is reduced, unless that is a mean. A
test runs a training and fails when one of its metrics is not here."""
