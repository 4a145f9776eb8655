"""The tokens of one request of the vLLM server on their way to the HTTP answer. Knows neither vLLM nor HTTP; used from one event
loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence

from grpo_async.inference.api import GenerateChunk
from grpo_async.records import FinishReason


class TokenStream:
    """Tokens are stamped with the policy version in `add`, at the moment they arrive: a slow client delays
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
