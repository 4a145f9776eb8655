"""The evaluator: held-out prompts go through the same servers, rollouts and reward functions as training, and are stored alike.

Its seeds depend only on the prompt and the sample's number: with an engine that uses seeds (embedded), every evaluation draws the
same samples. Its tokens are not in the ledger, and its failures are in its own metrics only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.buffer.group import OpenGroup
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import EvaluationSection
from grpo_async.data import LoadedData
from grpo_async.errors import ConfigError, FatalRolloutError, RunError, message_of
from grpo_async.evaluation.metrics import EvaluationResult, evaluation_result
from grpo_async.inference.client import InferenceClient
from grpo_async.records import (
    GroupStatus,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    RolloutStatus,
    ScoredGroup,
    no_tokens,
)
from grpo_async.rollout.components import Components
from grpo_async.rollout.group import ErrorLog, GroupProducer
from grpo_async.scoring.scorer import Scorer
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.text import both_ends
from grpo_async.viewer.format import conversation

logger = logging.getLogger(__name__)

_WARN_FAILED_FRACTION, _MAX_FAILED_FRACTION = 0.05, 0.5
_NUM_SHOWN, _MAX_TEXT = 16, 8000
"""Number of prompts in the table of completions, always the same ones, and maximum length of a text there."""
_TELL_EVERY_S = 2.0
_MAX_GROUPS = 64
"""Maximum number of values of `evaluation.group_by`: each has a dozen metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTask:
    """One evaluation. `step` names it; `served_version` returns the policy version that the servers serve at that moment;
    `max_in_flight` bounds its rollouts in progress (never fewer than those of one prompt); `store` takes its rows; `tell` is
    told how far it is, every other second."""

    step: int
    served_version: Callable[[], int]
    max_in_flight: int
    store: RolloutStore
    tell: Callable[[str], None] = lambda text: None


class Evaluator:
    """Makes `samples_per_prompt` completions per prompt with `producer`, and scores them. `majority_baseline`: score of always
    giving the most frequent held-out answer. Raises ConfigError for a `group_by` that cannot be used."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        producer: GroupProducer,
        scorer: Scorer,
        section: EvaluationSection,
        *,
        majority_baseline: float | None = None,
    ) -> None:
        self._prompts = prompts
        self._producer = producer
        self._scorer = scorer
        self._section = section
        self._samples = section.samples_per_prompt
        self._errors = ErrorLog()  # logs each kind once; the metric num_failed counts all
        _check_group_by(prompts, section.group_by)
        self.majority_baseline = majority_baseline
        self.num_tokens = 0
        """Tokens sampled so far, over all evaluations. Grows while one runs."""

    async def run(self, task: EvaluationTask) -> EvaluationResult:
        """Evaluate once, alongside whatever else runs on the loop. To stop it, cancel it.

        Raises:
            RunError: more than half of the rollouts failed (a reward that fails counts, too)."""
        began = told_at = time.monotonic()
        num_done = 0
        slots = asyncio.Semaphore(max(1, task.max_in_flight // self._samples))

        async def one(number: int) -> ScoredGroup:
            nonlocal num_done, told_at
            async with slots:  # rollouts have time limits
                scored = await self._make(task, number)
            num_done += 1
            if time.monotonic() - told_at >= _TELL_EVERY_S:
                told_at = time.monotonic()
                task.tell(f"{num_done} of {len(self._prompts)} prompts")
            return scored

        made = await all_of(map(one, range(len(self._prompts))))
        completions = [completion for scored in made for completion in scored.group.completions]
        failed = [completion for completion in completions if completion.status is RolloutStatus.FAILED]
        self._check_failures([f"{completion.rollout_id}: {completion.error}" for completion in failed])
        result = evaluation_result(
            made,
            group_by=self._section.group_by,
            samples=self._samples,
            pass_threshold=self._section.pass_threshold,
            duration_s=time.monotonic() - began,
        )
        rows = [{"step": task.step, **_row(scored)} for scored in made[:_NUM_SHOWN]]
        return replace(result, completions=rows)

    def _check_failures(self, failures: Sequence[str]) -> None:
        total = len(self._prompts) * self._samples
        if len(failures) > _WARN_FAILED_FRACTION * total:
            message = f"{len(failures)} of {total} rollouts of the evaluation failed; the first, {failures[0]}"
            if len(failures) > _MAX_FAILED_FRACTION * total:
                raise RunError(message)
            logger.warning("%s; its numbers are those of the others", message)

    async def _make(self, task: EvaluationTask, number: int) -> ScoredGroup:
        """The completions of one prompt with their rewards. A failure affects only this prompt."""
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
                record = group.record
                if record.trainable:
                    scored = await self._scorer.score(record, environments=group.environments, is_trained=False)
                else:
                    scored = _unscored(record)
        except FatalRolloutError:
            raise
        except Exception as error:  # noqa: BLE001 - only this prompt fails, as in training; many failures end the evaluation
            self._errors.note("evaluation", error)
            self._keep(task, _unscored(group.record), GroupStatus.FAILED)
            message = message_of(error)
            failed = [_failed(group.rollout_id(index), message) for index in range(group.size)]
            return _unscored(replace(group.record, completions=failed))
        self._keep(task, scored, GroupStatus.EVALUATED)
        return scored

    def _count(self, num_tokens: int, version: int | None) -> None:
        self.num_tokens += num_tokens

    def _keep(self, task: EvaluationTask, scored: ScoredGroup, status: GroupStatus) -> None:
        task.store.append(scored.group, status, task.step, scored=scored if scored.rewards else None)


def _unscored(group: RolloutGroup) -> ScoredGroup:
    return ScoredGroup(group=group, samples=[], rewards=[], reward_parts=[])


def _failed(rollout_id: str, error: str) -> RolloutCompletion:
    return RolloutCompletion(
        rollout_id=rollout_id, prompt_ids=no_tokens(), turns=(), status=RolloutStatus.FAILED, error=error
    )


def _row(scored: ScoredGroup) -> dict[str, str | float | None]:
    completion, is_scored = scored.group.completions[0], bool(scored.rewards)
    is_scored = is_scored and scored.group.trainable[0] is completion
    messages = completion.prompt_messages or scored.group.prompt.messages
    return {
        "prompt": both_ends(conversation(messages), _MAX_TEXT),
        "completion": both_ends(conversation(completion.completion_messages()), _MAX_TEXT),
        "reward": scored.rewards[0] if is_scored else None,
        **({f"rewards/{name}": value for name, value in scored.reward_parts[0].items()} if is_scored else {}),
    }


def _check_group_by(prompts: Sequence[Prompt], column: str | None) -> None:
    if column is None:
        return
    lacking = next((prompt for prompt in prompts if column not in prompt.columns), None)
    if lacking is not None:
        raise ConfigError(
            f"evaluation.group_by: {column} is not one of the columns {sorted(lacking.columns)} of row {lacking.prompt_id}"
        )
    values = {str(prompt.columns[column]) for prompt in prompts}
    if len(values) > _MAX_GROUPS:
        raise ConfigError(
            f"evaluation.group_by: {column} has {len(values)} different values; results are reported for each, so take a "
            f"column with at most {_MAX_GROUPS}"
        )


def majority_fraction(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Fraction of the most frequent value, the score of always answering it: answers [3, 3, 5] -> 2/3."""
    counts = Counter(str(row[column]) for row in rows)
    return counts.most_common(1)[0][1] / len(rows)


def build_evaluator(
    config: ExperimentConfig,
    data: LoadedData,
    components: Components,
    scorer: Scorer,
    *,
    client: InferenceClient,
    renderer: ChatRenderer,
) -> Evaluator | None:
    """Build the evaluator; None without `evaluation` in the configuration."""
    section = config.evaluation
    if section is None:
        return None
    column = section.baseline_column
    rows = [(source, number) for source in data.evaluation.values() for number in range(len(source.rows))]
    return Evaluator(
        [source.prompt(number, prompt_id) for prompt_id, (source, number) in enumerate(rows)],
        components.producer(
            config,
            section,
            group_size=section.samples_per_prompt,
            client=client,
            renderer=renderer,
            errors=ErrorLog(),
        ),
        scorer,
        section,
        majority_baseline=None
        if column is None
        else majority_fraction([source.rows[number] for source, number in rows], column),
    )
