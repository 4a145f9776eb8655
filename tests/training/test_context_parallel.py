"""Ranks that compute a sample together against one that computes it alone. Whole steps: test_equivalences.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.errors import ConfigError
from grpo_async.training.families import check_context_parallel, shares_prefixes
from tests.support.ranks import run_on_ranks
from tests.training.context_jobs import MODULE
from tests.training.tiny_families import FAMILIES, build_family


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])  # 4: more than the families' heads of keys and values
def test_every_family_computes_a_sample_on_several_ranks_as_on_one(tmp_path: Path, world_size: int) -> None:
    """Windows, soft-capping, sinks, latent attention, experts, embeddings of positions; prefixes that samples share."""
    families = [name for name in FAMILIES if shares_prefixes(build_family(name).config.to_dict())]
    assert len(families) > 15
    for family, (logprobs, gradients) in run_on_ranks(
        "compare", world_size, tmp_path, module=MODULE, families=families
    ).items():
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
