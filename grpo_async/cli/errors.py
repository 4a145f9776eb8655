"""Errors as users see them: only the message on stderr, and an exit code. A traceback means a bug in grpo-async."""

from __future__ import annotations

import errno
import os
from typing import Any

import typer
from typer.core import TyperGroup

from grpo_async.errors import ConfigError, GrpoAsyncError

USER_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
_OF_A_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS)
"""Errors caused by a path that the user named, wherever it is first opened."""
_MAX_SHOWN = 200


class ReportingGroup(TyperGroup):
    """Runs a command and turns the package's own errors into messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GrpoAsyncError as error:
            from grpo_async.utils.safe_text import visible

            typer.echo(visible(str(error)), err=True)  # it may quote what a model or a file says
            raise typer.Exit(USER_ERROR if isinstance(error, ConfigError) else FAILURE) from error
        except OSError as error:
            if error.errno not in _OF_A_PATH or not isinstance(error.filename, str | os.PathLike):
                raise
            typer.echo(f"{str(error.filename)[:_MAX_SHOWN]}: {error.strerror}", err=True)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
