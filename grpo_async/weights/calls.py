"""Calls to all servers at once in a phase of a push, and which servers failed.

Calls run in daemon threads, each with a deadline; one that outlives it is left behind.

In one group a server that dies takes the broadcast from all of them. Those that live say so in an HTTP answer: they are
affected. The one that failed broke its connection, did not answer, refused, or failed for another reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from grpo_async.errors import DeadlineError, ServerUnavailableError, WeightPushError
from grpo_async.inference.control import ServerControl
from grpo_async.utils.concurrency import in_thread

SETTING = "weights.timeout_s"
"""Holds the deadline of each phase."""
GRACE_S = 10.0
"""Waited beyond the deadline that a call itself was given, so that its own message about it comes first."""
NOT_ARRIVED = "the weights did not arrive"
"""In the error of a worker whose update broke off."""
NOT_FORMED = "the weight group did not form"
"""In the error of a worker that came, but whose group was aborted or lacked a member."""


class GroupClosedError(RuntimeError):
    """This end of the weight group was closed, so nothing can be sent or received over it."""


class PushFailedError(WeightPushError):
    """Servers failed in a phase of a push, or the broadcast to them did.

    Args:
        phase: connect, pause, start, transfer, finish or resume.
        failures: what each server that itself failed raised; empty when none did and a new attempt may well succeed.
        affected: what those raised that only saw the failure.
    """

    def __init__(
        self,
        what: str,
        *,
        phase: str,
        failures: Mapping[str, Exception],
        affected: Mapping[str, Exception] | None = None,
        hint: str = "",
    ) -> None:
        self.phase = phase
        self.failures = dict(failures)
        self.affected = dict(affected or {})
        named = self.failures or self.affected
        causes = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in named.items())
        super().__init__(f"{what} failed{f': {causes}' if causes else ''}{f' ({hint})' if hint else ''}")


def split_failed(errors: Mapping[str, Exception]) -> tuple[dict[str, Exception], dict[str, Exception]]:
    """(servers that failed, those that are only affected). Worked example: a connection that broke, and an answered "the weights
    did not arrive" -> the first failed."""
    affected: dict[str, Exception] = {
        name: error
        for name, error in errors.items()
        if isinstance(error, ServerUnavailableError)
        and error.answered
        and (NOT_ARRIVED in str(error) or NOT_FORMED in str(error))
    }
    return {name: error for name, error in errors.items() if name not in affected}, affected


def start_calls(
    servers: Sequence[ServerControl], call: Callable[[ServerControl], object], *, phase: str
) -> dict[str, Future[object]]:
    """Start `call` for every server at once; the ends of the calls, by the names of the servers."""
    return {server.name: in_thread(partial(call, server), name=f"push {phase} {server.name}") for server in servers}


def failed_calls(
    calls: Mapping[str, Future[object]], *, phase: str, deadline_s: float, setting: str = SETTING
) -> dict[str, Exception]:
    """Wait for all calls, `deadline_s` seconds altogether; returns what each one that failed raised."""
    failed: dict[str, Exception] = {}
    until = time.monotonic() + deadline_s
    for name, call in calls.items():
        try:
            error = call.exception(timeout=max(0.0, until - time.monotonic()))
        except TimeoutError:
            error = DeadlineError(f"an answer from {name} to {phase}", waited_s=deadline_s, setting=setting)
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None:
            failed[name] = error
    return failed
