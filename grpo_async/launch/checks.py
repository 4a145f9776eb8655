"""What can be known to be wrong before anything starts: files, folders and functions that the configuration names.

Reads a few rows at most and imports the reward functions, as the trainer will. Every problem goes into one error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import HubSource, Source
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.inference.surface import token_from_environment
from grpo_async.rewards import RewardFunction, load_rewards

_NUM_ROWS = 3
_HUB_NAME = re.compile(r"^\w[\w.-]*(/[\w.-]+)?$")  # ./x and ../x are paths


def check_inputs(config: ExperimentConfig) -> list[str]:
    """Look at everything that the configuration names; returns notes (what could not be checked).

    Raises:
        ConfigError: all problems, one a line, each with its dotted path.
    """
    problems: list[str] = []
    notes: list[str] = []
    _check_model(config, problems, notes)
    train_columns = _check_source("data.train", config.data.train, problems, notes)
    if config.evaluation is not None:
        columns = _check_source("evaluation.data", config.evaluation.data, problems, notes)
        baseline = config.evaluation.baseline_column
        if columns is not None and baseline is not None and baseline not in columns:
            problems.append(f"evaluation.baseline_column: {baseline} is not one of the columns {sorted(columns)}")
    try:
        rewards = load_rewards(config.rewards)
    except ConfigError as error:
        problems.append(str(error))
    else:
        if train_columns is not None:
            problems.extend(missing_columns(rewards, train_columns))
        for reward in rewards:
            reward.close()
    if config.inference.url is not None and token_from_environment() is None:
        notes.append("inference.url is set and $GRPO_ASYNC_TOKEN is not: the server must be one that asks for no token")
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


def _check_model(config: ExperimentConfig, problems: list[str], notes: list[str]) -> None:
    folder = Path(config.model.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            problems.append(f"model.path: {folder} has no config.json, so it is no Hugging Face model folder")
        elif not any(folder.glob("*.safetensors")):
            problems.append(f"model.path: {folder} has no *.safetensors file")
    elif _HUB_NAME.match(config.model.path) and not Path(folder.parts[0]).exists():
        notes.append(
            f"model.path: {config.model.path} is no local folder; it is taken as a hub name and not checked here"
        )
    else:
        problems.append(f"model.path: {config.model.path} does not exist (working directory: {Path.cwd()})")
    template = config.model.chat_template
    if template is not None and not template.is_file():
        problems.append(f"model.chat_template: {template} does not exist (working directory: {Path.cwd()})")


def _check_source(key: str, source: Source, problems: list[str], notes: list[str]) -> set[str] | None:
    """Read the first rows; returns their columns, None where they could not be read."""
    if isinstance(source, HubSource):
        notes.append(f"{key}: the dataset {source.name} is not checked here")
        return None
    from grpo_async.data import load_rows

    limit = min(source.limit or _NUM_ROWS, _NUM_ROWS)
    try:
        rows = load_rows(source.model_copy(update={"limit": limit}))
    except GrpoAsyncError as error:
        problems.append(f"{key}: {error}")
        return None
    return set(rows[0])


def missing_columns(rewards: Sequence[RewardFunction], columns: Collection[str]) -> list[str]:
    """One sentence for each reward function that needs a column which data.train does not have: it would fail every group."""
    given = sorted(set(columns) - {"prompt"})
    return [
        f"reward {reward.name!r} needs the column(s) {missing}, but data.train has {given}; rename with "
        "data.train.columns, or set them in the reward's `arguments`"
        for reward in rewards
        if (missing := reward.missing_columns(given))
    ]
