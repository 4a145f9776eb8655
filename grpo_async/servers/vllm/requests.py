"""One request of the vLLM server: its entry into the engine, and its tokens on their way to the HTTP answer.

vLLM keeps requests that it has not started in a queue. When the weights change there, such a request may start from cached
keys and values that the old weights made, since it was salted when it entered. So it is taken out and enters again, and
nobody outside notices.

Knows neither vLLM nor HTTP. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_async.inference.api import GenerateChunk
from grpo_async.records import FinishReason

if TYPE_CHECKING:
    from grpo_async.servers.vllm.compat import Abort, EngineOutput

_ENTRY_TIMEOUT_S = 30.0  # an entry only sends to the engine core


class EngineRequest:
    """One request, from its entry into the engine to its end.

    Args:
        submit: puts it into the engine; the callback it gets is called for every output, in order.
        deliver: gets the outputs of the newest entry only, or the exception that ended it.
        on_end: called once, when the engine has ended it.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[Any], None]], Awaitable[Abort]],
        deliver: Callable[[Any], None],
        *,
        on_end: Callable[[EngineRequest], None],
    ) -> None:
        self._submit, self._deliver, self._on_end = submit, deliver, on_end
        self._entry = 0  # number of the newest; what an older one still says is ignored
        self._entered = asyncio.Event()
        self._abort: Abort | None = None  # set: it is or was in the engine
        self._has_left = self._has_tokens = self._has_ended = False

    async def enter(self) -> None:
        """Put it into the engine. Raises what `submit` raises."""
        self._entry += 1
        entry = self._entry
        self._entered.clear()
        try:
            self._abort = await self._submit(lambda output: self._receive(entry, output))
        finally:
            self._entered.set()
        if self._has_left:  # while it was entering
            await self._abort()

    async def enter_again(self) -> None:
        """Take it out and add it again, if the engine has not begun to answer.

        Raises:
            TimeoutError: its first entry does not end.
        """
        async with asyncio.timeout(_ENTRY_TIMEOUT_S):
            await self._entered.wait()
        if self._has_tokens or self._has_ended or self._has_left or self._abort is None:
            return
        self._entry += 1  # the end that the abort brings is not this request's
        await self._abort()
        try:
            await self.enter()
        except Exception as error:  # noqa: BLE001 - whatever the engine raises belongs to this request's client
            self._receive(self._entry, error)

    async def leave(self) -> None:
        """Nobody wants it anymore."""
        self._has_left = True
        if self._abort is not None and not self._has_ended:
            await self._abort()

    def _receive(self, entry: int, output: EngineOutput | Exception) -> None:
        if entry != self._entry or self._has_ended:
            return
        if isinstance(output, Exception):
            self._has_ended = True
        else:
            self._has_ended = output.finish_reason is not None
            self._has_tokens |= bool(output.token_ids)
        self._deliver(output)
        if self._has_ended:
            self._on_end(self)


class TokenStream:
    """The tokens of one request, stamped with the policy version in `add`, at the moment they arrive: a slow client delays
    `next_chunk`, not the stamping."""

    def __init__(self, *, flush_interval_s: float) -> None:
        self._flush_interval_s = flush_interval_s
        self._runs: list[GenerateChunk] = []  # each of one version; the lists in it still grow
        self._end: GenerateChunk | None = None
        self._arrived_at: float | None = time.monotonic()  # None: the first token is there
        self._any = asyncio.Event()  # there is something to send
        self._now = asyncio.Event()  # ... that must not wait for the interval
        self._ready: deque[GenerateChunk] = deque()
        self._sent_at = time.monotonic()

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        version: int,
        finish: str | None,
        stop_reason: str | None = None,
    ) -> None:
        """Add tokens of policy `version`; `finish` ends the stream. What comes after the end is ignored.

        A token without a finite logprob cannot be trained on: it ends the stream with an error instead of a guess.
        """
        if self._end is not None:
            return
        if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
            self.fail(f"the engine gave {len(token_ids)} tokens with the logprobs {list(logprobs)}", version=version)
            return
        if token_ids:
            if not self._runs or self._runs[-1].policy_version != version:
                first_token_s = None if self._arrived_at is None else time.monotonic() - self._arrived_at
                self._runs.append(GenerateChunk(policy_version=version, first_token_s=first_token_s))
                self._arrived_at = None
            self._runs[-1].token_ids.extend(token_ids)
            self._runs[-1].logprobs.extend(logprobs)
            self._any.set()
        if finish in set(FinishReason):
            reason = FinishReason(finish)
            self._close(GenerateChunk(policy_version=version, finish_reason=reason, stop_reason=stop_reason))
        elif finish is not None:
            self.fail(f"the engine ended the request with {finish!r}", version=version)

    def fail(self, error: str, *, version: int) -> None:
        """End the stream with an error line."""
        if self._end is None:
            self._close(GenerateChunk(policy_version=version, error=error))

    def flush(self) -> None:
        """Send what is there without waiting for the interval: the policy version changes."""
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
            if self._end is not None:
                if self._ready and self._end.error is None:
                    end = {"finish_reason": self._end.finish_reason, "stop_reason": self._end.stop_reason}
                    ended = self._ready.pop().model_copy(update=end)
                    self._ready.append(ended)
                else:
                    self._ready.append(self._end)
        return self._ready.popleft()

    def _close(self, end: GenerateChunk) -> None:
        self._end = end
        self._any.set()
        self._now.set()
