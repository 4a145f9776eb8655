"""`grpo-async replay`: a stored step once more, from its checkpoint and its rollouts, as it was and under other settings.

    checkpoint of step K - 1 + groups of step K in the rollout store -> advantages -> pack -> one training step that is not kept

Nothing is generated and nothing of the run is written. One process takes all ranks' samples, so sums are in another order."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
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
    Branch,
    FloatArray,
    GroupStatus,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    ScoredGroup,
    TurnRecord,
)
from grpo_async.records import FinishReason as Finish
from grpo_async.rewards import RewardFunction, TrainerState, load_rewards
from grpo_async.rollout.components import load_components
from grpo_async.run_directory import RunDir
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
    groups = _scored(rows, own, step, asks=False)
    num_tokens = sum(sample.num_trained_tokens for group in groups for sample in group.samples)
    if num_tokens != recorded["num_tokens"]:
        raise ConfigError(
            f"step {step}: of its {recorded['num_tokens']:.0f} trained tokens {run.rollouts} has {num_tokens}; "
            "the step cannot be replayed (record.rollouts keeps a part of them only, or they were removed)"
        )
    changes = [str(each) for each in differences([own.model_dump(mode="json"), other.model_dump(mode="json")])]
    others = groups
    if (own.advantage, own.rewards, own.rollout) != (other.advantage, other.rewards, other.rollout):
        functions = [[each.model_dump(exclude={"weight"}) for each in config.rewards] for config in (own, other)]
        others = _scored(rows, other, step, asks=functions[0] != functions[1])
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


def _scored(rows: Sequence[GroupRow], config: ExperimentConfig, step: int, *, asks: bool) -> list[ScoredGroup]:
    """The groups as a step with these settings trains them. With `zero_variance: resample` another group took the place of one
    that was filtered, which stays out. `asks`: call the reward functions; otherwise the stored rewards are taken."""
    given = load_components(config).reward_weights  # of rewards that do not come from functions
    functions: Sequence[RewardFunction] = ()
    sources = {source.resolved_label: source for source in config.data.sources.values()}
    prompts = {label: Prompt(prompt_id=0, messages=(), temperature=each.temperature) for label, each in sources.items()}
    if asks:
        functions = load_rewards(config.rewards, opened_by_template=load_renderer(config).thinking_is_open)
        for label, source in sources.items():
            first = make_prompt(first_rows(source, 1, needs_prompt=False)[0], 0, source.system_prompt)
            prompts[label] = replace(prompts[label], is_conversational=first.is_conversational, rewards=source.rewards)
    else:
        given = {each.name or each.own_name: each.weight for each in config.rewards} | dict(given)
    scorer = Scorer(
        functions,
        advantage=config.advantage,
        train_zero_variance=config.rollout.zero_variance == "train",
        train_truncated=config.rollout.overlong == "train",
        environment_weights=given,
        state=TrainerState(global_step=step - 1, max_steps=config.num_steps),
    )

    async def score_all() -> list[ScoredGroup]:
        scored = []
        for row in rows:
            label = row.columns.get("source_label", next(iter(sources)))
            columns = {name: value for name, value in row.columns.items() if name != "source_label"}
            prompt = replace(prompts[label], prompt_id=row.group_id, messages=row.messages, columns=columns)
            group = RolloutGroup(prompt=prompt, completions=[_completion(rollout, given) for rollout in row.rollouts])
            was_replaced = config.rollout.zero_variance == "resample" and row.status is GroupStatus.FILTERED
            if group.trainable:
                scored.append(await scorer.score(group, is_trained=not was_replaced))
        return scored

    try:
        return scorer.advantages.over_step(asyncio.run(score_all()))
    finally:
        for function in functions:
            function.close()


def _completion(rollout: RolloutRow, given: Container[str]) -> RolloutCompletion:
    """As it was scored. `given`: names of the rewards that are taken from the store."""
    return RolloutCompletion(
        rollout_id=rollout.rollout_id,
        prompt_ids=np.array(rollout.prompt_ids, np.int32),
        turns=_turns(rollout),
        status=rollout.status,
        prompt_messages=rollout.reset_messages,
        environment_rewards={name: value for name, value in rollout.rewards.items() if name in given},
        reward_columns=rollout.extra,
        branches=[
            Branch(
                name=path.rollout_id.partition(".")[2],
                parent=int((path.parent or "").partition(".b")[2] or 0),
                prompt_ids=np.array(path.prompt_ids, np.int32),
                turns=_turns(path),
                prompt_messages=path.reset_messages or (),
                reward=None if path.rewards == rollout.rewards else path.rewards.get(AGENT_REWARD),
            )
            for path in rollout.branches
        ],
    )


def _turns(path: RolloutRow) -> list[TurnRecord]:
    """A turn for each stretch of tokens that are trained, or that are not; the first has all messages and tool calls."""
    untrained = sum(turn.num_tokens for turn in path.turns) - sum(path.mask)  # sampled all the same
    turns: list[TurnRecord] = []
    for is_trained, stretch in groupby(range(len(path.mask)), key=lambda at: bool(path.mask[at])):
        tokens = list(stretch)
        sampled = tokens if is_trained else tokens[:untrained]
        untrained -= 0 if is_trained else len(sampled)
        turns.append(
            TurnRecord(
                output_ids=np.array([path.completion_ids[at] for at in sampled], np.int32),
                output_logprobs=np.array([path.logprobs[at] or 0.0 for at in sampled], np.float32),
                policy_versions=np.array([path.versions[at] for at in sampled], np.int32),
                finish_reason=Finish.STOP,
                is_trained=is_trained,
                tool_response_ids=np.array([path.completion_ids[at] for at in tokens[len(sampled) :]], np.int32),
                messages=() if turns else path.messages,
                tool_calls=() if turns else [call for turn in path.turns for call in turn.tool_calls],
            )
        )
    return turns


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
