"""Who failed when a phase of a push failed: the servers themselves, or only what they saw of another's failure. Pure.

In one group a server that dies takes the broadcast from all of them. Those that live say so in an HTTP answer; the one to blame
broke its connection, did not answer, refused, or failed for a reason of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_async.errors import ServerUnavailableError, WeightPushError

NOT_ARRIVED = "the weights did not arrive"
"""In the error of a worker whose update broke off."""
NOT_FORMED = "the weight group did not form"
"""In the error of a worker that came, but whose group was called off or lacked a member."""


class PushFailedError(WeightPushError):
    """Servers failed in a phase of a push, or the broadcast to them did.

    Args:
        phase: connect, pause, start, update, finish or resume.
        failures: what each server that itself failed raised; empty when none did and a new attempt may well succeed.
        witnesses: what those raised that only saw the failure.
        finished: servers that serve the new version already.
    """

    def __init__(
        self,
        what: str,
        *,
        phase: str,
        failures: Mapping[str, Exception],
        witnesses: Mapping[str, Exception] | None = None,
        finished: tuple[str, ...] = (),
        hint: str = "",
    ) -> None:
        self.phase = phase
        self.failures = dict(failures)
        self.witnesses = dict(witnesses or {})
        self.finished = finished
        named = self.failures or self.witnesses
        causes = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in named.items())
        super().__init__(f"{what} failed{f': {causes}' if causes else ''}{f' ({hint})' if hint else ''}")


def split_blame(errors: Mapping[str, Exception]) -> tuple[dict[str, Exception], dict[str, Exception]]:
    """(servers that failed, those that only saw it). Worked example: a connection that broke, and an answered "the weights did
    not arrive" -> the first is to blame."""
    to_blame = {name: error for name, error in errors.items() if not is_witness(error)}
    return to_blame, {name: error for name, error in errors.items() if name not in to_blame}


def is_witness(error: Exception) -> bool:
    """Whether a server with this error is alive, and failed only because the broadcast or the group did."""
    answered = isinstance(error, ServerUnavailableError) and error.answered
    return answered and (NOT_ARRIVED in str(error) or NOT_FORMED in str(error))


def is_answer(error: Exception) -> bool:
    """Whether the server answered at all."""
    return not isinstance(error, ServerUnavailableError) or error.answered
