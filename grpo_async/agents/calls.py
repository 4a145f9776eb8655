"""The common form of a request of all APIs, and the error with which a request is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of an agent, from any API. `messages` and `tools` are in the form of Chat Completions, with every
    `content` as text."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    forced_tools: Sequence[Mapping[str, Any]] = ()
    """With `required`, those of `tools` one or more of which have to be called."""
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings of the request, by the names of GenerateRequest: {"temperature": 0.2}."""
    seed: int | None = None
    response_format: Mapping[str, Any] | None = None
    ignored: Sequence[str] = ()
    """Further fields of the request that would change what is sampled but are ignored."""


BUDGET_EXHAUSTED = "rollout_budget_exhausted"
"""The `code` of the error for a call after the rollout has used its tokens or turns."""

TOO_LONG = "context_length_exceeded"
"""OpenAI's `code` of the error for messages that no context can hold."""


class ApiError(Exception):
    """A call that is answered with an error in the format of its API; `kind` and `code` are OpenAI's, `param` is the field."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for an invalid or unsupported request."""
    return ApiError(400, "invalid_request_error", message, param=param, code=code)
