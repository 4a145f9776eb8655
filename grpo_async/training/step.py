"""One training step: for each minibatch, forward and backward over this rank's micro-batches, then one clip and one update.

    [old log-probabilities of everything, where the objective needs them]
      -> num_iterations times, for each minibatch: (reference, forward, backward) for each micro-batch -> clip -> update

Gradients are summed: the token weights already contain the common denominator of the minibatch. FSDP averages over ranks, so the
loss is multiplied by their number. An update with a non-finite loss or gradient is skipped; the step's others are made."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from grpo_async.batching.pack import MicroBatch
from grpo_async.errors import RunError
from grpo_async.tracking.timeline import span
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import Objective
from grpo_async.training.metrics import UpdateMetrics, UpdateSums, step_metrics
from grpo_async.training.model import Policy, Reference, reshard
from grpo_async.training.parameters import local_of, num_ranks
from grpo_async.training.token_statistics import TokenCollector

logger = logging.getLogger(__name__)

_START = 65_536  # the loss scale of a new run in float16
_STEPS_TO_GROW = 2000
_MAX_NONFINITE_STEPS = 3  # in a row; each is skipped, then the run ends


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float  # mean over the updates that were made, or over all if none was
    grad_norm: float  # before clipping, the same mean
    num_tokens: int  # trained tokens, each minibatch counted once
    updates: tuple[bool, ...]  # whether each was made or skipped as not finite. [num_iterations x num_minibatches]
    metrics: dict[str, float]
    num_iterations: int = 1
    token_statistics: Sequence[torch.Tensor] | None = None
    """The token statistics that each rank collected (training.token_statistics), if requested; on rank 0 only. [world_size]"""

    @property
    def is_finite(self) -> bool:
        return any(self.updates)

    @property
    def trained(self) -> tuple[bool, ...]:
        """For each minibatch, whether any update of it was made. [num_minibatches]"""
        count = len(self.updates) // self.num_iterations
        return tuple(any(self.updates[index::count]) for index in range(count))


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    minibatches: Sequence[Sequence[MicroBatch]],
    *,
    objective: Objective,
    reference: Reference | None,
    lr: float,
    max_grad_norm: float,
    device: torch.device,
    num_iterations: int = 1,
    tokens: TokenCollector | None = None,
    loss_scale: float = 1.0,
    before_sync: Callable[[], None] = lambda: None,
) -> StepResult:
    """Run one step on this rank. Every rank calls it with the same number of minibatches and micro-batches.

    Args:
        minibatches: the micro-batches of each optimizer update, on the CPU: one update or more, each of one or more.
        num_iterations: passes over the minibatches (mu in GRPO, arXiv 2402.03300, algorithm 1).
        tokens: collects the statistics of this rank's tokens in the first pass, if they are stored.
        loss_scale: a power of two; gradients are divided by it when they are clipped.
        before_sync: called in the last update, after its backward passes have been launched and before the host waits for the
            device. It costs a GPU no time while its queue of launched kernels lasts (with `training.cpu_offload` it does)."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    old_logprobs: Sequence[Sequence[torch.Tensor | None]] = [[None] * len(batches) for batches in minibatches]
    if objective.needs_old_policy:
        with span("old log-probabilities"):
            old_logprobs = _old_policy_logprobs(policy, minibatches, device)
    updates: list[UpdateMetrics] = []
    ref_of_batches: dict[tuple[int, int], torch.Tensor] = {}  # the reference does not change within a step
    for iteration in range(num_iterations):
        collector = tokens if iteration == 0 else None
        for index, (micro_batches, old_of_batches) in enumerate(zip(minibatches, old_logprobs, strict=True)):
            sums = UpdateSums(objective, device)
            for number, (cpu_batch, old) in enumerate(zip(micro_batches, old_of_batches, strict=True)):
                batch = cpu_batch.to(device)
                _set_gradient_sync(policy, device, is_last=number == len(micro_batches) - 1)
                ref_logprobs = ref_of_batches.get((index, number))
                if objective.section.needs_reference and ref_logprobs is None:
                    assert reference is not None
                    # before the policy's own forward: the reference may be the same FSDP modules with other adapters, and nothing
                    # may run through them between a forward and its backward
                    with span("reference", micro_batch=number):
                        ref_logprobs = reference.logprobs(batch)
                    if num_iterations > 1:
                        ref_of_batches[index, number] = ref_logprobs
                with span("forward", micro_batch=number):
                    output: PolicyOutput = policy(
                        batch,
                        objective=objective.of_tokens(batch, ref_logprobs=ref_logprobs, old=old),
                        is_per_token=objective.is_per_token,
                        loss_scale=loss_scale,
                    )
                with span("backward", micro_batch=number):
                    assert output.objective is not None
                    torch.autograd.backward(output.objective * (num_ranks() * loss_scale))
                if batch.num_trained_tokens == 0 or (policy.context is not None and policy.context.rank > 0):
                    continue  # of ranks that compute together the first counts their tokens
                with torch.no_grad():
                    terms = objective(output, batch, ref_logprobs=ref_logprobs, old=old)
                sums.add(terms)
                if collector is not None:
                    collector.add(terms)
            is_last = index == len(minibatches) - 1
            if is_last and collector is not None:
                collector.begin_copy()  # before this update's transfer, so that one wait covers both
            with span("clip gradients"):
                norm = square_norm(policy.parameters(), device) / loss_scale**2
                if is_last and iteration == num_iterations - 1:
                    metrics = sums.gather(norm, before_sync=before_sync)
                else:
                    metrics = sums.gather(norm)
            with span("optimizer"):
                if metrics.is_finite:
                    clip_(policy.parameters(), norm=metrics.grad_norm, max_norm=max_grad_norm, loss_scale=loss_scale)
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            updates.append(metrics)
    return _result(updates, objective, lr=lr, num_iterations=num_iterations)


def _set_gradient_sync(policy: Policy, device: torch.device, *, is_last: bool) -> None:
    """Set when gradients are reduced between ranks. GPU: after every micro-batch, so that a rank holds only its shard of the
    float32 gradient; between groups of ranks that hold the same shards (hybrid sharding) and on CPUs once, after the last
    micro-batch.
    """
    if not isinstance(policy, FSDPModule):
        return
    if device.type == "cpu":
        policy.set_requires_gradient_sync(is_last)
    else:
        policy.set_requires_all_reduce(is_last)


def _old_policy_logprobs(
    policy: Policy, minibatches: Sequence[Sequence[MicroBatch]], device: torch.device
) -> list[list[torch.Tensor]]:
    """Log-probabilities under the policy at the start of the step, in the structure of `minibatches`."""
    with torch.no_grad():
        found = [[policy(batch.to(device)).logprobs for batch in micro_batches] for micro_batches in minibatches]
    reshard(policy)
    return found


def _result(updates: Sequence[UpdateMetrics], objective: Objective, *, lr: float, num_iterations: int) -> StepResult:
    made = [update for update in updates if update.is_finite]
    metrics = step_metrics(made or updates, objective)
    result = StepResult(
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        num_tokens=0,
        updates=tuple(update.is_finite for update in updates),
        metrics=metrics,
        num_iterations=num_iterations,
    )
    num_tokens = [update.num_tokens for update in updates[: len(result.trained)]]  # of each minibatch
    trained = [count for count, is_trained in zip(num_tokens, result.trained, strict=True) if is_trained]
    metrics |= {
        "lr": lr,
        "num_tokens": float(sum(trained or num_tokens)),
        "training/skipped_updates": float(len(updates) - len(made)),
    }
    return replace(result, num_tokens=sum(trained))


@torch.no_grad()
def square_norm(parameters: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """This rank's part of the squared norm of all gradients: the sum over ranks is the total. () float64 on `device`. It
    travels with the metrics of the update (torch's clip_grad_norm_ reduces it in a separate collective).

    Gradient [3, 4] sharded over two ranks: 9 and 16; held whole by both: 12.5 and 12.5."""
    by_copies: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_of(parameter.grad)
            key = _num_copies(parameter.grad), gradient.device, gradient.dtype
            by_copies.setdefault(key, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _, dtype), gradients in by_copies.items():
        # for bfloat16 gradients the norms would also have only 8 bits
        norms = torch._foreach_norm(gradients, dtype=torch.float32 if dtype.itemsize < 4 else None)
        total += torch.stack(norms).double().square().sum().to(device) / copies
    return total


@torch.no_grad()
def clip_(parameters: Iterable[torch.Tensor], *, norm: float, max_norm: float, loss_scale: float = 1.0) -> None:
    """Scale all gradients by max_norm / (norm + 1e-6) if that is below 1, as torch's clip_grad_norm_ does, and by
    1 / loss_scale, which `norm` already includes."""
    factor = min(1.0, max_norm / (norm + 1e-6)) / loss_scale
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def _num_copies(gradient: torch.Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return num_ranks()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))


class LossScale:
    """The factor on the loss that keeps gradients from vanishing in float16 (arXiv 1710.03740), by the rule of
    torch.amp.GradScaler: halved after a step with a non-finite update, doubled after 2000 consecutive steps
    without one; a power of two, at least 1. It is a number on the host: rank 0 knows the norm of the gradients anyway.

    Worked example: 65536, a step that overflowed -> 32768, 2000 that did not -> 65536.
    `counters`: those of a checkpoint; empty for a new run."""

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
    """Counts steps that were not finite, and adapts the loss scale of float16 to them. `counters`: as of `LossScale`."""

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
