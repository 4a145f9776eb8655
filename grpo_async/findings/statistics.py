"""By how much a reward changed, and how certain that is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from grpo_async.utils.text import format_number

_MIN_VALUES, _MANY_VALUES = 6, 30
_MIN_CORRELATED, _MAX_CORRELATED = 0.2, 0.9
_MIN_DOF = 1.5
_ROUNDING = 1e-9  # float noise of summed rewards is about 1e-16 of their size, real differences are far larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change from `first` to `last`; [`low`, `high`] is the 95% confidence interval of the change. It rests on `count` values,
    counted in `unit`: 60 "steps". A count of 0: not known."""

    first: float
    last: float
    low: float
    high: float
    count: int
    unit: str

    @property
    def value(self) -> float:
        return self.last - self.first

    @property
    def numbers(self) -> dict[str, float]:
        """The fields and the change, for programs."""
        found = {"first": self.first, "last": self.last, "change": self.value, "low": self.low, "high": self.high}
        return found | {"count": float(self.count)}

    def __str__(self) -> str:
        """ "from 0.2 to 0.8: +0.600 (95%: +0.500 to +0.700; 100 prompts, paired)"."""
        count = f"{self.count} " if self.count else ""
        interval = f"95%: {self.low:+.3f} to {self.high:+.3f}"
        return f"from {format_number(self.first)} to {format_number(self.last)}: {self.value:+.3f} ({interval}; {count}{self.unit})"

    @property
    def has_risen(self) -> bool:
        """Whether the value rose by more than chance."""
        return self.low > _ROUNDING

    @property
    def has_fallen(self) -> bool:
        return self.high < -_ROUNDING


def are_equal(low: float, high: float) -> bool:
    """Whether `high` is not above `low` by more than rounding: high - low <= 1e-9 x max(1, |low|, |high|)."""
    return high - low <= _ROUNDING * max(1.0, abs(low), abs(high))


def mean_over_time(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    """A metric that is a fraction of a step's time or a rate, over all of the time: 0.5 in 2 s and 0 in 8 s -> 0.1. None: no row
    has it."""
    known = [(row[name], row["step_time"]) for row in rows if name in row and row.get("step_time")]
    return sum(value * s for value, s in known) / sum(s for _, s in known) if known else None


def _change(first: float, last: float, stderr: float, dof: float, count: int, unit: str, *, scale: float) -> Change:
    """`scale`: the range of the values, beyond which no change can be, nor its interval."""
    value, half = last - first, t_quantile(dof) * stderr
    limit = max(scale, abs(value))  # where the range is not known it is taken as 1
    low, high = max(value - half, -limit), min(value + half, limit)
    return Change(first=first, last=last, low=low, high=high, count=count, unit=unit)


def t_quantile(dof: float) -> float:
    """The 97.5 % quantile of Student's t, to about 2 % from 2 degrees of freedom on: 2 4.3, 10 2.2, many 1.96."""
    return 1.96 + 2.4 / dof + 4.5 / dof**2


def trend(values: Sequence[float]) -> Change | None:
    """How a series moved: the least-squares line over the steps, over their logarithm (most of what is learned is learned early),
    or, of 30 and more, over the first quarter alone (a task that is solved), whichever fits best. Its ends are kept within the
    values, so that no reward seems to exceed its maximum. None with fewer than 6 values.

    Neighboring steps are alike, so they count for less. Noise is taken as AR(1); its correlation as that of the residuals
    without the bias of a fitted line, (2 + 4 r) / n (Marriott and Pope, Biometrika 41, 1954), plus a standard error of it,
    and at least 0.2: a short series cannot show that there is none. The slope has its exact variance under such noise, and
    n steps are worth n x (1 - r) / (1 + r). Of series without a trend, of 6 to 50 steps with a correlation of up to 0.5, at
    most 4 % a side are said to move; at 0.7 about 5 %.
    """
    count = len(values)
    if count < _MIN_VALUES:
        return None
    fits = [
        _fit([float(step) for step in range(count)], values),
        _fit([math.log(step + 1) for step in range(count)], values),
    ]
    if count >= _MANY_VALUES:
        fits.append(_fit([float(min(step, count // 4)) for step in range(count)], values))
    first, last, stderr, dof, _ = min(fits, key=lambda fit: fit[-1])
    first, last = (min(max(end, min(values)), max(values)) for end in (first, last))
    return _change(first, last, stderr, dof, count, "steps", scale=max(values) - min(values))


def _fit(xs: Sequence[float], values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """(fitted first, fitted last, standard error of last - first, degrees of freedom, sum of squared residuals)."""
    count, center, mean = len(values), fmean(xs), fmean(values)
    variance = sum((x - center) ** 2 for x in xs)
    slope = sum((x - center) * (value - mean) for x, value in zip(xs, values, strict=True)) / variance
    residuals = [value - mean - slope * (x - center) for x, value in zip(xs, values, strict=True)]
    squares = sum(each**2 for each in residuals)
    lagged = sum(one * other for one, other in pairwise(residuals))
    correlation = lagged / squares if squares > 0.0 else 0.0
    correlation += (2.0 + 4.0 * correlation) / count
    correlation += math.sqrt(max(1.0 - correlation**2, 0.0) / count)
    correlation = min(max(correlation, _MIN_CORRELATED), _MAX_CORRELATED)
    # of noise with variance 1: that of the slope x sqrt(variance), and the expected sum of squared residuals
    own = _quadratic([x - center for x in xs], correlation) / variance
    expected = count - _quadratic([1.0] * count, correlation) / count - own
    x_range = xs[-1] - xs[0]
    stderr = x_range * math.sqrt(squares / expected / variance * own)
    dof = max((count - 2) * (1.0 - correlation) / (1.0 + correlation), _MIN_DOF)
    first = mean + slope * (xs[0] - center)
    return first, first + slope * x_range, stderr, dof, squares


def _quadratic(xs: Sequence[float], correlation: float) -> float:
    """The variance of the sum of x_i e_i, where e is AR(1) noise with variance 1: the sum of x_i x_j correlation^|i - j|."""
    total = before = 0.0
    for x in xs:
        total += x * (x + 2.0 * before)
        before = correlation * (before + x)
    return total


def held_out_change(
    first: Mapping[str, float],
    last: Mapping[str, float],
    first_rewards: Sequence[float | None],
    last_rewards: Sequence[float | None],
    *,
    scale: float,
) -> Change:
    """The change between two evaluations of the same prompts, from the differences of each prompt; where the rewards of the prompts
    are not known, from the standard errors of both. `scale`: the range of rewards.

    Rewards 0 0 1 0 and 1 0 1 1: differences 1 0 0 1, mean 0.5, standard error 0.577 / sqrt(4) = 0.29. It is taken as at least half
    a prompt's worth, scale / (2 n): agreement of a few prompts is not certainty.
    """
    if len(first_rewards) == len(last_rewards):
        pairs = [(a, b) for a, b in zip(first_rewards, last_rewards, strict=True) if a is not None and b is not None]
        if len(pairs) > 1:
            differences = [after - before for before, after in pairs]
            stderr = max(stdev(differences) / math.sqrt(len(pairs)), 0.5 * scale / len(pairs))
            before, after = fmean(before for before, _ in pairs), fmean(after for _, after in pairs)
            return _change(before, after, stderr, len(pairs) - 1, len(pairs), "prompts, paired", scale=scale)
    count = int(min(each.get("num_prompts", 0.0) for each in (first, last)))
    stderr = math.hypot(first.get("reward_stderr", 0.0), last.get("reward_stderr", 0.0))
    stderr = max(stderr, 0.5 * scale / count if count > 2 else 0.0)
    dof = 2.0 * count if count > 2 else math.inf
    return _change(first["reward"], last["reward"], stderr, dof, count, "prompts", scale=scale)
