"""Scores groups: calls the reward functions on the trainable completions, computes advantages, makes the rows.

Reward functions do not see a failed completion. Every path of a completion (its own turns, and each branch of an agent's) is a
row, with its reward and advantage, except branches to which the agent gave their own reward."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from grpo_async.config.sections import AdvantageSection
from grpo_async.records import (
    AGENT_REWARD,
    Branch,
    FloatArray,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    ScoredGroup,
    TokenPath,
    TurnRecord,
)
from grpo_async.rewards import RewardFunction, RewardOutcome, TrainerState
from grpo_async.scoring.advantages import Advantages, combine_rewards
from grpo_async.scoring.served_policy import ServedPolicy
from grpo_async.scoring.teachers import DISTILLATION, Teachers
from grpo_async.tracking.timeline import span
from grpo_async.utils.concurrency import all_of

_LOG_HISTORY = 100  # steps: every call of a reward gets a copy


class Scorer:
    """See the module's docstring. Groups without a signal, and truncated completions (which count in the group's mean in any case),
    become samples if `train_zero_variance` and `train_truncated`. `environment_weights`: of the environments' own rewards, by class
    name, or of an agent's, by AGENT_REWARD. `is_taught`: there will be `teachers`."""

    def __init__(
        self,
        rewards: Sequence[RewardFunction],
        *,
        advantage: AdvantageSection,
        train_zero_variance: bool,
        train_truncated: bool = True,
        environment_weights: Mapping[str, float] | None = None,
        is_taught: bool = False,
        state: TrainerState | None = None,
    ) -> None:
        self._rewards = rewards
        self._train_zero_variance = train_zero_variance
        self._train_truncated = train_truncated
        self._environment_names = list(environment_weights or {})
        self.weights = {reward.name: reward.weight for reward in rewards} | dict(environment_weights or {})
        """Weight of every reward by name, environments' rewards included."""
        self.teachers: Teachers | None = None
        self.policy: ServedPolicy | None = None
        self._has_rewards = bool(self.weights)
        if is_taught:  # a reward that is shown; without others it is the one that the run is judged by
            self.weights[DISTILLATION] = 0.0 if self._has_rewards else 1.0
        self.advantages = Advantages(advantage, self.weights)
        """Completes the advantages when the groups of a step are taken."""
        self._state = state or TrainerState()

    def set_step(self, step: int, epoch: float) -> None:
        self._state = replace(self._state, global_step=step, epoch=epoch)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        history = [*self._state.log_history, {"step": step, **metrics}][-_LOG_HISTORY:]
        self._state = replace(self._state, log_history=history)

    async def score(
        self, group: RolloutGroup, *, environments: Sequence[Any] | None = None, is_trained: bool = True
    ) -> ScoredGroup:
        """Score the trainable completions of a group (at least one). `environments`: one for each completion. Makes no samples
        unless `is_trained`. Raises GrpoAsyncError: a reward function failed; the message names it."""
        trainable = group.trainable
        if environments is not None:
            kept = {id(completion) for completion in trainable}
            environments = [e for e, c in zip(environments, group.completions, strict=True) if id(c) in kept]
        began = time.monotonic()
        asked: list[Coroutine[Any, Any, Any]] = [self._outcomes(group, trainable, environments=environments)]
        if self.teachers is not None and is_trained:
            asked.append(self.teachers.score(group, trainable))
        outcomes, *answers = await all_of(asked)
        taught = answers[0] if answers else {}
        took_s = time.monotonic() - began
        parts: list[dict[str, float | None]] = [
            {each.name: outcomes[each.name].values[index] if each.name in outcomes else None for each in self._rewards}
            | {name: completion.environment_rewards.get(name) for name in self._environment_names}
            | ({DISTILLATION: _reverse_kl_reward(completion, taught)} if taught else {})
            for index, completion in enumerate(trainable)
        ]
        rewards = combine_rewards(parts, self.weights)
        logged: dict[str, list[float]] = {}
        for outcome in outcomes.values():
            for metric, value in outcome.metrics.items():
                logged.setdefault(metric, []).append(value)
        samples = self._samples(group, trainable, rewards, parts, taught) if is_trained else []
        return ScoredGroup(
            group=group if all(sample.top is None for sample in samples) else _without_top(group),
            samples=samples,
            rewards=rewards,
            reward_parts=parts,
            metrics={"scoring/duration_s": took_s, **{metric: fmean(values) for metric, values in logged.items()}},
            extra_columns=_extra_columns(outcomes, {name for each in trainable for name in each.reward_columns}),
        )

    def _samples(
        self,
        group: RolloutGroup,
        trainable: Sequence[RolloutCompletion],
        rewards: Sequence[float | None],
        parts: Sequence[Mapping[str, float | None]],
        taught: Mapping[str, tuple[FloatArray, float]],
    ) -> list[RolloutSample]:
        advantages = self.advantages.of_group(rewards, parts) if self._has_rewards else [0.0] * len(rewards)
        samples = [
            _sample(group, completion, path, taught, advantage=advantage, reward=reward, rewards=part)
            for completion, advantage, reward, part in zip(trainable, advantages, rewards, parts, strict=True)
            if self._train_truncated or not completion.truncated
            for path in completion.paths
            if path.completion_mask.any()
        ]
        samples = self._with_own_rewards(samples, trainable, rewards, parts)
        has_signal = bool(taught) or any(advantages) or any(sample.advantage for sample in samples)
        return samples if has_signal or self._train_zero_variance else []

    def _with_own_rewards(
        self,
        samples: list[RolloutSample],
        trainable: Sequence[RolloutCompletion],
        rewards: Sequence[float | None],
        parts: Sequence[Mapping[str, float | None]],
    ) -> list[RolloutSample]:
        """Give branches to which the agent gave a reward that reward in place of AGENT_REWARD, and the advantage that their rollout
        would have with it; the others keep their rollout's."""
        own = {
            completion.sample_id(branch): (index, branch.reward)
            for index, completion in enumerate(trainable)
            for branch in completion.branches
            if branch.reward is not None
        }
        changed = []
        for sample in samples:
            if sample.rollout_id in own:
                index, value = own[sample.rollout_id]
                mine = {**parts[index], AGENT_REWARD: value}
                reward = combine_rewards([mine], self.weights)[0]
                sample = replace(sample, rewards=mine, reward=reward)
                sample = replace(sample, advantage=self.advantages.of_sample(sample, index, rewards, parts))
            changed.append(sample)
        return changed

    async def _outcomes(
        self, group: RolloutGroup, completions: Sequence[RolloutCompletion], *, environments: Sequence[Any] | None
    ) -> dict[str, RewardOutcome]:
        """The outcome of every reward function of the group's source on these completions of the group, by its name.

        The functions run at the same time; when one fails, the others are cancelled and its error is raised.
        """
        prompt = group.prompt
        given = [prompt.as_given(completion.prompt_messages) for completion in completions]
        texts: list[Any]
        if prompt.is_conversational:
            texts = [[message for turn in each.turns for message in _as_in_trl(turn)] for each in completions]
        else:
            texts = ["".join(m.content for m in completion.completion_messages()) for completion in completions]
        columns = {name: [value] * len(completions) for name, value in prompt.columns.items()}
        for name in sorted({name for completion in completions for name in completion.reward_columns}):
            columns[name] = [completion.reward_columns.get(name) for completion in completions]
        if AGENT_REWARD in self._environment_names:
            columns["branches"] = [list(map(_branch_column, completion.branches)) for completion in completions]
        ids = [completion.completion_ids.tolist() for completion in completions]
        policy = None if self.policy is None else self.policy.for_other_loops()
        began = time.time()
        with span("score", group=group.name, rollouts=len(completions)) as details:

            async def score(reward: RewardFunction) -> RewardOutcome:
                outcome = await reward.score(
                    given,
                    texts,
                    ids,
                    columns,
                    trainer_state=self._state,
                    environments=environments,
                    policy=policy,
                )
                details[f"{reward.name} s"] = time.time() - began
                return outcome

            chosen = [each for each in self._rewards if prompt.rewards is None or each.name in prompt.rewards]
            results = await all_of(map(score, chosen))
        return {reward.name: result for reward, result in zip(chosen, results, strict=True)}


def _without_top(group: RolloutGroup) -> RolloutGroup:
    """The group without the likeliest tokens of its turns, which its samples have."""

    def plain(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
        return [replace(turn, output_top=None) for turn in turns]

    completions = [
        replace(each, turns=plain(each.turns), branches=[replace(b, turns=plain(b.turns)) for b in each.branches])
        for each in group.completions
    ]
    return replace(group, completions=completions)


def _as_in_trl(turn: TurnRecord) -> list[dict[str, Any]]:
    """The messages of a turn, where the content of a tool's message is the list that the tool returned, if it returned one."""
    lists = {call.tool_call_id: call.returned for call in turn.tool_calls if call.returned is not None}
    messages = [message.as_dict() for message in turn.messages]
    return [
        {**message, "content": lists[message["tool_call_id"]]} if message.get("tool_call_id") in lists else message
        for message in messages
    ]


def _extra_columns(outcomes: Mapping[str, RewardOutcome], taken: Collection[str]) -> dict[str, list[Any]]:
    """What the rewards logged, by column. A column that is taken, or that another reward has too, gets its reward's name:
    `parsed` of the rewards a and b -> a/parsed, b/parsed."""
    uses = Counter([*taken, *chain.from_iterable(outcome.extra_columns for outcome in outcomes.values())])
    return {
        column if uses[column] == 1 else f"{reward}/{column}": values
        for reward, outcome in outcomes.items()
        for column, values in outcome.extra_columns.items()
    }


def _branch_column(branch: Branch) -> dict[str, Any]:
    """The columns that reward functions get for a branch, with its whole conversation."""
    messages = [message.as_dict() for message in (*branch.prompt_messages, *branch.completion_messages())]
    return {"name": branch.name, "parent": branch.parent, "reward": branch.reward, "messages": messages}


def _reverse_kl_reward(completion: RolloutCompletion, taught: Mapping[str, tuple[FloatArray, float]]) -> float | None:
    """Mean over the trained tokens of the teachers' log-probability less the sampler's, times the weights; None without any."""
    differences = [
        (logprobs - weight * path.logprobs)[path.completion_mask]
        for path in completion.paths
        if (given := taught.get(completion.sample_id(path))) is not None
        for logprobs, weight in [given]
    ]
    return float(np.concatenate(differences).mean()) if differences else None


def _sample(
    group: RolloutGroup,
    completion: RolloutCompletion,
    path: TokenPath,
    taught: Mapping[str, tuple[FloatArray, float]],
    *,
    advantage: float,
    reward: float | None,
    rewards: Mapping[str, float | None],
) -> RolloutSample:
    """One row: one path of a completion. Prompt [1, 2], completion [3, 4], logprobs [-.5, -.1], versions [7, 7] give
    ids [1, 2, 3, 4], mask [0, 0, 1, 1], logprobs [0, 0, -.5, -.1], versions [-1, -1, 7, 7]."""
    num_prompt = len(path.prompt_ids)
    teacher_logprobs, teacher_weight = taught.get(completion.sample_id(path), (None, 0.0))
    if teacher_logprobs is not None:
        teacher_logprobs = np.concatenate([np.zeros(num_prompt, np.float32), teacher_logprobs])
    return RolloutSample(
        group_id=group.group_id,
        rollout_id=completion.sample_id(path),
        token_ids=np.concatenate([path.prompt_ids, path.completion_ids]),
        loss_mask=np.concatenate([np.zeros(num_prompt, np.bool_), path.completion_mask]),
        sampler_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), path.logprobs]),
        policy_versions=np.concatenate([np.full(num_prompt, -1, np.int32), path.policy_versions]),
        advantage=advantage,
        rewards=rewards,
        reward=reward,
        truncated=completion.truncated,
        teacher_logprobs=teacher_logprobs,
        teacher_weight=teacher_weight,
        top=path.top,
        temperature=group.prompt.temperature,
    )
