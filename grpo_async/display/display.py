"""What the user is told of a run while it goes: the dashboard on a terminal, one line per event elsewhere, or only what matters.

All of them take the same calls. No text can move the cursor: some of it quotes models and tools.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.text import Text

from grpo_async.checks.report import Check, print_checks
from grpo_async.display.progress import Progress, evaluation_line, step_line
from grpo_async.findings import Finding, Verdict
from grpo_async.processes.wording import plain


class Display(Protocol):
    """What the supervisor tells the user, as it happens. Open while used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, name: str) -> None:
        """What the trainer does now."""

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step has ended."""

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        """Held-out results; `when` is before, after or "step 20"."""

    def preflight(self, checks: Sequence[Check]) -> None:
        """What the checks before the first step found."""

    def server(self, name: str, trouble: str | None) -> None:
        """What is wrong with a server; None: nothing any more. The supervisor says it in a note, too."""

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> None:
        """State and load of every server, about every other second; see progress.ServerLine."""

    def advice(self, step: int, advice: Finding) -> None:
        """What bounds the run, and what to change."""

    def learning(self, verdict: Verdict) -> None:
        """Whether it learns, by all that is known until now."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def warning(self, text: str) -> None:
        """Something that ought not to be."""


class ProgressDisplay:
    """Keeps `progress` up to date, under `lock`; shows nothing. Base of those that show it."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def on_change(self) -> None:
        """Called after each change of `progress`, without the lock."""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self.lock:
            yield
        self.on_change()

    def phase(self, name: str) -> None:
        with self._changing():
            self.progress.phase = plain(name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        with self._changing():
            self.progress.add_step(step, max_steps, metrics)

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        with self._changing():
            self.progress.evaluations[when] = dict(metrics)

    def preflight(self, checks: Sequence[Check]) -> None:
        pass

    def server(self, name: str, trouble: str | None) -> None:
        with self._changing():
            self.progress.set_server(name, trouble)

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> None:
        with self._changing():
            self.progress.set_servers(servers)

    def advice(self, step: int, advice: Finding) -> None:
        with self._changing():
            self.progress.advice, self.progress.advice_step = advice, step

    def learning(self, verdict: Verdict) -> None:
        with self._changing():
            self.progress.verdict = verdict

    def note(self, text: str) -> None:
        with self._changing():
            self.progress.add_message(text)

    def warning(self, text: str) -> None:
        with self._changing():
            self.progress.add_message(text, is_warning=True)


class LineDisplay(ProgressDisplay):
    """One line per event: for pipes, files, and CI."""

    def __init__(self, console: Console, *, run_name: str, max_steps: int, logs: Path) -> None:
        super().__init__(Progress(max_steps=max_steps))
        self._console = console
        self._run_name = run_name
        self._logs = logs

    def __enter__(self) -> Self:
        self._print(f"logs: {self._logs}")
        return self

    def phase(self, name: str) -> None:
        super().phase(name)
        self._print(name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        super().step(step, max_steps, metrics)
        self._print(step_line(self.progress))

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        super().evaluation(when, metrics)
        self._print(evaluation_line(when, metrics))

    def preflight(self, checks: Sequence[Check]) -> None:
        print_table(self._console, checks)

    def advice(self, step: int, advice: Finding) -> None:
        super().advice(step, advice)
        self._print(f"advice: {advice.text}")

    def learning(self, verdict: Verdict) -> None:
        super().learning(verdict)
        self._print(f"learning: {verdict.text}")

    def note(self, text: str) -> None:
        super().note(text)
        self._print(text)

    def warning(self, text: str) -> None:
        super().warning(text)
        self._print(f"warning: {text}")

    def _print(self, text: str) -> None:
        print_line(self._console, text)


class QuietDisplay(ProgressDisplay):
    """Warnings and failed checks only, a line each."""

    def __init__(self, console: Console) -> None:
        super().__init__(Progress(max_steps=0))
        self._console = console

    def preflight(self, checks: Sequence[Check]) -> None:
        for check in checks:
            if check.status != "pass":
                print_line(self._console, f"preflight: {check.status}: {check.name}: {check.detail}")

    def warning(self, text: str) -> None:
        print_line(self._console, f"warning: {text}")


class Displays:
    """Tells several at once, in order."""

    def __init__(self, displays: Sequence[Display]) -> None:
        self._displays = displays
        self._open: list[Display] = []

    def __enter__(self) -> Self:
        for display in self._displays:
            self._open.append(display.__enter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.pop().__exit__(kind, error, trace)

    def phase(self, name: str) -> None:
        for display in self._displays:
            display.phase(name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        for display in self._displays:
            display.step(step, max_steps, metrics)

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        for display in self._displays:
            display.evaluation(when, metrics)

    def preflight(self, checks: Sequence[Check]) -> None:
        for display in self._displays:
            display.preflight(checks)

    def server(self, name: str, trouble: str | None) -> None:
        for display in self._displays:
            display.server(name, trouble)

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> None:
        for display in self._displays:
            display.servers(servers)

    def advice(self, step: int, advice: Finding) -> None:
        for display in self._displays:
            display.advice(step, advice)

    def learning(self, verdict: Verdict) -> None:
        for display in self._displays:
            display.learning(verdict)

    def note(self, text: str) -> None:
        for display in self._displays:
            display.note(text)

    def warning(self, text: str) -> None:
        for display in self._displays:
            display.warning(text)


def print_table(console: Console, checks: Sequence[Check]) -> None:
    """The checks as a table, as text that no terminal obeys."""
    clean = [replace(check, name=plain(check.name), detail=plain(check.detail)) for check in checks]
    print_checks(console, clean, title="Preflight")
    console.file.flush()


def print_line(console: Console, text: str) -> None:
    """One line, whatever its length, for grep."""
    console.print(Text(plain(text)), soft_wrap=True)
    console.file.flush()
