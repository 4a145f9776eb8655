"""What ranks do in the tests of prompts that samples have in common; run by `run_on_ranks(..., module=...)`."""

from __future__ import annotations

from typing import Any

from grpo_async.config.loss_sections import ClippedLoss
from grpo_async.training.model import Policy
from grpo_async.training.reference import Reference
from tests.support import rank_jobs
from tests.training.test_shared_prompts import make_groups


def train_groups(model: str, *, share_prompts: bool, **settings: Any) -> dict[str, Any]:
    """A step of two updates; `computed` are this rank's tokens of all its forward passes with a gradient."""
    policy, optimizer = rank_jobs.build(model)
    computed: list[int] = []
    policy.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].input_ids.numel()))
    result = rank_jobs.one_step(
        policy,
        optimizer,
        make_groups(),
        loss=ClippedLoss(type="grpo", beta=0.1, proximal="recomputed", entropy_bonus=0.01),
        num_minibatches=2,
        reference=Reference(_reference(model)),
        share_prompts=share_prompts,
        **settings,
    )
    return {
        "computed": sum(computed),
        "updates": result.updates,
        "metrics": result.metrics,
        "weights": rank_jobs.fingerprint(policy),
    }


def _reference(model: str) -> Policy:
    """It is not the policy: that has been moved."""
    policy, optimizer = rank_jobs.build(model)
    rank_jobs.one_step(policy, optimizer, rank_jobs.random_samples(seed=5))
    return policy
