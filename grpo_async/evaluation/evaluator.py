"""The evaluator: held-out prompts, through the same servers, rollouts and reward functions as training.

    prompts -> produce (samples rollouts each) -> score -> CompletionOutcome... -> evaluation_result
                                                     '-> store (rows as those of training, never trained)

Its seeds depend on the prompt and the number of the sample only: where the engine uses them (embedded), every evaluation draws the
same, whatever training does. It counts its own tokens and its own failures; nothing of it enters the ledger or the metrics of
training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.data import LoadedData, make_prompt
from grpo_async.errors import ConfigError, FatalRolloutError, RunError
from grpo_async.evaluation.metrics import CompletionOutcome, EvaluationResult, PromptOutcomes, evaluation_result
from grpo_async.records import GroupStatus, Prompt, RolloutCompletion, RolloutGroup, RolloutStatus, ScoredGroup
from grpo_async.rollout.components import ProducerParts
from grpo_async.rollout.error_log import ErrorLog
from grpo_async.rollout.group import GroupProducer, OpenGroup
from grpo_async.scoring.advantages import combine_rewards
from grpo_async.scoring.answers import read_answer
from grpo_async.scoring.scorer import Scorer
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.tasks import all_of
from grpo_async.utils.text import both_ends
from grpo_async.viewer.format import conversation

logger = logging.getLogger(__name__)

_NOTED_FRACTION, _MAX_FAILED_FRACTION = 0.05, 0.5
_NUM_SHOWN, _MAX_TEXT = 16, 8000
"""Prompts in the table of completions, always the same ones, and characters of a text there."""
_MAX_GROUPS = 64
"""Values of `evaluation.group_by`: each has a dozen metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTask:
    """One evaluation. `step` names it; `served_version` returns the policy version that the servers serve at that moment;
    `max_in_flight` bounds its rollouts in progress (never fewer than those of one prompt); `store` takes its rows."""

    step: int
    served_version: Callable[[], int]
    max_in_flight: int
    store: RolloutStore | None = None


class Evaluator:
    """Makes `samples` completions per prompt with `producer`, which knows how to sample, and scores them.

    Args:
        pass_threshold: a completion passes when its reward is at least this.
        group_by: column whose values get separate results.
        errors: counts failures; that of an evaluation, not of training.
        majority_baseline: fraction of the most frequent held-out answer; None without `evaluation.baseline_column`.

    Raises:
        ConfigError: `group_by` is not a column of the prompts, or has too many values.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        producer: GroupProducer,
        scorer: Scorer,
        *,
        samples: int = 1,
        pass_threshold: float = 1.0,
        group_by: str | None = None,
        errors: ErrorLog | None = None,
        majority_baseline: float | None = None,
    ) -> None:
        self._prompts = prompts
        self._producer = producer
        self._scorer = scorer
        self._samples = samples
        self._pass_threshold = pass_threshold
        self._errors = errors or ErrorLog()
        self._groups = _groups(prompts, group_by)
        self.majority_baseline = majority_baseline
        self.num_tokens = 0
        """Sampled so far, over all evaluations. Grows while one runs."""

    async def run(self, task: EvaluationTask) -> EvaluationResult:
        """Evaluate once. Runs to its end alongside whatever else the loop does; cancel it to break it off.

        Raises:
            RunError: more than half of the rollouts failed (a reward that fails counts too). From 5% on it warns: the numbers are
                those of the others, and compare less.
            FatalRolloutError: the rollout function returned something unusable.
        """
        began = time.monotonic()
        slots = asyncio.Semaphore(max(1, task.max_in_flight // self._samples))

        rows: dict[int, dict[str, str | float | None]] = {}

        async def one(number: int) -> list[CompletionOutcome]:
            async with slots:  # for rollouts with limits
                group, outcomes = await self._make(task, number)
            if number < _NUM_SHOWN and group.completions:
                rows[number] = {"step": task.step, **_row(group, outcomes[0])}
            return outcomes

        made = await all_of(map(one, range(len(self._prompts))))
        self._check_failures([outcome.error for each in made for outcome in each if outcome.error is not None])
        prompts = [PromptOutcomes(outcomes=each, group=group) for each, group in zip(made, self._groups, strict=True)]
        result = evaluation_result(
            prompts, samples=self._samples, pass_threshold=self._pass_threshold, duration_s=time.monotonic() - began
        )
        return replace(result, completions=[rows[number] for number in sorted(rows)])

    def _check_failures(self, failures: Sequence[str]) -> None:
        total = len(self._prompts) * self._samples
        if len(failures) > _NOTED_FRACTION * total:
            said = f"{len(failures)} of {total} rollouts of the evaluation failed; the first, {failures[0]}"
            if len(failures) > _MAX_FAILED_FRACTION * total:
                raise RunError(said)
            logger.warning("%s; its numbers are those of the others", said)

    async def _make(self, task: EvaluationTask, number: int) -> tuple[RolloutGroup, list[CompletionOutcome]]:
        """The completions of one prompt, and what became of them. A failure is theirs alone."""
        group = OpenGroup(
            name=f"eval-v{task.step}-{number}",
            prompt=self._prompts[number],
            size=self._samples,
            seed=seed_of("evaluation", number),
            served_version=task.served_version,
            on_tokens=self._count,
        )
        try:
            async with self._producer.produce(group):
                scored, outcomes = await self._score(group.record, group.environments)
        except FatalRolloutError:
            raise
        except Exception as error:  # noqa: BLE001 - this prompt's failure is its own, as in training; many end the evaluation
            self._errors.note("evaluation", error)
            message = f"{group.name}: {error or type(error).__name__}"
            self._keep(task, group.record, GroupStatus.FAILED, None)
            return group.record, [CompletionOutcome(error=message)] * self._samples
        self._keep(task, group.record, GroupStatus.EVALUATED, scored)
        return group.record, outcomes

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    async def _score(
        self, group: RolloutGroup, environments: Sequence[Any] | None
    ) -> tuple[ScoredGroup | None, list[CompletionOutcome]]:
        """Outcomes of all completions, in their order. One that failed or has no token is not scored, as in training."""
        survivors = group.trainable
        kept = {id(completion): position for position, completion in enumerate(survivors)}
        if not survivors:
            return None, [_outcome(completion) for completion in group.completions]
        if environments is not None:
            environments = [e for e, c in zip(environments, group.completions, strict=True) if id(c) in kept]
        scores = await self._scorer.scores(group.prompt, survivors, environments=environments)
        rewards = combine_rewards(scores.parts, self._scorer.weights)
        scored = ScoredGroup(
            group=group,
            samples=[],
            rewards=rewards,
            reward_parts=scores.parts,
            metrics=scores.metrics,
            extra_columns=scores.extra_columns,
        )
        outcomes = []
        for completion in group.completions:
            position = kept.get(id(completion))
            if position is None:
                outcomes.append(_outcome(completion))
                continue
            extra = {name: values[position] for name, values in scores.extra_columns.items()}
            outcomes.append(
                _outcome(
                    completion,
                    reward=rewards[position],
                    parts=scores.parts[position],
                    answer=read_answer(completion, extra),
                )
            )
        return scored, outcomes

    def _keep(self, task: EvaluationTask, group: RolloutGroup, status: GroupStatus, scored: ScoredGroup | None) -> None:
        if task.store is not None:
            task.store.append(group, status, task.step, scored=scored)


def _row(group: RolloutGroup, outcome: CompletionOutcome) -> dict[str, str | float | None]:
    """The first completion of a prompt."""
    completion = group.completions[0]
    messages = completion.prompt_messages or group.prompt.messages
    return {
        "prompt": both_ends(conversation(messages), _MAX_TEXT),
        "completion": both_ends(conversation(completion.completion_messages()), _MAX_TEXT),
        "reward": outcome.reward,
        **{f"rewards/{name}": value for name, value in outcome.parts.items()},
    }


def _outcome(
    completion: RolloutCompletion,
    *,
    reward: float | None = None,
    parts: dict[str, float | None] | None = None,
    answer: str | None = None,
) -> CompletionOutcome:
    versions = [version for turn in completion.all_turns for version in turn.policy_versions.tolist()]
    return CompletionOutcome(
        reward=reward,
        parts=parts or {},
        answer=answer,
        num_tokens=completion.num_sampled_tokens,
        num_turns=len(completion.all_turns),
        truncated=completion.truncated,
        error=f"{completion.rollout_id}: {completion.error}" if completion.status is RolloutStatus.FAILED else None,
        versions=(min(versions), max(versions)) if versions else None,
    )


def _groups(prompts: Sequence[Prompt], column: str | None) -> list[str | None]:
    if column is None:
        return [None] * len(prompts)
    lacking = next((prompt for prompt in prompts if column not in prompt.columns), None)
    if lacking is not None:
        raise ConfigError(
            f"evaluation.group_by: {column} is not one of the columns {sorted(lacking.columns)} of row {lacking.prompt_id}"
        )
    groups = [str(prompt.columns[column]) for prompt in prompts]
    if len(set(groups)) > _MAX_GROUPS:
        raise ConfigError(
            f"evaluation.group_by: {column} has {len(set(groups))} different values; results are reported for each, so take a "
            f"column with at most {_MAX_GROUPS}"
        )
    return list(groups)


def majority_fraction(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Fraction of the most frequent value: answers [3, 3, 5] -> 2/3, what always answering 3 would score."""
    counts = Counter(str(row[column]) for row in rows)
    return counts.most_common(1)[0][1] / len(rows)


def build_evaluator(
    config: ExperimentConfig, data: LoadedData, parts: ProducerParts, scorer: Scorer
) -> Evaluator | None:
    """None where the configuration has no `evaluation`. `parts` are those of training; failures are counted apart from its own.

    Raises:
        ConfigError: `evaluation.group_by` cannot be used.
    """
    section = config.evaluation
    if section is None or data.evaluation is None:
        return None
    errors = ErrorLog()
    column = section.baseline_column
    return Evaluator(
        [make_prompt(row, number, data.evaluation_system_prompt) for number, row in enumerate(data.evaluation)],
        replace(parts, errors=errors, track="evaluation").build(section, group_size=section.samples_per_prompt),
        scorer,
        samples=section.samples_per_prompt,
        pass_threshold=section.pass_threshold,
        group_by=section.group_by,
        errors=errors,
        majority_baseline=None if column is None else majority_fraction(data.evaluation, column),
    )
