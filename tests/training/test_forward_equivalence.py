"""However the forward pass is computed, it is the same: recomputed or straight through, compiled or not."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal

import pytest
import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.model import Policy, compile_layers, recompute_activations
from tests.training.tiny_families import (
    LENGTHS,
    ROW_TOKENS,
    ROWS,
    build_family,
    pack_rows,
    pack_tree,
    samples_of,
    tree_samples,
)


def _policy(model: Any) -> Policy:
    return Policy(model, temperature=0.7, chunk_tokens=16)


def _backward(policy: Policy, batch: MicroBatch) -> PolicyOutput:
    policy.zero_grad()
    device = next(policy.parameters()).device
    weights = torch.linspace(-1.0, 1.0, batch.num_trained_tokens, device=device)
    output: PolicyOutput = policy(
        batch.to(device), objective=lambda logprobs, entropy, at, _: (logprobs * weights[at] + entropy).sum()
    )
    torch.autograd.backward(output.objective)
    return output


def _assert_same(ours: Policy, plain: Policy, *, lengths: list[int], rows: list[list[int]], row_tokens: int) -> None:
    _assert_same_batch(ours, plain, pack_rows(samples_of(lengths), rows, row_tokens))


def _assert_same_batch(ours: Policy, plain: Policy, batch: MicroBatch) -> None:
    found, wanted = (_backward(policy, batch) for policy in (ours, plain))
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.entropy, wanted.entropy, atol=1e-4, rtol=1e-5)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-3, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("family", "mode"), [("gemma2", "full"), ("gemma2", "selective"), ("qwen3-moe", "selective")])
def test_recomputed_activations_give_the_same_gradients(family: str, mode: Literal["full", "selective"]) -> None:
    plain = build_family(family)
    ours = copy.deepcopy(plain)
    policies = _policy(ours), _policy(plain)
    recompute_activations(ours, mode)
    _assert_same(*policies, lengths=LENGTHS, rows=ROWS, row_tokens=ROW_TOKENS)
    _assert_same_batch(*policies, pack_tree(tree_samples(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_generated_code_gives_the_same(device: str) -> None:
    """By inductor, as in a run; the tests below trace only, because generating code takes a minute."""
    torch._dynamo.reset()
    plain = build_family("qwen3").to(device)
    ours = copy.deepcopy(plain)
    policies = _policy(ours), _policy(plain)
    compile_layers(ours)
    _assert_same(*policies, lengths=LENGTHS, rows=ROWS, row_tokens=ROW_TOKENS)
    _assert_same_batch(*policies, pack_tree(tree_samples(0)))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_layers_are_compiled_once_for_every_layout(
    mode: Literal["none", "full", "selective"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, tokens and samples change with every micro-batch. One row and several are compiled once each, in parts around the
    attention; nothing after that."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    plain = build_family("qwen3")
    ours = copy.deepcopy(plain)
    policies = _policy(ours), _policy(plain)
    recompute_activations(ours, mode)
    compile_layers(ours)
    _assert_same(*policies, lengths=LENGTHS, rows=ROWS, row_tokens=ROW_TOKENS)
    _assert_same(*policies, lengths=[9, 8], rows=[[0, 1]], row_tokens=20)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs >= 4, "a layer is at least two graphs, for one row and for several"
    _assert_same(*policies, lengths=[31, 5, 7, 20], rows=[[0], [1, 2], [3]], row_tokens=33)
    _assert_same(*policies, lengths=[6, 5, 4], rows=[[0, 1, 2]], row_tokens=15)
    _assert_same(*policies, lengths=[6, 70, 4, 3], rows=[[1, 0], [2, 3]], row_tokens=76)
    for seed in range(3):
        _assert_same_batch(*policies, pack_tree(tree_samples(seed)))
    assert counters["stats"]["unique_graphs"] == graphs
    for policy in policies:  # without a gradient, as a pass before the step is
        with torch.no_grad():
            policy(pack_rows(samples_of([6, 5]), [[0, 1]], 11))
    torch._dynamo.reset()
