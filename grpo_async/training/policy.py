"""The policy: a Hugging Face causal LM behind one forward that goes from packed ids to log-probabilities, sharded by FSDP2.

The head is applied inside this forward, so that FSDP's root hooks gather its weight for both passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_async.batching.pack import MicroBatch
from grpo_async.errors import ConfigError
from grpo_async.training.attention import AttentionName, SampleLayout, use_attention
from grpo_async.training.logprobs import (
    LogitTransform,
    TokenObjective,
    chunked_logprobs,
    chunked_objective,
    is_plain_linear,
)
from grpo_async.training.router import experts_per_token, load_balancing_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """What one forward says of the N trained tokens of its micro-batch."""

    logprobs: torch.Tensor  # (N,) float32, with gradient unless `objective` has it
    entropy: torch.Tensor  # (N,) float32, nats; with gradient only when asked for, and unless `objective` has it
    objective: torch.Tensor | None = None  # () float32, with gradient: of its tokens, where it was made with them
    router_loss: torch.Tensor | None = None  # () float32, load balancing of a mixture of experts, over the real tokens
    anchor: torch.Tensor | None = None  # () zero that depends on every parameter; only without trained tokens


class Policy(nn.Module):
    """See the module's docstring. `model` is the Hugging Face model; its parameter names are those of its checkpoints."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        chunk_tokens: int,
        attention: AttentionName = "mask",
        with_router_loss: bool = False,
    ) -> None:
        """Replaces the attention of `model`.

        Args:
            chunk_tokens: logits are computed for this many tokens at a time.
            attention: see `attention.choose_attention`.
            with_router_loss: compute the load-balancing loss of a mixture of experts.

        Raises:
            ConfigError: the model's attention cannot be replaced, or it has no states before a head, or no router.
        """
        super().__init__()
        if model.base_model is model:
            raise ConfigError(
                f"model.path: {type(model).__name__} has no part that ends before the head; this family cannot be trained"
            )
        self.model = model
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        self._experts_per_token = experts_per_token(model) if with_router_loss else None
        config = model.config.get_text_config()
        self._transform = LogitTransform.from_config(config)
        self._num_layers = int(config.num_hidden_layers)
        self._attention = attention
        use_attention(model, attention)

    @property
    def obstacle_to_shared_prompts(self) -> str | None:
        """Why every sample needs its prompt in its own place; None: one copy does for all that begin with it. The same on every
        rank."""
        if self._experts_per_token is not None:
            return "the router's loss (model.router_aux_loss) counts the tokens of every sample"
        if self._attention != "mask":
            return (
                f"the attention is {self._attention} (model.attention), which finds keys in a sample's own place only"
            )
        return None

    def forward(
        self,
        batch: MicroBatch,
        *,
        temperature: float | None = None,
        entropy_gradient: bool = False,
        token_objective: TokenObjective | None = None,
    ) -> PolicyOutput:
        """Log-probabilities and entropies of the trained tokens.

        Args:
            temperature: of the distribution; None = that of the run.
            entropy_gradient: whether the loss depends on the entropy.
            token_objective: where the loss is a sum over tokens: a plain linear head makes its gradients with the logprobs.

        Raises:
            ConfigError: the model's layers do not keep packed samples apart.
        """
        hidden, router_logits = self._hidden(batch)
        flat = hidden.reshape(-1, hidden.shape[-1])  # (R x T, H)
        states = flat[batch.source_index]  # (N, H)
        head = self.model.get_output_embeddings()
        if batch.num_trained_tokens == 0:
            # a rank without trained tokens: every parameter, the head's too, still has to get a gradient (of zeros),
            # because FSDP reduces the same parameters on every rank
            nothing = states.sum(-1).float()
            return PolicyOutput(logprobs=nothing, entropy=nothing.detach(), anchor=head(flat[:1]).float().sum() * 0.0)
        temperature = self._temperature if temperature is None else temperature
        objective = None
        if token_objective is not None and is_plain_linear(head):
            logprobs, entropy, objective = chunked_objective(
                states,
                batch.target_ids,
                head,
                token_objective,
                temperature=temperature,
                chunk_tokens=self._chunk_tokens,
                transform=self._transform,
            )
        else:
            logprobs, entropy = chunked_logprobs(
                states,
                batch.target_ids,
                head,
                temperature=temperature,
                chunk_tokens=self._chunk_tokens,
                transform=self._transform,
                entropy_gradient=entropy_gradient,
            )
        router_loss = None
        if self._experts_per_token is not None:
            is_real = batch.segment_ids >= 0
            router_loss = load_balancing_loss(router_logits, is_real, experts_per_token=self._experts_per_token)
        return PolicyOutput(logprobs=logprobs, entropy=entropy, objective=objective, router_loss=router_loss)

    def _hidden(self, batch: MicroBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """States before the head, (R, T, H), and router logits of each layer where they are asked for."""
        segment_ids = batch.segment_ids if batch.host_segment_ids is None else batch.host_segment_ids
        layout = SampleLayout(segment_ids, device=batch.input_ids.device, continuations=batch.continuations)
        extra = {} if self._experts_per_token is None else {"output_router_logits": True}
        output = self.model.base_model(
            input_ids=batch.input_ids,
            attention_mask=layout.no_padding,
            position_ids=batch.position_ids,
            use_cache=False,
            sample_layout=layout,
            **extra,
        )
        if layout.num_uses < self._num_layers:
            raise ConfigError(
                f"model.path: only {layout.num_uses} of {self._num_layers} layers of {type(self.model).__name__} keep packed "
                "samples apart; this family cannot be trained"
            )
        return output.last_hidden_state, getattr(output, "router_logits", None) or ()
