"""What rank 0 tells of the run: metrics lines, trackers, messages to the launcher, and summary.json."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from grpo_async.buffer.ledger import is_balanced
from grpo_async.checks.memory import describe_peak
from grpo_async.evaluation.evaluations import RunEvaluations
from grpo_async.findings import RunHistory, diagnose
from grpo_async.inference.fleet import Fleet
from grpo_async.processes.control import ControlClient
from grpo_async.records import ScoredGroup
from grpo_async.rollout.source import RolloutSource
from grpo_async.tracking import MetricsWriter, Trackers
from grpo_async.tracking.timeline import span
from grpo_async.training.pipeline import Activity, CounterSnapshot, PipelineMeter, peak_bytes, pipeline_summary
from grpo_async.training.ranks import TrainerContext
from grpo_async.training.step import StepResult
from grpo_async.utils.files import write_atomically
from grpo_async.utils.run_state import FINISHED, STOPPED
from grpo_async.utils.text import both_ends
from grpo_async.viewer.format import conversation, message_text

logger = logging.getLogger(__name__)

_EXAMPLE_STEPS = 5
"""Number of steps between two examples of what the policy writes; the first step also has one."""
_MAX_PROMPT, _MAX_COMPLETION = 300, 1000  # characters


@contextmanager
def phase(name: str, control: ControlClient) -> Iterator[None]:
    """Tell the launcher what rank 0 does, and record it in the timeline."""
    control.send("phase", name=name)
    with span(name):
        yield


@dataclass(slots=True, kw_only=True)
class Reporter:
    """See the module's docstring. `log` and `trackers` receive the metrics of each step; `start`: finished steps when it began."""

    context: TrainerContext
    control: ControlClient
    fleet: Fleet
    source: RolloutSource
    evaluations: RunEvaluations
    log: MetricsWriter
    trackers: Trackers
    activity: Activity
    start: int
    meter: PipelineMeter = field(default_factory=PipelineMeter)

    def begin_training(self) -> None:
        """What happened until now (startup, evaluation) belongs to no step."""
        self.activity.take_seconds()
        self.meter.begin(self._read_counters())

    def measure(self, metrics: dict[str, float], result: StepResult, trained: Sequence[ScoredGroup], step: int) -> None:
        """Add the metrics of a step that has trained the groups `trained` to `metrics`."""
        metrics |= result.metrics
        metrics |= self.meter.step(
            self._read_counters(),
            trained_tokens=result.num_tokens,
            staleness=_staleness(trained, step - 1),
            spent=self.activity.take_seconds(),
        )
        metrics |= self.source.gauges() | self.context.checkpoints.take_metrics()

    def report(self, step: int, metrics: dict[str, float], groups: Sequence[ScoredGroup]) -> None:
        peak = float(peak_bytes(self.context.device))
        metrics |= {**self.fleet.metrics(), "perf/peak_memory_bytes": peak}
        self.log.write(step, metrics)
        self.source.log(step, metrics)
        self.trackers.log(step, metrics)
        config = self.context.config
        self.control.send("step", step=step, max_steps=config.num_steps, metrics=metrics)
        is_first = step == self.start + 1
        if (is_first or step % _EXAMPLE_STEPS == 0) and (example := example_of(groups)):
            self.control.send("example", step=step, **example)
        if "eval/step" in metrics and config.tracking:
            self.trackers.log_completions(step, self.evaluations.take_completions())
        if is_first and self.context.peaks:
            text = f"memory of a trainer rank after step {step}: {describe_peak(**self._memory())}"
            logger.info(text)
            self.control.send("note", text=text)

    def report_wait(self, step: int) -> None:
        groups = self.source.ledger_snapshot()["groups"]
        counts = ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in groups.items() if number)
        self.control.send("phase", name=f"training: step {step} waits for groups ({counts})")

    def report_evaluation(self, engine: str) -> None:
        """End a run of zero steps: tell the launcher what the evaluation found, unless a stop cancelled it."""
        summary = self.evaluations.summary()
        if summary is not None and summary["before"] is not None:
            self.control.send("summary", summary={"engine": engine, **summary})

    def write_summary(self, steps: int, *, is_complete: bool, engine: str) -> None:
        """Write summary.json of a run that ends after `steps` finished steps. `is_complete`: it has trained and exported all."""
        run_dir, memory, ledger = self.context.run_dir, self._memory(), self.source.ledger_snapshot()
        history = RunHistory.read(run_dir)
        self.trackers.log_completions(steps, self.evaluations.take_completions())
        summary = {
            "status": FINISHED if is_complete and not self.evaluations.is_final_missing else STOPPED,
            "steps": steps,
            "model": str(run_dir.model) if is_complete else None,
            "num_devices": self.context.world_size,
            "engine": engine,
            "on_gpu": memory.pop("on_gpu"),
            "server_failures": [
                {"server": failure.name, "reason": failure.reason, "recovery_s": failure.recovery_s}
                for failure in self.fleet.failures
            ],
            **pipeline_summary(history.metrics),
            "learning": diagnose(history).as_dict(),
            "evaluation": self.evaluations.summary(),
            "ledger": ledger,
            "ledger_closed": is_balanced(ledger),
            "memory": memory,
        }
        write_atomically(run_dir.summary, json.dumps(summary, indent=2))
        self.control.send("summary", summary=summary)

    def _memory(self) -> dict[str, Any]:
        return {"peaks": list(self.context.peaks or ()), "on_gpu": self.context.device.type == "cuda"}

    def _read_counters(self) -> CounterSnapshot:
        """The counters exclude tokens of evaluations, but include the time that servers are busy with them."""
        counters = self.fleet.read_counters()
        return CounterSnapshot(
            time_s=time.monotonic(),
            generation_busy_s=counters.busy_s,
            generated_tokens=counters.generated_tokens - self.evaluations.num_tokens,
        )


def example_of(groups: Sequence[ScoredGroup]) -> dict[str, Any] | None:
    """An example from the group whose rewards are furthest apart: the last message of its prompt, and the completions with the
    highest and the lowest reward; long texts lose their middle. One completion if all rewards are equal; None without any reward.

    {"prompt": "3 + 4 =", "completions": [{"reward": 1.0, "text": "7"}, {"reward": 0.0, "text": "8"}]}
    """
    found = []
    for group in groups:
        pairs = zip(group.rewards, group.group.trainable, strict=True)
        if rated := [(reward, completion) for reward, completion in pairs if reward is not None]:
            found.append((group.group.prompt, max(rated, key=itemgetter(0)), min(rated, key=itemgetter(0))))
    if not found:
        return None
    prompt, best, worst = max(found, key=lambda each: each[1][0] - each[2][0])
    messages = best[1].prompt_messages or prompt.messages
    return {
        "prompt": both_ends(message_text(messages[-1]) if messages else "", _MAX_PROMPT),
        "completions": [
            {"reward": reward, "text": both_ends(conversation(completion.completion_messages()), _MAX_COMPLETION)}
            for reward, completion in ([best, worst] if best[0] > worst[0] else [best])
        ],
    }


def _staleness(groups: Sequence[ScoredGroup], trainer_version: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for sample in chain.from_iterable(group.samples for group in groups):
        versions, numbers = np.unique(sample.policy_versions[sample.loss_mask], return_counts=True)
        counts.update(dict(zip((trainer_version - versions).tolist(), numbers.tolist(), strict=True)))
    return counts
