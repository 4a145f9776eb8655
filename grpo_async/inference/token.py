"""The run's bearer token. It travels by environment only: argv is visible to every user of a machine."""

from __future__ import annotations

import os

TOKEN_VARIABLE = "GRPO_ASYNC_TOKEN"


def token_from_environment() -> str | None:
    """The token, or None where none is set."""
    return os.environ.get(TOKEN_VARIABLE) or None
