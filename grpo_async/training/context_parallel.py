"""Context parallelism as in DeepSpeed-Ulysses (arXiv 2309.14509): N ranks compute one micro-batch together.

Rank r computes the tokens r, r + N, r + 2N, ... of each row, so that every rank has as many trained tokens. Attention alone
looks at other tokens: before it, an all-to-all exchanges tokens for heads, and each rank attends over all tokens with H / N heads.
The head computes a rank's own tokens; their log-probabilities are gathered, so that losses of whole samples and metrics see all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from grpo_async.batching.pack import MicroBatch, Rows
from grpo_async.training.logprobs import PolicyOutput, TokenObjective


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that compute the same micro-batches, N of them, neighbors by their numbers."""

    group: dist.ProcessGroup
    rank: int  # within the group
    size: int  # N

    @classmethod
    def join(cls, size: int, *, timeout_s: float) -> ContextGroup | None:
        """Make the groups of all ranks, and return that of this one; None if `size` is 1. A collective."""
        if size == 1:
            return None
        starts, timeout = range(0, dist.get_world_size(), size), timedelta(seconds=timeout_s)
        groups = [dist.new_group(list(range(start, start + size)), timeout=timeout) for start in starts]
        number, rank = divmod(dist.get_rank(), size)
        return cls(groups[number], rank, size)

    def own_columns(self, grid: torch.Tensor) -> torch.Tensor:
        """(R, T) -> (R, T / N), this rank's tokens of each row."""
        return grid[:, self.rank :: self.size]

    def own_tokens(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with only the trained tokens that this rank predicts, by their places among its own."""
        own = batch.of_tokens(self._own(batch))
        return replace(own, source_index=own.source_index // self.size)

    def own_objective(self, batch: MicroBatch, objective: TokenObjective, *, is_per_token: bool) -> TokenObjective:
        """The objective as a function of this rank's tokens: what they add, or, if it is no sum over tokens, the whole."""
        own = self._own(batch)
        if not is_per_token and not len(own):  # the objectives of the other ranks wait for it
            self._gathered(batch.advantages.new_empty(0, 2 + num_likeliest(batch)), batch)

        def of(logprobs: torch.Tensor, entropy: torch.Tensor, rows: Rows, top: torch.Tensor) -> torch.Tensor:
            if is_per_token:
                return objective(logprobs, entropy, own[rows], top)
            every = self._gathered(torch.cat([logprobs[:, None], entropy[:, None], top], -1), batch)
            return objective(every[:, 0], every[:, 1], slice(None), every[:, 2:])

        return of

    @torch.no_grad()
    def gathered(self, output: PolicyOutput, batch: MicroBatch) -> PolicyOutput:
        """The output with the values of all N trained tokens, in their order. A collective of the group."""
        top = output.logprobs.new_empty(len(output.logprobs), 0) if output.top_logprobs is None else output.top_logprobs
        every = self._gathered(torch.cat([output.logprobs[:, None], output.entropy[:, None], top], -1), batch)
        top_logprobs = None if output.top_logprobs is None else every[:, 2:]
        return replace(output, logprobs=every[:, 0], entropy=every[:, 1], top_logprobs=top_logprobs)

    def _own(self, batch: MicroBatch) -> torch.Tensor:
        """The trained tokens that this rank predicts."""
        return torch.split(_by_rank(batch), list(batch.tokens_of_ranks))[self.rank]

    def _gathered(self, own: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Values of this rank's tokens -> those of all, of which only its own have a gradient. (own, C) -> (N, C)"""
        counts = batch.tokens_of_ranks
        longest = max(counts)
        padded = F.pad(own.detach(), (0, 0, 0, longest - len(own)))
        every = padded.new_empty(self.size * longest, own.shape[1])
        dist.all_gather_into_tensor(every, padded.contiguous(), group=self.group)
        parts = [part[:count] for part, count in zip(torch.split(every, longest), counts, strict=True)]
        parts[self.rank] = own
        return torch.empty_like(every[: sum(counts)]).index_copy(0, _by_rank(batch), torch.cat(parts))

    def attend(
        self,
        attention: Callable[..., tuple[torch.Tensor, None]],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Call `attention` with all tokens and H / N of the heads. Shapes as of transformers' attention functions: (R, H, T / N, D)
        in, (R, T / N, H, D) out. A collective of the group, in both passes."""
        kv_heads = key.shape[1]
        if kv_heads < self.size:  # each rank gets the one that its queries share
            key, value = (each.repeat_interleave(self.size // kv_heads, dim=1) for each in (key, value))
        if (sinks := arguments.get("s_aux")) is not None:
            arguments["s_aux"] = sinks.chunk(self.size)[self.rank]
        output, _ = attention(module, *map(self._to_heads, (query, key, value)), mask, **arguments)
        return self._to_tokens(output), None

    def _to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(R, H, T / N, D) of this rank's tokens -> (R, H / N, T, D) of its heads"""
        rows, heads, tokens, size = states.shape
        sent = states.reshape(rows, self.size, heads // self.size, tokens, size).transpose(0, 1)
        return self._exchange(sent).permute(1, 2, 3, 0, 4).reshape(rows, heads // self.size, -1, size)

    def _to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """(R, T, H / N, D) of this rank's heads -> (R, T / N, H, D) of its tokens"""
        rows, tokens, heads, size = output.shape
        sent = output.reshape(rows, tokens // self.size, self.size, heads, size).permute(2, 0, 1, 3, 4)
        return self._exchange(sent).permute(1, 2, 0, 3, 4).reshape(rows, tokens // self.size, -1, size)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        received: torch.Tensor = _AllToAll.apply(sent, self.group)  # type: ignore[no-untyped-call]
        return received


class _AllToAll(torch.autograd.Function):
    """The r-th of N parts goes to rank r; gradients go back in the same way. (N, ...)"""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.forward(ctx, upstream[0], ctx.group), None


def _by_rank(batch: MicroBatch) -> torch.Tensor:
    assert batch.by_rank is not None  # it was `divided`
    return batch.by_rank


def num_likeliest(batch: MicroBatch) -> int:
    """K, the number of other tokens in each place that the objective gets the log-probabilities of."""
    return 0 if batch.top_ids is None else batch.top_ids.shape[1]
