"""One line of evaluations.jsonl: an evaluation of a run that has ended or failed, or that was skipped.

{"step": 20, "when": "during", "metrics": {"reward": 0.5, ...}, "by_group": {"gsm8k": {...}}, "prompt_rewards": [1.0, ...]}
{"step": 24, "when": "during", "skipped": "the evaluation of step 20 was still running"}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_async.utils.files import numbers, read_objects
from grpo_async.utils.text import finite

When = Literal["before", "during", "after"]
"""Relative to training."""
_WHEN: tuple[When, ...] = get_args(When)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """`step` is the one at whose end it began.

    `metrics` are over all prompts, `by_group` of each value of `evaluation.group_by`; both are empty where there is no result:
    `skipped` or `error` says why. `prompt_rewards`: the mean reward of each prompt, in the order of the data.
    """

    step: int
    when: When = "during"
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_group: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prompt_rewards: Sequence[float | None] = field(default_factory=list)
    skipped: str | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """ "before", "step 20", "after"."""
        return f"step {self.step}" if self.when == "during" else self.when

    @property
    def why_not(self) -> str | None:
        """Why it has no result."""
        return self.error or self.skipped

    def as_dict(self) -> dict[str, Any]:
        """The content of the line."""
        head = {"step": self.step, "when": self.when}
        why = {"skipped": self.skipped, "error": self.error}
        result = {"metrics": self.metrics, "by_group": self.by_group, "prompt_rewards": self.prompt_rewards}
        return head | {name: text for name, text in why.items() if text is not None} | (result if self.metrics else {})


def read_evaluations(path: Path, problems: list[str]) -> Iterator[EvaluationRecord]:
    """The records of a file, which need not be there. A line that cannot be read is counted in `problems`."""
    for line in read_objects(path, problems):
        if (record := _record(line)) is not None:
            yield record


def scores_by_step(records: Iterable[EvaluationRecord], metric: str) -> dict[int, float]:
    """`metric` of every trained policy that was evaluated, by step; a checkpoint of step 0 is never the best."""
    return {each.step: each.metrics[metric] for each in records if each.step > 0 and metric in each.metrics}


def _record(line: Mapping[str, Any]) -> EvaluationRecord | None:
    step, by_group, rewards = (line.get(name) for name in ("step", "by_group", "prompt_rewards"))
    if finite(step) is None:
        return None
    skipped, error = (str(line[name]) if line.get(name) else None for name in ("skipped", "error"))
    groups = by_group if isinstance(by_group, dict) else {}
    return EvaluationRecord(
        step=int(step or 0),
        when=next((when for when in _WHEN if when == line.get("when")), "during"),
        metrics=numbers(line.get("metrics")),
        by_group={str(group): numbers(values) for group, values in groups.items()},
        prompt_rewards=[finite(reward) for reward in rewards] if isinstance(rewards, list) else [],
        skipped=skipped,
        error=error,
    )
