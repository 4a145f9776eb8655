"""What every metric is: its unit, how several values of it become one, and a sentence.

The names are those of metrics.jsonl; `{...}` in a pattern stands for one or more parts of a name. The first pattern that fits
holds. A metric that matches no pattern (a reward function's own `log_metric`) is a mean without a unit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import fmean


class Reduction(StrEnum):
    """How the values of several steps become one."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    SUM = "sum"  # a count or an amount of each step
    LAST = "last"  # a running total, or a state

    def __call__(self, values: Sequence[float]) -> float:
        """[1.0, 3.0] -> mean 2.0, min 1.0, max 3.0, sum 4.0, last 3.0."""
        if not values:
            raise ValueError(f"there is no value to take the {self.value} of")
        return _REDUCE[self](values)


_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "min": min,
    "max": max,
    "sum": sum,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric. `unit` is "" for pure numbers, "fraction" for 0 to 1."""

    name: str
    help: str
    unit: str = ""
    reduction: Reduction = Reduction.MEAN
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
    MetricInfo(name, text, *(Reduction(each) if each in list(Reduction) else each for each in more))
    for name, (text, *more) in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
)
"""Every metric of this version: catalog.json has a help text for each, its unit and how it is reduced, unless that is a mean. A
test runs a training and fails when one of its metrics is not here."""
