"""The errors of this package. Their messages are what the model is told: short, one line, and with a way out."""

from __future__ import annotations

from grpo_async.errors import GrpoAsyncError


class ToolError(GrpoAsyncError):
    """One tool call failed. A tool may raise it too; then the model gets the message as it is, without the type's name."""


class ToolTimeoutError(ToolError):
    """A tool did not answer within its time limit."""
