"""Steps that were not finite, and the factor on the loss that keeps gradients from vanishing in float16 (arXiv 1710.03740)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from grpo_async.errors import RunError
from grpo_async.training.step import StepResult

logger = logging.getLogger(__name__)

_START = 65_536
_STEPS_TO_GROW = 2000
_MAX_NONFINITE_STEPS = 3  # in a row; each is skipped, then the run ends


class LossScale:
    """Follows the rule of torch.amp.GradScaler: halved after a step with a non-finite update, doubled after 2000 consecutive steps
    without one; a power of two, at least 1. It is a number on the host: rank 0 knows the norm of the gradients anyway.

    Worked example: 65536, a step that overflowed -> 32768, 2000 that did not -> 65536.

    Args:
        counters: those of a checkpoint (`counters`); empty for a new run.
    """

    def __init__(self, counters: Mapping[str, int]) -> None:
        self.value = counters.get("loss_scale", _START)
        self._num_finite = counters.get("loss_scale_steps", 0)  # consecutive

    def update(self, updates: Sequence[bool]) -> None:
        if not all(updates):
            self.value, self._num_finite = max(1, self.value // 2), 0
            return
        self._num_finite += 1
        if self._num_finite == _STEPS_TO_GROW:
            self.value, self._num_finite = self.value * 2, 0

    @property
    def counters(self) -> dict[str, int]:
        return {"loss_scale": self.value, "loss_scale_steps": self._num_finite}


class NonfiniteSteps:
    """Counts steps that were not finite, and adapts the loss scale of float16 to them.

    Args:
        counters: those of a checkpoint (`counters`); empty for a new run.
    """

    def __init__(self, counters: Mapping[str, int], *, is_float16: bool) -> None:
        count = counters.get("bad_steps", 0)
        # at the limit the run ended before: the next non-finite step would end it at once again
        self._count = count if count < _MAX_NONFINITE_STEPS else 0  # consecutive
        self._scale = LossScale(counters) if is_float16 else None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else float(self._scale.value)

    def update(self, result: StepResult, step: int) -> RunError | None:
        """Count a step. Return the error that ends the run if too many in a row were not finite."""
        scale = self.loss_scale
        if self._scale is not None:
            result.metrics["training/loss_scale"] = scale
            self._scale.update(result.updates)
        if result.is_finite:
            self._count = 0
            if num_skipped := result.trained.count(False):
                num = len(result.trained)
                logger.warning("step %d: %d of %d minibatches were skipped: not finite", step, num_skipped, num)
            return None
        if math.isfinite(result.loss) and scale > 1.0:
            logger.warning("step %d was skipped: gradients overflowed float16; the loss scale is halved", step)
            return None
        self._count += 1
        what = f"loss {result.loss} and gradient norm {result.grad_norm}"
        logger.warning("step %d was skipped: %s (%d consecutive)", step, what, self._count)
        if self._count < _MAX_NONFINITE_STEPS:
            return None
        return RunError(
            f"{self._count} consecutive steps were not finite; step {step} had {what}. Lower optimizer.lr, or look at "
            "sampling/importance_sampling_ratio/max in metrics.jsonl; if model.compute_dtype is float16, its range may be too "
            "small for this model: set bfloat16"
        )

    @property
    def counters(self) -> dict[str, int]:
        return {"bad_steps": self._count, **({} if self._scale is None else self._scale.counters)}
