"""The tokens of one request, from the engine's output task to the HTTP answer.

Tokens are stamped with the policy version in `add`, at the moment they arrive, never when they are sent: a slow client
delays `chunks`, not the stamping. Knows neither vLLM nor HTTP. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, get_args

from grpo_async.inference.surface import GenerateChunk

Finish = Literal["stop", "length", "abort"]


class TokenStream:
    """Consumes: `add`, `fail`. Waits for: the first token, then the flush interval. Unblocked by: the end, `flush`."""

    def __init__(self, *, flush_interval_s: float) -> None:
        self._flush_interval_s = flush_interval_s
        self._runs: list[GenerateChunk] = []  # each of one version; the lists in it still grow
        self._end: GenerateChunk | None = None
        self._arrived_at: float | None = time.monotonic()  # None: the first token is there
        self._any = asyncio.Event()  # there is something to send
        self._now = asyncio.Event()  # ... that must not wait for the interval

    @property
    def ended(self) -> bool:
        return self._end is not None

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, version: int, finish: str | None) -> None:
        """Take tokens of policy `version`; `finish` ends the stream. After the end nothing is taken.

        A token without a finite logprob cannot be trained on: it ends the stream with an error instead of a guess.
        """
        if self._end is not None:
            return None
        if len(logprobs) != len(token_ids) or not all(math.isfinite(value) for value in logprobs):
            return self.fail(
                f"the engine gave {len(token_ids)} tokens with the logprobs {list(logprobs)}", version=version
            )
        if token_ids:
            if not self._runs or self._runs[-1].policy_version != version:
                first_token_s = None if self._arrived_at is None else time.monotonic() - self._arrived_at
                self._runs.append(GenerateChunk(policy_version=version, first_token_s=first_token_s))
                self._arrived_at = None
            self._runs[-1].token_ids.extend(token_ids)
            self._runs[-1].logprobs.extend(logprobs)
            self._any.set()
        if finish in get_args(Finish):
            self._close(GenerateChunk(policy_version=version, finish_reason=finish))
        elif finish is not None:
            self.fail(f"the engine ended the request with {finish!r}", version=version)
        return None

    def fail(self, error: str, *, version: int) -> None:
        """End the stream with an error line."""
        if self._end is None:
            self._close(GenerateChunk(policy_version=version, error=error))

    def flush(self) -> None:
        """Send what is there without waiting for the interval: the policy version changes."""
        if self._runs:
            self._now.set()

    async def chunks(self) -> AsyncIterator[GenerateChunk]:
        """Lines of the answer, the last with a finish_reason or an error.

        Worked example: tokens 5, 6 (version 3), 7 (version 4), end -> [5, 6] v3; [7] v4 "stop".
        """
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        while True:
            await self._any.wait()
            try:
                async with asyncio.timeout_at(sent_at + self._flush_interval_s):
                    await self._now.wait()
            except TimeoutError:
                pass  # the interval is over
            runs, self._runs = self._runs, []
            self._any.clear()
            self._now.clear()
            end = self._end
            if end is not None:
                if runs and end.error is None:
                    runs[-1] = runs[-1].model_copy(update={"finish_reason": end.finish_reason})
                else:
                    runs.append(end)
            for run in runs:
                yield run
            if end is not None:
                return
            sent_at = loop.time()

    def _close(self, end: GenerateChunk) -> None:
        self._end = end
        self._any.set()
        self._now.set()
