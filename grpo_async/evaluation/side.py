"""Builds the evaluator: the same for a run and for `grpo-async eval`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.data import LoadedData, make_prompt
from grpo_async.rollout.error_log import ErrorLog
from grpo_async.rollout.evaluation import Evaluator, majority_share
from grpo_async.rollout.participants import ProducerParts
from grpo_async.scoring.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSide:
    """`majority_baseline` is the share of the most frequent held-out answer, None without `evaluation.baseline_column`."""

    evaluator: Evaluator
    majority_baseline: float | None


def build_evaluation_side(
    config: ExperimentConfig, data: LoadedData, parts: ProducerParts, scorer: Scorer
) -> EvaluationSide | None:
    """None where the configuration has no `evaluation`. `parts` are those of training; failures are counted apart from its own.

    Raises:
        ConfigError: `evaluation.group_by` cannot be used.
    """
    section = config.evaluation
    if section is None or data.evaluation is None:
        return None
    errors = ErrorLog()
    column = section.baseline_column
    return EvaluationSide(
        evaluator=Evaluator(
            [make_prompt(row, number, data.evaluation_system_prompt) for number, row in enumerate(data.evaluation)],
            replace(parts, errors=errors, lane="evaluation").build(
                temperature=section.temperature, group_size=section.samples
            ),
            scorer,
            samples=section.samples,
            pass_reward=section.pass_reward,
            group_by=section.group_by,
            errors=errors,
        ),
        majority_baseline=None if column is None else majority_share(data.evaluation, column),
    )
