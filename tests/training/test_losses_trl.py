"""The objective is TRL's on random tensors: loss, gradients and metrics, for every loss and reduction that both have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config.sections import (
    BaseLoss,
    CispoLoss,
    ClippedLoss,
    GmpoLoss,
    GspoLoss,
    ImportanceSamplingSection,
    SapoLoss,
    VespoLoss,
)
from grpo_async.records import RolloutSample
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import Objective, ObjectiveOutput
from grpo_async.training.metrics import UpdateSums, step_metrics
from tests.support.records import make_sample
from tests.support.trl_losses import TrlBatch, trl_loss

pytestmark = pytest.mark.slow  # importing TRL takes its time

MAX_TOKENS = 16


def _batch(*, seed: int = 0, count: int = 6, length: int = 9, mask_one: bool = False) -> TrlBatch:
    """Ragged completions with tool tokens in them; ratios from about 0.3 to 3. `mask_one`: one is masked whole (truncated)."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(count, length, generator=generator) * scale

    lengths = torch.randint(2, length + 1, (count, 1), generator=generator)
    mask = (torch.arange(length)[None] < lengths) & (torch.rand(count, length, generator=generator) > 0.15)
    mask[:, 0] = True
    if mask_one:
        mask[2] = False
    logprobs = -1.5 + noise(0.5)
    old = logprobs + noise(0.4)
    return TrlBatch(
        mask=mask.long(),
        logprobs=logprobs.requires_grad_(),
        entropy=(1.0 + noise(0.3)).abs().requires_grad_(),
        old=old,
        sampler=old + noise(0.4),
        ref=logprobs.detach() + noise(0.5),
        advantages=torch.randn(count, generator=generator),
    )


def _samples(batch: TrlBatch) -> list[RolloutSample]:
    """A prompt of one token and the completion; those that are masked whole are not there, as after scoring."""
    samples = []
    for mask, sampler, advantage in zip(batch.mask, batch.sampler, batch.advantages, strict=True):
        if mask.any():
            sample = make_sample(
                prompt=[1], completion=[1] * len(mask), advantage=advantage.item(), logprobs=sampler.tolist()
            )
            samples.append(replace(sample, loss_mask=[0, *mask.tolist()]))
    return samples


def _ours(batch: TrlBatch, section: BaseLoss) -> tuple[ObjectiveOutput, dict[str, float]]:
    """One micro-batch whose tokens, in the order of packing, are those of `batch`."""
    samples = _samples(batch)
    plan = plan_batch([len(s.token_ids) for s in samples], world_size=1, micro_batch_tokens=999, pack=True)
    weights = token_weights(
        samples,
        plan,
        reduction=section.resolved_reduction,
        max_completion_tokens=MAX_TOKENS,
        num_masked=len(batch.mask) - len(samples),
    )
    (micro_batch,) = split_by_rank(samples, weights, plan, trainer_version=0)[0].pack()
    kept = batch.mask.bool()
    assert micro_batch.sampler_logprobs.tolist() == pytest.approx(batch.sampler[kept].tolist())
    objective = Objective(section, num_updates=2)  # so that the proximal logprobs are the old ones
    output = objective(
        PolicyOutput(logprobs=batch.logprobs[kept], entropy=batch.entropy[kept]),
        micro_batch,
        ref_logprobs=batch.ref[kept],
        old=batch.old[kept],
    )
    sums = UpdateSums(objective, torch.device("cpu"))
    sums.add(output)
    return output, step_metrics([sums.gather(torch.zeros(()))], objective)


def _gradients(loss: torch.Tensor, batch: TrlBatch) -> list[torch.Tensor]:
    gradients = torch.autograd.grad(loss, [batch.logprobs, batch.entropy], allow_unused=True)
    zero = torch.zeros_like(batch.logprobs)
    return [zero if gradient is None else gradient for gradient in gradients]


def _assert_equal(section: BaseLoss, *, mask_one: bool = False, **trl: Any) -> dict[str, float]:
    section = section.model_copy(update={"proximal": "recomputed"})
    for seed in range(3):
        batch = _batch(seed=seed, mask_one=mask_one)
        theirs = trl_loss(batch, max_completion_tokens=MAX_TOKENS, **trl)
        ours, metrics = _ours(batch, section)
        torch.testing.assert_close(ours.total, theirs.loss, rtol=1e-5, atol=1e-7)
        for mine, other in zip(_gradients(ours.total, batch), _gradients(theirs.loss, batch), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        both = {name: value for name, value in theirs.metrics.items() if name in metrics}
        assert {name: metrics[name] for name in both} == pytest.approx(both, rel=1e-5, abs=1e-7)
    return both


REDUCTIONS = ["grpo", "bnpo", "dr_grpo", "dapo"]
CLIP_METRICS = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}


@pytest.mark.parametrize("mask_one", [False, True], ids=["", "one-masked-whole"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_clipped_losses(reduction: Any, mask_one: bool) -> None:
    both = _assert_equal(ClippedLoss(type=reduction), loss_type=reduction, mask_one=mask_one)
    assert both.keys() >= CLIP_METRICS | {"entropy"}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gspo(reduction: Any) -> None:
    """A wide clip, so that some ratios lie inside it."""
    section = GspoLoss(type="gspo", reduction=reduction, epsilon=0.1, epsilon_high=0.1)
    both = _assert_equal(section, loss_type=reduction, level="sequence", epsilon=0.1, epsilon_high=0.1)
    assert both.keys() >= CLIP_METRICS


def test_gmpo() -> None:
    """Its KL is never weighed by the ratio. (A completion that is masked whole has a ratio of 1 there, without gradient.)"""
    section = GmpoLoss(type="gmpo", beta=0.07, use_bias_correction_kl=False)
    both = _assert_equal(section, loss_type="gmpo", epsilon=0.4, epsilon_high=0.4, beta=0.07)
    assert both.keys() >= CLIP_METRICS | {"kl"}
    assert 0.0 < both["clip_ratio/low_mean"] + both["clip_ratio/high_mean"] < 1.0


LOSSES: list[tuple[BaseLoss, dict[str, Any]]] = [
    (
        GspoLoss(type="luspo", epsilon=0.1, epsilon_high=0.1),
        {"loss_type": "luspo", "level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
    ),
    (VespoLoss(type="vespo"), {"loss_type": "vespo"}),
    (ClippedLoss(type="grpo"), {"loss_type": "grpo"}),
    (ClippedLoss(type="dr_grpo"), {"loss_type": "dr_grpo"}),
    (ClippedLoss(type="bnpo"), {"loss_type": "bnpo"}),
    (ClippedLoss(type="dapo"), {"loss_type": "dapo"}),
    (CispoLoss(type="cispo", epsilon_high=1.3), {"loss_type": "cispo", "epsilon_high": 1.3}),
    (SapoLoss(type="sapo"), {"loss_type": "sapo"}),
    (
        GspoLoss(type="gspo", epsilon=0.1, epsilon_high=0.1),
        {"loss_type": "grpo", "level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
    ),
]
IDS = [section.type for section, _ in LOSSES]


@pytest.mark.parametrize("weighed", [None, False], ids=["as-by-default", "not-weighed"])
@pytest.mark.parametrize(("section", "trl"), LOSSES, ids=IDS)
def test_kl_with_a_reference_and_entropy_bonus(section: BaseLoss, trl: dict[str, Any], weighed: bool | None) -> None:
    """By default both weigh the KL by the ratio."""
    settings: dict[str, Any] = {"beta": 0.07, "entropy_bonus": 0.3}
    settings |= {} if weighed is None else {"use_bias_correction_kl": weighed}
    both = _assert_equal(section.model_copy(update=settings), **settings, **trl)
    assert both.keys() >= {"kl", "policy_loss"}


@pytest.mark.parametrize(("section", "trl"), LOSSES, ids=IDS)
def test_off_policy_mask(section: BaseLoss, trl: dict[str, Any]) -> None:
    """Threshold 0.05: the sampler is about as often above the policy as below it, so some are left out and some are not."""
    section = section.model_copy(update={"off_policy_mask": 0.05})
    _assert_equal(section, off_policy_mask=0.05, **trl)
    ours = [_ours(_batch(seed=seed), section.model_copy(update={"proximal": "recomputed"}))[1] for seed in range(3)]
    assert any(0.0 < metrics["masked/off_policy"] < 1.0 for metrics in ours)


@pytest.mark.parametrize("floor", [None, 0.6])
@pytest.mark.parametrize("action", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("section", "trl"), LOSSES[-4:], ids=IDS[-4:])
def test_corrections(section: BaseLoss, trl: dict[str, Any], level: Any, action: Any, floor: float | None) -> None:
    correction = ImportanceSamplingSection(level=level, action=action, cap=1.5, floor=floor)
    section = section.model_copy(update={"correction": correction, "beta": 0.07})
    _assert_equal(section, correction=f"{level}_{action}", cap=1.5, floor=floor, beta=0.07, **trl)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_figures_of_the_weights_are_those_of_the_weights_in_use(level: Any) -> None:
    """TRL logs min, mean and max of the same weights; ESS and chi-squared by their formulas, over tokens or samples."""
    batch = _batch()
    section = ClippedLoss(
        type="grpo",
        proximal="recomputed",
        correction=ImportanceSamplingSection(level=level, action="truncate", cap=1.5),
    )
    theirs = trl_loss(batch, loss_type="grpo", correction=f"{level}_truncate", cap=1.5).correction
    assert theirs is not None
    weights = theirs.flatten() if level == "sequence" else theirs[batch.mask.bool()]
    _, metrics = _ours(batch, section)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(weights.min().item(), rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(weights.mean().item(), rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(weights.max().item(), rel=1e-5)
    ess = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    assert metrics["sampling/ess"] == pytest.approx(ess.item(), rel=1e-5)
    assert metrics["sampling/chi_squared"] == pytest.approx((weights**2).mean().item() - 1.0, rel=1e-5, abs=1e-6)


def test_everything_at_once() -> None:
    correction = ImportanceSamplingSection(level="token", action="mask", cap=1.5, floor=0.6)
    values = {"beta": 0.1, "off_policy_mask": 0.05, "entropy_bonus": 0.2}
    _assert_equal(
        ClippedLoss(type="dapo", delta=1.5).model_copy(update={**values, "correction": correction}),
        loss_type="dapo", delta=1.5, correction="token_mask", cap=1.5, floor=0.6, **values,
    )  # fmt: skip
