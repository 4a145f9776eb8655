"""The sections of an experiment that have no file of their own, in the order of the data path.

The docstring under a field is its help text and goes into the JSON schema; rules that span sections stand in `rules`.
Elsewhere: `model_sections` (model, optimizer), `data_sections` (data, evaluation), `interaction_sections` (tools, environments,
rollout function, agent, rewards), `loss_sections` (advantage, loss), `server_sections` (inference, weights), `record_sections`
(record, tracking).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from grpo_async.config.base import (
    Count,
    FilePath,
    MinP,
    Processes,
    RepetitionPenalty,
    Seconds,
    Seed,
    StopStrings,
    StrictModel,
    StructuredOutputs,
    TopK,
    TopP,
)
from grpo_async.config.interaction_sections import AgentSection

_Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:+@-]+$")]
_Option = Annotated[str, StringConstraints(pattern=r"^--?[A-Za-z][^\n]*$")]
_Line = Annotated[str, StringConstraints(pattern=r"^[^\n]*$")]
_DEFAULT_STEPS = 100


RESHAPING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "structured_outputs": None}
"""Settings of `rollout` that change the distribution which tokens are sampled from, and the values with which they do not."""


class RunSection(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run; its directory is `run.dir`/`run.name`."""
    dir: FilePath = Path("runs")
    """Where run directories are made."""
    seed: Seed = 0
    """Seeds data order, sampling and initialization of everything random."""


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
    """Most turns of the policy in one rollout. One that calls a tool in its last turn counts as truncated. Of an agent: most of its
    calls of the model, with retries and those of sub-agents."""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    """Sampling temperature; the trainer's logprobs use the same. vLLM raises anything below 0.01 to that."""
    top_p: TopP = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to this (nucleus sampling, arXiv 1904.09751); 1 = all.
    This and the next four sample from another distribution than the policy's: they need `loss.proximal: recomputed` with
    `loss.correction: {level: token}`."""
    top_k: TopK = 0
    """Sample from this many of the most likely tokens; 0 = all (-1 in vLLM's API)."""
    min_p: MinP = 0.0
    """Sample from tokens that are at least this times as likely as the most likely one (arXiv 2407.01082); 0 = all."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Above 1 tokens that prompt or completion have already become less likely (arXiv 1909.05858); 1 = none."""
    structured_outputs: StructuredOutputs | None = None
    """Every turn of the policy is of this form; needs `inference.engine: vllm`. A turn that is interrupted (its server died, or a
    resume) starts over, because a grammar begins with the first token."""
    stop: StopStrings = Field(default_factory=list)
    """Texts that end a turn of the policy, such as ["\\nQ:"] for a base model that is shown examples; as vLLM's `stop`. The turn is
    whole, not truncated. All that was sampled is trained, the tokens of the text included; rewards and messages get what stands
    before it. A line feed needs double quotes in YAML."""
    max_in_flight: Count = 256
    """Most rollouts in progress at once: generating, or waiting for a tool or an environment."""
    zero_variance: Literal["skip", "resample", "train"] = "skip"
    """A group whose rewards are all equal teaches nothing. skip: not trained; the step uses the other groups.
    resample: another prompt takes its place (dynamic sampling, DAPO). train: trained with advantage 0, which dilutes the step."""
    overlong: Literal["train", "mask"] = "train"
    """What becomes of truncated completions. train: like any other. mask: they count in the group's mean but are not trained
    (overlong filtering, DAPO, arXiv 2503.14476)."""
    max_rounds_without_signal: int = Field(default=20, ge=1)
    """The run ends with an error when this many rounds of groups_per_step groups in a row had nothing to learn from: within each
    group all rewards were equal, or there were none."""
    rollout_timeout_s: Seconds = 600.0
    """Wall-clock limit of one rollout; past it the rollout fails and its group continues without it."""
    agent: AgentSection | None = None
    """Your own agent, which calls the model over HTTP, as the rollout: any framework, without `tools` or `environments`."""

    @property
    def reshaping(self) -> list[str]:
        """Names of the settings that make the sampling distribution differ from the policy's."""
        return [name for name, neutral in RESHAPING.items() if getattr(self, name) != neutral]


class TrainingSection(StrictModel):
    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the run; null = 100, or with `epochs` as many as they take."""
    epochs: float | None = Field(default=None, gt=0.0, le=1e6)
    """The run ends when every row of data.train has been used this many times (or at max_steps, if that comes first): ceil(epochs x
    rows) prompts are started, each once. A group that is filtered, stale or failed is not replaced; the ledger counts it. What
    is left for the last step may be fewer than rollout.groups_per_step groups. Schedules end with the steps that this takes when
    nothing is dropped."""
    minibatches: Count = 1
    """Optimizer updates that the samples of one step are divided into. The version still counts steps."""
    num_iterations: Count = 1
    """Passes over the samples of a step (mu in GRPO, arXiv 2402.03300), each with an update for every minibatch, at the same
    learning rate. Ratios are always taken against the policy before the first (`loss.proximal`). The version still counts steps."""
    weight_sync_steps: int = Field(default=1, ge=1)
    """Push weights to the server every N optimizer steps."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Most tokens (padding included) that one forward holds on one rank."""
    pack: bool = True
    """The samples of a forward in one row, without padding. false: one sample per row, padded to the longest (for comparison; but
    for `bnpo`, which weighs by micro-batch, the loss is the same)."""
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
    stall_timeout_s: Seconds = 1800.0
    """When neither a step is finished nor a token generated for so long, the run stops, saying what waits for what."""

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if self.max_steps is None and self.epochs is None:
            # the model is frozen for its users; here it is still being made
            object.__setattr__(self, "max_steps", _DEFAULT_STEPS)
        return self

    @property
    def num_updates(self) -> int:
        """In a step with enough groups: minibatches x num_iterations."""
        return self.minibatches * self.num_iterations

    def num_prompts(self, num_rows: int) -> int | None:
        """Prompts that a run of `epochs` over `num_rows` rows starts, ceil(epochs x num_rows); None: only `max_steps` ends it."""
        # 0.07 x 100 is 7.000000000000001
        return None if self.epochs is None else math.ceil(round(self.epochs * num_rows, 6))


class CheckpointSection(StrictModel):
    every_steps: int = Field(default=50, ge=1)
    """Save every N steps; a checkpoint is also written at the end and on SIGINT / SIGTERM."""
    keep_last: int = Field(default=2, ge=1)
    """Older checkpoints are removed, except those that the next two settings keep."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this are never removed."""
    keep_best: int = Field(default=0, ge=0)
    """How many more checkpoints to keep, those with the best evaluation."""
    best_metric: str = "reward"
    """Evaluation metric that `keep_best` ranks by; larger is better."""


class SlurmSection(StrictModel):
    """What `grpo-async launch slurm` writes into the batch script; everything is optional."""

    partition: _Word | None = None
    """`--partition`."""
    account: _Word | None = None
    """`--account`."""
    time: _Word | None = None
    """`--time`, such as 12:00:00. The run is signaled ahead of it, saves a checkpoint, and is requeued to continue."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=1024)
    """`--gpus-per-node`; null = what a training or a serving machine needs, whichever is more. 0: none are requested here
    (`options` may: --gres)."""
    options: list[_Option] = Field(default_factory=list)
    """Further `#SBATCH` options as they are, such as `--constraint=a100`; variables (${NAME}) are not replaced in them."""
    setup: list[_Line] = Field(default_factory=list)
    """Shell lines before anything is started, such as `module load cuda`. ${NAME} in them is a variable of the job, which its shell
    reads; it is not filled in when the script is written."""


class KubernetesSection(StrictModel):
    """What `grpo-async launch kubernetes` writes into the manifest."""

    image: str | None = Field(default=None, min_length=1)
    """Image with this package; required."""
    volume_claim: str | None = Field(default=None, min_length=1)
    """PersistentVolumeClaim (ReadWriteMany) that all machines mount, for `run.dir`, model and data; required."""
    mount_path: FilePath = Path("/workspace")
    """Where it is mounted; also the run's working directory."""


class NodesSection(StrictModel):
    """The machines of a run. On each of them the same command is started, `grpo-async train CONFIG`, with `run.dir` on a file
    system that they share. The scheduler, or
    --node-rank, says which machine it is: 0 leads, those that train come first."""

    train: int = Field(default=1, ge=1, le=65_536)
    """Machines that train."""
    infer: int = Field(default=0, ge=0, le=65_536)
    """Machines that serve, each with `inference.replicas` servers. 0: every machine that trains serves, too."""

    @property
    def count(self) -> int:
        """train + infer."""
        return self.train + self.infer

    @property
    def serving(self) -> range:
        """Ranks of the machines that serve: {train: 2, infer: 2} -> 2 and 3; {train: 2} -> 0 and 1."""
        return range(self.train, self.count) if self.infer else range(self.train)


class LaunchSection(StrictModel):
    num_trainer_ranks: Processes = 1
    """Trainer processes of each machine that trains, under torchrun; one per GPU (or any number on CPU)."""
    nodes: NodesSection = NodesSection()
    """Machines that train, and machines that serve."""
    colocate: bool = False
    """Put the servers on the GPUs of the trainer's ranks, sharing their memory. false: each has its own GPUs, and if
    there are too few, that is an error. Without GPUs it has no effect."""
    rdzv: str | None = None
    """`host:port` of the machine with node rank 0, where the others meet it. null = what the scheduler says (see `train --help`).
    Traffic between the trainer's ranks goes over the interface with this address, unencrypted and without a password: use a
    private network."""
    server_port: int | None = Field(default=None, ge=1024, le=65_000)
    """Port of the first server of a machine; the next ones follow. null = free ones."""
    rdzv_timeout_s: Seconds = 600.0
    """Time that all machines have to come to `rdzv`, from the first one on."""
    sharding: Literal["full", "hybrid"] = "full"
    """full: parameters are sharded over all ranks. hybrid: over the ranks of a machine, and replicated over machines (HSDP)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto = cuda where there is one."""
    trainer_threads: Processes = 1
    """CPU threads of each trainer rank."""
    stop_timeout_s: Seconds = 60.0
    """Time the trainer has to checkpoint and end after SIGINT / SIGTERM; then it is killed."""
    heartbeat_timeout_s: float = Field(default=300.0, gt=0.0)
    """Longest time without a sign of life of a trainer process: it is stopped, or some code holds its Python interpreter. Then its
    stack is shown and the run ends. What is only slow (a step, a compile, a disk, an evaluation) gives signs of life."""
    slurm: SlurmSection = SlurmSection()
    """For `grpo-async launch slurm`."""
    kubernetes: KubernetesSection = KubernetesSection()
    """For `grpo-async launch kubernetes`."""

    @field_validator("rdzv")
    @classmethod
    def _rdzv_names_one_address(cls, rdzv: str | None) -> str | None:
        host, _, port = (rdzv or "host:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536 or re.search(r"[\s/@]", host):
            raise ValueError(f"{rdzv!r} is not host:port, such as 10.0.0.1:29400 or node-1:29400")
        if host in ("0.0.0.0", "[::]"):  # noqa: S104 - it is refused
            raise ValueError(
                f"{host} would listen on every network; name the address of node 0 in the one that the machines share"
            )
        return rdzv

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of `rdzv`: "10.0.0.1:29400" -> ("10.0.0.1", 29400); only where it is set."""
        parts = urlsplit(f"//{self.rdzv}")
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    @property
    def world_size(self) -> int:
        """Trainer processes of all machines: nodes.train x num_trainer_ranks."""
        return self.nodes.train * self.num_trainer_ranks
