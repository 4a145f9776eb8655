"""Where the time of a training step goes: its functions are timed from outside, each without what it calls that is timed, too."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import _step_sides
from grpo_async.batching.pack import MicroBatch
from grpo_async.training import logprobs, metrics, model, step
from grpo_async.training.loss import Objective

REST = "the rest"


class PartClock:
    """Seconds of each part, without those of parts within it. On a GPU it waits at both ends of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inner: list[float] = []  # seconds of timed calls within each open part
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = self._now() - began
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return call

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def split_time(side: _step_sides.OurSide, device: torch.device) -> Iterator[PartClock]:
    """Within the block a step's parts are timed; `side.step` itself, called through the clock, is the rest. The loss of both sides
    is a sum over tokens, so the head makes gradients with its logprobs."""
    clock = PartClock(device)
    places: list[tuple[Any, str, str]] = [
        (_step_sides, "plan_batch", "plan"),
        (_step_sides, "pack_rank", "pack"),
        (MicroBatch, "to", "to the device"),
        (side.policy, "forward", "forward of the layers"),
        (model, "chunked_objective", "logprobs and their gradients"),
        (Objective, "__call__", "objective"),
        (torch.autograd, "backward", "backward of the layers"),
        (metrics.UpdateFigures, "add", "figures of a micro-batch"),
        (step, "square_norm", "gradient norm"),
        (metrics.UpdateFigures, "gather", "figures to the host"),
        (step, "clip_", "clip"),
        (side.optimizer, "step", "optimizer"),
        (side.optimizer, "zero_grad", "drop gradients"),
        (side, "step", REST),
    ]
    with ExitStack() as stack:
        for owner, name, part in places:
            timed = clock.timed(part, getattr(owner, name))
            if isinstance(owner, type):
                stack.enter_context(patch.object(owner, name, _as_method(timed)))
            else:
                stack.enter_context(patch.object(owner, name, timed))
        backward = staticmethod(clock.timed("logprobs, scaling their gradients", logprobs._LinearObjective.backward))
        stack.enter_context(patch.object(logprobs._LinearObjective, "backward", backward))
        yield clock


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A closure is a function and so binds; said here because a callable object would not."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method
