"""Sends packed buckets in a thread, so that the next bucket is gathered and packed meanwhile: one bucket ahead at most.

main thread     gather+pack 0 | gather+pack 1 | wait  | gather+pack 2 | ...
thread                        | send 0 -------------- | send 1 ----------- | ...

The thread goes from one bucket to the next by itself: a bucket that is packed waits for nobody but the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any

import torch

from grpo_async.errors import DeadlineError, WeightPushError
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.weights.participants import GRACE_S, start
from grpo_async.weights.transport import WeightTransport


class BucketSender:
    """Raises nothing of the servers or the backend: a failure is kept in `failure`, and everything after it is left out. Ends with
    `wait` or `abandon`.

    Args:
        answers: the servers' answers to update_weights; one that comes before the last bucket ends the sending.
        timeout_s: deadline of each bucket.
        timeline: takes a span for each bucket, in the lane "weights/send".
    """

    def __init__(
        self,
        transport: WeightTransport,
        answers: Mapping[str, Future[object]],
        *,
        timeout_s: float,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._timeline = timeline
        self.failure: Exception | None = None
        self.early: dict[str, Exception] = {}
        """Servers that answered with success before everything was sent."""
        self.send_s = 0.0
        self.progress_at = time.monotonic()
        """When the last bucket was out."""
        self._transport = transport
        self._answers = answers
        self._timeout_s = timeout_s
        self._handed_over: SimpleQueue[tuple[torch.Tensor, Future[None]] | None] = (
            SimpleQueue()
        )  # None: there are no more
        self._thread: Future[None] | None = None
        self._has_closed = False

    @property
    def takes_more(self) -> bool:
        """False once a send has failed or the transport is closed: then nothing is to be packed for it any more."""
        return self.failure is None and not self._has_closed

    def hand_over(self, buffer: torch.Tensor) -> None:
        """Send `buffer` as soon as the one before is out; returns when the sending of `buffer` has begun."""
        if not self.takes_more:
            return
        if self._thread is None:
            self._thread = start(self._run, name="weights send")
        begun: Future[None] = Future()
        self._handed_over.put((buffer, begun))
        self._wait_for(begun)

    def wait(self) -> None:
        """Return when all is sent that was handed over. Nothing can be handed over after it."""
        self.abandon()
        if self._thread is not None and not isinstance(self.failure, DeadlineError):
            self._wait_for(self._thread)

    def abandon(self) -> None:
        """Let the thread end by itself."""
        self._handed_over.put(None)

    def _wait_for(self, event: Future[None]) -> None:
        assert self._thread is not None  # it brings about every event
        until = time.monotonic() + self._timeout_s + GRACE_S
        while not event.done() and not self._thread.done() and time.monotonic() < until:
            if any(answer.done() and answer.exception() for answer in self._answers.values()):
                self._has_closed = True
                self._transport.close()  # a server is out: the send cannot end well, and ends now where the backend can
            watched: list[Future[Any]] = [event, *(answer for answer in self._answers.values() if not answer.done())]
            wait([*watched, self._thread], timeout=until - time.monotonic(), return_when=FIRST_COMPLETED)
        if self._thread.done() and (error := self._thread.exception()) is not None:
            raise error
        if not event.done():
            self.failure = self.failure or DeadlineError(
                "a bucket of weights to be sent", waited_s=self._timeout_s + GRACE_S, setting="weights.timeout_s"
            )

    def _run(self) -> None:
        while (handed_over := self._handed_over.get()) is not None:  # `wait` or `abandon` puts None
            buffer, begun = handed_over
            if self.failure is None:
                self._look_for_early_answers()
            begun.set_result(None)  # behind what may set `failure`: nobody packs for a transport that is closed
            if self.failure is None:
                self._send(buffer)

    def _send(self, buffer: torch.Tensor) -> None:
        began = time.monotonic()
        try:
            with self._timeline.span("send", "weights/send", bytes=buffer.nbytes):
                self._transport.send(buffer)
        except Exception as error:  # noqa: BLE001 - told apart by whoever looks at `failure`
            self.failure = self.failure or error  # the first one: at the deadline this thread is left behind
            return
        self.progress_at = time.monotonic()
        self.send_s += self.progress_at - began

    def _look_for_early_answers(self) -> None:
        for name, answer in self._answers.items():
            if not answer.done():
                continue
            error = answer.exception()
            if error is None:
                error = WeightPushError("it ended the update before all parameters were sent")
                self.early[name] = error
            self.failure = error if isinstance(error, Exception) else WeightPushError(repr(error))
