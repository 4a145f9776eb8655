"""Adapters as a run trains them: what moves, what is sent, what is exported; on a base of 16 bits too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.config.sections import LoraSection, ModelSection
from grpo_async.errors import ConfigError
from grpo_async.training.load import build_policy
from grpo_async.training.lora import gather_adapter, gather_weights, write_adapter
from grpo_async.training.model import Policy
from grpo_async.training.parameters import ShardedParameters
from grpo_async.training.verify import one_row
from tests.support.ranks import run_on_ranks
from tests.training.shard_jobs import MODULE
from tests.training.tiny_models import collect, load_tiny, save_model, sum_of_logprobs

LORA = {"rank": 4, "alpha": 8.0}


def _load(folder: Path, *, lora: dict[str, Any] | None = None, moved: bool = True, **settings: Any) -> Policy:
    policy = load_tiny(folder, lora=LoraSection(**{**LORA, **(lora or {})}), **settings)
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2, generator=generator)
    return policy


def _logprobs(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        logprobs: torch.Tensor = policy(one_row([5, 9, 200, 31, 7, 7, 8, 100, 3])).logprobs
    return logprobs


def test_adapters_begin_as_nothing_and_are_all_that_is_trained(tied_model: Path) -> None:
    policy = _load(tied_model, moved=False)
    assert torch.equal(_logprobs(policy), _logprobs(load_tiny(tied_model)))
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert len(trained) == 3 * 7 * 2  # A and B at every linear layer of three, the head left out
    assert all("lora_" in name for name in trained)
    torch.autograd.backward(policy(one_row([1, 2, 3, 4]), objective=sum_of_logprobs).objective)
    assert {name for name, parameter in policy.named_parameters() if parameter.grad is not None} == trained
    first = policy.model.model.layers[0].self_attn.q_proj.lora_A.default.weight
    # uniform in +-sqrt(6 / ((1 + 5) x 64)) = +-1/8: variance 1/192
    assert first.abs().max() <= 1 / 8
    assert first.var().item() == pytest.approx(1 / 192, rel=0.3)


def test_exports_are_a_merged_model_and_an_adapter_that_peft_loads(tied_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = _load(tied_model)
    policy.model.save_pretrained(tmp_path / "merged", state_dict=gather_weights(policy.model, torch.float32))
    torch.testing.assert_close(_logprobs(load_tiny(tmp_path / "merged")), _logprobs(policy), rtol=0, atol=1e-5)
    write_adapter(tmp_path / "adapter", policy.model, gather_adapter(policy.model))
    base = AutoModelForCausalLM.from_pretrained(tied_model)
    peft_model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 9, 200, 31, 7, 7, 8, 100, 3]])
    logits = torch.log_softmax(peft_model(ids).logits[0, :-1], dim=-1)
    theirs = logits.gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(_logprobs(policy), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_a_base_in_4_bits_is_pushed_and_exported_as_it_computes(
    tied_model: Path, tmp_path: Path, targets: str | list[str]
) -> None:
    policy = _load(tied_model, lora={"load_in_4bit": True, "target_modules": targets})
    assert (_logprobs(policy) - _logprobs(_load(tied_model))).abs().max() > 1e-3
    torch.autograd.backward(policy(one_row([1, 2, 3, 4]), objective=sum_of_logprobs).objective)
    assert all("lora_" in name for name, parameter in policy.named_parameters() if parameter.grad is not None)
    weights = gather_weights(policy.model, torch.float32)
    policy.model.save_pretrained(tmp_path, state_dict=weights)
    torch.testing.assert_close(_logprobs(load_tiny(tmp_path)), _logprobs(policy), rtol=0, atol=1e-5)
    pushed = ShardedParameters(policy.model, wire_dtype=torch.float32)
    for spec, tensor in zip(pushed.specs, pushed.gather(), strict=True):
        assert torch.equal(tensor, weights[spec.name])
        assert spec.shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"target_modules": ["q_proj", "nonsense"]}, "nonsense"),
        ({"modules_to_save": ["nonsense"]}, "nonsense"),
        ({"modules_to_save": ["lm_head"]}, r"tied to one of \['lm_head'\]"),
    ],
)
def test_modules_that_do_not_fit_are_refused(tied_model: Path, section: dict[str, Any], words: str) -> None:
    model = ModelSection(path=str(tied_model), lora=LoraSection(**section))
    with pytest.raises(ConfigError, match=words):
        build_policy(model, temperature=1.0, chunk_tokens=16, max_model_len=64)


@pytest.mark.slow
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_two_ranks_train_adapters_on_a_bfloat16_base_as_one_does(
    tied_model: Path, tmp_path: Path, in_4_bits: bool
) -> None:
    """With modules that are trained whole; on two ranks with activations that are computed again."""
    whole, runs = ["embed_tokens", "lm_head", "norm"], {}
    lora = {**LORA, "modules_to_save": whole, "load_in_4bit": in_4_bits}
    settings = {"lora": lora, "dtype": "bfloat16", "compute_dtype": "bfloat16"}
    for ranks, recompute in ((1, "none"), (2, "full")):
        own = {**settings, "activation_checkpointing": recompute, "out": tmp_path / f"{ranks}.pt"}
        result = run_on_ranks("train", ranks, tmp_path / str(ranks), module=MODULE, model=tied_model, **own)
        runs[ranks] = result, torch.load(own["out"], weights_only=True)
    (one, weights), (two, other) = runs[1], runs[2]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-2)
    assert two["norms"] == pytest.approx(one["norms"], rel=5e-2)
    assert two["frozen"] == one["frozen"] > 20
    start = collect(ShardedParameters(_load(tied_model, moved=False).model, wire_dtype=torch.float32))
    changed = {name for name in start if not torch.allclose(weights[name].float(), start[name], rtol=1e-2, atol=1e-4)}
    names = ("proj.weight", *(f"{name}.weight" for name in whole))
    assert changed <= {name for name in start if name.endswith(names)}
    assert "model.embed_tokens.weight" in changed
    assert any((weights[name].float() - start[name]).abs().max() > 1e-3 for name in start if "proj" in name)
    for name, tensor in weights.items():
        far = (other[name].float() - tensor.float()).abs() > 2e-2
        assert far.float().mean() < 5e-3, name


def test_dropout_acts_in_an_update_alone_and_is_the_same_when_it_is_recomputed(tied_model: Path) -> None:
    plain, policy = _load(tied_model), _load(tied_model, lora={"dropout": 0.5})
    recomputing = _load(tied_model, lora={"dropout": 0.5}, activation_checkpointing="full")
    assert torch.equal(_logprobs(policy), _logprobs(plain))  # before a step, and of scores
    gradients, values = [], []
    for each in (policy, recomputing):
        torch.manual_seed(3)
        output = each(one_row([5, 9, 200, 31, 7, 7, 8, 100, 3]), objective=sum_of_logprobs)
        torch.autograd.backward(output.objective)
        values.append(output.logprobs)
        gradients.append([parameter.grad for parameter in each.parameters() if parameter.requires_grad])
    assert (values[0] - _logprobs(plain)).abs().max() > 1e-3
    assert torch.equal(*values)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_modules_that_are_trained_whole_are_pushed_and_exported_with_the_adapters(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", "qwen3", vocab_size=320)
    policy = _load(folder, lora={"modules_to_save": ["lm_head", "norm"]}, dtype="bfloat16")
    trained = {name: each for name, each in policy.model.named_parameters() if each.requires_grad}
    whole = {name for name in trained if "lora_" not in name}
    assert whole == {"lm_head.weight", "model.norm.weight"}
    assert {each.dtype for each in trained.values()} == {torch.float32}
    before = collect(ShardedParameters(policy.model, wire_dtype=torch.float32))
    with torch.no_grad():
        for name in whole:
            trained[name].mul_(1.5)
    sent = collect(ShardedParameters(policy.model, wire_dtype=torch.float32))
    assert {name for name in sent if not torch.equal(sent[name], before[name])} == whole
    write_adapter(tmp_path / "adapter", policy.model, gather_adapter(policy.model))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    for name, tensor in sent.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-2, atol=1e-3)  # the base was rounded to bfloat16
    for name in whole:
        assert torch.equal(merged[name], sent[name])


def test_a_tied_pair_that_is_trained_whole_stays_tied(tied_model: Path) -> None:
    tied = _load(tied_model, lora={"modules_to_save": ["lm_head", "embed_tokens"]}, dtype="bfloat16").model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
