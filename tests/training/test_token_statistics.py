"""Statistics of each trained token: what a step collects, against what the objective says of each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config.sections import BaseLoss
from grpo_async.records import RolloutSample, TokenFlag
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy
from grpo_async.training.token_statistics import TokenCollector, TokenPlan
from tests.support.loss_inputs import loss_section
from tests.training.statistics_jobs import TRAINER_VERSION, as_lists, make_groups
from tests.training.tiny_models import build_tiny, step_alone

CPU = torch.device("cpu")
_RECOMPUTED = {"proximal": "recomputed"}
_TOKENS = {"level": "token", "action": "mask", "cap": 1.25, "floor": 0.8}
LOSSES: list[dict[str, Any]] = [
    {"type": "dapo", "delta": 1.3, "epsilon": 0.1},
    {"type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05},
    {"type": "cispo", "epsilon_high": 1.2},
    {"type": "grpo", **_RECOMPUTED, "correction": _TOKENS},
    {"type": "dr_grpo", **_RECOMPUTED, "correction": {**_TOKENS, "level": "sequence", "cap": 1.5}},
    {"type": "dapo", "proximal": "log_linear", "correction": {"level": "token", "action": "none"}},
    {"type": "dapo", "off_policy_mask": 0.001},
]


def _pack(samples: Sequence[RolloutSample]) -> tuple[TokenPlan, list[MicroBatch]]:
    tokens = TokenPlan(1)
    plan = plan_batch([len(each.token_ids) for each in samples], world_size=1, micro_batch_tokens=64, pack=True)
    weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=32)
    tokens.add(samples, plan, is_stored=[True] * len(samples))
    return tokens, split_by_rank(samples, weights, plan, trainer_version=TRAINER_VERSION)[0].pack()


def _alone(policy: Policy, section: BaseLoss, samples: Sequence[RolloutSample]) -> dict[str, dict[str, list[float]]]:
    """What the objective says of each sample, one alone in a forward."""
    found = {}
    for sample in samples:
        _, (batch,) = _pack([sample])
        with torch.no_grad():
            output = policy(batch)
        terms = Objective(section)(output, batch, old=output.logprobs)
        flags = torch.zeros_like(output.logprobs)
        for flag, holds in (
            (TokenFlag.CLIPPED_LOW, terms.token_loss.clipped_low),
            (TokenFlag.CLIPPED_HIGH, terms.token_loss.clipped_high),
            (TokenFlag.CLIPPED_HIGH, terms.token_loss.is_capped),
            (TokenFlag.IMPORTANCE_MASKED, terms.is_importance_masked),
            (TokenFlag.OFF_POLICY_MASKED, terms.is_off_policy),
        ):
            flags += 0.0 if holds is None else float(flag) * holds
        columns = {
            "logprobs": output.logprobs,
            "proximal_logprobs": terms.inputs.proximal_logprobs,
            "weights": terms.importance_weights,
            "entropies": output.entropy,
            "flags": flags,
        }
        found[sample.rollout_id] = {name: column.tolist() for name, column in columns.items()}
    return found


def test_the_statistics_of_a_step_are_what_the_objective_says_of_each_sample_alone(tiny_model: Path) -> None:
    """Twelve samples with tool tokens between sampled ones, in several packed micro-batches. (The objective itself is compared with
    TRL's and with numbers by hand: test_losses_trl, test_objective.)"""
    samples = [sample for group in make_groups(6) for sample in group.samples]
    samples[1] = replace(samples[1], loss_mask=[0] * len(samples[1].loss_mask), top=None)  # has no statistics
    trained, seen = [samples[0], *samples[2:]], set()
    for values in LOSSES:
        section, (policy, optimizer) = loss_section(**values), build_tiny(tiny_model)
        expected = _alone(policy, section, trained)
        plan, batches = _pack(samples)
        tokens = TokenCollector(plan.capacity, CPU)
        result = step_alone(policy, optimizer, [batches], section, tokens=tokens)
        found = as_lists(plan.by_rollout([tokens.on_host()], result.trained))
        assert found.keys() == expected.keys()
        for rollout_id, columns in expected.items():
            for name, column in columns.items():
                assert found[rollout_id][name] == pytest.approx(column, rel=1e-4, abs=2e-5), (rollout_id, name)
            seen |= set(columns["flags"])
    assert {flag for flag in TokenFlag if any(int(each) & flag for each in seen)} == set(TokenFlag) - {
        TokenFlag.SKIPPED
    }, "the cases say little"
