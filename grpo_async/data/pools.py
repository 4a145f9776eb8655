"""Which row of a source is drawn next, by how its groups did so far (`data.sampling`).

The solve rate of a row is the fraction of the completions of its last group with a reward of at least `pass_threshold`. Worked
example, target_rate 0.5: rows with the rates 0.5, 0.25 and 1, and one that was not drawn yet, have the weights 1, 0.5, 0.05 and 1.
A draw depends on the seed, the prompt's id and the groups that were scored until then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_async.config.sections import SamplingSection
from grpo_async.utils.seeds import seed_of

_LEAST_WEIGHT = 0.05  # of a row that is far from the target: the policy changes, so it must come again


class Pool:
    """The rows of one source. `shuffle`: whether rows that are otherwise alike come in a random order."""

    def __init__(self, num_rows: int, section: SamplingSection, *, seed: int, shuffle: bool) -> None:
        self._section, self._seed, self._shuffle = section, seed, shuffle
        self._num_drawn = np.zeros(num_rows, np.int64)
        self._rate = np.full(num_rows, np.nan)  # NaN: no group of it was scored yet
        self._num_solved = np.zeros(num_rows, np.int64)  # last groups in a row that every completion solved

    def draw(self, prompt_id: int) -> int:
        """The row of a new prompt."""
        is_active = ~self._is_retired
        if not is_active.any():  # all of them come back
            is_active[:] = True
            self._num_drawn[:] = self._num_solved[:] = 0
        rng = random.Random(seed_of(self._seed, "pool", prompt_id))
        if self._section.type == "target_rate":
            target = self._section.target
            rows = np.flatnonzero(is_active)
            distance = np.abs(np.nan_to_num(self._rate[rows], nan=target) - target) / max(target, 1.0 - target)
            weights = np.cumsum(np.maximum(1.0 - distance, _LEAST_WEIGHT))
            place = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
            row = int(rows[min(place, len(rows) - 1)])
        else:
            is_next = is_active & (self._num_drawn == self._num_drawn[is_active].min())
            if self._section.type == "easy_to_hard":
                rate = np.nan_to_num(self._rate, nan=-1.0)
                is_next &= rate == rate[is_next].max()
            rows = np.flatnonzero(is_next)
            row = int(rows[rng.randrange(len(rows)) if self._shuffle else 0])
        self._num_drawn[row] += 1
        return row

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """A group of this row was scored; at least one completion has a reward."""
        rate = sum(reward >= self._section.pass_threshold for reward in rewards) / len(rewards)
        self._rate[row] = rate
        self._num_solved[row] = self._num_solved[row] + 1 if rate == 1.0 else 0

    @property
    def _is_retired(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        limit = self._section.retire_solved
        return self._num_solved >= (np.inf if limit is None else limit)

    def counts(self) -> dict[str, int]:
        """Rows of each kind, for metrics."""
        kinds = {"seen": ~np.isnan(self._rate), "solved": self._rate == 1.0, "retired": self._is_retired}
        return {name: int(rows.sum()) for name, rows in kinds.items()}

    def state(self) -> dict[str, list[Any]]:
        """[times drawn, rate, solved groups in a row] of each row that was drawn, ready for JSON."""
        columns = self._num_drawn.tolist(), self._rate.tolist(), self._num_solved.tolist()
        return {
            str(row): [drawn, None if math.isnan(rate) else rate, solved]
            for row, (drawn, rate, solved) in enumerate(zip(*columns, strict=True))
            if drawn or not math.isnan(rate)
        }

    def restore(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on from `state()`."""
        for row, (drawn, rate, solved) in state.items():
            self._num_drawn[int(row)], self._num_solved[int(row)] = drawn, solved
            self._rate[int(row)] = math.nan if rate is None else rate
