"""A training step on a real model: its updates, its old log-probabilities, what is skipped; the norm and the clip of gradients."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.records import RolloutSample
from grpo_async.training.model import Policy
from grpo_async.training.step import LossScale, clip_, square_norm
from grpo_async.training.token_statistics import TokenCollector
from tests.support.loss_inputs import loss_section
from tests.support.rank_jobs import random_samples
from tests.training.tiny_models import build_tiny, step_alone

CPU = torch.device("cpu")


def _pack(samples: Sequence[RolloutSample], *, micro_batch_tokens: int = 4096) -> list[MicroBatch]:
    plan = plan_batch(
        [len(sample.token_ids) for sample in samples],
        world_size=1,
        micro_batch_tokens=micro_batch_tokens,
        pack=True,
    )
    weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=32)
    return split_by_rank(samples, weights, plan, trainer_version=0)[0].pack()


def _weights(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _poisoned(samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    return [replace(samples[0], advantage=float("nan")), *samples[1:]]


def test_several_passes_are_updates_of_the_same_samples_against_the_policy_before_the_first(tiny_model: Path) -> None:
    """Two passes over two minibatches, recomputed: four steps of one update each on tokens whose sampler is that policy."""
    samples = random_samples(8, spread=0.2)
    halves = [_pack(samples[:4]), _pack(samples[4:])]
    policy, optimizer = build_tiny(tiny_model)
    with torch.no_grad():
        start = [policy(half[0]).logprobs for half in halves]
    result = step_alone(policy, optimizer, halves, loss_section(proximal="recomputed"), num_iterations=2)
    assert (result.updates, result.trained) == ((True,) * 4, (True, True))
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    assert (result.num_tokens, result.metrics["num_tokens"]) == (num_tokens, num_tokens)
    assert result.metrics["clip_ratio/region_mean"] > 0.0  # the policy has moved away
    other, other_optimizer = build_tiny(tiny_model)
    as_sampled = [[replace(half[0], sampler_logprobs=logprobs)] for half, logprobs in zip(halves, start, strict=True)]
    alone = [step_alone(other, other_optimizer, [half], loss_section()) for half in (*as_sampled, *as_sampled)]
    for weight, expected in zip(_weights(policy), _weights(other), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)
    for name in ("loss", "grad_norm"):
        assert getattr(result, name) == pytest.approx(sum(getattr(step, name) for step in alone) / 4, rel=1e-5)


def test_an_update_that_is_not_finite_is_skipped_and_the_others_are_made(tiny_model: Path) -> None:
    samples = random_samples(8)
    good, halves = _pack(samples[4:]), [_poisoned(samples[:4]), samples[4:]]
    policy, optimizer = build_tiny(tiny_model)
    result = step_alone(policy, optimizer, [_pack(half) for half in halves], loss_section())
    assert result.updates == (False, True)
    assert result.is_finite
    assert result.metrics["training/skipped_updates"] == 1.0
    other, other_optimizer = build_tiny(tiny_model)
    alone = step_alone(other, other_optimizer, [good], loss_section())
    assert _same(_weights(policy), _weights(other))
    assert result.num_tokens == alone.num_tokens
    del result.metrics["training/skipped_updates"], alone.metrics["training/skipped_updates"]
    assert result.metrics == alone.metrics


def test_a_loss_scale_changes_nothing_but_what_overflows(tiny_model: Path) -> None:
    """A power of two changes no digit. 2^120 times a gradient is beyond float32."""
    batches = [_pack(random_samples(8), micro_batch_tokens=64)]
    found = []
    for scale in (1.0, 1024.0):
        policy, optimizer = build_tiny(tiny_model)
        found.append((step_alone(policy, optimizer, batches, loss_section(), loss_scale=scale), _weights(policy)))
    (one, weights), (other, scaled) = found
    assert one.metrics == pytest.approx(other.metrics, rel=1e-6)
    for weight, right in zip(scaled, weights, strict=True):
        torch.testing.assert_close(weight, right, rtol=1e-4, atol=1e-6)
    too_large = step_alone(policy, optimizer, batches, loss_section(), loss_scale=2.0**120)
    assert (too_large.updates, math.isfinite(too_large.loss)) == ((False,), True)
    assert _same(_weights(policy), scaled)


def test_the_mismatch_of_trainer_and_sampler_is_that_of_their_tokens(tiny_model: Path) -> None:
    """Over all updates and micro-batches of the step."""
    samples = random_samples(8, spread=0.2)
    policy, optimizer = build_tiny(tiny_model)
    batches = [_pack(samples[:4], micro_batch_tokens=64), _pack(samples[4:])]
    with torch.no_grad():
        pairs = [(policy(batch).logprobs, batch.sampler_logprobs) for part in batches for batch in part]
    d = torch.cat([ours - theirs for ours, theirs in pairs]).double()
    metrics = step_alone(policy, optimizer, batches, loss_section(), lr=0.0).metrics
    assert metrics["sampling/kl"] == pytest.approx((d.exp() - d - 1.0).mean().item(), rel=1e-4)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(d.abs().mean().item(), rel=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(d.abs().max().item(), rel=1e-4)


_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "nonzero", "__getitem__")


def test_the_host_waits_for_the_device_once_an_update_whatever_the_number_of_micro_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing tells a tensor of the device from one of the host: reads by the functions of a step are counted."""
    reads: Counter[str] = Counter()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any, **named: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename)
            is_mask = name != "__getitem__" or getattr(arguments[1], "dtype", None) == torch.bool
            is_step = caller.stem in ("step", "metrics", "loss", "token_statistics")
            if is_mask and is_step and caller.parent.name == "training":
                reads[f"{caller.stem}: {name}"] += 1
            return original(*arguments, **named)

        return read

    correction = {"level": "sequence", "action": "mask", "cap": 1.5, "floor": 0.8}
    section = loss_section(
        type="grpo", proximal="recomputed", entropy_bonus=0.01, off_policy_mask=0.01, correction=correction
    )
    samples = random_samples(8, spread=0.2)
    halves = [_pack(part, micro_batch_tokens=64) for part in (samples[:4], samples[4:])]
    assert min(map(len, halves)) > 1
    policy, optimizer = build_tiny(tiny_model)
    with monkeypatch.context() as patch:
        for name in _READS:
            patch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        tokens = TokenCollector(sum(sample.num_trained_tokens for sample in samples), CPU)
        step_alone(policy, optimizer, halves, section, tokens=tokens)
        tokens.on_host()
    assert reads == {"metrics: tolist": 2}


def _parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return [*parameters, nn.Parameter(torch.zeros(2))]  # the last one has no gradient


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_norm_and_clipped_gradients_are_those_of_torch(max_norm: float) -> None:
    mine, theirs = (_parameters(torch.float32, torch.float64, torch.float32) for _ in range(2))
    norm = math.sqrt(square_norm(mine, CPU).item())
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs, max_norm).item(), rel=1e-6)
    clip_(mine, norm=norm, max_norm=max_norm)
    for one, other in zip(mine, theirs, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_8_bits_and_shows_what_is_not_finite() -> None:
    parameters = _parameters(*[torch.bfloat16] * 50)
    exact = sum(p.grad.double().square().sum().item() for p in parameters if p.grad is not None)
    assert square_norm(parameters, CPU).item() == pytest.approx(exact, rel=1e-6)
    assert square_norm([nn.Parameter(torch.zeros(2))], CPU).item() == 0.0
    parameters[-1].grad = torch.tensor([1.0, math.nan])
    assert math.isnan(square_norm(parameters, CPU).item())


def test_a_step_without_any_finite_update_changes_nothing_and_says_so(tiny_model: Path) -> None:
    samples = random_samples(4)
    policy, optimizer = build_tiny(tiny_model)
    before = _weights(policy)
    result = step_alone(policy, optimizer, [_pack(_poisoned(samples))], loss_section())
    assert _same(before, _weights(policy))
    assert (result.is_finite, result.num_tokens, result.updates) == (False, 0, (False,))
    assert step_alone(policy, optimizer, [_pack(samples)], loss_section()).is_finite


def _scales_of_torch(steps: list[bool]) -> list[float]:
    """Of its GradScaler after each step, finite or not."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    found = []
    for is_finite in steps:
        parameter.grad = torch.full((1,), 1.0 if is_finite else torch.inf)
        scaler.unscale_(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_the_loss_scale_follows_torchs_rule_and_goes_on_from_a_checkpoint() -> None:
    steps = [True, False, False, *[True] * 2001, False, True]
    scale, found = LossScale({}), []
    for number, is_finite in enumerate(steps):
        scale.update([True, is_finite])
        found.append(float(scale.value))
        if number == 1000:
            scale = LossScale(scale.counters)
    assert found == _scales_of_torch(steps)
    for _ in range(40):
        scale.update([False])
    assert scale.value == 1
