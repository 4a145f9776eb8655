"""Says during training how the run stands, in the launcher, so that training does not wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_async.display.display import Display, View
from grpo_async.findings import Diagnosis, RunHistory, diagnose
from grpo_async.findings.history import MetricsReader
from grpo_async.run_directory import RunDir

_EARLY = ("no-steps", "too-early")


class Advisor(View):
    """Tells `display` how the run stands, by its files: after each evaluation, every `every_steps`
    steps (0: never), and from step to step while that is only "too early to say"."""

    def __init__(self, display: Display, *, every_steps: int, run_dir: RunDir) -> None:
        self._display = display
        self._every_steps = every_steps
        self._run_dir = run_dir
        self._last: Diagnosis | None = None
        self._metrics = MetricsReader(run_dir.metrics)

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "evaluation" or (event == "step" and self._is_due(fields["step"])):
            self._tell()

    def _is_due(self, step: int) -> bool:
        if not self._every_steps:
            return False
        return step % self._every_steps == 0 or self._last is None or self._last.key in _EARLY

    def _tell(self) -> None:
        diagnosis = diagnose(RunHistory.read(self._run_dir, list(self._metrics.rows().values())))
        is_news = self._last is None or diagnosis.key not in _EARLY or diagnosis.key != self._last.key
        if is_news and diagnosis != self._last:
            self._display.learning(diagnosis)
        self._last = diagnosis
