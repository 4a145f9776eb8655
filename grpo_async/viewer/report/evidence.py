"""What the checks of `findings` look at, and what they say. Pure.

A check is a function `Evidence -> Finding | None`: it reads figures, and where they say something it returns one plain sentence
with the figure in it, what usually causes it, and where to look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import fmean, stdev

from grpo_async.viewer.report.rollouts import StepCounts
from grpo_async.viewer.report.run_data import Evaluation, Row, RunData

_SMALLEST_WINDOW, _LARGEST_WINDOW = 3, 50


class Level(IntEnum):
    """How bad it is; sorted, the worst first."""

    BAD = 0  # it cannot learn like this
    WARNING = 1  # look at it
    GOOD = 2  # as it should be
    NOTE = 3  # worth knowing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the data says.

    Args:
        name: of the check, one word or two with "-".
        title: what is the case, in a few words.
        text: the figures and what they mean, what to change.
        query: rollouts that show it, for inspect-rollouts; None: no rollouts show it.
        sort: of these rollouts.
        plot: the plot that shows it.
    """

    name: str
    level: Level
    title: str
    text: str
    query: str | None = None
    sort: str | None = None
    plot: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A metric at the beginning and at the end of a run. `noise` is the standard error of the difference of both "
    "means."""

    first: float
    last: float
    noise: float
    num_values: int

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def has_risen(self) -> bool:
        """By more than chance: two standard errors."""
        return self.change > 2.0 * self.noise and self.change > 1e-9

    @property
    def has_fallen(self) -> bool:
        return self.change < -2.0 * self.noise and self.change < -1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One run's figures, ascending by step."""

    metrics: Sequence[Row] = ()
    evaluations: Sequence[Evaluation] = ()
    steps: Sequence[StepCounts] = ()
    errors: Sequence[tuple[str, int]] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    status: str = "finished"
    error: str | None = None

    @classmethod
    def of(cls, run: RunData) -> Evidence:
        return cls(
            metrics=run.metrics,
            evaluations=run.evaluations,
            steps=run.rollouts.steps,
            errors=run.rollouts.errors,
            config=run.config or {},
            status=run.ending.status,
            error=run.ending.error,
        )

    @property
    def num_steps(self) -> int:
        return len(self.metrics)

    def values(self, name: str) -> list[float]:
        """Of the steps that have the metric."""
        return [row[name] for row in self.metrics if name in row]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Metrics of any step whose names begin and end so, sorted."""
        names: set[str] = set().union(*self.metrics)
        return sorted(name for name in names if name.startswith(prefix) and name.endswith(suffix))

    def windows(self, name: str) -> Windows | None:
        """The mean of the first and of the last tenth of the steps (at least 3, at most 50); None with fewer than "
        "6 values."""
        values = self.values(name)
        size = min(max(_SMALLEST_WINDOW, len(values) // 10), _LARGEST_WINDOW)
        if len(values) < 2 * size:
            return None
        first, last = values[:size], values[-size:]
        return Windows(
            first=fmean(first),
            last=fmean(last),
            noise=(stdev(first) ** 2 / size + stdev(last) ** 2 / size) ** 0.5,
            num_values=len(values),
        )

    def recent(self, name: str) -> float | None:
        """The mean of the last third of the values; None without any."""
        values = self.values(name)
        return fmean(values[-max(1, len(values) // 3) :]) if values else None

    def last(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1] if values else None

    def setting(self, path: str) -> object:
        """Of the configuration, by its dotted path; None: not there, or not shown."""
        value: object = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def evaluated(self) -> list[Evaluation]:
        """Evaluations with a reward, ascending by step."""
        return sorted((each for each in self.evaluations if "reward" in each.metrics), key=lambda each: each.step)


def percent(share: float) -> str:
    """0.875 -> "88%"; 0.004 -> "0.4%"; 0.999 -> "99.9%"."""
    if 0.0 < share < 0.01 or 0.99 < share < 1.0:
        return f"{share:.1%}"
    return f"{share:.0%}"


def figure(value: float) -> str:
    """Three significant digits, without an exponent where that is short: 0.123456 -> "0.123", 1234.5 -> "1,234"."""
    if value == 0.0:
        return "0"
    size = abs(value)
    if size >= 1000.0:
        return f"{value:,.0f}"
    return f"{value:.3g}"
