"""Log-probabilities and entropies of chosen tokens, in chunks: full logits (N, vocab) are never held.

The exact gradients of states and head are computed in the forward pass, from a chunk's logits and the gradient of the objective by
the logprobs. If the objective is a sum over tokens, that is known as soon as the logprobs of a chunk are; otherwise only when those
of all chunks are, and the logits are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from grpo_async.batching.pack import Rows

_VOCAB_BLOCK = 8192  # rows of a 16-bit head whose gradient is computed at a time, before it is added in float32

# number of logits whose softmax, entropy and gradients are computed at a time
_CACHED = 2**20  # on a CPU: they stay in its caches
_LAUNCHED = 2**23  # on a GPU: a smaller kernel would end before the next one is launched


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """A model family's change of the head's output z: softcap x tanh(scale x z / softcap), or scale x z without softcap."""

    scale: float | torch.Tensor = 1.0  # Granite: 1 / logits_scaling, Cohere: logit_scale, Falcon-H1: lm_head_multiplier
    softcap: float | torch.Tensor | None = None  # Gemma: final_logit_softcapping

    @classmethod
    def from_config(cls, config: Any) -> LogitTransform:
        """Read it from a Hugging Face config (of the text part, if there are several parts)."""
        scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
        for name in ("logit_scale", "lm_head_multiplier"):
            scale *= float(getattr(config, name, None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(scale=scale, softcap=float(softcap) if softcap else None)

    def at(self, temperature: float | torch.Tensor) -> LogitTransform:
        """`temperature`: one, or (n, 1): then scale and softcap are (n, 1), too."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return LogitTransform(scale=self.scale / temperature, softcap=softcap)

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Returns float32 (float64 for a float64 `z`); overwrites a `z` that already has that dtype."""
        x = z if z.dtype == torch.float64 else z.float()
        if self.softcap is None:
            return x.mul_(self.scale)
        return x.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)


_IDENTITY = LogitTransform()

TokenObjective = Callable[[torch.Tensor, torch.Tensor, Rows, torch.Tensor], torch.Tensor]
"""Computes what some tokens add to the objective, (), with gradient, from their logprobs and entropies, (n,) each, and the logprobs
of other ids in their places, (n, K)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """The results for N tokens: those of a head, and of a policy's forward for the trained tokens of a micro-batch."""

    logprobs: torch.Tensor  # (N,) float32
    entropy: torch.Tensor  # (N,) float32, nats
    top_logprobs: torch.Tensor | None = None  # (N, K) float32, of `top_ids`, if an objective was given
    objective: torch.Tensor | None = None
    """() float32, the only one with a gradient; None if no objective was given. Without trained tokens, a zero that depends on
    every parameter."""
    router_aux: torch.Tensor | None = None
    """() this micro-batch's part of the load-balancing loss of routers, if `objective` has it; without gradient."""


def chunked_logprobs(
    hidden: torch.Tensor,
    target_ids: torch.Tensor,
    head: nn.Linear,
    *,
    temperature: float | torch.Tensor,
    chunk_tokens: int,
    transform: LogitTransform = _IDENTITY,
    objective: TokenObjective | None = None,
    top_ids: torch.Tensor | None = None,
    is_per_token: bool = True,
    in_float32: bool = False,
    loss_scale: float = 1.0,
) -> PolicyOutput:
    """log softmax(x) at the targets and the entropy of softmax(x), where x = transform(head(hidden)) / temperature.

    The head computes in its own dtype, everything after it in float32 (float64 for a float64 head).

    Args:
        hidden: state before each target. (N, H), N >= 1
        target_ids: (N,)
        temperature: one, or that of each token, (N,)
        head: maps (n, H) to (n, vocab); see `is_plain_linear`.
        objective: computed, with the gradients of hidden states and head, in the forward pass; it allows one backward pass.
        top_ids: other tokens in the places of the targets, whose logprobs the objective also gets. (N, K)
        is_per_token: the objective is a sum over tokens, called chunk after chunk; otherwise once for all tokens.
        in_float32: the products of a 16-bit head are summed in float32. Gradients are products in its own dtype.
        loss_scale: factor on the loss before its backward pass; a 16-bit head keeps its gradients scaled by it."""
    chunks = _chunks(hidden.shape[0], chunk_tokens)

    def scaled(rows: slice) -> LogitTransform:
        return transform.at(temperature[rows, None] if isinstance(temperature, torch.Tensor) else temperature)

    def logits(rows: slice) -> torch.Tensor:
        return scaled(rows)(_linear(hidden[rows], head.weight, head.bias, in_float32))

    if objective is None:
        with torch.no_grad():
            logprobs, entropy, *_ = _first_pass(logits, target_ids[:, None], chunks)
        return PolicyOutput(logprobs=logprobs[:, 0], entropy=entropy)
    ids = target_ids[:, None] if top_ids is None else torch.cat([target_ids[:, None], top_ids], -1)
    groups = [[rows] for rows in chunks] if is_per_token else [chunks]
    logprobs, entropy, total = _Objective.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, ids, logits, scaled, groups, objective, loss_scale
    )
    return PolicyOutput(logprobs=logprobs[:, 0], entropy=entropy, top_logprobs=logprobs[:, 1:], objective=total)


def is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the head does nothing but one matrix product. Subclasses (adapters, FSDP units) and hooks may do more."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return type(head) is nn.Linear and not any(hooks)


def _block_rows(x: torch.Tensor) -> int:
    """Number of rows of x (n, vocab) that are processed at a time, which bounds the temporaries."""
    return max(1, (_CACHED if x.device.type == "cpu" else _LAUNCHED) // x.shape[-1])


def _statistics(x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logprobs of the targets (n, C), the entropy in nats and logsumexp (n,). `x` (n, vocab) is only read."""
    size = _block_rows(x)
    scratch = torch.empty_like(x[:size])
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for block, ids in zip(torch.split(x, size), torch.split(targets, size), strict=True):
        largest = block.amax(-1)
        weights = torch.sub(block, largest[:, None], out=scratch[: len(block)]).exp_()
        total = weights.sum(-1)
        normalizer = largest + total.log()
        # H = logsumexp - sum p x: avoids the log of a probability that underflowed to 0
        expected = weights.mul_(block).sum(-1) / total
        rows.append((block.gather(-1, ids) - normalizer[:, None], normalizer - expected, normalizer))
    logprobs, entropy, normalizers = (torch.cat(column) for column in zip(*rows, strict=True))
    return logprobs, entropy, normalizers


def _logit_gradient_(
    x: torch.Tensor,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    logprob_gradient: torch.Tensor,
    entropy_gradient: torch.Tensor | None,
    transform: LogitTransform,
) -> None:
    """Overwrites x (n, vocab) with the gradient with respect to the head's output z.

    With p = softmax(x), g_t of the logprob at target t (of C at each position), e of the entropy H:
        d/dx_v = sum_t g_t ([v = t] - p_v) - e p_v (log p_v + H)
        d/dz_v = d/dx_v  scale  (1 - (x_v / softcap)^2)     the last factor only with a softcap
    """
    softcap, scale, size = transform.softcap, transform.scale, _block_rows(x)
    columns = [targets, normalizer, entropy, logprob_gradient * scale]
    if entropy_gradient is not None:
        columns.append(entropy_gradient * (scale[:, 0] if isinstance(scale, torch.Tensor) else scale))
    blocks = torch.split(x, size)
    softcaps = torch.split(softcap, size) if isinstance(softcap, torch.Tensor) else [softcap] * len(blocks)
    splits = zip(*(torch.split(column, size) for column in columns), strict=True)
    for block, cap, (ids, norm, block_entropy, g, *e) in zip(blocks, softcaps, splits, strict=True):
        derivative = None
        if cap is not None:
            derivative = (block / cap).square_().neg_().add_(1.0)
        block.sub_(norm[:, None])  # log p
        if e:
            outer = (block + block_entropy[:, None]).mul_(-e[0][:, None]).sub_(g.sum(-1, keepdim=True))
            block.exp_().mul_(outer)
        else:
            block.exp_().mul_(-g.sum(-1, keepdim=True))
        block.scatter_add_(-1, ids, g)
        if derivative is not None:
            block.mul_(derivative)


def _first_pass(
    logits: Callable[[slice], torch.Tensor], targets: torch.Tensor, chunks: Sequence[slice]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_statistics` of all tokens of neighboring chunks, and the logits of the last chunk."""
    found = []
    x = None
    for rows in chunks:
        x = None  # free it before the next chunk's logits are made
        x = logits(rows)
        found.append(_statistics(x, targets[rows]))
    assert x is not None
    logprobs, entropy, normalizers = (torch.cat(column) for column in zip(*found, strict=True))
    return logprobs, entropy, normalizers, x


def _differentiated(
    objective: TokenObjective, logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The objective's value, and `scale` times its gradients with respect to both; None if it does not depend on the entropies."""
    with torch.enable_grad():
        logprobs, entropy = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        value = objective(logprobs[:, 0], entropy, rows, logprobs[:, 1:])
        of_logprobs, of_entropy = torch.autograd.grad(value * scale, (logprobs, entropy), allow_unused=True)
    return value.detach(), torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs, of_entropy


class _Objective(torch.autograd.Function):
    """The objective of tokens behind a linear head. Gradients are computed in the forward pass, saved instead of all other tensors,
    and only scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        logits: Callable[[slice], torch.Tensor],
        scaled: Callable[[slice], LogitTransform],
        groups: Sequence[Sequence[slice]],
        objective: TokenObjective,
        loss_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`groups`: lists of chunks; the objective is called once for the tokens of each list, in their order."""
        gradients = _LinearGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        found = []
        for chunks in groups:
            x: torch.Tensor | None
            logprobs, entropy, normalizer, x = _first_pass(logits, targets, chunks)
            whole = slice(chunks[0].start, chunks[-1].stop)
            value, of_logprobs, of_entropy = _differentiated(objective, logprobs, entropy, whole, loss_scale)
            total += value
            for rows in reversed(chunks):  # the last one's logits are still there
                x = logits(rows) if x is None else x
                mine = slice(rows.start - whole.start, rows.stop - whole.start)
                e = None if of_entropy is None else of_entropy[mine]
                _logit_gradient_(x, targets[rows], normalizer[mine], entropy[mine], of_logprobs[mine], e, scaled(rows))
                gradients.add(rows, hidden[rows], x)
                x = None  # free it before the next chunk's logits are made
            found.append((logprobs, entropy))
        all_logprobs, all_entropies = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.mark_non_differentiable(all_logprobs, all_entropies)
        ctx.gradients, ctx.loss_scale = gradients, loss_scale
        return all_logprobs, all_entropies, total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("an objective that is computed in chunks has only one backward pass")
        return *gradients.result(upstream[2] / ctx.loss_scale), *(None,) * 6


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """Slices of the tokens; the smaller one comes first, so that the last, whose logits are not computed again, is a full chunk.
    5 tokens in chunks of 2: 0 to 1, 1 to 3, 3 to 5."""
    first = num_tokens % chunk_tokens or chunk_tokens
    stops = range(first, num_tokens + 1, chunk_tokens)
    return [slice(max(0, stop - chunk_tokens), stop) for stop in stops]


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_float32: bool) -> torch.Tensor:
    states = states.to(weight.dtype)
    if not in_float32:
        return nn.functional.linear(states, weight, bias)
    bias = None if bias is None else bias.float()
    with torch.autocast(states.device.type, enabled=False):  # autocast would round values that must stay in 32 bits
        if states.is_cuda and weight.dtype.itemsize == 2:  # without a copy of the weight in float32
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
            return logits if bias is None else logits + bias
        return nn.functional.linear(states.float(), weight.float(), bias)


class _LinearGradients:
    """The gradients of states (N, H), weight (vocab, H) and bias (vocab,) of a linear head, if they are needed, summed chunk by
    chunk; those of weight and bias in at least float32."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> None:
        self._head, self._head_bias = weight, bias
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if wanted[2] and bias is not None else None

    def add(self, rows: slice, states: torch.Tensor, logit_gradient: torch.Tensor) -> None:
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
        # a sum in 16 bits would lose the contributions of small chunks
        for start in range(0, self._weight.shape[0], _VOCAB_BLOCK):
            block = slice(start, start + _VOCAB_BLOCK)
            self._weight[block] += logit_gradient[:, block].T @ states

    def result(self, factor: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of states, head and bias, multiplied by the scalar `factor`, each in the dtype of its tensor. Call it only
        once: the products overwrite the sums."""
        for gradient in (self._hidden, self._weight, self._bias):
            if gradient is not None:
                gradient.mul_(factor)
        return (
            self._hidden,
            None if self._weight is None else self._weight.to(self._head.dtype),
            None if self._bias is None or self._head_bias is None else self._bias.to(self._head_bias.dtype),
        )
