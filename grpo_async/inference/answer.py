"""The answer to one generation request, checked line by line: nothing that a server says is believed.

A chunk is right, or it raises BadResponseError with the server and the field, before any of it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from pydantic import ValidationError

from grpo_async.errors import BadResponseError
from grpo_async.inference.api import GenerateChunk, GenerateRequest
from grpo_async.records import TOP, FinishReason
from grpo_async.utils.text import clipped
from grpo_async.utils.validation import problems_of

_LOGPROBS = -104.0, 1e-3
"""Limits of the logprob of a sampled token: e^-104 is 0 in float32, and rounding lifts a probability of 1 by far less."""
_MAX_CHARS = 300


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer, from its first line on. `server`: its name; `vocab_size`: every token id is below it; `oldest_version`: no
    token is older."""

    server: str
    request: GenerateRequest
    vocab_size: int
    oldest_version: int
    num_tokens: int = field(default=0, init=False)
    _has_stopped: bool = field(default=False, init=False)
    _is_over: bool = field(default=False, init=False)

    def read(self, line: bytes, *, newest_version: int) -> GenerateChunk:
        """The next chunk. Raises BadResponseError."""
        try:
            chunk = GenerateChunk.model_validate_json(line, strict=True)
        except ValidationError as error:
            raise self.bad(f"a line is not a chunk: {problems_of(error)}: {line[:200]!r}") from error
        if fault := next(self._faults(chunk, newest_version), None):
            raise self.bad(fault)
        if chunk.token_ids:
            self.num_tokens += len(chunk.token_ids)
            self.oldest_version = chunk.policy_version
            self._has_stopped = chunk.token_ids[-1] in self.request.stop_token_ids
        self._is_over = chunk.finish_reason is not None
        return chunk

    def bad(self, fault: str) -> BadResponseError:
        return BadResponseError(
            f"{self.server} sent an unusable answer to {self.request.request_id}: {clipped(fault, _MAX_CHARS)}"
        )

    def _faults(self, chunk: GenerateChunk, newest_version: int) -> Iterator[str]:
        """What cannot be true, the field first."""
        request, ids, logprobs, version = self.request, chunk.token_ids, chunk.logprobs, chunk.policy_version
        total, finish = self.num_tokens + len(ids), chunk.finish_reason
        if self._is_over:
            yield "finish_reason: the answer goes on after its end"
        if chunk.request_id not in ("", request.request_id):
            yield f"request_id: this is the answer to {chunk.request_id!r}"
        if chunk.offset not in (None, self.num_tokens):
            yield f"offset: tokens from number {chunk.offset} on follow {self.num_tokens}; some are repeated or missing"
        if len(logprobs) != len(ids):
            yield f"logprobs: {len(ids)} tokens with {len(logprobs)} logprobs; every token needs one"
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            yield f"token_ids: {wrong[0]} is outside the vocabulary of {self.vocab_size}"
        if wrong_logprobs := [value for value in logprobs if not _LOGPROBS[0] <= value <= _LOGPROBS[1]]:
            yield f"logprobs: {wrong_logprobs[0]:g} is not the logprob of a token that was sampled"
        if len(chunk.top_logprobs) != (len(ids) if request.top_logprobs else 0) or any(
            len(each) != request.top_logprobs * TOP.itemsize for each in chunk.top_logprobs
        ):
            yield f"top_logprobs: not {request.top_logprobs} for each of {len(ids)} tokens"
        elif chunk.top_logprobs:
            top = np.frombuffer(b"".join(chunk.top_logprobs), TOP)
            if not ((top["id"] >= 0) & (top["id"] < self.vocab_size) & (top["logprob"] <= _LOGPROBS[1])).all():
                yield "top_logprobs: a token outside the vocabulary, or a value that is no logprob"
        if total > request.max_tokens:
            yield f"token_ids: {total} tokens, and max_tokens is {request.max_tokens}"
        if ids and (self._has_stopped or not set(request.stop_token_ids).isdisjoint(ids[:-1])):
            yield "token_ids: more tokens after one that ends the generation"
        if ids and not self.oldest_version <= version <= newest_version:
            yield f"policy_version: {version} is not between {self.oldest_version} and {newest_version}"
        if finish is not None and chunk.error is not None:
            yield f"finish_reason: {finish} and an error at once: {chunk.error}"
        if finish is FinishReason.LENGTH and total < request.max_tokens:
            yield f"finish_reason: length, with {total} of {request.max_tokens} tokens"
        if finish is FinishReason.STOP and total == 0:
            yield "finish_reason: stop, without a token"
        if chunk.stop_reason is not None and (finish is not FinishReason.STOP or chunk.stop_reason not in request.stop):
            yield f"stop_reason: {chunk.stop_reason!r} is none of the stop strings, or nothing stopped"
