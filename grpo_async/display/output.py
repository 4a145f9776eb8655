"""What a command prints about its run: everything, only what matters (`--quiet`), or events for programs (`--json-logs`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from grpo_async.display.display import Display, InThread, JsonView, LineView, LiveView, View, print_line
from grpo_async.display.progress import Progress
from grpo_async.errors import ConfigError, GrpoAsyncError, exit_code_of
from grpo_async.run_directory import RunDir
from grpo_async.utils.console import stdout_console
from grpo_async.utils.resilient_stream import ResilientStream
from grpo_async.utils.safe_text import plain


class OutputMode(StrEnum):
    FULL = "full"
    QUIET = "quiet"
    JSON = "json"

    @classmethod
    def of(cls, *, quiet: bool, json_logs: bool) -> OutputMode:
        """From the options of a command; not both."""
        if quiet and json_logs:
            raise ConfigError("--quiet and --json-logs: choose one; --json-logs has the warnings as events")
        return cls.QUIET if quiet else cls.JSON if json_logs else cls.FULL


class Output:
    """What a command prints, in one of the modes. `console` is stdout; without a reader the run continues (ResilientStream)."""

    def __init__(self, mode: OutputMode = OutputMode.FULL, console: Console | None = None) -> None:
        self.mode = mode
        stdout = cast(TextIO, ResilientStream(sys.stdout, "standard output", self._lose))
        self.console = console or stdout_console(stdout)
        stderr = cast(TextIO, ResilientStream(sys.stderr, "standard error", self._lose))
        self._errors = Console(highlight=False, file=stderr)
        self._events = JsonView(stdout)
        self._progress: Progress | None = None
        self._in_thread: InThread | None = None

    def say(self, text: str) -> None:
        """One or more lines that --quiet leaves out."""
        if self.mode is OutputMode.FULL:
            print_line(self.console, text)
        elif self.mode is OutputMode.JSON:
            self._events.show("note", {"text": text})

    def warn(self, text: str) -> None:
        """Something went wrong and nothing stops because of it."""
        if self.mode is OutputMode.JSON:
            self._events.show("warning", {"text": text})
        else:
            self.console.file.flush()  # before stderr, where both are the same file
            self._errors.print(Text(f"warning: {plain(text)}"), soft_wrap=True)

    def working(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Show on a terminal that something is going on."""
        if self.mode is OutputMode.FULL and self._errors.is_terminal:
            return self._errors.status(text)
        return contextlib.nullcontext()

    def answer(self, text: str) -> None:
        """What the command was asked for, such as the plan of a dry run; --quiet prints it, too."""
        if self.mode is OutputMode.JSON:
            self._events.show("note", {"text": text})
        else:
            self.console.print(Text(plain(text)), soft_wrap=not self.console.is_terminal)

    def start(self, *, run_name: str, directory: Path, pid: int, plan: str) -> None:
        """The run begins."""
        if self.mode is OutputMode.JSON:
            self._events.show("start", {"run": run_name, "directory": str(directory), "pid": pid, "plan": plan})
        else:
            self.say(plan)

    def display(
        self,
        *,
        run_name: str,
        max_steps: int,
        run_dir: RunDir,
        resume_step: int | None = None,
        lines_only: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> Display:
        """For the run: on a terminal that can redraw the dashboard, else lines. `lines_only`: lines everywhere."""
        progress = self._progress = Progress(
            run_dir, run_name=run_name, max_steps=max_steps, resume_step=resume_step, about=about
        )
        console, is_quiet = self.console, self.mode is OutputMode.QUIET
        view: View
        if self.mode is OutputMode.JSON:
            view = self._in_thread = InThread(self._events)
        elif is_quiet or lines_only or not console.is_terminal or console.is_dumb_terminal:
            view = self._in_thread = InThread(LineView(console, progress, quiet=is_quiet))
        else:
            view = LiveView(console, progress)
        return Display(progress, [view])

    def end(
        self,
        *,
        exit_code: int,
        error: str | None,
        summary: Mapping[str, Any] | None,
        show: Callable[[Console], None] | None = None,
    ) -> None:
        """The run is over. `show` prints its summary for people, where there is one."""
        if self._in_thread is not None:
            self._in_thread.drain()
        if self.mode is OutputMode.JSON:
            if error is not None:
                self._events.show("error", {"error": error, "exit_code": exit_code})
            self._events.show("end", {"exit_code": exit_code, "summary": summary})
        elif show is not None:
            show(self.console)
        if error is not None:
            self.console.file.flush()  # before stderr, where both are the same file
            # it may quote a model or a tool
            self._errors.print(Text(f"error: {plain(error)}"), soft_wrap=True)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """With --json-logs an error of ours that is raised inside also becomes an event."""
        try:
            yield
        except GrpoAsyncError as error:
            if self.mode is OutputMode.JSON:
                self._events.show("error", {"error": str(error), "exit_code": exit_code_of(error)})
            raise

    def _lose(self, text: str) -> None:
        """A stream can no longer be written: status.json has the warning."""
        if self._progress is not None:
            self._progress.add("warning", {"text": text})
