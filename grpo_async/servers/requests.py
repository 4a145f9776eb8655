"""A server's state of its requests, for either engine: token streams, the gate of a pause, the requests in it."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.api import GenerateChunk
from grpo_async.records import FinishReason

NOT_FINITE = "the model's logits are not finite; the pushed weights are broken"


class EngineDeadError(GrpoAsyncError):
    """The engine has stopped answering; the message says why."""


@dataclass(slots=True, kw_only=True)
class EngineOutput:
    """New tokens of one request. A `finish_reason` or an `error` ends the request; `logprobs` may be too short if the engine is
    broken."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[bytes] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class TokenStream:
    """The tokens of one request. `add` stamps them with the policy version at the moment they arrive: a slow client delays
    `next_chunk`, not the stamping."""

    def __init__(self, *, flush_interval_s: float = 0.0, num_prompt_tokens: int = 0) -> None:
        self.num_prompt_tokens, self.num_sampled_tokens = num_prompt_tokens, 0
        self._flush_interval_s = flush_interval_s
        self._runs: list[GenerateChunk] = []  # one per version; their lists still grow
        self._is_over = False
        self._any = asyncio.Event()  # there is something to send
        self._now = asyncio.Event()  # ... that must not wait for the interval
        self._ready: deque[GenerateChunk] = deque()
        self._sent_at = time.monotonic()

    def add(self, output: EngineOutput, *, version: int) -> None:
        """Add tokens of policy `version`. Anything after the end is ignored.

        A token without a finite logprob cannot be trained on: it ends the stream with an error instead of a guess.
        """
        if self._is_over:
            return
        token_ids, logprobs, finish = output.token_ids, output.logprobs, output.finish_reason
        error = output.error
        if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
            token_ids, error = (), f"the engine gave {len(token_ids)} tokens with the logprobs {list(logprobs)}"
        elif finish is not None and finish not in set(FinishReason):
            error = f"the engine ended the request with {finish!r}"
        if token_ids:
            if not self._runs or self._runs[-1].policy_version != version:
                self._runs.append(GenerateChunk(policy_version=version))
            self._runs[-1].token_ids.extend(token_ids)
            self._runs[-1].logprobs.extend(logprobs)
            self._runs[-1].top_logprobs.extend(output.top_logprobs)
            self._any.set()
        if error is not None:
            self._runs.append(GenerateChunk(policy_version=version, error=error))
        elif finish is not None:
            last = self._runs.pop() if self._runs else GenerateChunk(policy_version=version)
            end = {"finish_reason": FinishReason(finish), "stop_reason": output.stop_reason}
            self._runs.append(last.model_copy(update=end))
        if output.is_last or error is not None:
            self._is_over = True
            self._any.set()
            self._now.set()

    def flush(self) -> None:
        """Send the collected tokens without waiting for the interval."""
        if self._runs:
            self._now.set()

    async def next_chunk(self) -> GenerateChunk:
        """The next line of the answer; the last has a finish_reason or an error.

        Worked example: tokens 5, 6 (version 3), 7 (version 4), end -> [5, 6] v3; [7] v4 "stop".
        """
        if not self._ready:
            await self._any.wait()
            try:
                async with asyncio.timeout(max(0.0, self._sent_at + self._flush_interval_s - time.monotonic())):
                    await self._now.wait()
            except TimeoutError:
                pass  # the interval is over
            self._ready.extend(self._runs)
            self._runs = []
            self._any.clear()
            self._now.clear()
            self._sent_at = time.monotonic()
        return self._ready.popleft()


class Gate:
    """Holds requests that arrive from the start of a pause until /resume, so that each enters the engine under the version that
    is then served. It is open, closed, or permanently broken."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._failure: str | None = None

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        if self._failure is None:
            self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def break_down(self, reason: str) -> None:
        """Refuse all requests from now on, including waiting ones."""
        self._failure = reason
        self._opened.set()

    async def wait(self) -> None:
        """Return at a moment when the gate is open; nothing else runs between that moment and the caller's next line."""
        while not self._opened.is_set():
            await self._opened.wait()  # ended by /resume, the end of the engine, or the client's disconnect
        if self._failure is not None:
            raise EngineDeadError(self._failure)


class RequestTracker:
    """Tracks the requests of a server. `is_paused`: the engine is frozen between two tokens."""

    def __init__(self) -> None:
        self.instance_id = secrets.token_hex(8)
        self.gate = Gate()
        self.num_active = 0  # requests that are being answered, including those that wait at the gate
        self.num_generated_tokens = 0
        self._num_computed_tokens = 0  # since the last `take_recomputed`
        self.in_engine: set[TokenStream] = set()  # that it has not ended
        self.is_paused = False
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was in the engine and the engine was not paused."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._busy_since is not None else 0.0)

    def enter(self, stream: TokenStream) -> None:
        self.in_engine.add(stream)
        self._update_busy()

    def receive(self, stream: TokenStream, output: EngineOutput, *, version: int, is_generated: bool = True) -> None:
        """Add the engine's output for a request, generated by the weights of `version`."""
        if is_generated:
            num_new = len(output.token_ids)
            self.num_generated_tokens += num_new
            if num_new and not stream.num_sampled_tokens:
                self._num_computed_tokens += stream.num_prompt_tokens
            self._num_computed_tokens += num_new
            stream.num_sampled_tokens += num_new
        if output.is_last:
            self.leave(stream)
        stream.add(output, version=version)
        if self.is_paused:  # it was on its way
            stream.flush()

    def leave(self, stream: TokenStream) -> bool:
        """The engine has ended the request, or nobody waits for it anymore. Returns False if it had already ended."""
        was_in = stream in self.in_engine
        self.in_engine.discard(stream)
        self._update_busy()
        return was_in

    def take_recomputed(self) -> tuple[int, int]:
        """The tokens that the engine will compute again because it loses its cache, those of the requests in it that have sampled
        some; and those that it computed since the last time. Worked example: prompts of 4 and 6 tokens, 2 and 3 sampled, the
        second request ended -> (6, 15)."""
        num_recomputed = sum(
            each.num_prompt_tokens + each.num_sampled_tokens for each in self.in_engine if each.num_sampled_tokens
        )
        num_computed, self._num_computed_tokens = self._num_computed_tokens, 0
        return num_recomputed, num_computed

    def flush(self) -> None:
        """Send the collected tokens of every request: a client that is lost during a pause has everything sampled before it."""
        for stream in self.in_engine:
            stream.flush()

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._update_busy()

    def _update_busy(self) -> None:
        is_busy = bool(self.in_engine) and not self.is_paused
        if is_busy and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not is_busy and self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None
