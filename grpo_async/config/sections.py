"""The sections of an experiment that have no file of their own, in the order of the data path.

The docstring under a field is its help text and goes into the JSON schema; rules that span sections stand in `rules/`.
Elsewhere: `model_sections` (model, optimizer), `data_sections` (data, evaluation), `interaction_sections` (tools, environments,
rollout function, rewards), `loss_sections` (advantage, loss), `server_sections` (inference, weights), `record_sections` (record,
tracking), `launch_sections`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo_async.config.base import Count, FilePath, Seconds, Seed, StrictModel


class RunSection(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run; its directory is `run.dir`/`run.name`."""
    dir: FilePath = Path("runs")
    """Where run directories are made."""
    seed: Seed = 0
    """Seeds data order, sampling and initialisation of everything random."""


class RolloutSection(StrictModel):
    group_size: int = Field(default=8, ge=2, le=1_000_000)
    """Completions per prompt; advantages are taken within a group."""
    groups_per_step: Count = 16
    """Groups that one optimizer step consumes."""
    max_staleness: int = Field(default=1, ge=0, le=1_000_000)
    """Oldest policy that may be trained on, in optimizer steps behind the trainer. 0 = synchronous GRPO.
    Also paces generation: at most (max_staleness + 1) x groups_per_step groups are started ahead of the trainer."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Token budget of one completion, over all its turns, tool results included."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that the policy may generate in one turn; null = what is left of the completion."""
    max_turns: int = Field(default=16, ge=1)
    """Most turns of the policy in one rollout. One that calls a tool in its last turn counts as truncated."""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    """Sampling temperature; the trainer's logprobs use the same. vLLM raises anything below 0.01 to that."""
    max_in_flight: Count = 256
    """Most rollouts in progress at once: generating, or waiting for a tool or an environment."""
    zero_variance: Literal["skip", "resample", "train"] = "skip"
    """A group whose rewards are all equal teaches nothing. skip: not trained, the step goes on with the other groups.
    resample: another prompt takes its place (dynamic sampling, DAPO). train: trained with advantage 0, which dilutes the step."""
    overlong: Literal["train", "mask"] = "train"
    """What becomes of truncated completions. train: like any other. mask: they count in the group's mean but are not trained
    (overlong filtering, DAPO, arXiv 2503.14476)."""
    max_rounds_without_signal: int = Field(default=20, ge=1)
    """Stop the run when this many times groups_per_step groups in a row had all-equal rewards: there is nothing to learn."""
    rollout_timeout_s: Seconds = 600.0
    """Wall time of one rollout; then it fails and its group goes on with the survivors."""
    shutdown_timeout_s: Seconds = 10.0
    """Time the rollout thread has to end its tasks when the run stops."""


class TrainingSection(StrictModel):
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    minibatches: Count = 1
    """Optimizer updates that the samples of one step are divided into. The version still counts steps."""
    weight_sync_steps: int = Field(default=1, ge=1)
    """Push weights to the server every N optimizer steps."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens (padding included) that one forward holds on one rank."""
    pack: bool = True
    """The samples of a forward in one row, without padding. false: one sample per row, padded to the longest (for comparison; but
    for `bnpo`, which weighs by micro-batch, the loss is the same)."""
    share_prompts: bool = True
    """Compute a prompt once for the samples of a forward that begin with it, where that saves time; but for `bnpo`, which weighs by
    micro-batch, the loss is the same. Packed only, without model.router_aux_loss, and with the attention `mask` only: with varlen
    every sample has its own (the log says which it is)."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Logits are computed for this many tokens at a time and never held for more."""
    compile: bool = False
    """torch.compile the layers: slow first steps, then faster ones."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the machine's memory, and only what is computed on the GPU. Slow."""
    reshard_after_forward: bool = True
    """Give the gathered parameters of a layer back after its forward pass; false: less traffic, more memory."""
    queue_timeout_s: Seconds = 600.0
    """Longest wait for samples without any progress of generation."""
    collective_timeout_s: Seconds = 600.0
    """Deadline of one collective between trainer ranks."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Consecutive steps with a loss or gradient that is not finite (each is skipped) after which the run stops."""
    stall_timeout_s: Seconds = 1800.0
    """When neither a step is finished nor a token generated for so long, the run stops, saying what waits for what."""


class CheckpointSection(StrictModel):
    every_steps: int = Field(default=50, ge=1)
    """Save every N steps; a checkpoint is also written at the end and on SIGINT / SIGTERM."""
    keep_last: int = Field(default=2, ge=1)
    """Older checkpoints are removed, but for those of the next two settings."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this are never removed."""
    keep_best: int = Field(default=0, ge=0)
    """So many checkpoints with the best evaluation are kept, too."""
    best_metric: str = "reward"
    """Metric of the evaluation that `keep_best` goes by; larger is better."""
