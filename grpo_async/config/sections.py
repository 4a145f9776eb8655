"""The sections of an experiment that have no file of their own, in the order of the data path.

The docstring under a field is its help text and goes into the JSON schema; rules that span sections stand in `experiment`.
Elsewhere: `data_sections` (data, evaluation), `interaction_sections` (tools, environments, rollout function, rewards),
`server_sections` (inference, weights).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_async.config.base import Dtype, StrictModel


class RunSection(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its directory is `run.dir`/`run.name`."""
    dir: Path = Path("runs")
    """Where run directories are made."""
    seed: int = Field(default=0, ge=0)
    """Seeds data order, sampling and initialisation of everything random."""


class ModelSection(StrictModel):
    path: str
    """Folder of a Hugging Face model (config, safetensors, tokenizer), or a hub name where the machine reaches a hub."""
    dtype: Dtype = "float32"
    """dtype of the trainer's master weights and optimizer state."""
    compute_dtype: Dtype | None = None
    """dtype of forward and backward; null = `model.dtype`. bfloat16 on GPUs."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""
    chat_template: Path | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `{enable_thinking: false}`."""
    end_of_turn_tokens: list[str] = Field(default_factory=list)
    """Tokens that end the policy's turn, beside the tokenizer's eos and those of the model's generation_config.json."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in trainer and server. Only for models whose code you have read."""


class RolloutSection(StrictModel):
    group_size: int = Field(default=8, ge=2)
    """Completions per prompt; advantages are taken within a group."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups that one optimizer step consumes."""
    max_staleness: int = Field(default=1, ge=0)
    """Oldest policy that may be trained on, in optimizer steps behind the trainer. 0 = synchronous GRPO.
    Also paces generation: at most (max_staleness + 1) x groups_per_step groups are started ahead of the trainer."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Token budget of one completion, over all its turns, tool results included."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that the policy may generate in one turn; null = what is left of the completion."""
    max_turns: int = Field(default=16, ge=1)
    """Most turns of the policy in one rollout. One that calls a tool in its last turn counts as truncated."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature; the trainer's logprobs use the same."""
    max_in_flight: int = Field(default=256, ge=1)
    """Most rollouts in progress at once: generating, or waiting for a tool or an environment."""
    zero_variance: Literal["skip", "resample", "train"] = "skip"
    """A group whose rewards are all equal teaches nothing. skip: not trained, the step goes on with the other groups.
    resample: another prompt takes its place (dynamic sampling, DAPO). train: trained with advantage 0, which dilutes the step."""
    overlong: Literal["train", "mask"] = "train"
    """What becomes of truncated completions. train: like any other. mask: they count in the group's mean but are not trained
    (overlong filtering, DAPO, arXiv 2503.14476)."""
    max_rounds_without_signal: int = Field(default=20, ge=1)
    """Stop the run when this many times groups_per_step groups in a row had all-equal rewards: there is nothing to learn."""
    advantage_scale: Literal["group", "none"] = "group"
    """group: (r - mean) / (std + 1e-4) within the group. none: r - mean (Dr. GRPO, arXiv 2503.20783)."""
    rollout_timeout_s: float = Field(default=600.0, gt=0.0)
    """Wall time of one rollout; then it fails and its group goes on with the survivors."""
    shutdown_timeout_s: float = Field(default=10.0, gt=0.0)
    """Time the rollout thread has to end its tasks when the run stops."""


class ClippedLoss(StrictModel):
    type: Literal["clipped"] = "clipped"
    """PPO's clipped surrogate on token ratios against the sampler's logprobs (GRPO, arXiv 2402.03300)."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip: ratio >= 1 - epsilon."""
    epsilon_high: float = Field(default=0.28, gt=0.0)
    """Upper clip: ratio <= 1 + epsilon_high (clip-higher, DAPO, arXiv 2503.14476)."""
    reduction: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """dapo: sum / trained tokens of the whole optimizer step. grpo: mean over samples of the token mean.
    dr_grpo: sum / (samples x max_completion_tokens)."""


class OptimizerSection(StrictModel):
    lr: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at `min_lr_ratio` x lr at `training.max_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Floor of linear and cosine schedules."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this total norm over all ranks."""


class TrainingSection(StrictModel):
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    weight_sync_steps: int = Field(default=1, ge=1)
    """Push weights to the server every N optimizer steps."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens (padding included) that one forward holds on one rank."""
    row_tokens: int | None = Field(default=None, ge=8)
    """Samples are packed into rows of this many tokens; null = the longest sample of the step. Longer rows pad less but
    attend over a larger block mask."""
    pack: bool = True
    """false: one sample per row (for comparison; the loss is the same)."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Logits are computed for this many tokens at a time and never held for more."""
    queue_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest wait for samples without any progress of generation."""
    collective_timeout_s: float = Field(default=600.0, gt=0.0)
    """Deadline of one collective between trainer ranks."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Consecutive steps with a loss or gradient that is not finite (each is skipped) after which the run stops."""


class CheckpointSection(StrictModel):
    every_steps: int = Field(default=50, ge=1)
    """Save every N steps; a checkpoint is also written at the end and on SIGINT / SIGTERM."""
    keep_last: int = Field(default=2, ge=1)
    """Older checkpoints are removed."""


class TensorboardTracker(StrictModel):
    type: Literal["tensorboard"]
    """Event files in the run directory (extra `tensorboard`)."""


class WandbTracker(StrictModel):
    type: Literal["wandb"]
    """Weights & Biases (extra `wandb`)."""
    project: str
    """Name of the project."""
    entity: str | None = None
    """User or team; null = the default of the login."""
    mode: Literal["online", "offline"] = "online"
    """offline: written to the run directory, for `wandb sync` later."""


TrackerSection = Annotated[TensorboardTracker | WandbTracker, Field(discriminator="type")]


class LaunchSection(StrictModel):
    num_trainer_ranks: int = Field(default=1, ge=1)
    """Trainer processes under torchrun, one per GPU (or any number on CPU)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto = cuda where there is one."""
    trainer_threads: int = Field(default=1, ge=1)
    """CPU threads of each trainer rank."""
    stop_timeout_s: float = Field(default=60.0, gt=0.0)
    """Time the trainer has to checkpoint and end after SIGINT / SIGTERM; then it is killed."""
