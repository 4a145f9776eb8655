"""The load-balancing loss of a mixture of experts."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch

from grpo_async.errors import ConfigError
from grpo_async.training.model import Policy, load_balancing_loss, recompute_activations
from tests.training.tiny_families import build_family, pack_rows, padding_only, random_samples


def test_the_worked_example() -> None:
    """f = (1, 0), P = (0.7, 0.3): 2 x (1 x 0.7 + 0 x 0.3) = 1.4. The third token is padding."""
    probabilities = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]])
    loss = load_balancing_loss([probabilities.log()], torch.tensor([[True, True, False]]), experts_per_token=1)
    assert loss.item() == pytest.approx(1.4)


def test_it_equals_the_one_of_transformers_with_its_gradient() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = tuple(torch.randn(2 * 9, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 9) > 0.3
    ours = load_balancing_loss(logits, mask, experts_per_token=2)
    theirs = load_balancing_loss_func(logits, 8, 2, mask.long())
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(one, other)


def _own_loss(model: Any, lengths: list[int]) -> torch.Tensor:
    """transformers' loss of samples as rows of one padded batch."""
    samples = random_samples(lengths)
    ids = torch.zeros(len(samples), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        mask[row, : len(sample.token_ids)] = 1
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    return loss


@pytest.mark.parametrize(
    ("family", "recompute"),
    [("qwen3-moe", "none"), ("qwen3-moe", "full"), ("mixtral", "none"), ("qwen2-moe", "none"), ("olmoe", "none")],
)
def test_the_loss_of_a_packed_batch_is_that_of_its_samples_unpacked(
    family: str, recompute: Literal["none", "full"]
) -> None:
    model = build_family(family)
    own = copy.deepcopy(model)
    recompute_activations(model, recompute)
    policy = Policy(model, temperature=1.0, chunk_tokens=16, with_router_loss=True)
    lengths = [13, 30, 2, 24]
    assert policy(padding_only(4)).router_loss is None
    output = policy(pack_rows(random_samples(lengths), [[0, 1], [2, 3]], 50))
    assert output.router_loss is not None
    expected = _own_loss(own, lengths)
    torch.testing.assert_close(output.router_loss, expected, atol=1e-5, rtol=1e-5)
    output.router_loss.backward()
    expected.backward()
    ours = dict(policy.model.named_parameters())
    compared = [name for name, parameter in own.named_parameters() if parameter.grad is not None]
    assert "model.layers.0.mlp.gate.weight" in compared
    for name in compared:
        wanted = own.get_parameter(name).grad
        found = ours[name].grad
        torch.testing.assert_close(torch.zeros_like(wanted) if found is None else found, wanted, atol=1e-5, rtol=1e-3)


def test_a_model_without_a_router_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.router_aux_loss: LlamaForCausalLM returns no router logits"):
        Policy(build_family("llama"), temperature=1.0, chunk_tokens=16, with_router_loss=True)
