"""The errors that this package raises on purpose. One that belongs to a single module derives from these and is defined there.

    GrpoAsyncError
    |- ConfigError               the user's input is wrong; nothing was started  -> exit 2
    |- RunError                  a run cannot continue                         -> exit 1
    |  |- DeadlineError          a wait outlived its deadline
    |  |- NothingToLearnError    many groups in a row had nothing to learn from
    |  |- FatalRolloutError      every rollout would fail the same way (also a ValueError, as in TRL)
    |  |- WeightPushError        new weights did not reach the server
    |  `- CheckpointError        a checkpoint cannot be written or read
    `- InferenceError            one request to an inference server failed
       |- RequestRejectedError   4xx: the request is wrong, retrying cannot help
       |- ServerUnavailableError connection errors and >= 500, after the last retry
       `- BadResponseError       the server answered with something unusable

A message says what happened, with which value, and what to do.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class GrpoAsyncError(Exception):
    """Base class of every error raised on purpose; the command line prints it without a traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without `__init__`, whose arguments differ: an error comes out of a child process as it was raised."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(GrpoAsyncError):
    """The configuration, or a file or callable that it names, is wrong. Nothing was started."""


class Problems(list[str]):
    """What is wrong with a configuration, a line each: checks go on after the first problem, and one error has all of them."""

    @contextmanager
    def collecting(self, prefix: str = "") -> Iterator[None]:
        """Add the message of an error of this package that is raised inside, after `prefix`."""
        try:
            yield
        except GrpoAsyncError as error:
            self.append(f"{prefix}{error}")

    def raise_if_any(self) -> None:
        if self:
            raise ConfigError("\n".join(self))


class RunError(GrpoAsyncError):
    """A run cannot continue; the message names the cause."""


class DeadlineError(RunError):
    """A wait for `what` ("samples of step 12") outlived the deadline that `setting` holds. `hint`: the usual cause."""

    def __init__(self, what: str, *, waited_s: float, setting: str, hint: str = "") -> None:
        self.what, self.waited_s, self.setting = what, waited_s, setting
        tail = f" {hint}" if hint else ""
        super().__init__(f"waited {waited_s:.0f} s for {what}; raise `{setting}` if this is expected.{tail}")


class NothingToLearnError(RunError):
    """Many groups in a row had nothing to learn from: no completion was better than another of its group."""


class FatalRolloutError(RunError, ValueError):
    """A rollout failed in a way that every other would, too, so the run ends: a rollout function broke its contract, say."""


class WeightPushError(RunError):
    """New weights did not reach the inference server."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class InferenceError(GrpoAsyncError):
    """One request to an inference server failed."""


class RequestRejectedError(InferenceError):
    """The server answered 4xx: the request itself is wrong, so it is not retried. `message` is the server's own."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"the inference server refused the request with {status}: {message}")


class ServerUnavailableError(InferenceError):
    """The server could not be reached, or kept answering >= 500, until the last retry. `answered`: the last failure was an answer,
    so it is alive; not a broken connection or silence."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        self.answered = answered
        super().__init__(message)


class BadResponseError(InferenceError):
    """The server answered with something unusable: missing, short or non-finite logprobs, broken JSON."""


USER_ERROR, FAILURE = 2, 1
"""Exit codes of commands; see cli.app."""


def exit_code_of(error: GrpoAsyncError) -> int:
    return USER_ERROR if isinstance(error, ConfigError) else FAILURE


def message_of(error: BaseException) -> str:
    """The text to show of an error: ours are complete sentences, others get their type in front."""
    return str(error) if isinstance(error, GrpoAsyncError) else with_type(error)


def with_type(error: BaseException) -> str:
    """Type and message: KeyError("a") -> `KeyError: 'a'`."""
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - a user's exception may raise in its __str__
        message = f"(its message cannot be read: {type(broken).__name__})"
    return f"{kind}: {message}" if message else kind
