"""Shows a run while it goes: a live panel on a terminal (fits 80 x 24), one line per step elsewhere.

Both take the same calls and keep nothing back: what the panel cannot show (notes, evaluations) is printed above it.
No text can move the cursor: some of it quotes models and tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_async.launch.preflight_report import Check, print_checks
from grpo_async.launch.progress import (
    Progress,
    duration,
    evaluation_line,
    evaluations_text,
    join,
    ledger_text,
    servers_text,
    sparkline,
    step_line,
)
from grpo_async.launch.wording import plain

_REFRESHES_PER_S = 4


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

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


def make_display(console: Console, *, run_name: str, max_steps: int, logs: Path) -> Display:
    """The panel where `console` is a terminal that can redraw, else lines."""
    kind = LiveDisplay if console.is_terminal and not console.is_dumb_terminal else LineDisplay
    return kind(console, run_name=run_name, max_steps=max_steps, logs=logs)


class LineDisplay:
    """One line per event: for pipes, files, and CI."""

    def __init__(self, console: Console, *, run_name: str, max_steps: int, logs: Path) -> None:
        self._console = console
        self._run_name = run_name
        self._logs = logs
        self.progress = Progress(max_steps=max_steps)

    def __enter__(self) -> Self:
        self._print(f"logs: {self._logs}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def phase(self, name: str) -> None:
        self.progress.phase = plain(name)
        self._print(name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        self.progress.add_step(step, max_steps, metrics)
        self._print(step_line(self.progress))

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        self.progress.evaluations[when] = dict(metrics)
        self._print(evaluation_line(when, metrics))

    def preflight(self, checks: Sequence[Check]) -> None:
        _print_table(self._console, checks)
        self._console.file.flush()

    def server(self, name: str, trouble: str | None) -> None:
        self.progress.set_server(name, trouble)

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(plain(text)), soft_wrap=True)  # soft: one line stays one line, for grep
        self._console.file.flush()


class LiveDisplay:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console, *, run_name: str, max_steps: int, logs: Path) -> None:
        self._console = console
        self._run_name = run_name
        self._logs = logs
        self.progress = Progress(max_steps=max_steps)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESHES_PER_S)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, name: str) -> None:
        self.progress.phase = plain(name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        self.progress.add_step(step, max_steps, metrics)

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        self.progress.evaluations[when] = dict(metrics)
        self.note(evaluation_line(when, metrics))

    def preflight(self, checks: Sequence[Check]) -> None:
        _print_table(self._console, checks)

    def server(self, name: str, trouble: str | None) -> None:
        self.progress.set_server(name, trouble)

    def note(self, text: str) -> None:
        self._console.print(Text(plain(text)))

    def render(self) -> RenderableType:
        """The panel for the state as it is now."""
        progress = self.progress
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=progress.max_steps, completed=progress.step, width=22)
        left = progress.seconds_left
        clock = f"{duration(progress.seconds_elapsed)} elapsed" + ("" if left is None else f", {duration(left)} left")
        head.add_row(f"step {progress.step}/{progress.max_steps}", bar, clock)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        for name, text in self._rows():
            if text:
                rows.add_row(name, Text(text))
        title = Text.assemble((self._run_name, "bold"), "  ", progress.phase)
        return Panel(Group(head, rows), title=title, title_align="left", width=min(80, self._console.width))

    def _rows(self) -> list[tuple[str, str | None]]:
        progress = self.progress
        reward, average = progress.reward, progress.reward_average
        return [
            (
                "reward",
                None if reward is None else f"{reward:.3f}  average {average:.3f}  {sparkline(progress.rewards)}",
            ),
            (
                "tokens/s",
                join(
                    [
                        progress.text("perf/generated_tokens_per_s", "generated {:.0f}"),
                        progress.text("perf/trained_tokens_per_s", "trained {:.0f}"),
                    ]
                ),
            ),
            (
                "staleness",
                join(
                    [
                        progress.text("async/staleness_mean", "mean {:.2f}"),
                        progress.text("async/staleness_max", "max {:.0f}"),
                    ]
                ),
            ),
            (
                "trainer",
                join(
                    [
                        progress.text("pipeline/trainer_idle_ratio", "idle {:.0f}%", scale=100),
                        progress.text("step_time", "{:.1f} s/step"),
                        progress.text("sync/push_s", "last push {:.2f} s"),
                    ]
                ),
            ),
            ("groups", ledger_text(progress)),
            ("servers", servers_text(progress)),
            (
                "held out",
                evaluations_text(progress),
            ),
            ("logs", str(self._logs)),
        ]


def _print_table(console: Console, checks: Sequence[Check]) -> None:
    clean = [replace(check, name=plain(check.name), detail=plain(check.detail)) for check in checks]
    print_checks(console, clean, title="Preflight")
