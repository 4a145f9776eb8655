"""Statistics of each trained token: what a step collects, against the formulas; how they come to their rollouts; what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config.sections import BaseLoss
from grpo_async.records import RolloutSample, TokenFlag, TokenStats
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy
from grpo_async.training.step import StepResult
from grpo_async.training.token_statistics import TokenCollector, TokenPlan
from tests.support.loss_inputs import loss_section
from tests.training.statistics_jobs import TRAINER_VERSION, make_groups
from tests.training.tiny_models import build_tiny, step_alone

CPU = torch.device("cpu")

_RECOMPUTED = {"proximal": "recomputed"}
_TOKENS = {"level": "token", "action": "mask", "cap": 1.25, "floor": 0.8}
_SEQUENCES = {"level": "sequence", "action": "truncate", "cap": 1.5, "floor": 0.8}
LOSSES: dict[str, dict[str, Any]] = {
    "delta": {"type": "dapo", "delta": 1.3, "epsilon": 0.1},
    "gspo": {"type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05},
    "cispo": {"type": "cispo", "epsilon_high": 1.2},
    "sapo": {"type": "sapo"},
    "custom": {"type": "custom", "function": "tests.training.test_objective:reinforce"},
    "token correction": {"type": "grpo", **_RECOMPUTED, "correction": _TOKENS},
    "sequence mask": {"type": "dr_grpo", **_RECOMPUTED, "correction": {**_SEQUENCES, "action": "mask"}},
    "log_linear": {"type": "dapo", "proximal": "log_linear", "correction": {"level": "token", "action": "none"}},
    "off_policy_mask": {"type": "dapo", "off_policy_mask": 0.001},
}


def _samples(num_groups: int = 6) -> list[RolloutSample]:
    return [sample for group in make_groups(num_groups) for sample in group.samples]


def _plan_and_pack(
    minibatches: Sequence[Sequence[RolloutSample]], *, stored: Callable[[RolloutSample], bool] = lambda sample: True
) -> tuple[TokenPlan, list[list[MicroBatch]]]:
    tokens, packed = TokenPlan(1), []
    for samples in minibatches:
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_batch(lengths, world_size=1, micro_batch_tokens=64, pack=True)
        weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=32)
        packed.append(split_by_rank(samples, weights, plan, trainer_version=TRAINER_VERSION)[0].pack())
        tokens.add(samples, plan, is_stored=[stored(sample) for sample in samples])
    return tokens, packed


def _step(
    model: Path, section: BaseLoss, minibatches: Sequence[Sequence[RolloutSample]], **settings: Any
) -> tuple[dict[str, TokenStats], StepResult, Policy]:
    """One step on one rank without a process group; the statistics of the samples that are stored."""
    policy, optimizer = build_tiny(model)
    plan, packed = _plan_and_pack(minibatches, **settings)
    tokens = TokenCollector(plan.capacity, CPU) if plan.capacity else None
    result = step_alone(policy, optimizer, packed, section, tokens=tokens)
    return ({} if tokens is None else plan.by_rollout([tokens.on_host()], result.trained)), result, policy


def _alone(policy: Policy, section: BaseLoss, samples: Sequence[RolloutSample]) -> dict[str, list[list[float]]]:
    """What the objective says of each sample, one alone in a forward. Rows of logprob, proximal logprob, weight, entropy, flags."""
    objective = Objective(section)
    batches = [_plan_and_pack([[sample]])[1][0][0] for sample in samples]
    with torch.no_grad():
        outputs = [policy(batch) for batch in batches]
    rows = {}
    for sample, batch, output in zip(samples, batches, outputs, strict=True):
        # a user's loss has to have a gradient
        known = replace(output, logprobs=output.logprobs.clone().requires_grad_())
        terms = objective(known, batch, old=output.logprobs)
        flags = torch.zeros_like(output.logprobs)
        for flag, holds in (
            (TokenFlag.CLIPPED_LOW, terms.token_loss.clipped_low),
            (TokenFlag.CLIPPED_HIGH, terms.token_loss.clipped_high),
            (TokenFlag.CLIPPED_HIGH, terms.token_loss.is_capped),
            (TokenFlag.IMPORTANCE_MASKED, terms.is_importance_masked),
            (TokenFlag.OFF_POLICY_MASKED, terms.is_off_policy),
        ):
            flags += 0.0 if holds is None else float(flag) * holds
        columns = (output.logprobs, terms.inputs.proximal_logprobs, terms.importance_weights, output.entropy, flags)
        rows[sample.rollout_id] = [column.tolist() for column in columns]
    return rows


def _rows(stats: TokenStats) -> list[list[float]]:
    columns = (stats.logprobs, stats.proximal_logprobs, stats.weights, stats.entropies, stats.flags)
    return [[float(value) for value in column] for column in columns]


def _assert_rows(found: Mapping[str, TokenStats], expected: Mapping[str, list[list[float]]]) -> None:
    assert found.keys() == expected.keys()
    for rollout_id, rows in expected.items():
        mine = _rows(found[rollout_id])
        for row, values in zip(mine[:4], rows[:4], strict=True):
            assert row == pytest.approx(values, rel=1e-4, abs=2e-5)
        assert mine[4] == rows[4], rollout_id


def test_the_statistics_of_a_step_are_what_the_objective_says_of_each_sample_alone(tiny_model: Path) -> None:
    """Twelve samples with tool tokens between sampled ones, in several packed micro-batches. (The objective itself is compared with
    TRL's and with numbers by hand: test_losses_trl, test_objective.)"""
    bits = 0
    samples = _samples()
    samples[1] = replace(samples[1], loss_mask=[0] * len(samples[1].loss_mask), top=None)  # has no statistics
    trained = [samples[0], *samples[2:]]
    for values in LOSSES.values():
        stats, _, _ = _step(tiny_model, loss_section(**values), [samples])
        _assert_rows(stats, _alone(build_tiny(tiny_model)[0], loss_section(**values), trained))
        bits |= int(np.bitwise_or.reduce(np.concatenate([row.flags for row in stats.values()])))
    for sample in trained:
        mine = stats[sample.rollout_id]
        assert len(mine.logprobs) == len(mine.flags) == sample.num_trained_tokens < sum(map(bool, sample.token_ids))
    assert {flag for flag in TokenFlag if flag & bits} == set(TokenFlag) - {TokenFlag.SKIPPED}, "the cases say little"
