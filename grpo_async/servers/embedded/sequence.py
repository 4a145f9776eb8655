"""One request inside the engine: its tokens, what has not been sent yet, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from grpo_async.inference.surface import GenerateChunk, GenerateRequest

FinishReason = Literal["stop", "length", "abort"]


class RunningSequence:
    """State of one request. `tokens` is prompt + sampled; `sink` gets every chunk, the last has a reason or an error."""

    __slots__ = (
        "arrived_at",
        "filled_by",
        "finish_reason",
        "first_token_s",
        "flush_at",
        "limit",
        "pending_ids",
        "pending_logprobs",
        "prompt_key",
        "prompt_len",
        "request",
        "sink",
        "slot",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self, request: GenerateRequest, *, eos_ids: Sequence[int], sink: Callable[[GenerateChunk], None]
    ) -> None:
        self.request = request
        self.sink = sink
        self.tokens = list(request.token_ids)
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + request.max_tokens
        self.stop_ids = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(eos_ids))
        self.prompt_key = tuple(request.token_ids[:-1])
        self.slot = -1  # -1: waiting or over
        # which weights (SlotEngine counts them) computed the keys and values of the prompt that are in the slot; None: none yet
        self.filled_by: int | None = None
        self.flush_at = 0.0
        self.arrived_at = time.monotonic()
        self.first_token_s: float | None = None
        self.pending_ids: list[int] = []
        self.pending_logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None

    @property
    def cache_key(self) -> tuple[int, ...]:
        """Sequences of equal key that the same weights fill have equal keys and values for tokens[:-1]."""
        return self.prompt_key if len(self.tokens) == self.prompt_len else tuple(self.tokens[:-1])

    def append(self, token: int, logprob: float) -> bool:
        """Take one sampled token; True when it was the last."""
        if len(self.tokens) == self.prompt_len:
            self.first_token_s = time.monotonic() - self.arrived_at
        self.tokens.append(token)
        self.pending_ids.append(token)
        self.pending_logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def take_chunk(self, policy_version: int, error: str | None = None) -> GenerateChunk:
        """What was sampled since the last chunk, all of it by `policy_version`."""
        chunk = GenerateChunk(
            token_ids=self.pending_ids,
            logprobs=self.pending_logprobs,
            policy_version=policy_version,
            finish_reason=self.finish_reason if error is None else None,
            error=error,
            first_token_s=self.first_token_s,
        )
        self.first_token_s = None
        self.pending_ids, self.pending_logprobs = [], []
        return chunk
