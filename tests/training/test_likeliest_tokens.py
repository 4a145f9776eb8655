"""What the sampler's likeliest tokens are for. Score centering: nothing is learned from a constant advantage, and the formula of
the paper for each weight. The sampling mask of top_k."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import Objective
from tests.support.loss_inputs import loss_section, token_batch

VOCAB, LOW, CAP = 9, 0.7, 1.3
PLAIN = {"proximal": "recomputed"}
TRUNCATED, MASKED = (
    {**PLAIN, "correction": {"level": "token", "action": action, "cap": CAP, "floor": LOW}}
    for action in ("truncate", "mask")
)
LOSSES: dict[str, dict[str, Any]] = {
    "reinforce": PLAIN,
    "truncated": TRUNCATED,
    "masked": MASKED,
    "dapo": {"epsilon": 0.1, "epsilon_high": 0.2, "delta": 1.4},
    "log_linear": {"epsilon": 0.02, "epsilon_high": 0.03, **TRUNCATED, "proximal": "log_linear"},
    "cispo": {"type": "cispo", "epsilon_high": 1.1},
    "dppo": {"type": "dppo", "epsilon": 0.02},
    "dppo_kl": {"type": "dppo", "divergence": "kl", "epsilon": 0.001},
    "sapo": {"type": "sapo"},
}


def _policies(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy, and log-probabilities of a sampler near it. (rows, VOCAB) each"""
    torch.manual_seed(3)
    logits = torch.randn(rows, VOCAB, dtype=torch.float64, requires_grad=True)
    return logits, (logits.detach() + 0.4 * torch.randn(rows, VOCAB, dtype=torch.float64)).log_softmax(-1)


def _batch(sampler: torch.Tensor, targets: torch.Tensor, *, num_top: int, **more: torch.Tensor) -> MicroBatch:
    """One token in each place, and what the sampler says of its likeliest ones."""
    top_ids = sampler.topk(num_top).indices
    more |= {"target_ids": targets, "top_ids": top_ids, "top_logprobs": sampler.gather(1, top_ids)}
    return token_batch(sampler.gather(1, targets[:, None])[:, 0], **more)


def _total(loss: dict[str, Any], logits: torch.Tensor, batch: MicroBatch, **settings: Any) -> torch.Tensor:
    """The objective by full logits."""
    logprobs = logits.log_softmax(-1)
    assert batch.top_ids is not None
    output = PolicyOutput(
        logprobs=logprobs.gather(1, batch.target_ids[:, None])[:, 0],
        entropy=torch.zeros(len(logits), dtype=torch.float64),
        top_logprobs=logprobs.gather(1, batch.top_ids),
    )
    return Objective(loss_section(**loss), **settings)(output, batch).total


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_of_a_constant_advantage_nothing_is_learned_in_expectation_over_the_sampler(
    loss: dict[str, Any], advantage: float
) -> None:
    """Every token of the vocabulary once, weighted by the sampler's probability; exact, since all of them are reported."""
    row, sampler = _policies(1)
    logits, sampler = row.expand(VOCAB, -1), sampler.expand(VOCAB, -1)
    known = {"advantages": torch.full((VOCAB,), advantage, dtype=torch.float64), "weights": sampler[0].exp()}
    batch = _batch(sampler, torch.arange(VOCAB), num_top=VOCAB, **known)
    expected = []
    for num_top in (VOCAB, None):
        (gradient,) = torch.autograd.grad(_total({**loss, "score_centering": num_top}, logits, batch), row)
        expected.append(gradient.abs().max().item())
    centered, plain = expected
    assert centered < 1e-12
    assert plain > 0.01


@pytest.mark.parametrize(("name", "num_top"), [("reinforce", 3), ("truncated", 4), ("masked", 2), ("masked", VOCAB)])
def test_it_adds_the_formula_of_the_paper(name: str, num_top: int) -> None:
    """A sum_v sg(m - alpha p) log p, by the probabilities themselves; and the rest of the loss stays what it is."""
    logits, sampler = _policies(40)
    targets = torch.randint(0, VOCAB, (40,))
    known = {"advantages": torch.randn(40, dtype=torch.float64), "weights": torch.rand(40, dtype=torch.float64)}
    batch = _batch(sampler, targets, num_top=num_top, **known)
    found, plain = (_total({**LOSSES[name], "score_centering": top}, logits, batch) for top in (num_top, None))
    logprobs = logits.log_softmax(-1).gather(1, sampler.topk(num_top).indices)
    p, q = logprobs.detach().exp(), sampler.topk(num_top).values.exp()
    rho = (1.0 - q.sum(-1)).clamp(min=1e-6) / (1.0 - p.sum(-1)).clamp(min=1e-6)
    if name == "reinforce":
        m, alpha = q, rho
    elif name == "truncated":
        m = torch.maximum(torch.minimum(p, CAP * q), LOW * q)
        alpha = torch.maximum(torch.minimum(torch.ones_like(rho), CAP * rho), LOW * rho)
    else:
        m = torch.where((p / q >= LOW) & (p / q <= CAP), p, 0.0)
        alpha = torch.where((1.0 / rho >= LOW) & (1.0 / rho <= CAP), 1.0, 0.0)
        assert 0 < int((m == 0.0).sum()) < m.numel()
    added = (known["weights"] * known["advantages"] * ((m - alpha[:, None] * p) * logprobs).sum(-1)).sum()
    torch.testing.assert_close(found - plain, added)
    wanted = torch.autograd.grad(added, logits, retain_graph=True)[0]
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(torch.autograd.grad(found - plain, logits)[0], wanted)


TOKENS, TOP_K = 30, 5
UNDER_TOP_K: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon": 0.1, "epsilon_high": 0.2},
    "gspo": {"type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05},
    "cispo": {"type": "cispo", "epsilon_high": 1.1},
    "decoupled": {"proximal": "recomputed", "correction": {"level": "token", "action": "truncate", "cap": 1.2}},
    "log_linear": {"proximal": "log_linear", "off_policy_mask": 0.1},
}


@pytest.mark.parametrize("loss", UNDER_TOP_K.values(), ids=UNDER_TOP_K)
def test_under_top_k_value_and_gradient_are_those_of_logits_without_the_other_tokens(loss: dict[str, Any]) -> None:
    """The loss is that of a policy that cannot say what the sampler cut off."""
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, requires_grad=True)
    sampled_from = logits.detach() + 0.4 * torch.randn(TOKENS, VOCAB, dtype=torch.float64)
    # of the 5 likeliest, what top_p leaves: 2 to 5 tokens
    order = sampled_from.argsort(-1, descending=True)
    num_kept = torch.randint(2, TOP_K + 1, (TOKENS, 1))
    is_cut = torch.ones(TOKENS, VOCAB, dtype=torch.bool).scatter(1, order, torch.arange(VOCAB) >= num_kept)
    sampler = sampled_from.masked_fill(is_cut, -math.inf).log_softmax(-1)
    batch = _batch(
        sampler,
        torch.multinomial(sampler.exp(), 1)[:, 0],
        num_top=TOP_K,
        advantages=torch.randn(TOKENS // 6, dtype=torch.float64).repeat_interleave(6),
        weights=torch.rand(TOKENS, dtype=torch.float64),
        sample_index=torch.arange(TOKENS) // 6,
        staleness=torch.arange(TOKENS) % 3,
    )
    found, wanted, uncut = (
        _total(loss, logits, batch, keeps_sampling_mask=True),
        _total(loss, logits.masked_fill(is_cut, -math.inf), batch),
        _total(loss, logits, batch),
    )
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (found, wanted, uncut)]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert not torch.allclose(gradients[2], gradients[1], atol=1e-3)
