"""Draws the next token of every running row with one vectorized pass.

A row's random number is a hash of (seed, position), and it selects the token on the cumulative distribution: a request that
is continued after a lost connection samples the same tokens. Logprobs are log_softmax(logits / temperature), after penalty
and filters; for temperature 0, of the unscaled logits after the penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from grpo_async.inference.api import GenerateRequest
from grpo_async.records import TOP, TopArray

Uint64s = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(state: Uint64s) -> Uint64s:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection on 64 bits that mixes them well. [n] -> [n]"""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def mix_seeds(seeds: Sequence[int]) -> Uint64s:
    """Start states of the rows' generators; seeds are taken modulo 2**64. [n]"""
    wrapped = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    return _mix(wrapped + _GOLDEN)


def uniforms(states: Uint64s, positions: Uint64s) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), with 53 random bits. [n], [n] -> [n]"""
    bits = _mix(states + (positions + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling settings of the running rows. A field is None if no row uses it, so that its work is skipped."""

    states: Uint64s  # [n]
    temperature: torch.Tensor | None  # [n, 1]; 1 in greedy rows
    greedy: torch.Tensor | None  # [n] bool
    sampled: bool  # some row is not greedy
    top_k: torch.Tensor | None  # [n, 1]; vocabulary size where off
    top_p: torch.Tensor | None  # [n, 1] double, like the sums that it is compared with
    min_p: torch.Tensor | None  # [n, 1]
    top_logprobs: int = 0  # the most that a row asks for
    penalty: torch.Tensor | None = None  # [n, 1]; 1 in rows without one
    seen: torch.Tensor | None = None  # [n, vocab] bool, tokens of prompt and output in rows with a penalty

    @classmethod
    def of(
        cls,
        requests: Sequence[GenerateRequest],
        *,
        tokens: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingBatch:
        """Collect the settings of one request per row; `tokens` are its prompt and output. Greedy rows are not scaled or
        filtered."""
        greedy = [request.temperature == 0.0 for request in requests]

        def column(values: Sequence[float], neutral: float, dtype: torch.dtype) -> torch.Tensor | None:
            used = [neutral if is_greedy else value for value, is_greedy in zip(values, greedy, strict=True)]
            if all(value == neutral for value in used):
                return None
            return torch.tensor(used, dtype=dtype, device=device).unsqueeze(1)

        penalties = [request.repetition_penalty for request in requests]
        penalty = seen = None
        if any(each != 1.0 for each in penalties):
            penalty = torch.tensor(penalties, dtype=torch.float32, device=device).unsqueeze(1)
            seen = torch.zeros(len(requests), vocab_size, dtype=torch.bool, device=device)
            for row, (each, known) in enumerate(zip(penalties, tokens, strict=True)):
                if each != 1.0:
                    seen[row, torch.tensor(known, device=device)] = True
        return cls(
            states=mix_seeds([request.seed for request in requests]),
            temperature=column([request.temperature for request in requests], 1.0, torch.float32),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            sampled=not all(greedy),
            top_k=column(
                [min(request.top_k or vocab_size, vocab_size) for request in requests], vocab_size, torch.int64
            ),
            top_p=column([request.top_p for request in requests], 1.0, torch.float64),
            min_p=column([request.min_p for request in requests], 0.0, torch.float32),
            top_logprobs=max(request.top_logprobs for request in requests),
            penalty=penalty,
            seen=seen,
        )

    def note(self, tokens: torch.Tensor) -> None:
        if self.seen is not None:
            self.seen.scatter_(1, tokens.unsqueeze(1), True)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, positions: Uint64s
) -> tuple[torch.Tensor, torch.Tensor, TopArray | None]:
    """Next token and its logprob per row, from logits [n, vocab]; `positions` [n] are those of the tokens within their sequences.
    Logits that are not finite give a logprob that is not finite. And the likeliest tokens, [n, batch.top_logprobs], if a row
    asks for them."""
    logits = logits.float()
    if batch.penalty is not None:
        assert batch.seen is not None
        penalized = torch.where(logits > 0, logits / batch.penalty, logits * batch.penalty)
        logits = torch.where(batch.seen, penalized, logits)
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logits = filter_logits(logits, batch)
    logprobs = logits.log_softmax(-1)
    tokens: torch.Tensor | None = None
    if batch.sampled:
        # In double precision: in single precision, the sum over a large vocabulary would shift the boundaries between tokens.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        numbers = torch.from_numpy(uniforms(batch.states, positions)).to(logits.device).unsqueeze(1)
        # First entry above the number: a token of probability 0 adds nothing to the sum and is never the first.
        tokens = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True).squeeze(1)
        tokens.clamp_(max=logits.shape[1] - 1)  # only reached with NaN
    if batch.greedy is not None:
        best = logits.argmax(-1)
        tokens = best if tokens is None else torch.where(batch.greedy, best, tokens)
    assert tokens is not None
    top = None
    if batch.top_logprobs:
        values, ids = logprobs.topk(batch.top_logprobs)
        top = np.empty(values.shape, TOP)
        top["id"], top["logprob"] = ids.cpu().numpy(), values.cpu().numpy()
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), top


def filter_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Set removed tokens to -inf, in vLLM's order: min_p, then top_k, then top_p over what is left.

    min_p keeps p >= min_p * max(p); top_k the k largest; top_p the fewest most likely tokens with sum >= top_p.
    [n, vocab] -> [n, vocab]
    """
    if batch.min_p is not None:
        floor = logits.max(-1, keepdim=True).values + batch.min_p.log()  # log(0) = -inf: off
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if batch.top_k is None and batch.top_p is None:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    removed = torch.zeros_like(ordered, dtype=torch.bool)
    if batch.top_k is not None:
        removed = torch.arange(logits.shape[1], device=logits.device) >= batch.top_k
        ordered = ordered.masked_fill(removed, -torch.inf)
    if batch.top_p is not None:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        # The sum before the first token is 0 < top_p, so one token always stays. A row without top_p keeps all:
        # rounding can lift the sum before the last tokens to 1.
        removed = removed | ((before >= batch.top_p) & (batch.top_p < 1.0))
    return logits.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), -torch.inf)
