"""What the ranks of the tests of context parallelism do."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from grpo_async.training.context_parallel import ContextGroup
from grpo_async.training.model import Policy
from tests.training.tiny_families import build_family, pack_tree, tree_samples
from tests.training.tiny_models import sum_of_logprobs

MODULE = "tests.training.context_jobs"


def compare(families: list[str]) -> dict[str, list[float]]:
    """Of each family the largest differences between what all ranks compute together and one alone: of log-probabilities, and of
    gradients, summed over the ranks, in units of the largest of a parameter (of biases of keys it is 0, up to rounding)."""
    context = ContextGroup.join(dist.get_world_size(), timeout_s=60.0)
    assert context is not None
    found = {}
    for family in families:
        model, samples = build_family(family), tree_samples(seed=3)
        alone = Policy(copy.deepcopy(model), temperature=0.7, chunk_tokens=16)
        together = Policy(model, temperature=0.7, chunk_tokens=16, context=context)
        expected = alone(pack_tree(samples), objective=sum_of_logprobs)
        output = together(pack_tree(samples, context_parallel=context.size), objective=sum_of_logprobs)
        for each in (expected, output):
            assert each.objective is not None
            each.objective.backward()
        differences = [0.0]
        floor = 1e-2 * max(float(each.grad.abs().max()) for each in alone.parameters() if each.grad is not None)
        for ours, wanted in zip(together.model.parameters(), alone.model.parameters(), strict=True):
            if wanted.grad is not None:
                gradient = torch.zeros_like(ours) if ours.grad is None else ours.grad
                dist.all_reduce(gradient)
                differences.append(float((gradient - wanted.grad).abs().max() / (wanted.grad.abs().max() + floor)))
        found[family] = [float((output.logprobs - expected.logprobs).abs().max()), max(differences)]
    return found
