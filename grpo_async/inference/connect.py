"""What every connection to a server has: the run's token, and whose certificates are trusted."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

from grpo_async.errors import ConfigError


def authorization(token: str | None) -> dict[str, str]:
    """The header that carries the bearer token; empty without one."""
    return {"authorization": f"Bearer {token}"} if token else {}


@functools.cache
def trusted_certificates(authority: Path | None) -> ssl.SSLContext:
    """For HTTPS: certificates of the PEM file `authority`, or those of the system. Shared, because loading takes long.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # an SSLError is one too
        raise ConfigError(f"inference.tls: {authority} is not a PEM file with certificates: {error}") from error
