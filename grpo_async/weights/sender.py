"""Sends packed buckets in a thread, so that the next bucket is gathered and packed meanwhile: one bucket ahead at most.

main thread     gather+pack 0 | gather+pack 1 | wait  | gather+pack 2 | ...
thread                        | send 0 -------------- | send 1 ----------- | ...
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import torch

from grpo_async.errors import DeadlineError, WeightPushError
from grpo_async.timeline import NO_TIMELINE, Timeline
from grpo_async.weights.calls import GRACE_S, start


class BucketTransport(Protocol):
    """What a bucket goes through; see transport.WeightTransport."""

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One bucket in one of two buffers that take turns."""

    def send(self, buffer: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class BucketSender:
    """Never raises: a failure is kept in `failure`, and everything after it is left out.

    Args:
        answers: the servers' answers to update_weights; one that comes before the last bucket ends the sending.
        timeout_s: deadline of each bucket.
        timeline: takes a span for each bucket, in the lane "weights/send".
    """

    def __init__(
        self,
        transport: BucketTransport,
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
        self._sending: Future[float] | None = None

    def hand_over(self, buffer: torch.Tensor) -> None:
        """Send `buffer` as soon as the one before is out; returns when the sending of `buffer` has begun."""
        self.wait()
        if self.failure is None:
            self._look_for_early_answers()
        if self.failure is None:
            self._sending = start(lambda: self._send(buffer), name="weights send")

    def wait(self) -> None:
        """Return when nothing is being sent any more."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        until = time.monotonic() + self._timeout_s + GRACE_S
        while not sending.done() and time.monotonic() < until:
            if any(answer.done() and answer.exception() for answer in self._answers.values()):  # waits: it is done
                self._transport.close()  # a server is out: the send cannot end well, and ends now where the carrier can
            watched: list[Future[Any]] = [sending, *(answer for answer in self._answers.values() if not answer.done())]
            wait(watched, timeout=until - time.monotonic(), return_when=FIRST_COMPLETED)
        if not sending.done():
            self.failure = DeadlineError(
                "a bucket of weights to be sent", waited_s=self._timeout_s + GRACE_S, setting="weights.timeout_s"
            )
            return
        error = sending.exception()  # waits: it is done
        if error is None:
            self.send_s += sending.result()  # waits: it is done
            self.progress_at = time.monotonic()
        elif isinstance(error, Exception):
            self.failure = error
        else:
            raise error

    def _send(self, buffer: torch.Tensor) -> float:
        began = time.monotonic()
        with self._timeline.span("send", "weights/send", bytes=buffer.nbytes):
            self._transport.send(buffer)
        return time.monotonic() - began

    def _look_for_early_answers(self) -> None:
        for name, answer in self._answers.items():
            if not answer.done():
                continue
            error = answer.exception()  # waits: it is done
            if error is None:
                error = WeightPushError("it ended the update before all parameters were sent")
                self.early[name] = error
            self.failure = error if isinstance(error, Exception) else WeightPushError(repr(error))
