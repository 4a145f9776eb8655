"""A phase of a push on all servers at once, and which of them failed.

Calls run in daemon threads, each with a deadline. One that outlives it is left behind: its thread cannot be killed, and does not
keep the process from ending.

In one group a server that dies takes the broadcast from all of them. Those that live say so in an HTTP answer: they are
affected. The one that failed broke its connection, did not answer, refused, or failed for a reason of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from grpo_async.errors import DeadlineError, ServerUnavailableError, WeightPushError

Result = TypeVar("Result")

GRACE_S = 10.0
"""Waited beyond the deadline that a call itself was given, so that its own words about it come first."""
NOT_ARRIVED = "the weights did not arrive"
"""In the error of a worker whose update broke off."""
NOT_FORMED = "the weight group did not form"
"""In the error of a worker that came, but whose group was aborted or lacked a member."""


class PushFailedError(WeightPushError):
    """Servers failed in a phase of a push, or the broadcast to them did.

    Args:
        phase: connect, pause, start, update, finish or resume.
        failures: what each server that itself failed raised; empty when none did and a new attempt may well succeed.
        affected: what those raised that only saw the failure.
        finished: servers that serve the new version already.
    """

    def __init__(
        self,
        what: str,
        *,
        phase: str,
        failures: Mapping[str, Exception],
        affected: Mapping[str, Exception] | None = None,
        finished: tuple[str, ...] = (),
        hint: str = "",
    ) -> None:
        self.phase = phase
        self.failures = dict(failures)
        self.affected = dict(affected or {})
        self.finished = finished
        named = self.failures or self.affected
        causes = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in named.items())
        super().__init__(f"{what} failed{f': {causes}' if causes else ''}{f' ({hint})' if hint else ''}")


def split_failed(errors: Mapping[str, Exception]) -> tuple[dict[str, Exception], dict[str, Exception]]:
    """(servers that failed, those that are only affected). Worked example: a connection that broke, and an answered "the weights
    did not arrive" -> the first failed."""
    failed = {name: error for name, error in errors.items() if not is_affected(error)}
    return failed, {name: error for name, error in errors.items() if name not in failed}


def is_affected(error: Exception) -> bool:
    """Whether a server with this error is alive, and failed only because the broadcast or the group did."""
    answered = isinstance(error, ServerUnavailableError) and error.answered
    return answered and (NOT_ARRIVED in str(error) or NOT_FORMED in str(error))


def is_answer(error: Exception) -> bool:
    """Whether the server answered at all."""
    return not isinstance(error, ServerUnavailableError) or error.answered


def start(function: Callable[[], Result], *, name: str) -> Future[Result]:
    """Run `function` in a daemon thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def start_each(calls: Mapping[str, Callable[[], object]], *, what: str) -> dict[str, Future[object]]:
    """Start every call, by name."""
    return {name: start(call, name=f"{what} {name}") for name, call in calls.items()}


def failures_of(
    futures: Mapping[str, Future[object]], *, what: str, deadline_s: float, setting: str
) -> dict[str, Exception]:
    """Wait for all of them, `deadline_s` seconds altogether; returns what each one that failed raised.

    Args:
        what: for the error of one that did not end: "an answer to WHAT".
        setting: the setting that holds the deadline.
    """
    failed: dict[str, Exception] = {}
    until = time.monotonic() + deadline_s
    for name, future in futures.items():
        try:
            error = future.exception(timeout=max(0.0, until - time.monotonic()))
        except TimeoutError:
            error = DeadlineError(f"an answer of {name} to {what}", waited_s=deadline_s, setting=setting)
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None:
            failed[name] = error
    return failed
