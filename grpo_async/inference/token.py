"""The run's bearer token. Processes get it by environment, never by argv, which every user of a machine can see; other machines
read it from the run's file `token`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable

from grpo_async.errors import ConfigError
from grpo_async.utils.network import is_loopback

TOKEN_VARIABLE = "GRPO_ASYNC_TOKEN"


def token_from_environment() -> str | None:
    """The token, or None if none is set."""
    return os.environ.get(TOKEN_VARIABLE) or None


def has_bearer(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Whether exactly one header of an ASGI request is `Authorization: Bearer TOKEN`: with several, a proxy in front may have
    checked another one. Compares in constant time."""
    given = [value for name, value in headers if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {token}".encode())


def require_token(host: str, token: str | None) -> None:
    """Raise ConfigError if other machines can reach `host` and there is no token."""
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"inference.host: {host} is reachable from other machines and ${TOKEN_VARIABLE} is not set, so anyone could "
            f"use the server; set {TOKEN_VARIABLE}, or inference.host: 127.0.0.1"
        )
