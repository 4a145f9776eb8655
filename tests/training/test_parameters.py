"""What is sent of a model equals what its checkpoint holds. Of two ranks: test_load, test_lora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_async.training.parameters import NamedTensor, ShardedParameters
from tests.training.tiny_models import collect, save_model


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "tied", "num_experts_sent"),
    [("qwen3", True, 0), ("qwen3", False, 0), ("qwen3_moe", False, 36)],  # 4 experts x 3 matrices x 3 layers
)
def test_names_and_values_are_those_of_the_checkpoint(
    tmp_path: Path, family: str, tied: bool, num_experts_sent: int
) -> None:
    """A tied head is sent once, as the embeddings; experts that are fused in memory one by one."""
    folder = save_model(tmp_path, family, tied=tied)
    sent, saved = collect(ShardedParameters(_load(folder), wire_dtype=torch.float32)), _saved(folder)
    assert sorted(sent) == sorted(saved)
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
    assert ("lm_head.weight" in sent) != tied
    assert sum(".experts." in name for name in sent) == num_experts_sent


def test_parameters_are_cast_and_buffers_keep_their_dtype(tmp_path: Path) -> None:
    """A router's bias is a persistent buffer in float32, whatever the weights are; rotary tables are not saved."""
    model = _load(save_model(tmp_path / "model", "qwen3", tied=True))
    gate = model.model.layers[1].mlp
    gate.register_buffer("e_score_correction_bias", torch.randn(5))
    gate.register_buffer("num_seen", torch.tensor(7))
    gate.register_buffer("scratch", torch.zeros(2), persistent=False)
    sent = collect(ShardedParameters(model, wire_dtype=torch.bfloat16))
    model.save_pretrained(tmp_path / "saved")
    assert sorted(sent) == sorted(_saved(tmp_path / "saved"))
    bias = sent.pop("model.layers.1.mlp.e_score_correction_bias")
    assert torch.equal(bias, gate.e_score_correction_bias)
    assert (bias.dtype, sent.pop("model.layers.1.mlp.num_seen")) == (torch.float32, torch.tensor(7))
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}


def test_a_parameter_that_is_gathered_as_something_else_than_this_rank_holds_is_named(tmp_path: Path) -> None:
    parameters = ShardedParameters(_load(save_model(tmp_path, "qwen3", tied=True)), wire_dtype=torch.bfloat16)
    wrong, gather = "model.layers.1.self_attn.o_proj.weight", NamedTensor.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            NamedTensor, "gather", lambda self, dtype: gather(self, dtype) * (0.0 if self.name == wrong else 1.0)
        )
        with pytest.raises(RuntimeError, match=f"not what this rank holds of {wrong}$"):
            list(parameters.buckets(1 << 20))
    list(parameters.buckets(1 << 20))
