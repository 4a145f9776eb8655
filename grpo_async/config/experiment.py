"""The experiment: all sections together, and the rules that span them, each with its reason."""

from __future__ import annotations

import ipaddress
import math
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from grpo_async.config.base import StrictModel
from grpo_async.config.data_sections import DataSection, EvaluationSection
from grpo_async.config.interaction_sections import (
    EnvironmentSection,
    RewardSection,
    RolloutFunctionSection,
    ToolCallingSection,
    ToolSection,
)
from grpo_async.config.sections import (
    CheckpointSection,
    ClippedLoss,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    TrackerSection,
    TrainingSection,
)
from grpo_async.config.server_sections import InferenceSection, WeightsSection

_SET_BY_US = {
    "--host": "see inference.host",
    "--port": "train chooses a free one, serve-vllm takes --port",
    "--model": "see model.path",
    "--dtype": "see inference.dtype",
    "--max-model-len": "see inference.max_model_len",
    "--tensor-parallel-size": "see inference.vllm.tensor_parallel_size",
    "--gpu-memory-utilization": "see inference.vllm.gpu_memory_utilization",
    "--trust-remote-code": "see model.trust_remote_code",
    "--ssl-certfile": "see inference.tls",
    "--ssl-keyfile": "see inference.tls",
    "--middleware": "it asks for the token",
    "--api-key": "the token of the run guards every path",
    "--worker-extension-cls": "weight updates need it",
    "--weight-transfer-config": "see weights.transport",
    "--api-server-count": "one process keeps the policy version",
    "--data-parallel-size": "see inference.replicas",
    "--logprobs-mode": "the loss needs those of the distribution that was sampled from",
}


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may be any machine


class ExperimentConfig(StrictModel):
    """One experiment."""

    run: RunSection
    """Name and place of the run."""
    model: ModelSection
    """The policy."""
    data: DataSection
    """Where prompts come from."""
    rollout: RolloutSection = RolloutSection()
    """How completions are generated and how far generation may run ahead."""
    tools: list[ToolSection] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_calling: ToolCallingSection = ToolCallingSection()
    """How tool calls are read and answered."""
    environments: dict[str, EnvironmentSection] = Field(default_factory=dict)
    """Environments by name. With more than one, the data's column `environment` says which one a row uses."""
    rollout_function: RolloutFunctionSection | None = None
    """Your own rollouts instead of ours: no tools, no environments, any engine."""
    rewards: list[RewardSection] = Field(default_factory=list)
    """What is rewarded; several are added up by weight. May be left out where every environment has a `get_reward`."""
    inference: InferenceSection = InferenceSection()
    """The inference servers."""
    loss: ClippedLoss = ClippedLoss()
    """The objective."""
    optimizer: OptimizerSection = OptimizerSection()
    """How parameters move."""
    training: TrainingSection = TrainingSection()
    """The training loop."""
    weights: WeightsSection = WeightsSection()
    """How weights travel to the servers."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When state is saved."""
    evaluation: EvaluationSection | None = None
    """Greedy evaluation on held-out prompts before and after training."""
    tracking: list[TrackerSection] = Field(default_factory=list)
    """Where metrics go beside metrics.jsonl."""
    launch: LaunchSection = LaunchSection()
    """Processes."""

    @field_validator("rewards")
    @classmethod
    def _reward_names_are_unique(cls, rewards: list[RewardSection]) -> list[RewardSection]:
        names = [reward.name or reward.function.rpartition(":")[2] for reward in rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the reward names {twice} are used more than once; give each a `name`")
        return rewards

    @model_validator(mode="after")
    def _check_rules_across_sections(self) -> Self:
        problems = list(self._conflicts())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _conflicts(self) -> list[str]:
        rollout, training, inference = self.rollout, self.training, self.inference
        found = []
        if not self.rewards and not self.environments:
            found.append("rewards: there are none; name at least one, or an environment that has a `get_reward`")
        if self.rollout_function is not None and (self.tools or self.environments):
            found.append(
                "rollout_function.function: with one, `tools` and `environments` are not used (it makes the whole rollout); "
                "remove one or the other"
            )
        if self.evaluation is not None and self.evaluation.data is None and self.data.held_out is None:
            found.append(
                "evaluation.data: there is none; name a source, or keep rows of data.train back with data.held_out: 0.05"
            )
        if self.evaluation is not None and self.evaluation.data is not None and self.data.held_out is not None:
            found.append(
                "data.held_out: keeps rows back for evaluation, but evaluation.data names others; remove one of the two"
            )
        for name, environment in self.environments.items():
            if environment.max_instances is not None and environment.max_instances < rollout.group_size:
                found.append(
                    f"environments.{name}.max_instances: {environment.max_instances} is less than rollout.group_size: "
                    f"{rollout.group_size}; a group needs an instance for each of its rollouts"
                )
        if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_completion_tokens:
            found.append(
                f"rollout.max_turn_tokens: {rollout.max_turn_tokens} is more than rollout.max_completion_tokens: "
                f"{rollout.max_completion_tokens}, the budget of all turns together"
            )
        limits = {f"tools.{index}.timeout_s": tool.timeout_s for index, tool in enumerate(self.tools)}
        limits |= {f"environments.{name}.timeout_s": section.timeout_s for name, section in self.environments.items()}
        if self.rollout_function is not None:
            limits["rollout_function.timeout_s"] = self.rollout_function.timeout_s
        for path, limit_s in limits.items():
            if limit_s >= training.queue_timeout_s:
                found.append(
                    f"{path}: {limit_s:g} is not less than training.queue_timeout_s: {training.queue_timeout_s:g}; the trainer "
                    "would give up while such a call, during which no token comes, is within its limit"
                )
        if training.weight_sync_steps > rollout.max_staleness + 1:
            found.append(
                f"rollout.max_staleness: {rollout.max_staleness} with training.weight_sync_steps: "
                f"{training.weight_sync_steps} would drop every sample as stale; the server is up to "
                f"{training.weight_sync_steps - 1} steps behind, so set max_staleness >= {training.weight_sync_steps - 1}"
            )
        if rollout.max_completion_tokens >= inference.max_model_len:
            found.append(
                f"rollout.max_completion_tokens: {rollout.max_completion_tokens} leaves no room for a prompt in "
                f"inference.max_model_len: {inference.max_model_len}; raise the latter or lower the former"
            )
        if training.row_tokens is not None and training.row_tokens > training.micro_batch_tokens:
            found.append(
                f"training.row_tokens: {training.row_tokens} is more than training.micro_batch_tokens: "
                f"{training.micro_batch_tokens}; a row must fit into a micro-batch"
            )
        if training.micro_batch_tokens < inference.max_model_len:
            found.append(
                f"training.micro_batch_tokens: {training.micro_batch_tokens} is less than inference.max_model_len: "
                f"{inference.max_model_len}; the longest possible sample would not fit into a micro-batch"
            )
        if self.launch.num_trainer_ranks > rollout.groups_per_step * rollout.group_size:
            found.append(
                f"launch.num_trainer_ranks: {self.launch.num_trainer_ranks} is more than the samples of a step "
                f"({rollout.groups_per_step} groups x {rollout.group_size})"
            )
        if self.optimizer.warmup_steps > training.max_steps:
            found.append(
                f"optimizer.warmup_steps: {self.optimizer.warmup_steps} is more than training.max_steps: {training.max_steps}; "
                "set both for a short run"
            )
        if inference.urls and inference.replicas > 1:
            found.append(
                f"inference.replicas: {inference.replicas} servers would be spawned, but inference.urls names servers that run "
                "already; remove one of the two"
            )
        remote = [url for url in inference.urls if not _is_loopback(url)]
        if remote and _is_loopback(f"//{self.weights.host}"):
            found.append(
                f"weights.host: {self.weights.host} cannot be reached from {remote[0]} (inference.urls); set the address of the "
                "trainer's machine in the network that it shares with the servers"
            )
        if inference.vllm.sleep_while_training and rollout.max_staleness > 0:
            found.append(
                f"inference.vllm.sleep_while_training: with rollout.max_staleness: {rollout.max_staleness} the server generates "
                "while a step trains; set max_staleness: 0, or let the server stay awake"
            )
        for argument in inference.vllm.extra_args:
            name = argument.split("=", 1)[0]
            if name in _SET_BY_US:
                found.append(f"inference.vllm.extra_args: {name} is set by grpo-async; {_SET_BY_US[name]}")
        return found

    @property
    def max_groups_ahead(self) -> int:
        """(max_staleness + 1) x groups_per_step: most groups started and not yet trained (design, invariant 3)."""
        return (self.rollout.max_staleness + 1) * self.rollout.groups_per_step

    @property
    def connection_limit(self) -> int:
        """HTTP connections to the server: every completion in flight has its own, plus some for control."""
        return self.rollout.max_in_flight + 8

    @property
    def run_path(self) -> Path:
        return self.run.dir / self.run.name

    def lr_factor(self, step: int) -> float:
        """Factor on `optimizer.lr` at 0-based optimizer step `step`.

        Warm-up: (step + 1) / warmup_steps. After it, with progress p in [0, 1] to max_steps and floor f = min_lr_ratio:
        constant 1; linear 1 - (1 - f) p; cosine f + (1 - f) (1 + cos(pi p)) / 2.
        """
        optimizer = self.optimizer
        if step < optimizer.warmup_steps:
            return (step + 1) / optimizer.warmup_steps
        progress = min(1.0, (step - optimizer.warmup_steps) / max(1, self.training.max_steps - optimizer.warmup_steps))
        floor = optimizer.min_lr_ratio
        if optimizer.schedule == "linear":
            return 1.0 - (1.0 - floor) * progress
        if optimizer.schedule == "cosine":
            return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
        return 1.0
