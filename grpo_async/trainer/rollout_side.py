"""Builds the rollout side of rank 0: data -> worker -> buffer on a separate thread, and the evaluator."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.config_checks import reward_problems
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import RolloutSection
from grpo_async.data import LoadedData, PromptStream, load_data, make_prompt
from grpo_async.data.look import look_at_rows
from grpo_async.errors import ConfigError, Problems
from grpo_async.evaluation.evaluator import Evaluator, build_evaluator
from grpo_async.inference.fleet import Fleet
from grpo_async.inference.router import FixedServers
from grpo_async.records import Prompt
from grpo_async.rewards import RewardFunction, TrainerState, load_rewards
from grpo_async.rollout.components import Components, load_components, token_counter
from grpo_async.rollout.group import ErrorLog
from grpo_async.rollout.pace import AdaptiveSlots
from grpo_async.rollout.source import RolloutSource
from grpo_async.rollout.worker import RolloutWorker
from grpo_async.scoring.scorer import Scorer
from grpo_async.scoring.served_policy import ServedPolicy
from grpo_async.scoring.teachers import Teachers
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.trainer.connections import make_client
from grpo_async.training.checkpoint import CheckpointState

logger = logging.getLogger(__name__)

_NUM_FIRST_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSide:
    """The rollout side of rank 0.

    Attributes:
        config: the configuration, with `training.epochs` converted to steps.
        first_prompts: a few prompts of the data.
        first_prompt_ids: their tokens, as rollouts begin with them; empty if a rollout function or an agent makes the prompts.
        next_seq: number of the first row that the store has from after the checkpoint to resume from."""

    config: ExperimentConfig
    source: RolloutSource
    evaluator: Evaluator | None
    first_prompts: Sequence[Prompt]
    first_prompt_ids: Sequence[Sequence[int]]
    tool_sets: Sequence[Sequence[Mapping[str, Any]]]
    next_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInputs:
    """What makes and scores rollouts, in training and in a standalone evaluation."""

    components: Components
    data: LoadedData
    rewards: Sequence[RewardFunction]
    scorer: Scorer


def load_rollout_inputs(config: ExperimentConfig, renderer: ChatRenderer) -> RolloutInputs:
    """Import and read what the configuration names, and check that it fits together."""
    components = load_components(config)
    data = load_data(
        config.data,
        config.evaluation,
        count_tokens=token_counter(renderer, components),
        needs_prompt=not config.environments,
    )
    is_templated = {
        config.templates_text(config.sources[key]) or not isinstance(source.rows[0]["prompt"], str)
        for key, source in data.train.items()
    }
    if len(is_templated) > 1 and renderer.thinking_is_open:
        raise ConfigError(
            "data.train: some sources are plain text and others messages, and the chat template begins the thinking of the latter "
            "only, so rewards could not tell where an answer begins; give all of them one form"
        )
    rewards = load_rewards(config.rewards, opened_by_template=True in is_templated and renderer.thinking_is_open)
    problems = Problems()
    for key, source in data.train.items():
        problems.extend(reward_problems(config, rewards, source.rows[0], key))
    # all rows: the launcher may have seen the first ones only
    evaluated = (("the data to evaluate on", source) for source in data.evaluation.values())
    for key, source in (*data.train.items(), *evaluated):
        with problems.collecting():
            components.check_rows(source.rows, renderer)
        for note in look_at_rows(key, source.rows, config, problems):
            logger.info("%s", note)
    problems.raise_if_any()
    max_steps, rollout = config.with_rows(data.num_rows).num_steps, config.rollout
    state = TrainerState(
        max_steps=max_steps,
        train_batch_size=rollout.groups_per_step * rollout.group_size,
        num_train_epochs=math.ceil(max_steps * rollout.groups_per_step / data.num_rows),
        save_steps=config.checkpoint.every_steps,
    )
    scorer = Scorer(
        rewards,
        advantage=config.advantage,
        train_zero_variance=config.rollout.zero_variance == "train",
        train_truncated=config.rollout.overlong == "train",
        environment_weights=components.reward_weights,
        is_taught=config.distillation is not None,
        state=state,
    )
    return RolloutInputs(components=components, data=data, rewards=rewards, scorer=scorer)


def build_rollout_side(
    config: ExperimentConfig,
    *,
    fleet: Fleet | FixedServers,
    renderer: ChatRenderer,
    vocab_size: int,
    store: RolloutStore,
    state: CheckpointState | None,
) -> RolloutSide:
    """Connect everything between the data and the trainer; `state` comes from the checkpoint to resume from, `vocab_size` is the
    number of rows of the policy's embedding."""
    start = state.step if state else 0
    inputs = load_rollout_inputs(config, renderer)
    components, data, scorer = inputs.components, inputs.data, inputs.scorer
    config = config.with_rows(data.num_rows)
    rollout = config.rollout
    for note in data.notes:
        logger.info("%s", note)
    stream = PromptStream(
        list(data.train.values()),
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        num_prompts=config.training.num_prompts(data.num_rows),
        sampling=config.data.sampling,
        state=state.rollouts["data"] if state else None,
    )
    resume = state.resume_state(stream.prompt).with_top(config.num_top_logprobs) if state else None

    client = make_client(config, fleet, vocab_size=vocab_size)
    scorer.policy = ServedPolicy(client, renderer, max_model_len=config.inference.max_model_len)
    if config.distillation is not None:
        system_prompts = {each.label: each.system_prompt for each in data.train.values()}

        def teacher_prompt_ids(prompt: Prompt, seen: Any) -> list[int]:
            row = {**prompt.columns, "prompt": seen}
            other = make_prompt(row, prompt.prompt_id, system_prompts[prompt.source])
            tools = components.schemas_for(prompt.columns)
            own = renderer.for_row(prompt.columns)
            return own.prompt_ids(other.messages, is_conversational=other.is_conversational, tools=tools)

        scorer.teachers = Teachers(config.distillation, own=client.score, teacher_prompt_ids=teacher_prompt_ids)
    errors = ErrorLog(resume.failures if resume else None)
    slots = None
    if rollout.max_in_flight == "auto" and isinstance(fleet, Fleet):
        slots = _follow_servers(rollout, fleet, every_s=config.inference.heartbeat_interval_s)
    worker = RolloutWorker(
        section=rollout,
        seed=config.run.seed,
        stream=stream,
        producer=components.producer(
            config,
            rollout,
            group_size=rollout.group_size,
            client=client,
            renderer=renderer,
            errors=errors,
            slots=slots,
        ),
        errors=errors,
        scorer=scorer,
        store=store,
        num_steps=config.num_steps,
        resume=resume,
        version=start,
    )
    source = RolloutSource(
        config,
        client=client,
        worker=worker,
        # servers that somebody else runs may come and go forever
        server_changes=(lambda: 0) if config.inference.urls else (lambda: fleet.num_changes),
        closing=[reward.close for reward in inputs.rewards],
        closing_on_loop=[components.aclose],
    )
    first = [
        source.prompt(number, number)
        for number in range(_NUM_FIRST_PROMPTS)
        for source in data.train.values()
        if number < len(source.rows)
    ][:_NUM_FIRST_PROMPTS]
    return RolloutSide(
        config=config,
        source=source,
        evaluator=build_evaluator(config, data, components, scorer, client=client, renderer=renderer),
        first_prompts=first,
        first_prompt_ids=[
            renderer.for_row(prompt.columns).prompt_ids(
                prompt.messages,
                is_conversational=prompt.is_conversational,
                tools=components.schemas_for(prompt.columns),
            )
            for prompt in first
            # prompts of an environment may begin empty
            if prompt.messages and not config.has_own_rollouts
        ],
        tool_sets=components.tool_sets,
        next_seq=resume.next_seq if resume else None,
    )


def _follow_servers(rollout: RolloutSection, fleet: Fleet, *, every_s: float) -> AdaptiveSlots:
    """Begin with the rollouts of a step; several servers report within one interval."""
    first = rollout.groups_per_step * rollout.group_size
    slots = AdaptiveSlots(first=first, most=rollout.most_in_flight, every_s=0.75 * every_s)

    def report() -> None:
        infos = [fleet.current_info(server.index) for server in fleet.serving()]
        slots.report_soon([info for info in infos if info is not None])

    fleet.subscribe_info(report)
    return slots
