"""JSON answers, errors as statuses, and the reading of query strings.

400 the query or a parameter is wrong (with the position of the mistake) | 404 no such run, group or rollout
503 the store cannot be read, or all threads hang | 504 the deadline has passed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from grpo_async.errors import ConfigError, RunError
from grpo_async.store.query import QueryError
from grpo_async.user_code.threads import ThreadsExhaustedError
from grpo_async.viewer.web.sources import DEADLINE_S

MOST_ROWS = 500
_MOST_CHARACTERS = 4000  # of a query


class NotFoundError(ConfigError):
    """What the address names is not there."""


class Json(Response):
    """Dataclasses, enums and numpy arrays included; NaN and infinities become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        return orjson.dumps(content, default=_storable, option=options)


def _storable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    return repr(value)


def error_answer(error: Exception) -> Json:
    """The answer to a request that failed; every error of ours has a status."""
    match error:
        case QueryError():
            where = {"position": error.position, "length": error.length, "suggestions": list(error.suggestions)}
            return Json({"error": error.problem, **where}, status_code=400)
        case NotFoundError():
            return Json({"error": str(error)}, status_code=404)
        case ConfigError():
            return Json({"error": str(error)}, status_code=400)
        case TimeoutError():
            words = f"no answer within {DEADLINE_S:.0f} s; narrow the query, or ask again when the machine is less busy"
            return Json({"error": words}, status_code=504)
        case RunError() | ThreadsExhaustedError():
            return Json({"error": str(error)}, status_code=503)
    raise error


class Parameters:
    """The query string of a request, checked."""

    def __init__(self, request: Request) -> None:
        self._values = request.query_params

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name, default)
        if len(value) > _MOST_CHARACTERS:
            raise ConfigError(f"{name}: {len(value)} characters; at most {_MOST_CHARACTERS}")
        return value

    def optional(self, name: str) -> str | None:
        return self.text(name) or None

    def flag(self, name: str) -> bool:
        return self._values.get(name, "") in ("1", "true")

    def number(self, name: str, default: int, *, low: int = 0, high: int = 2**53) -> int:
        value = self._values.get(name)
        if value is None or value == "":
            return default
        if not (value.isascii() and value.removeprefix("-").isdecimal() and len(value) <= 17):
            raise ConfigError(f"{name}: '{value[:40]}' is not a whole number")
        if not low <= int(value) <= high:
            raise ConfigError(f"{name}: {value} is not within {low} and {high}")
        return int(value)

    def real(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None or value == "":
            return None
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{name}: '{value[:40]}' is not a number") from None
