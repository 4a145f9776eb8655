"""The sections of an experiment, in the order of the data path: run and model; data and evaluation; what takes part in a rollout
(tools, environments, rollout functions, agents, rewards) and the rollout; the objective; the training loop; servers and weights;
what is kept (checkpoints, records, trackers); processes.

The docstring under a field is its help text and goes into the JSON schema. Rules that span sections are in `rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from grpo_async.config.base import (
    MAX_TOP_LOGPROBS,
    AttentionName,
    ComputeDtype,
    Count,
    Dtype,
    EngineName,
    FilePath,
    Host,
    MinP,
    ModelName,
    PushMode,
    Reference,
    RepetitionPenalty,
    Seconds,
    Seed,
    ServerUrl,
    SmallCount,
    StopStrings,
    StrictModel,
    StructuredOutputs,
    TopK,
    TopP,
    TransportKind,
    Weight,
    default_type,
    exactly_one,
)
from grpo_async.utils.network import WILDCARDS
from grpo_async.utils.text import duplicates

_DEFAULT_STEPS = 100
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of `rollout` that agents and rollout functions may replace for one request."""
MAX_RESTART_DELAY_S = 60.0
"""The longest wait between the end of a server and its next start, or, where others start it, the next attempt to use it."""
Reduction = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


# ---- run and model ----


class RunSection(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run; its directory is `run.dir`/`run.name`."""
    dir: FilePath = Path("runs")
    """Where run directories are made."""
    seed: Seed = 0
    """Seeds data order, sampling and initialization of everything random."""


MAX_SWAPPED_RANK = 512  # of vLLM's --max-lora-rank


class LoraSection(StrictModel):
    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank r of the adapters (LoRA, arXiv 2106.09685)."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The product B A is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers that get adapters, by the ends of their names; all-linear = every one but the head."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapters' input, in the forward pass of an update only: not in log-probabilities before it, not in scores, and
    not on servers. So policy and sampler differ by it."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Modules that are fully trained in addition to the adapters, by the ends of their names, such as [embed_tokens,
    lm_head]; of tied ones, name both. They are pushed and exported with the rest (peft's setting of this name)."""
    load_in_4bit: bool = False
    """Keep the frozen base in 4 bits (QLoRA, arXiv 2305.14314; extra `qlora`), whole on every rank; experts and the head stay as
    they are. Servers get the same weights, unpacked, with the adapters merged."""
    push: Literal["merged", "adapter", "adapter_swap"] | None = None
    """What travels to the servers. merged: whole weights. adapter: the adapters alone, over gloo, for networks that are slower than
    a server's disk; each server adds them to the weights that it has loaded itself from `model.path`. adapter_swap (vLLM): the
    adapters alone, which vLLM keeps beside its weights (`--enable-lora`). Nothing pauses: requests in flight end on the version
    that they began with, new ones take the new one; `weights.mode` does not apply. Every token takes longer to generate. null:
    adapter_swap where the run starts vLLM on GPUs and the model's family is known to work so, else merged."""


class ModelSection(StrictModel):
    path: ModelName
    """Folder of a Hugging Face model (config, safetensors, tokenizer), or a hub name where the machine reaches a hub."""
    revision: str | None = Field(default=None, min_length=1)
    """Commit, tag or branch of a hub name, for trainer, tokenizer and servers; null = the newest. Without a network it is taken
    from the hub's cache on each machine (HF_HOME)."""
    dtype: Dtype = "float32"
    """dtype of the trainer's master weights and optimizer state."""
    compute_dtype: ComputeDtype | None = None
    """dtype of forward and backward. null: bfloat16 on a GPU, float32 on a CPU. float16 rounds eight times finer than bfloat16 and
    so brings trainer and servers closer (arXiv 2510.26788), for models whose activations stay below 65504; the loss is scaled, so
    that small gradients do not vanish."""
    head_dtype: Literal["float32"] | None = None
    """float32: trainer and servers compute logits in float32 (of weights and states in their dtypes), which brings their
    log-probabilities closer (arXiv 2506.13585). null: in the dtype of everything else."""
    attention: Literal["auto", AttentionName] = "auto"
    """How packed samples are kept apart. varlen: kernels that know where samples begin (GPU, 16 bit). mask: a sample at a
    time, on any device. auto: varlen where it can run."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them: less memory, more compute. full: of every layer (about a
    third more compute). selective: all but matrix products and attention."""
    lora: LoraSection | None = None
    """Train adapters instead of all weights."""
    chat_template: FilePath | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `{enable_thinking: false}`."""
    end_of_turn_tokens: list[str] = Field(default_factory=list)
    """Tokens that end the policy's turn, in addition to the tokenizer's EOS and those of the model's generation_config.json."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in trainer and server. Only for models whose code you have read."""

    @property
    def may_use_varlen(self) -> bool:
        """Whether `attention` is varlen on a GPU that computes in `resolved_compute_dtype`, if the family is one for it."""
        return self.attention != "mask" and self.resolved_compute_dtype != "float32"

    @property
    def resolved_compute_dtype(self) -> ComputeDtype:
        """`compute_dtype`, or float32 where it is null: `ExperimentConfig.for_devices` fills it in where there is a GPU."""
        return self.compute_dtype or "float32"


# ---- data and evaluation ----


class DataSource(StrictModel):
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames: `{problem: prompt, reward_model.ground_truth: answer}`; a dotted name looks into a nested column. After renaming
    a column named `prompt` must exist; it holds text or a list of `{role, content}` messages. Every other column is handed to
    the reward functions."""
    system_prompt: str | None = None
    """Put before every prompt as a system message."""
    limit: int | None = Field(default=None, ge=1)
    """Use the first N rows only; counted before any filter."""
    remove_columns: list[str] = Field(default_factory=list)
    """Columns to leave out, by their names before renaming."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Rows with more prompt tokens, chat template and `system_prompt` included, are left out."""
    task_columns: list[str] = Field(default_factory=list)
    """Columns that make a row another task although its prompt is the same, such as `seed`: the search for duplicates, the
    held-out split and the leak check compare them too. A row with an empty prompt is compared by all of its columns."""
    label: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """In a list of sources: what metrics, the summary and rollouts call this one; null = the last part of its file, hub name or
    function."""
    weight: float = Field(default=1.0, ge=0.0, le=1e6)
    """In a list of sources to train on: its share of the prompts is this / the sum over all sources, however many rows it has."""
    rewards: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the functions of `rewards` that score its rows; the others give None. null = all."""
    temperature: float | None = Field(default=None, ge=0.01, le=100.0)
    """In training: in place of `rollout.temperature`, in sampling and in the trainer's log-probabilities."""
    group_size: int | None = Field(default=None, ge=2, le=1_000_000)
    """In training: in place of `rollout.group_size`."""
    environment: str | None = None
    """The environment (of `environments`) of all of its rows, as if they had the column `environment`."""

    @property
    def resolved_label(self) -> str:
        """`label`, or gsm8k of openai/gsm8k, data/gsm8k.jsonl and tasks:gsm8k."""
        fields = ("label", "path", "name", "function", "environment", "type")
        found = next(value for field in fields if (value := getattr(self, field, None)) is not None)
        last = re.split("[/:]", str(found).rstrip("/"))[-1]
        return re.sub(r"[^\w.-]+", "-", re.sub(r"\.(jsonl|json|csv|parquet)$", "", last))

    def without_filters(self) -> Self:
        """All rows, which can be read without the tokenizer."""
        return self.model_copy(update={"max_prompt_tokens": None})


class JsonlSource(DataSource):
    type: Literal["jsonl"] = "jsonl"
    """One JSON object per line."""
    path: FilePath
    """The file."""


class ParquetSource(DataSource):
    type: Literal["parquet"]
    """Apache Parquet, read in batches (extra `parquet`: pip install 'grpo-async[parquet]')."""
    path: FilePath
    """The file, or a folder whose *.parquet files are read in the order of their names."""


class HubSource(DataSource):
    type: Literal["hub"]
    """A dataset of the package `datasets` (extra `hub`: pip install 'grpo-async[hub]')."""
    name: str
    """Name on the hub, or a local folder: one that `save_to_disk` wrote, or one with data files."""
    subset: str | None = None
    """Configuration of the dataset."""
    split: str = "train"
    """Split of the dataset."""
    revision: str | None = None
    """Commit, tag or branch on the hub; null = the newest."""


class GeneratorSource(DataSource):
    type: Literal["generator"]
    """Rows made by a Python function: a generator, or anything that returns an iterable of dicts."""
    function: Reference
    """`module:attribute`; the working directory is importable. It must make the same rows at every call."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments. A generator without end needs `limit`."""


class EnvironmentSource(DataSource):
    type: Literal["environment"]
    """No dataset: the environment's `reset` gives the task. Each row is a `seed`, which `reset` receives."""
    num_prompts: Count
    """Number of rows."""
    prompt: str = ""
    """The user's message before the text that `reset` returns; may stay empty."""
    first_seed: Seed = 0
    """The rows have the seeds first_seed, first_seed + 1, ...; evaluation needs others than training."""
    environments: list[str] = Field(default_factory=list)
    """With several environments: the names that the rows use in turn, in the column `environment`."""


Source = Annotated[
    JsonlSource | ParquetSource | HubSource | GeneratorSource | EnvironmentSource,
    Field(discriminator="type"),
    default_type("jsonl"),
]
Sources = Annotated[
    Annotated[Source, Tag("one")] | Annotated[Annotated[list[Source], Field(min_length=1)], Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
"""One source, or a list of them (a mixture)."""


def sources_at(key: str, sources: Sources) -> dict[str, Source]:
    """Each source by its dotted path: {"data.train": ...}, or {"data.train.0": ..., "data.train.1": ...}."""
    if isinstance(sources, list):
        return {f"{key}.{number}": source for number, source in enumerate(sources)}
    return {key: sources}


def _check_sources(sources: Sources) -> Sources:
    """Raises ValueError for labels and weights that cannot be used."""
    if not isinstance(sources, list):
        return sources
    if twice := duplicates([source.resolved_label for source in sources]):
        raise ValueError(f"the labels {twice} are used more than once; give each source a `label` of its own")
    if not any(source.weight for source in sources):
        raise ValueError("the weight of every source is 0; give at least one more")
    return sources


class SamplingSection(StrictModel):
    """How the prompts of a source are chosen; of several sources, of each."""

    type: Literal["uniform", "target_rate", "easy_to_hard"] = "uniform"
    """By the solve rate of a row: the fraction of the completions of its last group with a reward of at least `pass_threshold`.
    uniform: every row once, then every row again, whatever its rate. target_rate: at random; the further the rate is from `target`,
    the less likely, down to a twentieth; rows that were not drawn yet count as if they were at it. easy_to_hard: every row once,
    then every row again, from the highest rate to the lowest, and so on."""
    target: float = Field(default=0.5, ge=0.0, le=1.0)
    """With target_rate: the solve rate to look for."""
    retire_solved: int | None = Field(default=None, ge=1)
    """A row whose last N groups were solved by every completion is not drawn again until there is no other; null = it is."""
    pass_threshold: float = 1.0
    """A completion solves its prompt when its reward is at least this."""

    @property
    def is_fixed(self) -> bool:
        """Whether the order of the prompts is known from the start."""
        return self.type == "uniform" and self.retire_solved is None

    @model_validator(mode="after")
    def _target_has_a_use(self) -> Self:
        if self.type != "target_rate" and self.target != type(self).model_fields["target"].default:
            raise ValueError(f"target: {self.target:g} has no effect with type: {self.type}; set type: target_rate")
        return self


class DataSection(StrictModel):
    train: Annotated[Sources, AfterValidator(_check_sources)]
    """Prompts to train on: one source, or a list of sources that are mixed by their `weight`."""
    shuffle: bool = True
    """Reshuffle every epoch, seeded by `run.seed`."""
    sampling: SamplingSection = SamplingSection()
    """Which prompts come how often."""
    held_out: float | None = Field(default=None, gt=0.0)
    """Rows of `train` that are kept for evaluation and not trained on: below 1 a fraction (0.05), else a number of rows (200), of
    each source.
    A row's own prompt decides (not `run.seed`), so that rows added later never move one from training to evaluation."""

    @field_validator("held_out")
    @classmethod
    def _is_a_fraction_or_a_number(cls, held_out: float | None) -> float | None:
        if held_out is not None and held_out >= 1 and held_out != int(held_out):
            raise ValueError(f"{held_out:g} is neither a fraction (below 1) nor a whole number of rows")
        return held_out

    @property
    def sources(self) -> dict[str, Source]:
        return sources_at("data.train", self.train)


def powers_up_to(limit: int) -> list[int]:
    """The k that an evaluation reports for `limit` completions of a prompt: 1 -> [1]; 4 -> [1, 2, 4]; 6 -> [1, 2, 4, 6]."""
    powers = [1 << exponent for exponent in range(limit.bit_length())]
    return powers if powers[-1] == limit else [*powers, limit]


class EvaluationSection(StrictModel):
    data: Annotated[Sources, AfterValidator(_check_sources)] | None = None
    """Prompts to evaluate on, with the keys of `data.train`; null = those that `data.held_out` keeps back. Of a list of sources
    (without `weight`, `temperature` and `group_size`), results are also reported for each."""
    num_prompts: Count = 200
    """Only the first N of them; of a list, of each source."""
    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate every N steps while training and generation continue; null = only at the start and the end. An evaluation
    that is due while the one before it is still running is skipped."""
    at_start: bool = True
    """Evaluate before the first step."""
    samples_per_prompt: Count = 1
    """Completions per prompt. With more than one, pass@k is reported for k = 1, 2, 4, ... and for this number, and mean@k for this
    number."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Sampling temperature; 0 = greedy, else at least 0.01."""
    top_p: TopP = 1.0
    """As `rollout.top_p`, for evaluation only; here it and the next four have no effect on the loss."""
    top_k: TopK = 0
    """As `rollout.top_k`, for evaluation only."""
    min_p: MinP = 0.0
    """As `rollout.min_p`, for evaluation only."""
    repetition_penalty: RepetitionPenalty = 1.0
    """As `rollout.repetition_penalty`, for evaluation only; also applies to greedy completions."""
    structured_outputs: StructuredOutputs | None = None
    """As `rollout.structured_outputs`, for evaluation only."""
    stop: StopStrings | None = None
    """Texts that end a turn; null = those of `rollout.stop`, [] = none."""
    pass_threshold: float = 1.0
    """A completion passes (pass@k) when its reward is at least this."""
    group_by: str | None = None
    """A column of the data: results are also reported for each of its values; null = for each source, if there are several."""
    max_in_flight: Count | None = None
    """Maximum number of evaluation rollouts in progress at once, in addition to those of training (but never fewer than one
    prompt's); null = a quarter of `rollout.max_in_flight` during training, all of it before and after."""
    pin_version: bool = False
    """true: no weights are pushed while an evaluation runs, so that one policy version answers; training continues until
    `rollout.max_staleness` makes it wait. false: pushes continue, and a result from several versions is marked as mixed."""
    leak_check: Literal["error", "warn", "off"] = "error"
    """What happens when a prompt to evaluate on is also trained on (letter case and whitespace aside)."""
    baseline_column: str | None = None
    """If set, the report also states the fraction of the most frequent value of this column: the score of always giving it."""

    @field_validator("temperature")
    @classmethod
    def _is_greedy_or_warm(cls, temperature: float) -> float:
        if 0.0 < temperature < 0.01:
            raise ValueError(f"{temperature:g} is less than 0.01, to which vLLM would raise it; set 0 for greedy")
        return temperature


# ---- what takes part in a rollout: all of it is the user's code, named as `module:attribute` ----


class ToolSection(StrictModel):
    function: Reference
    """`module:attribute` of a typed function with a Google-style docstring, sync or async; the model sees name, types and texts."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that are fixed here and that the model does not see."""
    timeout_s: Seconds = 30.0
    """Time limit of one call; then the model gets a timeout error."""
    run_in: Literal["thread", "process"] = "thread"
    """process: calls run in the main thread of worker processes, where `signal.alarm` works, and are killed on timeout."""


class ToolCallingSection(StrictModel):
    parser: str = "auto"
    """How calls are read from the model's text: `hermes` (Qwen, Hermes: <tool_call>{json}</tool_call>), `llama3_json`, `mistral`,
    `cohere`, `harmony` (GPT-OSS), any parser of vLLM where that is installed, or `module:attribute` of your own:
    `parse(text) -> {"content", "tool_calls": [{"name", "arguments"}]}`, which must be fast, for it runs on the event loop.
    auto: by the chat template; the plan says which."""
    max_result_chars: int = Field(default=8192, ge=16)
    """Longer tool results are cut, with a mark that says so."""


class EnvironmentSection(StrictModel):
    factory: Reference
    """`module:attribute` of a class or zero-argument factory: `reset(**row)`, tool methods, and, if wanted, `is_done()`,
    `get_reward()`, `close()`. As in TRL's `environment_factory`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    reward_weight: Weight = 1.0
    """Factor on what `get_reward` returns, in the sum of the rewards."""
    timeout_s: Seconds = 60.0
    """Time limit of one call of an instance: reset, a tool, is_done, get_reward."""
    max_instances: Count | None = None
    """Maximum number of instances at once; null = as many as there are rollouts in flight."""
    run_in: Literal["thread", "process"] = "thread"
    """process: each instance lives in the main thread of a process of its own, where `signal.alarm` works. Reward functions read
    the attributes of `environments` there."""


class RolloutFunctionSection(StrictModel):
    function: Reference
    """`module:attribute` of `rollout_func(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", ...}`, as in TRL."""
    max_concurrent_calls: SmallCount = 1
    """Calls that may run at once, each in a thread of its own."""
    timeout_s: Seconds = 300.0
    """Time limit of one call; then its groups fail, and its `trainer` refuses further calls."""


class AgentSection(StrictModel):
    """Exactly one of `function`, `command` and `environment`. Whichever it is, it calls the model at an endpoint that speaks
    the APIs of OpenAI and Anthropic."""

    function: Reference | None = None
    """`module:attribute` of `run(row, client, **arguments) -> float | dict | None`, sync or async. `client` has `base_url`,
    `api_key`, `model` and `openai`, a ready client of that package (AsyncOpenAI for an async function). It returns its reward, or a
    dict with `reward` and what else reward functions are to get, or nothing where they judge alone."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A process for each rollout, without a shell: [node, agent.js]. It gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
    ANTHROPIC_API_KEY, and the row as JSON on stdin; the last line of its stdout is its result, as JSON."""
    environment: Annotated[str, StringConstraints(pattern=r"^verifiers:.+")] | None = None
    """An environment of the library verifiers: `verifiers:NAME`. One of OpenEnv is a class in `environments`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function, or of the environment."""
    timeout_s: Seconds = 300.0
    """Time limit of one rollout; then it fails, its key is refused, and its process is killed with all that it started."""
    max_concurrent: Count | None = None
    """Maximum number of agents that run at once; null = `rollout.max_in_flight`."""
    reward_weight: Weight = 1.0
    """Factor on the agent's own reward, which is named `agent`, in the sum of the rewards."""
    host: Host = "127.0.0.1"
    """Where the endpoint listens and agents connect to. For agents in containers: an address of this machine that they reach."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the endpoint; 0 = a free one."""
    memory_mb: int | None = Field(default=None, ge=16)
    """Memory limit, in MiB, of each process of a command; null = no limit."""

    @property
    def kind(self) -> Literal["function", "command", "environment"]:
        return "function" if self.function is not None else "command" if self.command is not None else "environment"

    @model_validator(mode="after")
    def _is_one_kind_of_agent(self) -> Self:
        exactly_one(self, "function", "command", "environment", what="an agent")
        if self.command is not None and self.arguments:
            raise ValueError("arguments: a command has none; write them into `command`")
        if self.command is None and self.memory_mb is not None:
            raise ValueError("memory_mb applies to the process of a `command` only; leave it out")
        if self.host in WILDCARDS:
            raise ValueError(
                f"host: {self.host} is no address that an agent could connect to; write one of this machine"
            )
        return self


class RewardSection(StrictModel):
    """One of `function` and `model`."""

    function: Reference | None = None
    """`module:attribute` of a function, partial or callable object with TRL's signature
    `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async.
    The working directory is importable."""
    model: ModelName | None = None
    """A reward model in its place: folder or hub name of a sequence classifier with one output, as TRL's `reward_funcs` takes it,
    or the address of a vLLM server that has one (http://judge:8000). A model by name runs in a process of its own; `arguments` may
    have device (auto, cpu, cuda:N), batch_size, dtype, revision, max_tokens, see grpo_async.rewards.model; by address those of
    grpo_async.rewards.served_model."""
    name: str | None = None
    """Name in the metrics; null = the function's own name, or the last part of the model's."""
    weight: Weight = 1.0
    """Factor in the sum of the rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of every call."""
    run_in: Literal["thread", "process"] = "thread"
    """process: in a pool of worker processes that are killed on timeout. For CPU-heavy functions, patterns that may backtrack, and
    functions that use signals. thread is the default, because a function may share objects with environments, tools and its own
    earlier calls (as in TRL), and loads a model once; a function that holds the GIL there ends the run after
    launch.heartbeat_timeout_s."""
    timeout_s: Seconds = 60.0
    """Time limit of one call; then the group fails."""

    @model_validator(mode="after")
    def _is_a_function_or_a_model(self) -> Self:
        exactly_one(self, "function", "model", what="a reward")
        if self.model is not None and self.run_in != "thread":
            raise ValueError("run_in: a reward model never runs in this process; leave it out")
        return self

    @property
    def reference(self) -> str:
        if self.function is not None:
            return self.function
        if self.has_address:
            return "grpo_async.rewards.served_model:served_model_reward"
        return "grpo_async.rewards.model:model_reward"

    @property
    def has_address(self) -> bool:
        return self.model is not None and self.model.startswith(("http://", "https://"))

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments in addition to those that a run offers: `arguments`, those of a reward model together with its name."""
        return self.arguments if self.model is None else {"settings": {"model": self.model, **self.arguments}}

    @property
    def own_name(self) -> str:
        """ "my_rewards:length_reward" -> length_reward; my-org/judge, http://judge:8000 -> judge."""
        if self.model is None:
            return self.reference.rpartition(":")[2]
        return str(urlsplit(self.model).hostname) if self.has_address else PurePath(self.model).name


class RolloutSection(StrictModel):
    group_size: int = Field(default=8, ge=2, le=1_000_000)
    """Completions per prompt; advantages are taken within a group."""
    groups_per_step: Count = 16
    """Groups that one optimizer step consumes."""
    max_staleness: int = Field(default=1, ge=0, le=1_000_000)
    """Oldest policy that may be trained on, in optimizer steps behind the trainer. 0 = synchronous GRPO. Where training is slower
    than generation, most tokens are that old.
    Also paces generation: at most (max_staleness + 1) x groups_per_step groups are started ahead of the trainer."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Token budget of one completion, over all its turns, tool results included."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens that the policy may generate in one turn; null = what is left of the completion."""
    max_turns: int = Field(default=16, ge=1)
    """Maximum number of turns of the policy in one rollout. A rollout that calls a tool in its last turn counts as truncated.
    For an agent: maximum number of its calls of the model, with retries and those of sub-agents."""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    """Sampling temperature; the trainer's logprobs use the same. vLLM raises anything below 0.01 to that."""
    top_p: TopP = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to this (nucleus sampling,
    arXiv 1904.09751); 1 = all. This and the next four sample from another distribution than the policy's. With `top_k` of 1 to 128
    the loss sees the policy cut to the same tokens. Otherwise, and always with `repetition_penalty`, they need
    `loss.proximal: recomputed` with `loss.correction: {level: token}`, or cispo with `loss.proximal: sampler`, and do not go with
    gspo or `loss.off_policy_mask`. A custom loss is not held to this."""
    top_k: TopK = 0
    """Sample from this many of the most likely tokens; 0 = all (-1 in vLLM's API). Up to 128, servers report them (8 bytes each),
    and ratios are exact, also with `top_p`, `min_p` and `structured_outputs`."""
    min_p: MinP = 0.0
    """Sample from tokens whose probability is at least this fraction of that of the most likely one (arXiv 2407.01082); 0 = all."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Above 1, tokens that are already in the prompt or the completion become less likely (arXiv 1909.05858); 1 = none."""
    structured_outputs: StructuredOutputs | None = None
    """Every turn of the policy satisfies this constraint (vLLM only). A turn that is interrupted
    (its server died, or a resume) starts over, because the constraint begins with the first token."""
    stop: StopStrings = Field(default_factory=list)
    """Texts that end a turn of the policy, such as ["\\nQ:"] for a base model that is shown examples; as vLLM's `stop`. The turn is
    whole, not truncated. All sampled tokens are trained on, those of the stop string included; rewards and messages get the text
    before it. A line feed needs double quotes in YAML."""
    max_in_flight: Count | Literal["auto"] = 256
    """Maximum number of rollouts in progress at once: generating, or waiting for a tool or an environment. auto: as many as the
    servers run without letting requests wait or filling their KV caches, within what `max_staleness` allows."""
    zero_variance: Literal["skip", "resample", "train"] = "skip"
    """A group whose rewards are all equal teaches nothing. skip: not trained; the step uses the other groups.
    resample: another prompt takes its place (dynamic sampling, DAPO). train: trained with advantage 0, which dilutes the step."""
    overlong: Literal["train", "mask"] = "train"
    """What happens to truncated completions. train: they are trained like any other. mask: they count in the group's mean but are
    not trained (overlong filtering, DAPO, arXiv 2503.14476)."""
    max_rounds_without_signal: int = Field(default=20, ge=1)
    """The run ends with an error when this many rounds of groups_per_step groups in a row had nothing to learn from: within each
    group all rewards were equal, or there were none."""
    rollout_timeout_s: Seconds = 600.0
    """Wall-clock limit of one rollout; past it the rollout fails and its group continues without it."""
    agent: AgentSection | None = None
    """Your own agent, which calls the model over HTTP, as the rollout: any framework, without `tools` or `environments`."""

    @property
    def most_in_flight(self) -> int:
        """`max_in_flight`; with auto, the rollouts of all groups that may be started ahead of the trainer."""
        ahead = (self.max_staleness + 1) * self.groups_per_step * self.group_size
        return ahead if self.max_in_flight == "auto" else self.max_in_flight

    @property
    def non_neutral_sampling(self) -> list[str]:
        """Names of the settings that make the sampling distribution differ from the policy's."""
        return [name for name, neutral in NEUTRAL_SAMPLING.items() if getattr(self, name) != neutral]


NEUTRAL_SAMPLING = {name: RolloutSection.model_fields[name].default for name in (*SAMPLING[1:], "structured_outputs")}
"""Settings of `rollout` that change the sampling distribution, and their defaults, which do not."""


# ---- the objective ----


class AdvantageSection(StrictModel):
    type: Literal["group", "batch", "none", "rloo", "maxrl", "reinforce_plus_plus_baseline"] = "group"
    """What a reward is compared with. group: (r - mean) / (std + 1e-4) within the group (GRPO, arXiv 2402.03300).
    batch: (r - mean of the group) / (std of the step's rewards + 1e-4). none: r - mean of the group (Dr. GRPO, arXiv 2503.20783).
    rloo: r - mean of the others of the group (arXiv 2402.14740). maxrl: (r - mean) / mean within the group, which weighs hard
    prompts more; for rewards of at least 0 (arXiv 2602.02710). reinforce_plus_plus_baseline: r - mean of the group, then whitened
    over the tokens of the step (arXiv 2501.03262)."""
    rewards: Literal["sum", "normalize_each"] = "sum"
    """Several rewards. sum: added by weight, then compared. normalize_each: each is compared on its own within the group, as with
    `type: group`, then they are added by weight and divided by their std over the step + 1e-4 (GDPO, arXiv 2601.05242)."""

    @model_validator(mode="after")
    def _goes_with_the_type(self) -> Self:
        if self.rewards == "normalize_each" and self.type != "group":
            raise ValueError(
                f"rewards: normalize_each compares each reward as `type: group` does, not {self.type}; set type: group"
            )
        return self


class TeacherSection(StrictModel):
    url: str | None = Field(default=None, pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$")
    """Address of a model with the policy's tokenizer that `vllm serve` serves, with a `--max-model-len` above
    `inference.max_model_len`. null = the policy itself, on the servers of the run, which needs `prompt_column`."""
    served_model_name: str | None = None
    """vLLM's name of the model, needed if the server has several."""
    token_env: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Name of the environment variable that holds a bearer token, which does not belong in the YAML."""
    weight: float = Field(default=1.0, gt=0.0)
    """Weight of its log-probabilities."""
    prompt_column: str | None = None
    """Column of the data, text or messages, that this teacher sees in place of the prompt: with a hint or the answer in it
    (self-distillation with privileged context). null = the prompt."""
    max_concurrency: Count = 64
    """Requests at once to `url`."""
    timeout_s: Seconds = 300.0
    """Longest wait for an answer of `url`."""

    @model_validator(mode="after")
    def _differs_from_the_policy(self) -> Self:
        if self.url is None and self.prompt_column is None:
            raise ValueError(
                "without `url` the policy teaches itself, and needs another prompt than its own; set `prompt_column`"
            )
        return self


class DistillationSection(StrictModel):
    teachers: dict[str, TeacherSection] = Field(min_length=1)
    """Who scores what the policy sampled, by name. Each token's advantage gains weight x (teacher's - policy's log-probability):
    the reverse KL divergence from the teacher as a reward for each token, beside `rewards`, if there are any."""
    teacher_column: str | None = None
    """Column of the data that names the teacher of a row. null = all of them, added by weight."""

    def teachers_of(self, row: Mapping[str, Any]) -> list[str]:
        """Names of the teachers of a row of the data."""
        return list(self.teachers) if self.teacher_column is None else [row[self.teacher_column]]


class ImportanceSamplingSection(StrictModel):
    """Importance weights of sampled tokens, for the difference between the policy that sampled them and the proximal policy:
    w = exp(proximal - sampler), per token or (the sum over its tokens) per sequence. Applied to the loss, without gradient."""

    level: Literal["token", "sequence"] = "sequence"
    """Whether each token has its own weight, or all tokens of a completion the same."""
    action: Literal["truncate", "mask", "none"] = "mask"
    """truncate: weights above `cap` become `cap` (TIS). mask: tokens with a weight outside `floor`..`cap` are left out (MIS,
    IcePop). none: the weights as they are (decoupled PPO, arXiv 2505.24298)."""
    cap: float = Field(default=3.0, gt=0.0)
    """Largest weight."""
    floor: float | None = Field(default=None, ge=0.0)
    """Smallest weight; null = 0. With `truncate` smaller ones become `floor`, with `mask` they are left out."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor: {self.floor} is not less than cap: {self.cap}; no weight would lie between them")
        return self


class BaseLoss(StrictModel):
    own_reduction: ClassVar[Reduction] = "dapo"
    has_sequence_ratio: ClassVar[bool] = False
    """Whether the ratio of the loss is that of whole samples."""
    type: str
    reduction: Reduction | None = None
    """How tokens are averaged; null = as the type says. grpo: mean over completions of the token mean. bnpo: token mean of each
    micro-batch (depends on how samples are packed). dr_grpo: sum / (completions x max_completion_tokens). dapo: sum / trained
    tokens of the whole optimizer update. luspo: mean over completions of the token sum. Completions that are masked whole
    (rollout.overlong) count, in groups that have others; one of an agent counts once, with all of its branches."""
    proximal: Literal["sampler", "recomputed", "log_linear"] = "sampler"
    """The policy that the ratio is taken against. sampler: the one that sampled, by its own logprobs. recomputed: the trainer's, at
    the start of the step; costs a forward pass where a step has several updates (training.minibatches, num_iterations). log_linear:
    between the two by the age of each token's version, without a forward pass (A-3PO)."""
    correction: ImportanceSamplingSection | None = None
    """Importance weights between sampler and proximal policy; needs a `proximal` other than sampler."""
    off_policy_mask: float | None = Field(default=None, gt=0.0)
    """OPSM: completions with a negative advantage are left out when mean(sampler - policy logprob) over their tokens is above
    this."""
    geometric_mask: tuple[float, float] | None = None
    """Completions are left out when exp(mean(policy - sampler logprob)) over their tokens is outside these bounds: [0.99, 1.01]
    (SkyRL's geometric sequence mask)."""
    score_centering: int | None = Field(default=None, ge=1, le=MAX_TOP_LOGPROBS)
    """Subtract the gradient that the sampler's tokens have on average, whatever their rewards: where sampler and policy differ it
    is not 0, and moves the policy for no reward (arXiv 2609.20807). Estimated from this many of the likeliest tokens at each
    position, which servers report (8 bytes each). With `proximal: recomputed`, one update a step and no correction it is centered
    REINFORCE. For losses of single tokens, sampled from the policy's whole distribution."""
    beta: float = Field(default=0.0, ge=0.0, le=1e6)
    """Weight of the KL divergence (k3) from `reference`; 0 = none, and no reference is loaded."""
    use_bias_correction_kl: bool = True
    """Multiply the KL of a token by its ratio (gspo: of its sample), with gradient: unbiased also for tokens of an older policy
    (DeepSeek-V3.2, arXiv 2512.02556). As TRL's setting of this name."""
    reference: ModelName = "initial"
    """Reference policy of the KL: `initial` = the model that the run began with (with LoRA: the model without its adapters, at no
    cost), or the folder of a model."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656): every `ref_model_sync_steps` steps it becomes
    ref_model_mixup_alpha x policy + (1 - ref_model_mixup_alpha) x itself. It is kept in model.dtype then, and in checkpoints. As
    TRL's settings of these names."""
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0.0, le=1.0)
    """See `sync_ref_model`; 1 = the policy itself."""
    ref_model_sync_steps: int = Field(default=512, ge=1)
    """See `sync_ref_model`."""
    entropy_bonus: Weight = 0.0
    """This times the mean entropy is subtracted from the loss; with its exact gradient."""
    router_aux: Weight = 0.0
    """This times the loss by which routers balance the load of their experts (Switch Transformer, arXiv 2101.03961), taken over the
    tokens of a forward pass, is added. For mixtures of experts that have router logits."""

    @property
    def corrects_sampling(self) -> bool:
        """Whether each token is weighted by policy / sampler, so that it may be sampled from a part of the policy's distribution.
        (CISPO's capped ratio is such a weight; a custom loss has to do it.)"""
        has_weights = self.correction is not None and self.correction.level == "token"
        is_weight = isinstance(self, CispoLoss) and self.proximal == "sampler"
        is_corrected = self.proximal == "recomputed" and has_weights and not self.has_sequence_ratio
        if self.score_centering is not None:  # it compares whole distributions
            return False
        return isinstance(self, CustomLoss) or is_weight or is_corrected

    @property
    def masks_samples(self) -> bool:
        return self.off_policy_mask is not None or self.geometric_mask is not None

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0.0

    @property
    def resolved_reduction(self) -> Reduction:
        return self.reduction or self.own_reduction


class ClippedLoss(BaseLoss):
    type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """PPO's clipped surrogate on token ratios (GRPO, arXiv 2402.03300); the four differ in `reduction` only."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip: ratio >= 1 - epsilon."""
    epsilon_high: float = Field(default=0.28, gt=0.0)
    """Upper clip: ratio <= 1 + epsilon_high (clip-higher, DAPO, arXiv 2503.14476)."""
    delta: float | None = Field(default=None, gt=1.0)
    """Two-sided clip: the unclipped ratio is capped at this (INTELLECT-2, arXiv 2505.07291); more than 1 + epsilon_high."""

    @model_validator(mode="after")
    def _delta_is_above_the_clip(self) -> Self:
        if self.delta is not None and self.delta <= 1.0 + self.epsilon_high:
            raise ValueError(f"delta: {self.delta} is not more than 1 + epsilon_high = {1.0 + self.epsilon_high:g}")
        return self

    @property
    def resolved_reduction(self) -> Reduction:
        return self.reduction or self.type


class GspoLoss(BaseLoss):
    has_sequence_ratio = True
    type: Literal["gspo", "luspo"]
    """Clipped surrogate on the ratio of whole sequences, the geometric mean of their tokens'. gspo (arXiv 2507.18071): reduction
    grpo. luspo: without gspo's bias towards short completions, each weighs as much as it is long (arXiv 2602.05261)."""
    epsilon: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """Lower clip: ratio >= 1 - epsilon."""
    epsilon_high: float = Field(default=4e-4, gt=0.0)
    """Upper clip: ratio <= 1 + epsilon_high."""

    @property
    def resolved_reduction(self) -> Reduction:
        return self.reduction or ("luspo" if self.type == "luspo" else "grpo")


class GmpoLoss(BaseLoss):
    own_reduction = "grpo"
    has_sequence_ratio = True
    type: Literal["gmpo"]
    """The geometric mean of a sequence's token ratios, each clipped first (arXiv 2507.20673); reduction grpo."""
    epsilon: float = Field(default=0.4, gt=0.0)
    """Lower clip: log ratio >= -epsilon."""
    epsilon_high: float = Field(default=0.4, gt=0.0)
    """Upper clip: log ratio <= epsilon_high."""


class DppoLoss(BaseLoss):
    type: Literal["dppo"]
    """REINFORCE with ratios; a token whose probability moved too far in the direction of its advantage is left out, instead of one
    whose ratio did: rare tokens may learn more, frequent ones less (DPPO, arXiv 2602.04879); reduction dapo."""
    divergence: Literal["tv", "kl"] = "tv"
    """What is far, with p of the policy and q of the proximal policy. tv: |p - q|.
    kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""
    epsilon: float | None = Field(default=None, gt=0.0)
    """Limit for tokens that became rarer; null = 0.2 with tv (prime-rl's), 0.05 with kl."""
    epsilon_high: float | None = Field(default=None, gt=0.0)
    """Limit for tokens that became likelier; null = as `epsilon`."""

    @property
    def limits(self) -> tuple[float, float]:
        """`epsilon` and `epsilon_high`, with null filled in."""
        low = self.epsilon or (0.2 if self.divergence == "tv" else 0.05)
        return low, self.epsilon_high or low


class VespoLoss(BaseLoss):
    has_sequence_ratio = True
    type: Literal["vespo"]
    """REINFORCE, each completion weighted by a smooth function of its ratio w, the product of its tokens': w^k exp(lambda (1 - w)),
    which is 1 at w = 1 and vanishes far from it (arXiv 2602.10693); reduction dapo."""
    k_positive: float = Field(default=2.0, ge=0.0)
    """k for advantages of at least 0."""
    lambda_positive: float = Field(default=3.0, gt=0.0)
    """lambda for advantages of at least 0."""
    k_negative: float = Field(default=3.0, ge=0.0)
    """k for the others."""
    lambda_negative: float = Field(default=2.0, gt=0.0)
    """lambda for the others."""


class CispoLoss(BaseLoss):
    type: Literal["cispo"]
    """REINFORCE with capped, detached ratios: every token keeps its gradient (MiniMax-M1, arXiv 2506.13585); reduction dapo."""
    epsilon_high: float = Field(default=5.0, gt=0.0)
    """The cap itself: ratio <= epsilon_high."""


class SapoLoss(BaseLoss):
    own_reduction = "grpo"
    type: Literal["sapo"]
    """A soft gate in place of the clip (arXiv 2511.20347); reduction grpo."""
    temperature_positive: float = Field(default=1.0, gt=0.0)
    """Steepness of the gate for advantages above 0."""
    temperature_negative: float = Field(default=1.05, gt=0.0)
    """Steepness of the gate for the others."""


class CustomLoss(BaseLoss):
    type: Literal["custom"]
    """Your own; reduction dapo unless set."""
    function: Reference
    """`module:attribute`, f(inputs: LossInputs, **arguments) -> tensor (N,), the loss of each token; see
    grpo_async.training.loss."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


LossSection = Annotated[
    ClippedLoss | GspoLoss | GmpoLoss | DppoLoss | VespoLoss | CispoLoss | SapoLoss | CustomLoss,
    Field(discriminator="type"),
    default_type("dapo"),
]


# ---- training ----


class OptimizerSection(StrictModel):
    type: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw (arXiv 1711.05101). adamw_8bit: its moments in 8 bits (arXiv 2110.02861), a quarter of their memory. muon:
    orthogonalized momentum for the matrices of the layers, adamw for everything else."""
    lr: float = Field(default=1e-6, gt=0.0, le=10.0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Muon's momentum."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=100.0)
    """Decoupled weight decay, of matrices only."""
    schedule: Literal[
        "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "warmup_stable_decay"
    ] = "constant"
    """Shape after the warmup, as transformers' schedules of these names; all but constant and inverse_sqrt end with the run."""
    schedule_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of transformers' schedule, such as {num_cycles: 3} (cosine_with_restarts), {power: 2} (polynomial),
    {num_decay_steps: 50, decay_type: linear} (warmup_stable_decay), {timescale: 1000} (inverse_sqrt)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup, at most those of the run; the first step has lr / warmup_steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """linear, cosine, polynomial and warmup_stable_decay end at this x lr."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this total norm over all ranks."""


class TrainingSection(StrictModel):
    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the run; null = 100, or with `epochs` as many as they take."""
    epochs: float | None = Field(default=None, gt=0.0, le=1e6)
    """The run ends when every row of data.train has been used this many times (or at max_steps, if that comes first): ceil(epochs x
    rows) prompts are started, each once; of a list of sources, as many prompts, by their weights. A group that is filtered, stale
    or failed is not replaced; the ledger counts it. What is left for the last step may be fewer than rollout.groups_per_step
    groups. Schedules end with the steps that this takes when nothing is dropped."""
    minibatches: Count = 1
    """Optimizer updates that the samples of one step are divided into. The version still counts steps."""
    num_iterations: Count = 1
    """Passes over the samples of a step (mu in GRPO, arXiv 2402.03300), each with an update for every minibatch, at the same
    learning rate. Ratios are always taken against the policy before the first (`loss.proximal`). The version still counts steps."""
    weight_sync_steps: int = Field(default=1, ge=1)
    """Push weights to the server every N optimizer steps."""
    micro_batch_tokens: int = Field(default=4096, ge=8)
    """Maximum number of tokens of one forward pass on one rank; a prefix that samples share counts once, padding counts."""
    context_parallel: SmallCount = 1
    """Ranks that compute each sample together (DeepSpeed-Ulysses, arXiv 2309.14509): samples may then be so many times
    micro_batch_tokens long. A divisor of launch.num_trainer_ranks and of the model's attention heads."""
    pack: bool = True
    """Put the samples of a forward pass into one row, without padding, and compute each prefix that they share once: the prompt of
    a group, the history of an agent's calls. false: one sample per row, padded to the longest
    (for comparison; except for `bnpo`, which weighs by micro-batch, the loss is the same)."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Logits are computed for this many tokens at a time and never held for more. null: 4096 on a GPU, 1024 on a CPU."""
    compile: bool | None = None
    """torch.compile the layers: slow first steps, then faster ones. null: on a GPU, if no layer carries a state along the row."""
    cpu_offload: bool = False
    """Offload parameters, gradients and optimizer state to host memory (FSDP CPU offload). Slow."""
    reshard_after_forward: bool = True
    """Free a layer's unsharded parameters after its forward pass (FSDP); false: less traffic, more memory."""
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
    def resolved_chunk_tokens(self) -> int:
        """`logprob_chunk_tokens`, or 1024 where it is null: `ExperimentConfig.for_devices` fills it in where there is a GPU."""
        return self.logprob_chunk_tokens or 1024

    @property
    def num_updates(self) -> int:
        """Optimizer updates of a step that has enough groups: minibatches x num_iterations."""
        return self.minibatches * self.num_iterations

    def num_prompts(self, num_rows: int) -> int | None:
        """Prompts that a run of `epochs` over `num_rows` rows starts, ceil(epochs x num_rows); None: only `max_steps` ends it."""
        # 0.07 x 100 is 7.000000000000001
        return None if self.epochs is None else math.ceil(round(self.epochs * num_rows, 6))


# ---- servers, and how weights reach them ----


class VllmOptions(StrictModel):
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of a GPU's memory that vLLM takes (GPU only), `kv_cache_mb` set aside. null = 0.9 on GPUs of its own; on one that it
    shares with the trainer, what the trainer leaves (the plan says how much)."""
    tensor_parallel_size: SmallCount = 1
    """GPUs that share each layer of the model."""
    pipeline_parallel_size: SmallCount = 1
    """Stages, each with some of the layers and its own GPUs."""
    data_parallel_size: SmallCount = 1
    """Copies of the model behind one URL. For mixtures of experts, with `expert_parallel`; others gain more from `replicas`."""
    expert_parallel: bool = False
    """Divide the experts of a layer among all GPUs of `tensor_parallel_size` and `data_parallel_size`."""
    kv_cache_mb: int | None = Field(default=None, ge=16)
    """Size of the KV cache in MiB, on each GPU of a server. null = 512 on a CPU; on a GPU what `gpu_memory_utilization` leaves
    after the weights."""
    enforce_eager: bool = False
    """Skip graph capture and compilation: starts faster, generates slower."""
    sleep_while_training: bool = False
    """On a GPU shared with the trainer: give the server's memory back while a step trains. Only with
    `rollout.max_staleness: 0`, where the server has nothing to do then."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of vLLM's own server, as they are."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one server: tensor_parallel_size x pipeline_parallel_size x data_parallel_size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


class EmbeddedOptions(StrictModel):
    max_slots: Count = 64
    """Completions generated at once; more wait."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the embedded engine runs."""


class ReplicaRange(StrictModel):
    min: int = Field(ge=1, le=65_536)
    """Servers without which the run does not begin."""
    max: int = Field(ge=1, le=65_536)
    """Servers that are started where the cluster has room."""

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; max is the larger one")
        return self


class InferenceSection(StrictModel):
    engine: Literal["auto", EngineName] = "auto"
    """vllm: the real vLLM server. embedded: a small engine on transformers, for machines without vLLM.
    auto: vllm where it is installed and its platform is usable, else embedded; the plan says which and why."""
    urls: list[ServerUrl] = Field(default_factory=list)
    """Servers that already run (`grpo-async serve-vllm`), instead of those spawned by `train`; one that is not up yet may
    join later. Their token: $GRPO_ASYNC_TOKEN."""
    replicas: Annotated[
        Annotated[SmallCount, Tag("number")] | Annotated[ReplicaRange, Tag("range")],
        Discriminator(lambda value: "range" if isinstance(value, dict | ReplicaRange) else "number"),
    ] = 1
    """Servers that `train` starts; each of vLLM takes as many GPUs as the sizes under `vllm` multiply to. With `launch.ray` they
    are spread over the cluster, and `{min: 2, max: 16}` lets them come and go with its nodes. With `urls` it has no effect."""
    host: Host = "127.0.0.1"
    """Address that a spawned server binds. With `launch.ray` each binds that of its node, or all where this is 0.0.0.0."""
    dtype: ComputeDtype | None = None
    """dtype of the served weights; weights are cast to it before they are sent. null: bfloat16 on a GPU, float32 on a CPU."""
    max_model_len: int = Field(default=2048, ge=8)
    """Longest prompt + completion in tokens."""
    threads: SmallCount = 1
    """CPU threads of a server's compute."""
    startup_timeout_s: Seconds = 600.0
    """Longest time until a server answers /health, also after a restart. vLLM compiles for minutes when it first starts on a
    machine. Where it is not set, a second is added for each 100 MB of weights in a local folder: 2000 s for 140 GB."""
    request_timeout_s: Seconds = 300.0
    """Longest silence of the server within one request."""
    max_retries: int = Field(default=5, ge=0)
    """Retries of one request after connection errors and answers >= 500; 4xx is never retried."""
    heartbeat_interval_s: Seconds = 2.0
    """Each server is asked this often whether its engine still answers."""
    heartbeat_timeout_s: Seconds = 30.0
    """A server whose engine does not answer for so long counts as hung: its requests go elsewhere, and it is restarted."""
    max_restarts: int = Field(default=3, ge=0)
    """Consecutive restarts after which a spawned server is given up. The run ends when none is left."""
    restart_delay_s: float = Field(default=1.0, ge=0.0, le=2e6)
    """Wait before the first restart; doubled for each consecutive one, a minute at most."""
    vllm: VllmOptions = VllmOptions()
    """Options of the vLLM server."""
    embedded: EmbeddedOptions = EmbeddedOptions()
    """Options of the embedded engine."""

    @field_validator("urls")
    @classmethod
    def _urls_differ(cls, urls: list[str]) -> list[str]:
        if twice := duplicates(urls):
            raise ValueError(f"named more than once: {twice}")
        return urls

    @property
    def min_replicas(self) -> int:
        return self.replicas.min if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def max_replicas(self) -> int:
        return self.replicas.max if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def resolved_dtype(self) -> ComputeDtype:
        """`dtype`, or float32 where it is null: `ExperimentConfig.for_devices` fills it in where there is a GPU."""
        return self.dtype or "float32"

    def gpus_of_a_server(self, engine: str) -> int:
        """GPUs that a server takes with this engine, where its machine has some."""
        if engine == "embedded":
            return 1 if self.embedded.device == "cuda" else 0
        return self.vllm.num_gpus

    @property
    def longest_outage_s(self) -> float:
        """Longest time until the only server serves again or is given up: every restart takes its longest delay and start."""
        return (self.max_restarts + 1) * (self.startup_timeout_s + MAX_RESTART_DELAY_S)


class WeightsSection(StrictModel):
    transport: Literal["auto", TransportKind] = "auto"
    """gloo: over TCP, on CPU and everywhere. nccl: between GPUs. ipc: servers share GPUs with the trainer.
    auto: what fits the machine; the plan says which and why."""
    mode: PushMode = "keep_kv"
    """What happens to requests in flight. keep_kv: they freeze, then continue with the new weights over the KV cache of the old
    ones (in-flight updates of PipelineRL, arXiv 2509.19128). recompute: their context is computed again with the new weights, as
    in TRL. abort: they are aborted and sent again with the tokens they have."""
    bucket_mb: int | None = Field(default=None, ge=1)
    """Parameters travel in buckets of this many MiB. null: a 64th of the weights, from 8 to 256 MiB, and less where the trainer's
    GPU has little room. Trainer and servers each hold two of them in addition to the weights."""
    timeout_s: Seconds = 120.0
    """Deadline of each phase of a push; while weights travel, of each bucket."""
    host: Host | None = None
    """Master address of the process group that transfers the weights: an address of the trainer's machine (node rank 0). null = the
    one that the servers reach: 127.0.0.1 where they are on the same machine."""
    verify_every_pushes: int = Field(default=25, ge=0)
    """After every Nth push, and when a server joins, log-probabilities of trainer and servers are compared on fixed probe
    sequences, and the run stops when they differ (the preflight does so after the first push in any case). Before that, weights far
    from the true ones are pushed and compared, once: a server that goes on with what it had is found. 0: neither. Whether every
    tensor of a push arrives and is loaded is checked at each push, whatever this is."""
    verify_tolerance: float | None = Field(default=None, gt=0.0)
    """Largest mean absolute difference of log-probabilities, in nats. null: twice the difference that rounding alone causes,
    measured by scoring the same tokens twice in the trainer; at least 1e-3, at most 0.5."""

    def bucket_bytes(self, num_bytes: int, *, free_bytes: int | None = None) -> int:
        """Size of the buckets of an update of `num_bytes`; see `bucket_mb`. Where it is null, at most an eighth of `free_bytes`:
        trainer and server each hold two.

        Worked examples: 400 MB -> 8 MiB, 50 buckets; 8B in bfloat16 (16 GB) -> 250 MB; 70B (140 GB) -> 256 MiB, about 550 buckets,
        5 ms each at 50 GB/s.
        """
        if self.bucket_mb is not None:
            return self.bucket_mb << 20
        size = min(num_bytes // 64, 256 << 20)
        return max(size if free_bytes is None else min(size, free_bytes // 8), 8 << 20)


# ---- what is kept ----


class CheckpointSection(StrictModel):
    every_steps: int = Field(default=50, ge=1)
    """Save every N steps; a checkpoint is also written at the end and on SIGINT, SIGTERM, SIGHUP and SIGQUIT."""
    keep_last: int = Field(default=2, ge=1)
    """Older checkpoints are removed, except those that the next two settings keep."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this are never removed."""
    keep_best: int = Field(default=0, ge=0)
    """How many more checkpoints to keep, those with the best evaluation."""
    best_metric: str = "reward"
    """Evaluation metric that `keep_best` ranks by; larger is better."""


class RolloutRecordSection(StrictModel):
    """Which rollouts are kept, and how much disk space they may take."""

    sample_rate: float = Field(default=1.0, ge=0.0, le=1.0)
    """Fraction of the groups that are stored; which ones follows from the group's id. Failed and stale groups are always stored.
    Metrics and the ledger count all groups, stored or not."""
    token_stats: bool = True
    """Store what the trainer found for each token: its log-probability, the proximal one, the importance ratio, the entropy, and
    why a token was clipped or left out."""
    max_gb: float = Field(default=20.0, gt=0.0)
    """Disk space for the rollouts of training. Above it the oldest blocks are deleted, and readers say so. Each evaluation has
    a folder of its own, evaluations/step_N, with as much space again."""
    block_mb: int = Field(default=16, ge=1, le=1024)
    """A block of JSON lines that has reached this size is rewritten as one Parquet file."""


class RecordSection(StrictModel):
    rollouts: RolloutRecordSection = RolloutRecordSection()
    """Every rollout, for `grpo-async inspect-rollouts` and `grpo-async export`."""
    report: bool = True
    """Write report.html at the end of the run, also of one that failed."""
    advise_every_steps: int = Field(default=20, ge=0)
    """Say every N steps how the run stands and what to do about it; 0 = only after evaluations."""


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


# ---- processes ----


class LaunchSection(StrictModel):
    num_trainer_ranks: SmallCount = 1
    """Trainer processes of each machine that trains, under torchrun; one per GPU (or any number on CPU)."""
    ray: str | None = None
    """The Ray cluster to run on, for more than one machine (extra `ray`): auto = the one that this machine is part of, or
    host:port. Every node sees the working directory, model, data and `run.dir` under the same paths."""
    trainer_nodes: int = Field(default=1, ge=1, le=65_536)
    """Machines that train, each with `num_trainer_ranks`; more than one with `ray` only. Traffic between them is unencrypted and
    without a password: use a private network."""
    placement_timeout_s: Seconds = 600.0
    """Time in which `ray` must have room for the machines that train and for the servers (the least of `inference.replicas`)."""
    max_restarts: int = Field(default=0, ge=0)
    """How often a run on `ray` goes on from its last checkpoint by itself after a machine that trains was lost."""
    colocate: bool = False
    """Put the servers on the GPUs of the trainer's ranks, sharing their memory. false: each has its own GPUs, and if
    there are too few, that is an error. Without GPUs it has no effect."""
    sharding: Literal["full", "hybrid"] = "full"
    """full: parameters are sharded over all ranks. hybrid: over the ranks of a machine, and replicated over machines (HSDP)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto = cuda where there is one."""
    trainer_threads: SmallCount = 1
    """CPU threads of each trainer rank."""
    stop_timeout_s: Seconds = 60.0
    """Time the trainer has to checkpoint and end after SIGINT / SIGTERM; then it is killed."""
    heartbeat_timeout_s: float = Field(default=300.0, gt=0.0)
    """Longest time without a sign of life from a trainer process; none comes while it is stopped, or some code holds the GIL. Then
    its stack is shown and the run ends. What is only slow (a step, a compile, a disk, an evaluation) gives signs of life."""

    @property
    def world_size(self) -> int:
        return self.trainer_nodes * self.num_trainer_ranks
