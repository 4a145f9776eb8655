"""The policy: a Hugging Face causal LM behind one forward that goes from packed ids to log-probabilities, sharded by FSDP2.

The head is applied inside this forward, so that FSDP's root hooks gather its weight for both passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_async.batching.pack import MicroBatch
from grpo_async.training.logprobs import chunked_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """What one forward says of the N trained tokens of its micro-batch."""

    logprobs: torch.Tensor  # (N,) float32, with gradient
    entropy: torch.Tensor  # (N,) float32, nats; with gradient only when asked for
    router_loss: torch.Tensor | None = (
        None  # () load balancing of a mixture of experts, over the real tokens
    )
    anchor: torch.Tensor | None = None  # () zero that depends on every parameter; only without trained tokens


class Policy(nn.Module):
    """See the module's docstring. `model` is the Hugging Face model; its parameter names are those of its checkpoints."""

    def __init__(self, model: Any, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def forward(
        self, batch: MicroBatch, *, temperature: float | None = None, entropy_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probabilities and entropies of the trained tokens.

        Args:
            temperature: of the distribution; None = that of the run.
            entropy_gradient: whether the loss depends on the entropy.
        """
        hidden = self.model.base_model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask(),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state  # (R, T, H)
        flat = hidden.reshape(-1, hidden.shape[-1])  # (R x T, H)
        states = flat[batch.source_index]  # (N, H)
        head = self.model.get_output_embeddings()
        if batch.num_trained_tokens == 0:
            # a rank without trained tokens: every parameter, the head's too, still has to get a gradient (of zeros),
            # because FSDP reduces the same parameters on every rank
            nothing = states.sum(-1).float()
            return PolicyOutput(logprobs=nothing, entropy=nothing.detach(), anchor=head(flat[:1]).float().sum() * 0.0)
        logprobs, entropy = chunked_logprobs(
            states,
            batch.target_ids,
            head,
            temperature=self._temperature if temperature is None else temperature,
            chunk_tokens=self._chunk_tokens,
        )
        return PolicyOutput(logprobs=logprobs, entropy=entropy)
