"""Says during training what limits its speed and whether it learns; all in the launcher, so that training does not wait for it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpo_async.display.display import Display, View
from grpo_async.findings import Evidence, Verdict, judge
from grpo_async.findings.evidence import MetricsReader
from grpo_async.findings.speed import PipelineSetup, advise, pipeline_metrics
from grpo_async.run_directory import RunDir
from grpo_async.tracking.jsonl import keep_steps
from grpo_async.utils.files import append_whole

_MIN_STEPS = 5


class Advisor(View):
    """Tells `display` every `every_steps` steps what limits the speed, by the metrics of the steps since the last time (of five at
    least), and whether the run learns, by its files; the latter after each evaluation, too.

    Args:
        every_steps: 0: only after evaluations.
        run_dir: gets advice.jsonl, one line each: {"step", "bound_by", "text", "setting", "current", "suggested"}.
    """

    def __init__(
        self,
        display: Display,
        *,
        setup: PipelineSetup,
        every_steps: int,
        run_dir: RunDir,
    ) -> None:
        self._display = display
        self._setup = setup
        self._every_steps = every_steps
        self._run_dir = run_dir
        self._log = run_dir.advice
        self._steps: deque[Mapping[str, float]] = deque(maxlen=max(_MIN_STEPS, every_steps))
        self._warned = False
        self._verdict: Verdict | None = None
        self._metrics = MetricsReader(run_dir.metrics)

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "evaluation":
            self._judge()
        elif event == "step":
            self._after_step(fields["step"], fields["metrics"])

    def _after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._steps:  # only the ranks know which checkpoint they went on from: the launcher's may be damaged
            with self._warning():
                keep_steps(self._log, step - 1)
        self._steps.append(metrics)
        if not self._every_steps or step % self._every_steps:
            return
        self._judge()
        advice = advise(pipeline_metrics(list(self._steps)), self._setup)
        if advice is None:
            return
        self._display.advice(step, advice)
        line = json.dumps({"step": step, **advice.as_advice()}) + "\n"
        with self._warning(), self._log.open("ab") as file:
            append_whole(file.fileno(), line.encode())

    def _judge(self) -> None:
        """Show the verdict when it has changed."""
        verdict = judge(Evidence.read(self._run_dir, list(self._metrics.rows().values())))
        if verdict != self._verdict:
            self._verdict = verdict
            self._display.learning(verdict)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Where the file cannot be written, the user is warned once, and training continues."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._display.warning(f"advice cannot be written to {self._log}: {error}")
