"""Streams of tokens in flight, and the times at which each token came."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.push_parts.server import START_TIMEOUT_S

TOKENS_BETWEEN = 20
"""Of each stream, between two pushes: what its usual gap is taken from."""
_MAX_TOKENS = 1024


@dataclass(slots=True)
class Window:
    """From the beginning of a push until every stream has gone on; seconds of time.perf_counter."""

    began: float
    ended: float = float("inf")


@dataclass(slots=True)
class Tokens:
    """When the tokens of each stream came; written by one thread, read by another."""

    num_streams: int
    timeout_s: float
    arrivals: list[list[float]] = field(init=False)
    failure: BaseException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.arrivals = [[] for _ in range(self.num_streams)]

    def arrived(self, stream: int) -> None:
        """Tokens of this stream came."""
        with self._changed:
            self.arrivals[stream].append(time.perf_counter())
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        """The streams have ended: nobody needs to wait for them."""
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Return when every stream has got so many times tokens from now on. Raises: SystemExit, it does not get them in time."""
        with self._changed:
            wanted = [len(times) + count for times in self.arrivals]
            enough = self._changed.wait_for(
                lambda: self.failure or all(len(a) >= n for a, n in zip(self.arrivals, wanted, strict=True)),
                self.timeout_s,
            )
            if self.failure is not None:
                raise SystemExit(f"the streams ended: {type(self.failure).__name__}: {self.failure}")
            if not enough:
                raise SystemExit(f"the streams did not go on within {self.timeout_s:.0f} s")

    @contextmanager
    def window(self) -> Iterator[Window]:
        """The time in the block."""
        window = Window(time.perf_counter())
        yield window
        window.ended = time.perf_counter()

    def gaps(self, windows: Sequence[Window]) -> tuple[float, list[float]]:
        """Seconds between tokens: the median outside all windows, and of each stream the longest that touches each window."""
        usual, longest = [], []
        for times in self.arrivals:
            gaps = list(pairwise(times))
            for window in windows:
                longest.append(max(b - a for a, b in gaps if b > window.began and a < window.ended))
            usual += [b - a for a, b in gaps if all(b <= w.began or a >= w.ended for w in windows)]
        return statistics.median(usual), longest


@contextmanager
def streaming(url: str, num_streams: int, *, seed: int, timeout_s: float) -> Iterator[Tokens]:
    """`num_streams` completions in flight as long as the block runs; every token is sent when it was sampled."""
    from grpo_async.inference.client import InferenceClient
    from grpo_async.inference.router import FixedServers
    from grpo_async.inference.surface import GenerateRequest

    stop = threading.Event()
    tokens = Tokens(num_streams, timeout_s)

    async def one(client: InferenceClient, number: int) -> None:
        turn = 0
        while not stop.is_set():
            request = GenerateRequest(
                request_id=f"push{number}-{turn}", token_ids=[5 + number % 90, *range(10, 42)], max_tokens=_MAX_TOKENS,
                temperature=1.0, seed=seed + number, ignore_eos=True, flush_interval_s=0.0,
            )  # fmt: skip

            def on_tokens(_count: int, _version: int) -> None:
                tokens.arrived(number)
                if stop.is_set():
                    raise asyncio.CancelledError

            await client.generate(request, on_tokens=on_tokens)
            turn += 1

    async def run() -> None:
        client = InferenceClient(
            FixedServers([url]), token=os.environ["GRPO_ASYNC_TOKEN"], request_timeout_s=timeout_s,
            wait_timeout_s=START_TIMEOUT_S,
        )  # fmt: skip
        async with client:
            await asyncio.gather(*(one(client, number) for number in range(num_streams)), return_exceptions=False)

    def in_thread() -> None:
        try:
            asyncio.run(run())
        except asyncio.CancelledError:  # `stop` was set
            return
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for tokens
            tokens.failed(error)

    thread = threading.Thread(target=in_thread, name="push streams", daemon=True)
    thread.start()
    try:
        yield tokens
    finally:
        stop.set()
        thread.join(timeout=timeout_s)
