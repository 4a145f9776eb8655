"""The gradients of a linear head's states, weight and bias, added up chunk by chunk."""

from __future__ import annotations

import torch

_VOCAB_BLOCK = 8192  # rows of a 16-bit head whose gradient is computed at a time, before it is added in float32


class LinearGradients:
    """Those of states (N, H), weight (vocab, H) and bias (vocab,) of a linear head, as far as they are wanted, chunk by chunk."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self._weight, self._bias = weight, bias
        wants_hidden, self._wants_weight, wants_bias = wanted
        self._hidden = torch.empty_like(hidden) if wants_hidden else None
        is_head_wanted = self._wants_weight or wants_bias
        self._head = _HeadGradient(weight, bias if wants_bias else None) if is_head_wanted else None

    def add(self, rows: slice, states: torch.Tensor, logit_gradient: torch.Tensor) -> None:
        """Those of one chunk, from its states (n, H) and the gradient of its logits (n, vocab), both in the weight's dtype."""
        if self._hidden is not None:
            self._hidden[rows] = logit_gradient @ self._weight
        if self._head is not None:
            self._head.add(logit_gradient, states)

    def result(
        self, factor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """All three times `factor` (), in the dtypes of what they are of. Once: it works in place."""
        head_weight = self._head.weight if self._head is not None and self._wants_weight else None
        head_bias = self._head.bias if self._head is not None else None
        if factor is not None:
            for gradient in (self._hidden, head_weight, head_bias):
                if gradient is not None:
                    gradient.mul_(factor)
        return (
            self._hidden,
            None if head_weight is None else head_weight.to(self._weight.dtype),
            None if head_bias is None or self._bias is None else head_bias.to(self._bias.dtype),
        )


class _HeadGradient:
    """Sum over chunks of the gradients of weight (vocab, H) and bias (vocab,), in at least float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        self.bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)

    def add(self, logit_gradient: torch.Tensor, states: torch.Tensor) -> None:
        """Adds those of one chunk: (n, vocab) and (n, H)."""
        if self.bias is not None:
            self.bias += logit_gradient.sum(0, dtype=self.bias.dtype)
        if states.dtype == self.weight.dtype:
            self.weight.addmm_(logit_gradient.T, states)
            return
        # a sum in 16 bits would lose what small chunks add to it
        for start in range(0, self.weight.shape[0], _VOCAB_BLOCK):
            block = slice(start, start + _VOCAB_BLOCK)
            self.weight[block] += logit_gradient[:, block].T @ states
