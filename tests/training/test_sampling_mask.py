"""Training under top_k: the loss is that of a policy that cannot say what the sampler cut off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch, Segment
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import Objective
from tests.support.loss_inputs import loss_section

VOCAB, TOKENS, TOP_K = 11, 30, 5
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon": 0.1, "epsilon_high": 0.2},
    "gspo": {"type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05},
    "cispo": {"type": "cispo", "epsilon_high": 1.1},
    "decoupled": {"proximal": "recomputed", "correction": {"level": "token", "action": "truncate", "cap": 1.2}},
    "log_linear": {"proximal": "log_linear", "off_policy_mask": 0.1},
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_value_and_gradient_are_those_of_logits_without_the_other_tokens(loss: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, requires_grad=True)
    sampled_from = logits.detach() + 0.4 * torch.randn(TOKENS, VOCAB, dtype=torch.float64)
    # of the 5 likeliest, what top_p leaves: 2 to 5 tokens
    order = sampled_from.argsort(-1, descending=True)
    num_kept = torch.randint(2, TOP_K + 1, (TOKENS, 1))
    is_cut = torch.ones(TOKENS, VOCAB, dtype=torch.bool).scatter(1, order, torch.arange(VOCAB) >= num_kept)
    sampler = sampled_from.masked_fill(is_cut, -math.inf).log_softmax(-1)
    targets = torch.multinomial(sampler.exp(), 1)
    top_ids = order[:, :TOP_K]
    unused = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = MicroBatch(
        input_ids=unused,
        position_ids=unused,
        segments=[Segment(TOKENS)],
        source_index=unused[0],
        target_ids=targets[:, 0],
        sample_index=torch.arange(TOKENS) // 6,
        sampler_logprobs=sampler.gather(1, targets)[:, 0],
        advantages=torch.randn(TOKENS // 6, dtype=torch.float64).repeat_interleave(6),
        weights=torch.rand(TOKENS, dtype=torch.float64),
        staleness=torch.arange(TOKENS) % 3,
    )

    def total(logits: torch.Tensor, batch: MicroBatch, *, keeps: bool = False) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        output = PolicyOutput(
            logprobs=logprobs.gather(1, targets)[:, 0],
            entropy=torch.zeros(TOKENS, dtype=torch.float64),
            top_logprobs=logprobs.gather(1, top_ids),
        )
        return Objective(loss_section(**loss), keeps_sampling_mask=keeps)(output, batch).total

    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    masked = MicroBatch(**fields | {"top_ids": top_ids, "top_logprobs": sampler.gather(1, top_ids)})
    found, wanted, uncut = (
        total(logits, masked, keeps=True),
        total(logits.masked_fill(is_cut, -math.inf), batch),
        total(logits, batch),
    )
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (found, wanted, uncut)]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert not torch.allclose(gradients[2], gradients[1], atol=1e-3)
