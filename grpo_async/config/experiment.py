"""The experiment: all sections together. The rules that span them are in `config.rules`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from grpo_async.config import sections
from grpo_async.config.base import MAX_TOP_LOGPROBS, StrictModel
from grpo_async.config.rules import conflicts
from grpo_async.utils.text import duplicates

_BYTES_PER_S = 100_000_000
"""Speed at which a model is read from a network file system that several machines read at once."""


class ExperimentConfig(StrictModel):
    """One experiment."""

    run: sections.RunSection
    """Name and place of the run."""
    model: sections.ModelSection
    """The policy."""
    data: sections.DataSection
    """Where prompts come from."""
    rollout: sections.RolloutSection = sections.RolloutSection()
    """How completions are generated and how far generation may run ahead."""
    tools: list[sections.ToolSection] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_calling: sections.ToolCallingSection = sections.ToolCallingSection()
    """How tool calls are read and answered."""
    environments: dict[str, sections.EnvironmentSection] = Field(default_factory=dict)
    """Environments by name. With more than one, the data's column `environment` says which one a row uses."""
    rollout_function: sections.RolloutFunctionSection | None = None
    """Your own function in place of the built-in rollouts; `tools` and `environments` cannot be set with it."""
    rewards: list[sections.RewardSection] = Field(default_factory=list)
    """What is rewarded; several are added up by weight. May be left out where every environment has a `get_reward`,
    and with `distillation`."""
    inference: sections.InferenceSection = sections.InferenceSection()
    """The inference servers."""
    advantage: sections.AdvantageSection = sections.AdvantageSection()
    """How rewards become advantages."""
    distillation: sections.DistillationSection | None = None
    """Teachers whose log-probabilities the policy learns from, token by token (on-policy distillation)."""
    loss: sections.LossSection = sections.ClippedLoss()
    """The objective."""
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    """The optimizer."""
    training: sections.TrainingSection = sections.TrainingSection()
    """The training loop."""
    weights: sections.WeightsSection = sections.WeightsSection()
    """How weights travel to the servers."""
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    """When state is saved."""
    evaluation: sections.EvaluationSection | None = None
    """Evaluation on held-out prompts, before, during and after training."""
    record: sections.RecordSection = sections.RecordSection()
    """What the run records."""
    tracking: list[sections.TrackerSection] = Field(default_factory=list)
    """Where metrics go in addition to metrics.jsonl, with a table of held-out completions and the diagnosis of
    learning after each evaluation."""
    launch: sections.LaunchSection = sections.LaunchSection()
    """Processes."""

    @field_validator("rewards")
    @classmethod
    def _reward_names_are_unique(cls, rewards: list[sections.RewardSection]) -> list[sections.RewardSection]:
        names = [reward.name or reward.own_name for reward in rewards]
        if twice := duplicates(names):
            raise ValueError(f"the reward names {twice} are used more than once; give each a `name`")
        return rewards

    @model_validator(mode="after")
    def _give_large_models_time_to_start(self) -> Self:
        """See `inference.startup_timeout_s`."""
        folder = Path(self.model.path)
        if "startup_timeout_s" not in self.inference.model_fields_set and folder.is_dir():
            num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())
            timeout_s = self.inference.startup_timeout_s + num_bytes // _BYTES_PER_S
            # the model is frozen for its users; here it is still being made
            object.__setattr__(self, "inference", self.inference.model_copy(update={"startup_timeout_s": timeout_s}))
        return self

    @model_validator(mode="after")
    def _check_rules_across_sections(self) -> Self:
        problems = list(conflicts(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def sources(self) -> dict[str, sections.Source]:
        evaluated = None if self.evaluation is None else self.evaluation.data
        return self.data.sources | ({} if evaluated is None else sections.sources_at("evaluation.data", evaluated))

    @property
    def num_steps(self) -> int:
        """The most steps of the run; 0 until the rows that `training.epochs` goes by are counted (`with_rows`)."""
        return self.training.max_steps or 0

    @property
    def warmup_steps(self) -> int:
        """`optimizer.warmup_steps`, but no more than the steps of the run, once these are known."""
        return min(self.optimizer.warmup_steps, self.num_steps or self.optimizer.warmup_steps)

    def with_rows(self, num_rows: int) -> ExperimentConfig:
        """The config with `training.max_steps` set to the most steps that `training.epochs` over `num_rows` can take.

        Worked example: 2 epochs of 50 rows at 16 groups per step: 100 / 16 -> 7 steps, the last one of 4 groups.
        """
        num_prompts = self.training.num_prompts(num_rows)
        if num_prompts is None:
            return self
        steps = math.ceil(num_prompts / self.rollout.groups_per_step)
        training = self.training.model_copy(update={"max_steps": min(steps, self.training.max_steps or steps)})
        return self.model_copy(update={"training": training})

    @property
    def group_sizes(self) -> list[int]:
        return [source.group_size or self.rollout.group_size for source in self.data.sources.values()]

    @property
    def num_servers(self) -> int:
        """Servers: those of `inference.urls`, else the most of `inference.replicas`."""
        return len(self.inference.urls) or self.inference.max_replicas

    @property
    def max_in_flight_evaluation(self) -> int:
        """Evaluation rollouts in progress in addition to those of training; by default max(1, rollout.max_in_flight / 4)."""
        if self.evaluation is not None and self.evaluation.max_in_flight is not None:
            return self.evaluation.max_in_flight
        return max(1, self.rollout.most_in_flight // 4)

    @property
    def max_in_flight_evaluation_only(self) -> int:
        """Evaluation rollouts in progress while nothing else is generated; by default rollout.max_in_flight."""
        limit = None if self.evaluation is None else self.evaluation.max_in_flight
        return limit or self.rollout.most_in_flight

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the policy without its adapters. Not with `modules_to_save`: training overwrites those."""
        lora = self.model.lora
        return lora is not None and not lora.modules_to_save and self.loss.reference == "initial"

    @property
    def keeps_sampling_mask(self) -> bool:
        """Whether the loss sees the policy cut to the tokens that the sampler kept, so that ratios are exact under `top_k`, with
        `top_p`, `min_p` or `structured_outputs`: servers report the likeliest tokens then."""
        rollout, loss = self.rollout, self.loss
        compares_once = loss.proximal != "recomputed" or self.training.num_updates == 1
        reports_all = (
            self.rollout_function is None and rollout.repetition_penalty == 1.0 and loss.score_centering is None
        )
        return 0 < rollout.top_k <= MAX_TOP_LOGPROBS and reports_all and compares_once

    @property
    def num_top_logprobs(self) -> int:
        """The likeliest tokens at each position that the trainer needs from the servers."""
        return self.rollout.top_k if self.keeps_sampling_mask else self.loss.score_centering or 0

    @property
    def corrects_sampling(self) -> bool:
        """Whether tokens that were sampled from a part of the policy's distribution are trained as what they are."""
        return self.keeps_sampling_mask or self.loss.corrects_sampling

    @property
    def adapter_slots(self) -> int:
        """Adapters that a server has at a time with `model.lora.push: adapter_swap`: the newest, and those of requests that are
        fresh enough to be trained on, while another arrives. Each takes memory, so at most 8; 0 without swaps."""
        swaps = self.model.lora is not None and self.model.lora.push == "adapter_swap"
        return min(self.rollout.max_staleness + 3, 8) if swaps else 0

    @property
    def has_own_rollouts(self) -> bool:
        """Whether a rollout function or an agent makes whole rollouts, which may bring columns that the data lacks."""
        return self.rollout_function is not None or self.rollout.agent is not None

    def templates_text(self, source: sections.Source) -> bool:
        """Whether prompts of plain text of this source go through the chat template, as messages always do."""
        has_tools = bool(self.tools or self.environments or self.rollout.agent is not None)
        return has_tools or source.system_prompt is not None

    @property
    def run_path(self) -> Path:
        return self.run.dir / self.run.name

    def for_devices(self, *, trains_on_gpu: bool, serves_on_gpu: bool) -> ExperimentConfig:
        """The config with null filled in for what depends on devices: `model.compute_dtype`, `inference.dtype` and
        `training.logprob_chunk_tokens`."""
        compute = self.model.compute_dtype or ("bfloat16" if trains_on_gpu else "float32")
        served = self.inference.dtype or ("bfloat16" if serves_on_gpu else "float32")
        chunk = self.training.logprob_chunk_tokens or (4096 if trains_on_gpu else 1024)
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"compute_dtype": compute}),
                "inference": self.inference.model_copy(update={"dtype": served}),
                "training": self.training.model_copy(update={"logprob_chunk_tokens": chunk}),
            }
        )

    @property
    def precision(self) -> str:
        """The dtypes in words: "float32 master weights, computed and served in bfloat16, logits in float32"."""
        compute, served = self.model.resolved_compute_dtype, self.inference.resolved_dtype
        both = f"computed and served in {served}" if compute == served else f"computed in {compute}, served in {served}"
        head = f", logits in {self.model.head_dtype}" if self.model.head_dtype is not None else ""
        return f"{self.model.dtype} master weights, {both}{head}"
