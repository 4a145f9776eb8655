"""Log-probabilities and entropies of chosen tokens, in chunks: full logits (N, vocab) are never held.

Logits live for one chunk only. Where the objective is a sum over tokens, its gradient with respect to the logprobs is known as
soon as the logprobs of a chunk are, and the gradients of states and head are made from the chunk's logits at once: three matrix
products, as with full logits. Else that gradient comes with the backward pass, which computes the logits again. Gradients are
exact either way.

    products, N tokens in C chunks:   logits N, states' gradient N, head's gradient N   [+ logits again, all chunks but the last]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

_VOCAB_BLOCK = 8192  # rows of a 16-bit head whose gradient is computed at a time, before it is added in float32

# logits that softmax, entropy and their gradients are computed of at a time
_CACHED = 2**20  # on a CPU: they stay in its caches
_LAUNCHED = 2**23  # on a GPU, where a kernel that does less is over before the next one is launched


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What a model family does to the head's output z: softcap x tanh(scale x z / softcap), or scale x z without softcap."""

    scale: float = 1.0  # Granite: 1 / logits_scaling, Cohere: logit_scale
    softcap: float | None = None  # Gemma: final_logit_softcapping

    @classmethod
    def from_config(cls, config: Any) -> LogitTransform:
        """From a Hugging Face config (of the text part, where there are several)."""
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(scale=scale, softcap=float(softcap) if softcap else None)


_IDENTITY = LogitTransform()

TokenObjective = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
"""From logprobs (n,) and entropies (n,) of the tokens in a slice: what they add to the objective, (), and its gradients with
respect to both, (n,) each; None: it does not depend on the entropies."""


class TokenLogprobs(NamedTuple):
    """Of N tokens."""

    logprobs: torch.Tensor  # (N,); without gradient where `objective` has it
    entropy: torch.Tensor  # (N,), nats; likewise
    objective: torch.Tensor | None = None
    """() float32, with gradient. None where none was given."""


def chunked_logprobs(
    hidden: torch.Tensor,
    target_ids: torch.Tensor,
    head: nn.Linear,
    *,
    temperature: float,
    chunk_tokens: int,
    transform: LogitTransform = _IDENTITY,
    entropy_gradient: bool = False,
    objective: TokenObjective | None = None,
    in_float32: bool = False,
    loss_scale: float = 1.0,
) -> TokenLogprobs:
    """log softmax(x) at the targets and the entropy of softmax(x), where x = transform(head(hidden)) / temperature.

    The head computes in its own dtype, everything after it in float32 (float64 for a float64 head).

    Args:
        hidden: state before each target. (N, H), N >= 1
        target_ids: (N,)
        head: maps (n, H) to (n, vocab); see `is_plain_linear`.
        chunk_tokens: logits are computed for this many tokens at a time.
        entropy_gradient: whether the entropies carry a gradient.
        objective: a sum over tokens. It is computed, with the gradients of hidden states and head, in the forward pass, and allows
            one backward pass.
        in_float32: a head of 16 bits gives logits of 32: its products, exact in float32, are added up there. Gradients
            are products in its own dtype.
        loss_scale: by which the loss is multiplied before its backward pass; a 16-bit head keeps the gradients of `objective` so
            scaled, or small ones would vanish in float16.
    """
    logprobs, entropy, total = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        head.weight,
        head.bias,
        target_ids,
        temperature,
        transform,
        chunk_tokens,
        entropy_gradient,
        objective,
        in_float32,
        loss_scale,
    )
    if objective is not None:
        return TokenLogprobs(logprobs, entropy, total)
    return TokenLogprobs(logprobs, entropy if entropy_gradient else entropy.detach())


def is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the head does nothing but one matrix product. Subclasses (adapters, FSDP units) and hooks may do more."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return type(head) is nn.Linear and not any(hooks)


def _to_scaled_logits(logits: torch.Tensor, temperature: float, transform: LogitTransform) -> torch.Tensor:
    """transform(logits) / temperature, in the memory of `logits` where the dtype allows. (n, vocab)"""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if transform.softcap is None:
        return x.mul_(transform.scale / temperature)
    return x.mul_(transform.scale / transform.softcap).tanh_().mul_(transform.softcap / temperature)


def _block_rows(x: torch.Tensor) -> int:
    """Rows of x (n, vocab) that are worked on at a time: bounds the temporaries."""
    return max(1, (_CACHED if x.device.type == "cpu" else _LAUNCHED) // x.shape[-1])


def _statistics(x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logprob of the target, entropy in nats, logsumexp; (n,) each. `x` (n, vocab) is only read."""
    size = _block_rows(x)
    scratch = torch.empty_like(x[:size])
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for block, ids in zip(torch.split(x, size), torch.split(targets, size), strict=True):
        largest = block.amax(-1)
        weights = torch.sub(block, largest[:, None], out=scratch[: len(block)]).exp_()
        total = weights.sum(-1)
        normalizer = largest + total.log()
        # H = logsumexp - sum p x: no log of a probability that underflowed to 0
        expected = weights.mul_(block).sum(-1) / total
        rows.append((block.gather(-1, ids[:, None])[:, 0] - normalizer, normalizer - expected, normalizer))
    logprobs, entropy, normalizers = (torch.cat(column) for column in zip(*rows, strict=True))
    return logprobs, entropy, normalizers


def _logit_gradient_(
    x: torch.Tensor,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    logprob_gradient: torch.Tensor,
    entropy_gradient: torch.Tensor | None,
    temperature: float,
    transform: LogitTransform,
) -> torch.Tensor:
    """Overwrites x (n, vocab) with the gradient with respect to the head's output z.

    With p = softmax(x), g of the logprob at target t, e of the entropy H:
        d/dx_v = g ([v = t] - p_v) - e p_v (log p_v + H)
        d/dz_v = d/dx_v  scale / temperature  (1 - (temperature x_v / softcap)^2)     the last factor only with a softcap
    """
    factor = transform.scale / temperature
    columns = [targets, normalizer, entropy, logprob_gradient * factor]
    if entropy_gradient is not None:
        columns.append(entropy_gradient * factor)
    size = _block_rows(x)
    splits = zip(*(torch.split(column, size) for column in columns), strict=True)
    for block, (ids, norm, block_entropy, g, *e) in zip(torch.split(x, size), splits, strict=True):
        derivative = None
        if transform.softcap is not None:
            derivative = (block * (temperature / transform.softcap)).square_().neg_().add_(1.0)
        block.sub_(norm[:, None])  # log p
        if e:
            outer = (block + block_entropy[:, None]).mul_(-e[0][:, None]).sub_(g[:, None])
            block.exp_().mul_(outer)
        else:
            block.exp_().mul_(-g[:, None])
        block.scatter_add_(-1, ids[:, None], g[:, None])
        if derivative is not None:
            block.mul_(derivative)
    return x


class _LinearLogprobs(torch.autograd.Function):
    """A linear head and what follows it.

    With an objective the gradients are made in the forward pass, saved in place of everything else, and only scaled in the backward
    pass. Without one it saves hidden and weight, both held anyway, two numbers a token, and the scaled logits of the last chunk:
    the backward pass begins with that one, and needs the memory of one chunk at any time, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        transform: LogitTransform,
        chunk_tokens: int,
        with_entropy: bool,
        objective: TokenObjective | None,
        in_float32: bool,
        loss_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradients = None if objective is None else _LinearGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunks = []
        x = None
        for rows in _chunks(hidden.shape[0], chunk_tokens):
            ids = targets[rows]
            x = None  # before the next chunk's logits are made: one chunk at a time
            x = _to_scaled_logits(_linear(hidden[rows], weight, bias, in_float32), temperature, transform)
            logprobs, entropy, normalizer = _statistics(x, ids)
            if objective is not None and gradients is not None:
                value, of_logprobs, of_entropy = objective(logprobs, entropy, rows)
                total += value
                of_logprobs = of_logprobs * loss_scale
                of_entropy = None if of_entropy is None else of_entropy * loss_scale
                _logit_gradient_(x, ids, normalizer, entropy, of_logprobs, of_entropy, temperature, transform)
                gradients.add(rows, hidden[rows], x)
            chunks.append((logprobs, entropy, normalizer))
        all_logprobs, all_entropies, normalizers = (torch.cat(column) for column in zip(*chunks, strict=True))
        ctx.has_objective, ctx.gradients, ctx.loss_scale = objective is not None, gradients, loss_scale
        if objective is not None:
            ctx.mark_non_differentiable(all_logprobs, all_entropies)
        else:
            ctx.mark_non_differentiable(total)
            ctx.last_chunk = x  # without a gradient ctx, and so this, ends with the call
            ctx.save_for_backward(hidden, weight, bias, targets, normalizers, all_entropies)
            ctx.settings = (temperature, transform, chunk_tokens, with_entropy, in_float32)
        return all_logprobs, all_entropies, total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        nothing = (None,) * 8
        if ctx.has_objective:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise RuntimeError("an objective that is computed in chunks has only one backward pass")
            return *gradients.result(upstream[2] / ctx.loss_scale), *nothing
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        temperature, transform, chunk_tokens, with_entropy, in_float32 = ctx.settings
        gradients = _LinearGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for rows in reversed(_chunks(hidden.shape[0], chunk_tokens)):
            x, ctx.last_chunk = ctx.last_chunk, None  # a second backward pass recomputes it
            if x is None:
                x = _to_scaled_logits(_linear(hidden[rows], weight, bias, in_float32), temperature, transform)
            of_entropy = upstream[1][rows] if with_entropy else None
            per_token = targets[rows], normalizer[rows], entropy[rows], upstream[0][rows], of_entropy
            gradients.add(rows, hidden[rows], _logit_gradient_(x, *per_token, temperature, transform))
            del x  # before the next chunk's logits are made: one chunk at a time
        return *gradients.result(), *nothing


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """The smaller one first, so that the last, which is held for the backward pass, is a whole one. 5 tokens in chunks of 2: 0 to
    1, 1 to 3, 3 to 5."""
    first = num_tokens % chunk_tokens or chunk_tokens
    stops = range(first, num_tokens + 1, chunk_tokens)
    return [slice(max(0, stop - chunk_tokens), stop) for stop in stops]


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_float32: bool) -> torch.Tensor:
    states = states.to(weight.dtype)
    if not in_float32:
        return nn.functional.linear(states, weight, bias)
    bias = None if bias is None else bias.float()
    with torch.autocast(states.device.type, enabled=False):  # it would round what is to stay in 32 bits
        if states.is_cuda and weight.dtype.itemsize == 2:  # without a copy of the weight in float32
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
            return logits if bias is None else logits + bias
        return nn.functional.linear(states.float(), weight.float(), bias)


class _LinearGradients:
    """Those of states (N, H), weight (vocab, H) and bias (vocab,) of a linear head, as far as they are wanted, added up chunk by
    chunk; of weight and bias in at least float32."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> None:
        self._head, self._head_bias = weight, bias
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if wanted[2] and bias is not None else None

    def add(self, rows: slice, states: torch.Tensor, logit_gradient: torch.Tensor) -> None:
        """Those of one chunk, from its states (n, H) and the gradient of its logits (n, vocab)."""
        states, logit_gradient = states.to(self._head.dtype), logit_gradient.to(self._head.dtype)
        if self._hidden is not None:
            self._hidden[rows] = logit_gradient @ self._head
        if self._bias is not None:
            self._bias += logit_gradient.sum(0, dtype=self._bias.dtype)
        if self._weight is None:
            return
        if states.dtype == self._weight.dtype:
            self._weight.addmm_(logit_gradient.T, states)
            return
        # a sum in 16 bits would lose what small chunks add to it
        for start in range(0, self._weight.shape[0], _VOCAB_BLOCK):
            block = slice(start, start + _VOCAB_BLOCK)
            self._weight[block] += logit_gradient[:, block].T @ states

    def result(
        self, factor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """All three times `factor` (), in the dtypes of what they are of. Once: it works in place."""
        if factor is not None:
            for gradient in (self._hidden, self._weight, self._bias):
                if gradient is not None:
                    gradient.mul_(factor)
        return (
            self._hidden,
            None if self._weight is None else self._weight.to(self._head.dtype),
            None if self._bias is None or self._head_bias is None else self._bias.to(self._head_bias.dtype),
        )
