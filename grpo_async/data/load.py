"""All data of a run: rows to train on, rows to evaluate on, and the check that they are not the same."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_async.config.sections import DataSection, EvaluationSection, Source
from grpo_async.data.identity import find_leaks, split_held_out, task_columns
from grpo_async.data.rows import Rows
from grpo_async.data.sources import CountTokens, load_rows
from grpo_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """`evaluation` is None without an `evaluation` section. `notes` are sentences for the plan, each with its setting."""

    train: Rows
    evaluation: Rows | None
    train_system_prompt: str | None
    evaluation_system_prompt: str | None
    notes: tuple[str, ...]


def load_data(
    data: DataSection,
    evaluation: EvaluationSection | None,
    *,
    count_tokens: CountTokens | None = None,
    needs_prompt: bool = True,
) -> LoadedData:
    """Read, filter, split and compare.

    Args:
        data: where prompts come from.
        evaluation: what is evaluated on, if anything.
        count_tokens: number of prompt tokens of a Prompt, chat template included; needed for `max_prompt_tokens`.
        needs_prompt: see `load_rows`.

    Raises:
        ConfigError: data cannot be used, or rows to evaluate on are trained on and `evaluation.leak_check` is `error`.
    """
    train = _load("data.train", data.train, count_tokens, needs_prompt)
    notes = [f"data.train: {note}" for note in train.notes]
    held_out: Rows | None = None
    if data.held_out is not None:
        train, held_out = split_held_out(train, data.held_out, columns=task_columns(data.train))
        notes.append(f"data.held_out: {len(held_out)} rows are held out, {len(train)} are left to train on")
    evaluated, evaluated_source = held_out, data.train
    if evaluation is not None and evaluation.data is not None:
        evaluated_source = evaluation.data
        evaluated = _load("evaluation.data", evaluated_source, count_tokens, needs_prompt)
        notes += [f"evaluation.data: {note}" for note in evaluated.notes]
    if evaluation is None:
        evaluated = None
    else:
        assert evaluated is not None  # config.rules refuses an evaluation without data
        evaluated = evaluated.take(range(min(evaluation.num_prompts, len(evaluated))))
        notes += _check_leaks(train, data.train, evaluated, evaluated_source, evaluation)
    return LoadedData(
        train=train,
        evaluation=evaluated,
        train_system_prompt=data.train.system_prompt,
        evaluation_system_prompt=evaluated_source.system_prompt if evaluated is not None else None,
        notes=tuple(notes),
    )


def _load(setting: str, source: Source, count_tokens: CountTokens | None, needs_prompt: bool) -> Rows:
    try:
        return load_rows(source, count_tokens=count_tokens, needs_prompt=needs_prompt)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _check_leaks(
    train: Rows, train_source: Source, evaluated: Rows, evaluated_source: Source, evaluation: EvaluationSection
) -> list[str]:
    if evaluation.leak_check == "off":
        return []
    leaks = find_leaks(train, evaluated, task_columns(train_source) | task_columns(evaluated_source))
    if leaks is None:
        return []
    message = f"evaluation.data: {leaks}"
    if evaluation.leak_check == "error":
        raise ConfigError(
            f"{message}. Remove them from one side, use another `seed` or `first_seed` where the rows are made, or name the "
            "columns that tell such rows apart in `task_columns`; `evaluation.leak_check: warn` continues nevertheless"
        )
    return [message]
