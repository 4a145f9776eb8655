"""Blocking calls in daemon threads: one on several servers at once, each with a deadline.

A call that outlives its deadline is left behind: its thread cannot be killed, and does not keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from grpo_async.errors import DeadlineError

Result = TypeVar("Result")

GRACE_S = 10.0
"""Waited beyond the deadline that a call itself was given, so that its own words about it come first."""


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
