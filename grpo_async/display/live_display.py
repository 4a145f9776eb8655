"""The dashboard on a terminal: the whole screen while the run goes, and the messages of the run below each other afterwards.

Drawn by a thread of its own, on every event (at most four times a second) and every second; nothing of the run waits for a slow
terminal. The size is asked for each picture, so a resized window is right again within a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live

from grpo_async.checks.report import Check
from grpo_async.display.dashboard import dashboard
from grpo_async.display.display import ProgressDisplay, print_line
from grpo_async.display.progress import Progress, evaluation_line
from grpo_async.rundir import RunDir
from grpo_async.tracking.jsonl import read_metrics

_INTERVAL_S = 1.0
_LEAST_INTERVAL_S = 0.25
_END_S = 5.0


class LiveDisplay(ProgressDisplay):
    """See the module.

    Args:
        run_dir: where checkpoints are looked for; None: nowhere.
        resume_step: the steps up to this one are read from metrics.jsonl, for the curves.
    """

    def __init__(
        self,
        console: Console,
        *,
        run_name: str,
        max_steps: int,
        logs: Path,
        run_dir: RunDir | None = None,
        resume_step: int | None = None,
    ) -> None:
        super().__init__(Progress(max_steps=max_steps))
        self._console = console
        self._run_name = run_name
        self._footer = f"logs: {logs} · Ctrl-C saves and stops"
        self._run_dir = run_dir
        if run_dir is not None and resume_step is not None:
            read_past(self.progress, run_dir, until_step=resume_step)
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="dashboard", daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(_END_S)
        self._live.stop()
        for message in self.progress.messages:  # the screen that had them is gone
            print_line(self._console, f"warning: {message.text}" if message.is_warning else message.text)
        if self.progress.verdict is not None:
            print_line(self._console, f"learning: {self.progress.verdict.text}")
        if self.progress.advice is not None:
            print_line(self._console, f"advice at step {self.progress.advice_step}: {self.progress.advice.text}")

    def on_change(self) -> None:
        self._changed.set()

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        super().evaluation(when, metrics)
        self.note(evaluation_line(when, metrics))

    def preflight(self, checks: Sequence[Check]) -> None:
        counts = {status: sum(check.status == status for check in checks) for status in ("pass", "warn", "fail")}
        self.note(f"preflight: {counts['pass']} passed, {counts['warn']} warned, {counts['fail']} failed")
        for check in checks:
            if check.status != "pass":
                self.warning(f"preflight: {check.status}: {check.name}: {check.detail}")

    def render(self) -> RenderableType:
        """The picture for the state and the size of the terminal as they are now."""
        width, height = self._console.size
        with self.lock:
            return Group(
                *dashboard(self.progress, run_name=self._run_name, footer=self._footer, width=width, height=height)
            )

    def _draw(self) -> None:
        while not self._ended.is_set():  # leaving the context ends it; a daemon thread
            self._changed.clear()
            if self._run_dir is not None:
                with self.lock:
                    self.progress.look_at_checkpoints(self._run_dir)
            try:
                self._live.update(self.render(), refresh=True)
            except OSError:  # the terminal is gone; the run is not
                return
            drawn = time.monotonic()
            self._changed.wait(_INTERVAL_S)
            self._ended.wait(max(0.0, _LEAST_INTERVAL_S - (time.monotonic() - drawn)))


def read_past(progress: Progress, run_dir: RunDir, *, until_step: int) -> None:
    """Fill the curves with the steps that the run has behind it."""
    if run_dir.metrics.exists():
        for line in read_metrics(run_dir.metrics):
            if line["step"] <= until_step:
                progress.add_to_curves(int(line["step"]), line)
