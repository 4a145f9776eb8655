"""Rewards to advantages, in plain Python: a group has a handful of rewards.

None means unscored throughout: it takes part in no mean, and its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

_STD_FLOOR = 1e-4  # added to the standard deviation, as in TRL
_EQUAL_WITHIN = 1e-9  # relative; float noise of summed rewards is about 1e-16, real differences are far larger


def combine_rewards(rows: Sequence[Mapping[str, float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """One reward per row: r = sum over the functions that scored the row of weight x value (TRL's weighted nansum).

    A row that no function scored is None. KeyError for a name without a weight.
    Example: weights {a: 1, b: 0.5}: {a: 1, b: 0.4} -> 1.2; {a: None, b: 0.4} -> 0.2; {a: None, b: None} -> None.
    """
    return [_weighted_sum(row, weights) for row in rows]


def group_advantages(rewards: Sequence[float | None], *, scale: Literal["group", "none"] = "group") -> list[float]:
    """Advantages of one group (GRPO, arXiv 2402.03300), over its scored rewards:

        group    A = (r - mean) / (std + 1e-4), std with ddof = 1
        none     A = r - mean                   (Dr. GRPO, arXiv 2503.20783)

    Unscored rewards and groups with fewer than two scored ones get 0. So do rewards that are equal but for float noise:
    divided by a tiny std it would become advantages of up to +-1, and 0.1 + 0.2 would beat 0.3.

    Example: [1, 0, None, 1, 0]: mean 0.5, std = sqrt(4 x 0.25 / 3) = 0.57735, A = +-0.5 / 0.57745 = +-0.86588, and 0.
    """
    scored = [reward for reward in rewards if reward is not None]
    if has_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    if scale == "none":
        return [0.0 if reward is None else reward - mean for reward in rewards]
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    return [0.0 if reward is None else (reward - mean) / (std + _STD_FLOOR) for reward in rewards]


def has_zero_variance(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches nothing: fewer than two scored rewards, or max - min <= 1e-9 x max(1, largest |r|)."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return True
    low, high = min(scored), max(scored)
    return high - low <= _EQUAL_WITHIN * max(1.0, abs(low), abs(high))


def _weighted_sum(row: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    terms = [weights[name] * value for name, value in row.items() if value is not None]
    return math.fsum(terms) if terms else None
