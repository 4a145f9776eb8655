"""Ranks that compute a sample together against one that computes it alone. Whole steps: test_equivalences.py."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grpo_async.errors import ConfigError
from grpo_async.training.context_parallel import ContextGroup
from grpo_async.training.families import check_context_parallel, shares_prefixes
from grpo_async.training.model import Policy
from tests.support.ranks import run_on_ranks
from tests.training.tiny_families import FAMILIES, build_family, pack_tree, tree_samples
from tests.training.tiny_models import sum_of_logprobs


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


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])  # 4: more than the families' heads of keys and values
def test_every_family_computes_a_sample_on_several_ranks_as_on_one(tmp_path: Path, world_size: int) -> None:
    """Windows, soft-capping, sinks, latent attention, experts, embeddings of positions; prefixes that samples share."""
    families = [name for name in FAMILIES if shares_prefixes(build_family(name).config.to_dict())]
    assert len(families) > 15
    found = run_on_ranks("compare", world_size, tmp_path, module=__name__, families=families)
    for family, (logprobs, gradients) in found.items():
        assert logprobs < 2e-5, family
        assert gradients < 1e-3, family


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"num_attention_heads": 14, "num_key_value_heads": 2}, 4),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2),
        ({"num_attention_heads": 8, "layer_types": ["linear_attention", "full_attention"]}, 2),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(config: dict[str, object], size: int) -> None:
    with pytest.raises(ConfigError, match=r"training\.context_parallel"):
        check_context_parallel(config, "models/mine", size)
