"""The one error of this package."""

from __future__ import annotations

from grpo_async.errors import GrpoAsyncError


class ChatError(GrpoAsyncError):
    """These messages cannot be turned into token ids; only the rollout they belong to is lost. At start-up the same problem is
    a ConfigError."""
