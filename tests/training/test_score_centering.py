"""Score centering: what it is for (nothing is learned from a constant advantage), and the formula of the paper for each weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch, Segment
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import Objective
from tests.support.loss_inputs import loss_section

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


def _total(
    loss: dict[str, Any],
    logits: torch.Tensor,
    sampler: torch.Tensor,
    targets: torch.Tensor,
    *,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    num_top: int | None,
) -> torch.Tensor:
    """The objective of one token in each place, by full logits."""
    count = len(targets)
    logprobs = logits.log_softmax(-1)
    unused = torch.zeros(1, count, dtype=torch.int64)
    top_ids = sampler.topk(num_top or 1).indices
    batch = MicroBatch(
        input_ids=unused,
        position_ids=unused,
        segments=[Segment(count)],
        source_index=unused[0],
        target_ids=targets,
        sample_index=unused[0],
        sampler_logprobs=sampler.gather(1, targets[:, None])[:, 0],
        advantages=advantages,
        weights=weights,
        staleness=torch.ones(count, dtype=torch.int64),
        top_ids=top_ids,
        top_logprobs=sampler.gather(1, top_ids),
    )
    output = PolicyOutput(
        logprobs=logprobs.gather(1, targets[:, None])[:, 0],
        entropy=-(logprobs.exp() * logprobs).sum(-1),
        top_logprobs=logprobs.gather(1, top_ids),
    )
    return Objective(loss_section(**loss, score_centering=num_top))(output, batch).total


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_of_a_constant_advantage_nothing_is_learned_in_expectation_over_the_sampler(
    loss: dict[str, Any], advantage: float
) -> None:
    """Every token of the vocabulary once, weighted by the sampler's probability; exact, since all of them are reported."""
    row, sampler = _policies(1)
    logits, sampler = row.expand(VOCAB, -1), sampler.expand(VOCAB, -1)
    known = {
        "targets": torch.arange(VOCAB),
        "advantages": torch.full((VOCAB,), advantage, dtype=torch.float64),
        "weights": sampler[0].exp(),
    }
    expected = []
    for num_top in (VOCAB, None):
        (gradient,) = torch.autograd.grad(_total(loss, logits, sampler, num_top=num_top, **known), row)
        expected.append(gradient.abs().max().item())
    centered, plain = expected
    assert centered < 1e-12
    assert plain > 0.01


@pytest.mark.parametrize(("name", "num_top"), [("reinforce", 3), ("truncated", 4), ("masked", 2), ("masked", VOCAB)])
def test_it_adds_the_formula_of_the_paper(name: str, num_top: int) -> None:
    """A sum_v sg(m - alpha p) log p, by the probabilities themselves; and the rest of the loss stays what it is."""
    logits, sampler = _policies(40)
    known = {
        "targets": torch.randint(0, VOCAB, (40,)),
        "advantages": torch.randn(40, dtype=torch.float64),
        "weights": torch.rand(40, dtype=torch.float64),
    }
    found, plain = (_total(LOSSES[name], logits, sampler, num_top=top, **known) for top in (num_top, None))
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
