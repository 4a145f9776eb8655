"""The factor on the loss that keeps small gradients from vanishing in float16 (arXiv 1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_START = 65_536
_STEPS_TO_GROW = 2000


class LossScale:
    """Follows the rule of torch.amp.GradScaler: halved after a step with a non-finite update, doubled after 2000 consecutive steps
    without one; a power of two, at least 1.

    It is a number on the host, kept by rank 0, which knows the norm of the gradients anyway: a GradScaler would pass over all
    gradients once more, and make the ranks agree whether all are finite.

    Worked example: 65536, a step that overflowed -> 32768, 2000 that did not -> 65536.

    Args:
        counters: those of a checkpoint (`counters`); empty for a new run.
    """

    def __init__(self, counters: Mapping[str, int]) -> None:
        self.value = counters.get("loss_scale", _START)
        self._num_finite = counters.get("loss_scale_steps", 0)  # consecutive

    def update(self, updates: Sequence[bool]) -> None:
        """Called after each step. `updates`: for each update, whether it was finite."""
        if not all(updates):
            self.value, self._num_finite = max(1, self.value // 2), 0
            return
        self._num_finite += 1
        if self._num_finite == _STEPS_TO_GROW:
            self.value, self._num_finite = self.value * 2, 0

    @property
    def counters(self) -> dict[str, int]:
        """The counters for a checkpoint."""
        return {"loss_scale": self.value, "loss_scale_steps": self._num_finite}
