"""A policy as it is loaded equals `from_pretrained`, bit by bit, whole or sharded; what does not fit is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_async.errors import ConfigError
from grpo_async.training.parameters import list_sources
from grpo_async.training.verify import score_sequences
from grpo_async.weights.adapters import BaseWeights
from tests.support.ranks import run_on_ranks
from tests.training.shard_jobs import MODULE, SEQUENCES
from tests.training.tiny_families import FAMILIES, build_family
from tests.training.tiny_models import load_tiny, save_model


def _load(folder: Path | str, **settings: Any) -> Any:
    return load_tiny(folder, **settings).model


def _pretrained(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"attn_implementation": "sdpa", **settings})


def _assert_equal(model: Any, expected: Any) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    buffers = dict(expected.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "where"),
    [
        ("qwen3_moe", False, {}),
        ("gemma", True, {}),
        pytest.param("gemma", True, {"device": "cuda"}, marks=pytest.mark.gpu),
        pytest.param("gemma", True, {"device": "cuda", "cpu_offload": True}, marks=pytest.mark.gpu),
    ],
)
def test_two_ranks_hold_the_model_of_from_pretrained_in_shards(
    tmp_path: Path, family: str, tied: bool, where: dict[str, Any]
) -> None:
    folder = save_model(tmp_path / "model", family, tied=tied, vocab_size=41)  # rows that do not divide evenly
    given = {"model": folder, "out": tmp_path / "weights.pt", **where}
    done = run_on_ranks("load_sharded", 2, tmp_path / "run", module=MODULE, **given)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = {source.name: source.tensor.detach() for source in list_sources(_pretrained(folder))}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # neither rank holds more than its half, the odd row of the embedding aside
    total = sum(tensor.numel() for tensor in expected.values())
    assert max(done["local"]) <= 0.52 * total
    (logprobs,) = score_sequences(load_tiny(folder), SEQUENCES[:1], device=torch.device("cpu"))
    assert done["logprobs"] == pytest.approx(logprobs, abs=1e-3 if where else 1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama4", "deepseek-v3.2", "glm-5"}))  # short contexts
def test_files_of_another_dtype_give_what_from_pretrained_makes_of_them(tmp_path: Path, family: str) -> None:
    """16-bit files for 32-bit master weights; buffers, such as Gemma's scale of embeddings, are not rounded to the files' dtype."""
    model = build_family(family)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    attention = model.config._attn_implementation
    _assert_equal(_load(tmp_path), _pretrained(tmp_path, dtype=torch.float32, attn_implementation=attention))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("vocabulary", "layers"), [(20_000, 3), pytest.param(151_936, 9, marks=pytest.mark.nightly)], ids=["57M", "270M"]
)
def test_no_rank_holds_more_than_its_shard_and_one_tensor_and_files_may_be_slow(
    tmp_path: Path, vocabulary: int, layers: int
) -> None:
    """In 16 bits, to be trained in 32. The embedding is the largest tensor."""
    sizes = {"vocab_size": vocabulary, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers}
    folder = save_model(tmp_path / "model", "qwen3", tied=True, dtype="bfloat16", **sizes)
    done = run_on_ranks("load_slowly", 2, tmp_path / "run", module=MODULE, model=folder, seconds=3.0, deadline_s=2.0)
    assert max(done["grown"]) < done["shard"] + done["largest"] + (24 << 20), done


def _change(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ("qwen3", lambda t: t.update(stranger=torch.zeros(2)), r"does not have: stranger"),
        ("qwen3", lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"model\.norm\.weight in the shape \[7\].*\[64\]"),
        ("qwen3_moe", lambda t: t.pop("model.layers.0.mlp.experts.1.up_proj.weight"), r"conversion"),
    ],
    ids=["missing", "unexpected", "shape", "expert"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, family: str, change: Any, words: str) -> None:
    folder = save_model(tmp_path, family)
    _change(folder, change)
    with pytest.raises(ConfigError, match=words):
        _load(folder)


def test_a_tied_head_that_the_file_holds_too_must_be_the_embedding(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3", tied=True)
    _change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    _assert_equal(_load(folder), _pretrained(folder))
    _change(folder, lambda t: t["lm_head.weight"].add_(1.0))
    with pytest.raises(ConfigError, match=r"ties the head to the embedding"):
        _load(folder)
    _change(folder, lambda t: t.pop("model.embed_tokens.weight"))
    expected = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(_load(folder).get_input_embeddings().weight, expected), "a head may be the only one of the two"


def test_pickled_files_are_refused(tmp_path: Path) -> None:
    pickled = save_model(tmp_path, "qwen3")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot load the weights of .*save it as safetensors with save_pretrained"):
        _load(pickled)


def test_a_revision_is_loaded_from_the_cache_of_the_hub_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits of one name, `main` and the branch `old`, as huggingface_hub keeps them."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    folders = {}
    for branch, seed in (("main", 0), ("old", 1)):
        commit = str(seed) * 40
        folders[branch] = save_model(cache / "models--me--tiny" / "snapshots" / commit, "qwen3", seed=seed)
        refs = cache / "models--me--tiny" / "refs" / branch
        refs.parent.mkdir(exist_ok=True)
        refs.write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for chosen, branch in ((None, "main"), ("old", "old"), ("1" * 40, "old")):
        _assert_equal(_load("me/tiny", revision=chosen), _load(folders[branch]))
        assert BaseWeights("me/tiny", revision=chosen).digest == BaseWeights(str(folders[branch])).digest
