"""`grpo-async replay`: a stored step once more, from its checkpoint and its rollouts, as it was and under other settings.

    checkpoint of step K - 1 + groups of step K in the rollout store -> advantages -> pack -> one training step that is not kept

Nothing is generated and nothing of the run is written. One process takes all ranks' samples, so sums are in another order."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_async.batching.pack import MicroBatch
from grpo_async.chat.renderer import load_renderer
from grpo_async.config import ExperimentConfig
from grpo_async.config.diff import differences
from grpo_async.config.loader import load_config
from grpo_async.data import first_rows, make_prompt
from grpo_async.errors import ConfigError, RunError
from grpo_async.findings.history import read_metrics
from grpo_async.processes.assignment import Assignment
from grpo_async.records import (
    AGENT_REWARD,
    FloatArray,
    GroupStatus,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    ScoredGroup,
    TaggedMessage,
    TurnRecord,
)
from grpo_async.records import FinishReason as Finish
from grpo_async.rewards import TrainerState, load_rewards
from grpo_async.rollout.components import load_components
from grpo_async.run_directory import RunDir
from grpo_async.scoring.advantages import Advantages, combine_rewards
from grpo_async.scoring.scorer import Scorer
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.table import RolloutTable
from grpo_async.trainer.context import build_context, join_process_group
from grpo_async.trainer.packed_step import divide_step
from grpo_async.training.checkpoint import load_state
from grpo_async.training.fingerprints import check_fingerprints, run_fingerprints
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import Objective, ObjectiveOutput
from grpo_async.training.optimizer import lr_factors
from grpo_async.training.parameters import whole_of
from grpo_async.training.ranks import StepCommand
from grpo_async.utils.seeds import seed_of

_MAY_DIFFER = (
    "loss", "advantage", "rewards", "optimizer", "training.minibatches", "training.num_iterations", "rollout.overlong",
)  # fmt: skip
_SAME = 1e-3  # relative difference of two slopes that no one needs to see
_TRAINED = (GroupStatus.TRAINED, GroupStatus.FILTERED, GroupStatus.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a step came to. `gradient`: of the first update, clipped, flat. `slopes`: by rollout id, the derivative of the
    loss of the update by the log-probability of each trained token, in the first pass."""

    metrics: Mapping[str, float]
    gradient: torch.Tensor
    slopes: Mapping[str, FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A step as the run recorded it, as it was replayed with the run's own settings, and with others (None: there are none)."""

    config: ExperimentConfig
    recorded: Mapping[str, float]
    own: Replayed
    other: Replayed | None
    changes: Sequence[str]
    groups: Sequence[GroupRow]

    @property
    def cosine(self) -> float | None:
        """Of the angle between both gradients."""
        if self.other is None:
            return None
        a, b = self.own.gradient.double(), self.other.gradient.double()
        return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))

    def tokens(self, limit: int) -> list[tuple[str, int, int, float, float]]:
        """Those on which both differ most: rollout, number among its trained tokens, token id, its slope with the run's own
        settings and with the others."""
        paths = {path.rollout_id: path for group in self.groups for rollout in group.rollouts for path in rollout.paths}
        other = {} if self.other is None else self.other.slopes
        found = []
        for rollout in self.own.slopes.keys() | other.keys():
            both = [slopes.get(rollout) for slopes in (self.own.slopes, other)]
            size = max(len(each) for each in both if each is not None)
            a, b = (np.zeros(size, np.float32) if each is None else each for each in both)
            if np.allclose(a, b, rtol=_SAME, atol=0.0):
                continue
            ids = np.array(paths[rollout].completion_ids)[np.array(paths[rollout].mask, np.bool_)]
            most = np.argsort(-np.abs(a - b))[:limit].tolist()
            found += [(rollout, at, int(ids[at]), float(a[at]), float(b[at])) for at in most]
        return sorted(found, key=lambda token: -abs(token[3] - token[4]))[:limit]


def replay(run: RunDir, step: int, overrides: Sequence[str] = ()) -> Comparison:
    """Replay a step of a run, on a GPU if there is one.

    Raises:
        ConfigError: the run lacks the step, its checkpoint or its rollouts, or a setting is none of a step's computation.
    """
    own = load_config(run.config)
    other = load_config(run.config, overrides)
    steps = {int(row["step"]): row for row in read_metrics(run, [])}
    _check(run, step, own, other, steps)
    recorded = steps[step]
    with RolloutTable(run.rollouts) as table:
        rows = [row for row in table.groups_of_step(step) if row.status in _TRAINED]
    rows.sort(key=lambda row: row.group_id)
    groups = _as_trained(rows, own)
    num_tokens = sum(sample.num_trained_tokens for group in groups for sample in group.samples)
    if num_tokens != recorded["num_tokens"]:
        raise ConfigError(
            f"step {step}: of its {recorded['num_tokens']:.0f} trained tokens {run.rollouts} has {num_tokens}; "
            "the step cannot be replayed (record.rollouts keeps a part of them only, or they were removed)"
        )
    changes = [str(each) for each in differences([own.model_dump(mode="json"), other.model_dump(mode="json")])]
    others = groups
    if (own.advantage, own.rewards, own.rollout) != (other.advantage, other.rewards, other.rollout):
        unweighted = [[each.model_dump(exclude={"weight"}) for each in config.rewards] for config in (own, other)]
        given = load_components(other).reward_weights  # rewards that do not come from functions
        parts = None if unweighted[0] == unweighted[1] else _rewarded(rows, other, step, given)
        others = _rescored(rows, other, given, parts)
    with _alone(run, own) as assignment:
        mine = _train(assignment, own, groups, step)
        theirs = _train(assignment, other, others, step) if changes else None
    return Comparison(config=own, recorded=recorded, own=mine, other=theirs, changes=changes, groups=rows)


def _check(run: RunDir, step: int, own: ExperimentConfig, other: ExperimentConfig, trained: Container[int]) -> None:
    known = [each + 1 for each in (0, *run.checkpoint_steps()) if each + 1 in trained]
    if step not in known:
        raise ConfigError(
            f"step {step} cannot be replayed: {run.root} has no such step, or no checkpoint of the step before it; the steps "
            f"that can be: {', '.join(map(str, known)) or 'none'} (checkpoint.every_steps, keep_last and keep_every decide)"
        )
    for each in differences([own.model_dump(mode="json"), other.model_dump(mode="json")]):
        if not any(section in _MAY_DIFFER for section in (each.path, each.path.partition(".")[0])):
            raise ConfigError(
                f"--set {each.path}: a replay can change {', '.join(_MAY_DIFFER)}, which decide what a step computes from its "
                "rollouts"
            )
    for config in (own, other):
        if config.num_top_logprobs or config.distillation is not None:
            raise ConfigError(
                "the rollout store has neither the sampler's likeliest tokens nor the teachers' log-probabilities, so "
                "loss.score_centering, the mask of rollout.top_k and distillation cannot be replayed"
            )


def _scored(row: GroupRow, config: ExperimentConfig) -> ScoredGroup:
    """The group as it was scored, with all samples that may be trained and the advantages that were stored."""
    kept = [each for each in row.rollouts if each.status.is_trainable and each.num_tokens > 0]
    sources, label = config.data.sources.values(), row.columns.get("source_label")
    temperature = next((each.temperature for each in sources if each.resolved_label == label), None)
    prompt = Prompt(prompt_id=row.group_id, messages=row.messages, temperature=temperature)
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, completions=[_completion(each) for each in kept]),
        samples=[
            _sample(row, each, path, temperature)
            for each in kept
            if config.rollout.overlong == "train" or not each.truncated
            for path in each.paths
            if any(path.mask)
        ],
        rewards=[each.reward for each in kept],
        reward_parts=[each.rewards for each in kept],
    )


def _completion(
    rollout: RolloutRow, *, ids: Sequence[int] | None = None, messages: Sequence[TaggedMessage] = ()
) -> RolloutCompletion:
    """As much of it as advantages look at: its id, and how many tokens were sampled. `ids`, `messages`: what rewards look at."""
    tokens = np.array(ids, np.int32) if ids is not None else np.zeros(rollout.num_tokens, np.int32)
    turn = TurnRecord(
        output_ids=tokens,
        output_logprobs=np.zeros(len(tokens), np.float32),
        policy_versions=np.zeros(len(tokens), np.int32),
        finish_reason=Finish.STOP,
        messages=messages,
    )
    return RolloutCompletion(rollout_id=rollout.rollout_id, prompt_ids=tokens[:0], turns=[turn], status=rollout.status)


def _sample(row: GroupRow, rollout: RolloutRow, path: RolloutRow, temperature: float | None) -> RolloutSample:
    num_prompt, mask = len(path.prompt_ids), np.array(path.mask, np.bool_)
    before = np.zeros(num_prompt, np.int32)
    return RolloutSample(
        group_id=row.group_id,
        rollout_id=path.rollout_id,
        token_ids=np.concatenate([path.prompt_ids, path.completion_ids]),
        loss_mask=np.concatenate([before.astype(np.bool_), mask]),
        sampler_logprobs=np.concatenate([before, [value or 0.0 for value in path.logprobs]]),
        policy_versions=np.concatenate([before - 1, path.versions]),
        advantage=path.advantage or 0.0,
        rewards=path.rewards,
        reward=path.reward,
        truncated=rollout.truncated,
        temperature=temperature,
    )


def _as_trained(rows: Sequence[GroupRow], config: ExperimentConfig) -> list[ScoredGroup]:
    """The groups as the run trained them: those that were filtered have no samples."""
    groups = [_scored(row, config) for row in rows]
    is_filtered = [row.status is GroupStatus.FILTERED for row in rows]
    return [replace(g, samples=[]) if out else g for g, out in zip(groups, is_filtered, strict=True)]


def _rewarded(
    rows: Sequence[GroupRow], config: ExperimentConfig, step: int, given: Mapping[str, float]
) -> list[Sequence[Mapping[str, float | None]]]:
    """The rewards of each trainable rollout of each group, by other functions. Those in `given`, of environments and agents,
    are the stored ones."""
    renderer = load_renderer(config)
    sources = {source.resolved_label: source for source in config.data.sources.values()}
    prompts = {
        label: make_prompt(first_rows(source, 1, needs_prompt=False)[0], 0, source.system_prompt)
        for label, source in sources.items()
    }
    functions = load_rewards(config.rewards, opened_by_template=renderer.thinking_is_open)
    scorer = Scorer(
        functions,
        advantage=config.advantage,
        train_zero_variance=False,
        environment_weights=given,
        state=TrainerState(global_step=step - 1, max_steps=config.num_steps),
    )

    def group_of(row: GroupRow) -> RolloutGroup:
        kept = [each for each in row.rollouts if each.status.is_trainable and each.num_tokens > 0]
        columns = {name: value for name, value in row.columns.items() if name != "source_label"}
        label = row.columns.get("source_label", next(iter(sources)))
        prompt = replace(
            prompts[label],
            prompt_id=row.prompt_id,
            messages=row.messages,
            columns=columns,
            rewards=sources[label].rewards,
        )
        return RolloutGroup(
            prompt=prompt,
            completions=[
                replace(
                    _completion(each, ids=each.completion_ids, messages=each.messages),
                    prompt_messages=each.reset_messages,
                    environment_rewards={name: each.rewards.get(name) for name in given},
                    reward_columns=each.extra,
                )
                for each in kept
            ],
        )

    async def score_all() -> list[Sequence[Mapping[str, float | None]]]:
        return [(await scorer.score(group_of(row), is_trained=False)).reward_parts for row in rows]

    try:
        return asyncio.run(score_all())
    finally:
        for function in functions:
            function.close()


def _rescored(
    rows: Sequence[GroupRow],
    config: ExperimentConfig,
    given: Mapping[str, float],
    parts: Sequence[Sequence[Mapping[str, float | None]]] | None = None,
) -> list[ScoredGroup]:
    """The groups as they would have been trained: scored anew, and without samples where that leaves no signal. With
    `zero_variance: resample` another group took the place of one that was filtered, which stays out. `parts`: their rewards; None:
    those that were stored."""
    weights = {each.name or each.own_name: each.weight for each in config.rewards} | dict(given)
    advantages, changed = Advantages(config.advantage, weights), []
    zero_variance = config.rollout.zero_variance
    for number, row in enumerate(rows):
        group = _scored(row, config)
        stored = group.reward_parts
        if parts is not None:
            group = replace(group, reward_parts=parts[number])
        rewards = combine_rewards(group.reward_parts, weights)
        indexes = {each.rollout_id: index for index, each in enumerate(group.group.completions)}
        of_group = advantages.of_group(rewards, group.reward_parts)
        samples = []
        for sample in group.samples:
            index = indexes[sample.root_id]
            advantage = of_group[index]
            if sample.rewards != stored[index]:  # a branch with its own reward
                mine = {**group.reward_parts[index], AGENT_REWARD: sample.rewards.get(AGENT_REWARD)}
                sample = replace(sample, rewards=mine, reward=combine_rewards([mine], weights)[0])
                advantage = advantages.of_sample(sample, index, rewards, group.reward_parts)
            samples.append(replace(sample, advantage=advantage))
        has_signal = any(of_group) or any(sample.advantage for sample in samples)
        was_replaced = zero_variance == "resample" and row.status is GroupStatus.FILTERED
        if was_replaced or not (has_signal or zero_variance == "train"):
            samples = []
        changed.append(replace(group, rewards=rewards, samples=samples))
    return advantages.over_step(changed)


class _RecordingObjective(Objective):
    """Also keeps the slope of each token: the trainer asks once more for what a micro-batch came to, without gradient."""

    slopes: list[torch.Tensor]

    def __call__(self, output: PolicyOutput, batch: MicroBatch, **given: Any) -> ObjectiveOutput:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                leaf = output.logprobs.detach().requires_grad_()
                total = super().__call__(replace(output, logprobs=leaf), batch, **given).total
                self.slopes.append(torch.autograd.grad(total, leaf)[0].float().cpu())
        return super().__call__(output, batch, **given)


def _train(assignment: Assignment, config: ExperimentConfig, groups: Sequence[ScoredGroup], step: int) -> Replayed:
    renderer = load_renderer(config)
    context = build_context(assignment, config, tokenizer=renderer.tokenizer)
    if step > 1:
        state = load_state(assignment.run_dir, step - 1)
        check_fingerprints(state.fingerprints, run_fingerprints(config, renderer), step=step - 1)
        context.load(step - 1)
    context.objective = objective = _RecordingObjective(config.loss, num_updates=config.training.num_updates)
    objective.slopes = []
    gradients: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        if not gradients:
            parts = [whole_of(p.grad) for p in context.policy.parameters() if p.grad is not None]
            gradients.append(torch.cat([part.float().cpu().flatten() for part in parts]))

    context.optimizer.register_step_pre_hook(keep)
    packed, (command,) = divide_step(
        groups,
        config,
        world_size=1,
        pack=config.training.pack and not context.policy.one_sample_per_row,
        shares_prefixes=context.policy.shares_prefixes,
        trainer_version=step - 1,
        is_stored=lambda _: True,
    )
    context.pack(command)
    lr = config.optimizer.lr * lr_factors(config)(step - 1)
    result = context.step(StepCommand(lr=lr, seed=seed_of(config.run.seed, step, 0)), before_sync=lambda: None)
    if not gradients:
        raise RunError(f"step {step}: the loss or the gradient is not finite, so there is nothing to compare")
    slopes = torch.cat(objective.slopes)[: packed.tokens.capacity]  # of the first pass
    rows = torch.zeros(5, len(slopes))
    rows[0] = slopes
    by_rollout = packed.tokens.by_rollout([rows], [True] * len(packed.minibatches))
    return Replayed(
        metrics=result.metrics,
        gradient=gradients[0],
        slopes={name: np.asarray(stats.logprobs) for name, stats in by_rollout.items()},
    )


@contextmanager
def _alone(run: RunDir, config: ExperimentConfig) -> Iterator[Assignment]:
    """A process group of this process alone."""
    with TemporaryDirectory() as folder:
        assignment = Assignment(
            run_dir=run,
            attempt_dir=Path(folder),
            private_dir=Path(folder),
            on_gpu=torch.cuda.is_available() and config.launch.device != "cpu",
        )
        join_process_group(assignment, config)
        try:
            yield assignment
        finally:
            dist.destroy_process_group()
