"""Where prompts come from: the sources of data, and the sections `data` and `evaluation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from grpo_async.config.base import (
    Count,
    FilePath,
    MinP,
    Reference,
    RepetitionPenalty,
    Seed,
    StopStrings,
    StrictModel,
    StructuredOutputs,
    TopK,
    TopP,
    default_type,
)


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


class JsonlSource(DataSource):
    type: Literal["jsonl"] = "jsonl"
    """One JSON object per line."""
    path: FilePath
    """The file."""


class CsvSource(DataSource):
    type: Literal["csv"]
    """Comma-separated values with a header line; every value is text."""
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


class ReasoningGymTask(StrictModel):
    name: str
    """Name of the task, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0.0)
    """Its fraction of the rows, compared with the weights of the other tasks."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, such as `{max_terms: 3}`."""


class ReasoningGymSource(DataSource):
    type: Literal["reasoning_gym"]
    """Tasks made by reasoning-gym (extra `reasoning-gym`); their reward is grpo_async.rewards.reasoning_gym:task_score."""
    tasks: list[ReasoningGymTask] = Field(min_length=1)
    """The tasks; with several, their rows are mixed evenly by weight."""
    size: Count
    """Number of rows, over all tasks."""
    seed: Seed = 0
    """Another seed makes other rows: training and evaluation need different ones."""


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
    JsonlSource | CsvSource | ParquetSource | HubSource | ReasoningGymSource | GeneratorSource | EnvironmentSource,
    Field(discriminator="type"),
    default_type("jsonl"),
]


class DataSection(StrictModel):
    train: Source
    """Prompts to train on."""
    shuffle: bool = True
    """Reshuffle every epoch, seeded by `run.seed`."""
    held_out: float | None = Field(default=None, gt=0.0)
    """Rows of `train` that are kept for evaluation and not trained on: below 1 a fraction (0.05), else a number of rows (200).
    A row's own prompt decides (not `run.seed`), so that rows added later never move one from training to evaluation."""

    @field_validator("held_out")
    @classmethod
    def _is_a_fraction_or_a_number(cls, held_out: float | None) -> float | None:
        if held_out is not None and held_out >= 1 and held_out != int(held_out):
            raise ValueError(f"{held_out:g} is neither a fraction (below 1) nor a whole number of rows")
        return held_out


def powers_up_to(limit: int) -> list[int]:
    """The k that an evaluation reports for `limit` completions of a prompt: 1 -> [1]; 4 -> [1, 2, 4]; 6 -> [1, 2, 4, 6]."""
    powers = [1 << exponent for exponent in range(limit.bit_length())]
    return powers if powers[-1] == limit else [*powers, limit]


class EvaluationSection(StrictModel):
    data: Source | None = None
    """Prompts to evaluate on, with the keys of `data.train`; null = those that `data.held_out` keeps back."""
    num_prompts: Count = 200
    """Only the first N of them."""
    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate every N steps while training and generation continue; null = only at the start and the end. An evaluation
    that is due while the one before it is still running is skipped."""
    at_start: bool = True
    """Evaluate before the first step."""
    samples_per_prompt: Count = 1
    """Completions per prompt. With more than one, pass@k is reported for k = 1, 2, 4, ... and this number, majority@k (where
    answers can be read) for those from 3 on, and mean@k for k = this."""
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
    """A column of the data, such as its source: results are also reported for each of its values."""
    max_in_flight: Count | None = None
    """Most evaluation rollouts in progress at once, in addition to those of training (but never fewer than one prompt's); null = a
    quarter of `rollout.max_in_flight` during training, all of it before and after."""
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
            raise ValueError(
                f"{temperature:g} is more than 0 and less than 0.01, to which vLLM would raise it; set 0 for greedy"
            )
        return temperature
