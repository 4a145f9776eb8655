"""The policy's forward against a plain forward of the same model, a sample at a time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.errors import ConfigError
from grpo_async.records import RolloutSample
from grpo_async.training import families
from grpo_async.training.families import one_sample_per_row
from grpo_async.training.model import Policy, recompute_activations
from tests.support.records import make_sample
from tests.training.tiny_families import (
    FAMILIES,
    LENGTHS,
    ROW_TOKENS,
    ROWS,
    build_family,
    pack_rows,
    pack_tree,
    samples_of,
    tree_samples,
)
from tests.training.tiny_models import load_tiny, sum_of_logprobs

PACKED_BY_KERNELS = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "olmo-hybrid"]


def _alone(model: Any, samples: Sequence[RolloutSample], *, temperature: float) -> torch.Tensor:
    """Log-probabilities of every token but the first of each sample, by the model's own forward."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
        found.append(torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_computes_what_the_cpu_does(family: str) -> None:
    model, samples = build_family(family), samples_of(LENGTHS)
    found = {}
    for device in ("cpu", "cuda"):
        policy = Policy(copy.deepcopy(model).to(device), temperature=0.7, chunk_tokens=16)
        output = policy(pack_rows(samples, ROWS, ROW_TOKENS).to(torch.device(device)), objective=sum_of_logprobs)
        output.objective.backward()
        found[device] = [output.logprobs.cpu(), *(each.grad.cpu() for each in policy.model.parameters())]
    for ours, wanted in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", PACKED_BY_KERNELS)
def test_kernels_keep_packed_samples_apart(family: str) -> None:
    for package in ("fla", "causal_conv1d"):
        pytest.importorskip(package, reason="the extra `hybrid` is not installed")
    model, samples = build_family(family), samples_of(LENGTHS)
    packed = Policy(copy.deepcopy(model).cuda(), temperature=0.7, chunk_tokens=16, device_type="cuda")
    batch = pack_rows(samples, [range(len(samples))], sum(LENGTHS)).to(torch.device("cuda"))
    expected = _alone(model, samples, temperature=0.7)
    torch.testing.assert_close(packed(batch).logprobs.cpu(), expected.detach(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_are_those_of_each_sample_alone(family: str) -> None:
    """Neither a neighbor in the row, nor padding, nor a later token changes them, in every family: windows, soft-capped scores
    and logits, scaled logits, grouped queries, experts, sinks, latent attention. States do not leak: one sample per row."""
    model, samples = build_family(family), samples_of(LENGTHS)
    if Policy(copy.deepcopy(model), temperature=1.0, chunk_tokens=16).one_sample_per_row:
        _assert_as_alone(model, samples, pack_rows(samples, [[index] for index in range(len(samples))], max(LENGTHS)))
        return
    order = [samples[index] for row in ROWS for index in row]
    _assert_as_alone(model, order, pack_rows(samples, ROWS, ROW_TOKENS))
    for seed in range(2):
        samples = tree_samples(seed)
        _assert_as_alone(model, samples, pack_tree(samples))


@pytest.mark.parametrize("family", PACKED_BY_KERNELS)
def test_layers_with_a_state_are_packed_where_kernels_begin_anew_at_each_sample(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the kernels, which need a GPU, the reference functions that they replace, applied to each sample."""
    model, samples = build_family(family), samples_of(LENGTHS)
    module = sys.modules[type(model).__module__]
    convolve, update = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule

    def causal_conv1d_fn(
        x: torch.Tensor, *weights: Any, seq_idx: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        if seq_idx is None:
            return convolve(x, *weights, **_known(options))
        assert seq_idx.shape == (len(x), x.shape[-1])
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([convolve(part, *weights, **_known(options)) for part in x.split(lengths, -1)], -1)

    def chunk_gated_delta_rule(
        *columns: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if cu_seqlens is None:
            return update(*columns, g=g, beta=beta, **_known(options))
        assert len(g) == 1  # as the kernel wants it
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(column.split(lengths, 1) for column in (*columns, g, beta)), strict=True)
        made = [update(q, k, v, g=decay, beta=rate, **_known(options))[0] for q, k, v, decay, rate in parts]
        return torch.cat(made, 1), None

    assert one_sample_per_row(model.config.to_dict(), device_type="cuda")  # without the packages
    monkeypatch.setattr(families, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "causal_conv1d_fn", causal_conv1d_fn)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
    batch = pack_rows(samples, [range(len(samples))], sum(LENGTHS))
    policy = Policy(copy.deepcopy(model), temperature=0.7, chunk_tokens=16, device_type="cuda")
    assert (policy.one_sample_per_row, policy.shares_prefixes) == (False, False)
    packed = policy(batch, objective=sum_of_logprobs)
    packed.objective.backward()
    one_each = pack_rows(samples, [[index] for index in range(len(samples))], max(LENGTHS))  # training.pack: false
    unpacked = policy(one_each)
    monkeypatch.undo()
    alone = Policy(copy.deepcopy(model), temperature=0.7, chunk_tokens=16)
    rows = alone(one_each, objective=sum_of_logprobs)
    rows.objective.backward()
    torch.testing.assert_close(unpacked.logprobs, rows.logprobs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(packed.logprobs, rows.logprobs, atol=2e-5, rtol=1e-5)
    for ours, theirs in zip(policy.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("sample_layout", "seq_idx", "cu_seq_lens_q")}


def test_samples_that_share_prefixes_are_computed_as_each_alone() -> None:
    """200 random trees of token ids."""
    model = build_family("qwen3", num_hidden_layers=2)
    for seed in range(200):
        samples = tree_samples(seed, count=2 + seed % 9)
        batch = pack_tree(samples)
        assert batch.input_ids.numel() <= sum(len(sample.token_ids) for sample in samples)
        _assert_as_alone(model, samples, batch)


def _assert_as_alone(model: Any, order: Sequence[RolloutSample], batch: MicroBatch) -> None:
    """The samples of `batch`, in their order, have the log-probabilities and gradients of each alone."""
    policy = Policy(copy.deepcopy(model), temperature=0.7, chunk_tokens=16)
    expected = _alone(model, order, temperature=0.7)
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(2))
    packed = policy(batch, objective=lambda logprobs, _, rows, __: (logprobs * weights[rows]).sum())
    torch.testing.assert_close(packed.logprobs, expected.detach(), atol=2e-5, rtol=1e-5)
    packed.objective.backward()
    model.zero_grad()
    (expected * weights).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), model.parameters(), strict=True):
        assert ours.requires_grad == (theirs.requires_grad and ".indexer." not in name)
        if not ours.requires_grad:
            continue
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=1e-3, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_samples_of_a_source_with_a_temperature_are_computed_at_it() -> None:
    policy = Policy(build_family("qwen3-moe"), temperature=0.7, chunk_tokens=16)
    samples = samples_of([5, 6, 4])
    assert pack_rows(samples, [[0, 1, 2]], 15).temperatures is None
    samples[1] = replace(samples[1], temperature=1.3)
    found = policy(pack_rows(samples, [[0, 1, 2]], 15)).logprobs
    alone = [_alone(policy.model, [each], temperature=each.temperature or 0.7) for each in samples]
    torch.testing.assert_close(found, torch.cat(alone).detach(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5-moe"])
def test_routers_get_the_gradient_of_their_load_balancing_loss(family: str) -> None:
    """Of two rows, the second one with padding; with activations that are computed again, too."""
    model, samples = build_family(family), samples_of([30, 17])
    expected = copy.deepcopy(model)
    ids, mask = torch.zeros(2, 30, dtype=torch.int64), torch.zeros(2, 30, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids)
        mask[row, : len(sample.token_ids)] = True
    aux = expected(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss
    (3.0 * aux).backward()
    for mode in ("none", "full"):
        policy = Policy(copy.deepcopy(model), temperature=1.0, chunk_tokens=16, router_aux=3.0)
        recompute_activations(policy.model, mode)
        output = policy(pack_rows(samples, [[0], [1]], 30), objective=lambda logprobs, *_: 0.0 * logprobs.sum())
        torch.testing.assert_close(output.router_aux, aux.detach())
        output.objective.backward()
        for (name, ours), theirs in zip(policy.model.named_parameters(), expected.parameters(), strict=True):
            wanted = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(ours.grad, wanted, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_dropout_of_the_config_is_off(tmp_path: Path) -> None:
    model = build_family("qwen2", attention_dropout=0.5)
    model.save_pretrained(tmp_path)
    policy = load_tiny(tmp_path)
    batch = pack_rows([make_sample(prompt=list(range(20)), completion=list(range(20)))], [[0]], 40)
    with torch.no_grad():
        assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2-window", "gemma2", "qwen3-moe", "mixtral", "qwen3.5-moe", "gpt-oss"]
)
def test_a_batch_without_trained_tokens_gives_every_parameter_a_gradient_of_zeros(family: str) -> None:
    """Ranks reduce the same parameters, whether they have samples or not. Experts that no token went to included."""
    model = build_family(family)
    policy = Policy(model, temperature=1.0, chunk_tokens=16)
    output = policy(pack_rows([], [], 8))
    assert output.logprobs.shape == output.entropy.shape == (0,)
    assert output.objective is not None
    output.objective.backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_model_whose_layers_drop_the_layout_is_refused_before_any_number_is_given() -> None:
    model = build_family("llama")
    policy = Policy(model, temperature=1.0, chunk_tokens=16)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, sample_layout, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ConfigError, match="only 1 of 2 layers of LlamaForCausalLM keep packed samples apart"):
        policy(pack_rows(samples_of([5, 4]), [[0, 1]], 9))


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("deepseek_v4", {}, r"compressed_sparse_attention"),
        ("llama4_text", {"num_hidden_layers": 4, "attention_chunk_size": 64}, r"attention_chunk_size.*to at most 64"),
        ("glm_moe_dsa", {"num_hidden_layers": 4, "index_topk": 64}, r"index_topk.*to at most 64"),
    ],
)
def test_families_that_the_forward_does_not_cover_are_refused(
    tmp_path: Path, model_type: str, settings: dict[str, Any], message: str
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_tiny(tmp_path)
