"""The numbers of a warm-up. The marker of a prepared folder holds them, so that other numbers make the folder again."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRecipe:
    """How the base model is made."""

    num_steps: int = 280
    batch_size: int = 32
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    lr_warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    good_only_share: float = 0.875
    """Of the steps: so many, from the first, in which every demonstration is of the good way."""
    good_share_after: float = 0.3
    """Of the demonstrations in the steps after those: so many are good, the others lazy."""

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then cosine from 1 to `min_lr_ratio` at the last step."""
        if step < self.lr_warmup_steps:
            return (step + 1) / self.lr_warmup_steps
        progress = (step - self.lr_warmup_steps) / max(1, self.num_steps - self.lr_warmup_steps)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
