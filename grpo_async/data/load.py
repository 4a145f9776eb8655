"""All data of a run: rows to train on, rows to evaluate on, and the check that they are not the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from grpo_async.config.sections import DataSection, EvaluationSection, Source, sources_at
from grpo_async.data.identity import find_leaks, split_held_out, task_columns
from grpo_async.data.rows import Rows
from grpo_async.data.sources import CountTokens, load_rows
from grpo_async.data.stream import SourceRows
from grpo_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """The rows of each source by its dotted path; `evaluation` is empty without an `evaluation` section. `notes` are sentences for
    the plan, each with its setting."""

    train: Mapping[str, SourceRows]
    evaluation: Mapping[str, SourceRows]
    notes: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Rows to train on."""
        return sum(len(source.rows) for source in self.train.values())


def load_data(
    data: DataSection,
    evaluation: EvaluationSection | None,
    *,
    count_tokens: CountTokens | None = None,
    needs_prompt: bool = True,
) -> LoadedData:
    """Read, filter, split and compare; without `count_tokens` (see `load_rows`) `max_prompt_tokens` has no effect.

    Raises:
        ConfigError: data cannot be used, or rows to evaluate on are trained on and `evaluation.leak_check` is `error`.
    """
    notes: list[str] = []

    def load(sources: Mapping[str, Source]) -> dict[str, SourceRows]:
        if count_tokens is None:
            sources = {key: source.without_filters() for key, source in sources.items()}
        loaded = {key: _load(key, source, count_tokens, needs_prompt) for key, source in sources.items()}
        notes.extend(f"{key}: {note}" for key, source in loaded.items() for note in source.rows.notes)
        return loaded

    train = load(data.sources)
    evaluated: dict[str, SourceRows] = {}
    columns = {column for source in data.sources.values() for column in task_columns(source)}
    if data.held_out is not None:
        for key, source in train.items():
            kept, held_out = split_held_out(source.rows, data.held_out, columns=task_columns(data.sources[key]))
            train[key], evaluated[key] = replace(source, rows=kept), replace(source, rows=held_out)
        num_held_out, num_kept = (sum(len(each.rows) for each in part.values()) for part in (evaluated, train))
        notes.append(f"data.held_out: {num_held_out} rows are held out, {num_kept} are left to train on")
    if evaluation is not None and evaluation.data is not None:
        sources = sources_at("evaluation.data", evaluation.data)
        columns.update(column for source in sources.values() for column in task_columns(source))
        evaluated = load(sources)
    if evaluation is None:
        evaluated = {}
    else:
        assert evaluated  # config.rules refuses an evaluation without data
        for key, source in evaluated.items():
            first = source.rows.take(range(min(evaluation.num_prompts, len(source.rows))))
            evaluated[key] = replace(source, rows=first, temperature=None, group_size=None)
        leaks = find_leaks(_joined(train.values()), _joined(evaluated.values()), columns)
        notes += _check_leaks(leaks, evaluation)
    return LoadedData(train=train, evaluation=evaluated, notes=tuple(notes))


def _load(key: str, source: Source, count_tokens: CountTokens | None, needs_prompt: bool) -> SourceRows:
    try:
        rows = load_rows(source, count_tokens=count_tokens, needs_prompt=needs_prompt)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return SourceRows(
        rows=rows,
        system_prompt=source.system_prompt,
        label=source.resolved_label if key.rpartition(".")[2].isdecimal() else None,
        weight=source.weight,
        rewards=source.rewards,
        temperature=source.temperature,
        group_size=source.group_size,
    )


def _joined(sources: Iterable[SourceRows]) -> Rows:
    """The rows of all sources, one after the other."""
    every = [source.rows for source in sources]
    return Rows((row for rows in every for row in rows), locations=(each for rows in every for each in rows.locations))


def _check_leaks(leaks: str | None, evaluation: EvaluationSection) -> list[str]:
    if leaks is None or evaluation.leak_check == "off":
        return []
    message = f"evaluation.data: {leaks}"
    if evaluation.leak_check == "error":
        raise ConfigError(
            f"{message}. Remove them from one side, use another `seed` or `first_seed` where the rows are made, or name the "
            "columns that tell such rows apart in `task_columns`; `evaluation.leak_check: warn` continues nevertheless"
        )
    return [message]
