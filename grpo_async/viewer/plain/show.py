"""The printed views of `inspect-rollouts`: the table of groups, one group, one rollout, JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from grpo_async.errors import ConfigError, RunError
from grpo_async.rundir import RunDir
from grpo_async.store.json_text import printable
from grpo_async.store.query import Query, both, parse_query, quote
from grpo_async.store.rows import to_json
from grpo_async.store.summaries import GroupSummary
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.plain.rollout_page import rollout_page
from grpo_async.viewer.plain.tables import group_page, group_table
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.token_text import load_token_texts

_PAGE = 500  # groups of one read


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is asked for. `text` is a query, `sort` an order of the store ("" = newest first), `limit` None shows all."""

    text: str = ""
    sort: str = ""
    limit: int | None = None
    group_id: int | None = None
    rollout_id: str | None = None
    with_superseded: bool = False

    @property
    def query(self) -> Query:
        return parse_query(self.text)

    @property
    def order(self) -> str:
        return self.sort or "-seq"


def show_groups(run: RunDir, table: RolloutTable, selection: Selection, console: Console) -> None:
    """The table of groups, and what a reader must know of the store."""
    num_stored = _num_groups(run, table, selection)
    matching = table.count(selection.query, with_superseded=selection.with_superseded).groups
    console.print(group_table(list(_summaries(table, selection)), matching, num_stored))
    _print_notes(table, console)


def show_group(run: RunDir, table: RolloutTable, selection: Selection, console: Console) -> None:
    """The rollouts of one group.

    Raises:
        ConfigError: the run has no such group, or the query leaves none of it.
    """
    assert selection.group_id is not None
    _demand(run, table, selection)
    console.print(group_page(table.group(selection.group_id, with_superseded=selection.with_superseded)))


def show_rollout(run: RunDir, table: RolloutTable, selection: Selection, console: Console) -> None:
    """One rollout with its tokens.

    Raises:
        ConfigError: the run has no such rollout, or the query excludes it.
    """
    assert selection.rollout_id is not None
    _demand(run, table, selection)
    group, rollout = table.rollout(selection.rollout_id, with_superseded=selection.with_superseded)
    console.print(rollout_page(group, rollout, load_token_texts(run)))


def write_json(run: RunDir, table: RolloutTable, selection: Selection, write: Callable[[bytes], Any]) -> None:
    """One line per group: the stored row with a `summary`; with `rollout_id`, the rollout alone, with what its group is.

    Raises:
        ConfigError: the group or rollout that is asked for is not there.

    `write` gets lines without their end. Groups are read one by one: a store may be larger than the memory.
    """
    superseded = selection.with_superseded
    if selection.rollout_id is not None:
        _demand(run, table, selection)
        group, rollout = table.rollout(selection.rollout_id, with_superseded=superseded)
        known = {
            "group_id": group.group_id,
            "prompt_id": group.prompt_id,
            "step": group.step,
            "group_status": group.status,
        }
        write(_line({**known, **orjson.loads(orjson.dumps(rollout))}))
        return
    _num_groups(run, table, selection)
    if selection.group_id is not None:
        _demand(run, table, selection)
    for summary in _summaries(table, selection):
        row = table.group_at(summary.seq)
        write(_line({**orjson.loads(to_json(row)), "summary": summary}))


def _line(content: dict[str, Any]) -> bytes:
    return printable(orjson.dumps(content).decode()).encode()


def _summaries(table: RolloutTable, selection: Selection) -> Iterator[GroupSummary]:
    query, superseded = _narrowed(selection), selection.with_superseded
    left, offset = selection.limit, 0
    while left is None or left > 0:
        limit = _PAGE if left is None else min(left, _PAGE)
        page = table.group_page(query, sort=selection.order, offset=offset, limit=limit, with_superseded=superseded)
        yield from page
        if len(page) < limit:
            return
        offset += limit
        left = None if left is None else left - limit


def _narrowed(selection: Selection) -> Query:
    """The query, and only the group that was asked for."""
    if selection.group_id is None:
        return selection.query
    return both(selection.query, parse_query(f"group.id={selection.group_id}"))


def _num_groups(run: RunDir, table: RolloutTable, selection: Selection) -> int:
    """Groups of the store.

    Raises:
        RunError: there is none.
    """
    num_groups = table.count(with_superseded=selection.with_superseded).groups
    if num_groups == 0:
        raise RunError(f"{run.root} has no rollouts yet; the first appear with the first groups that are done")
    return num_groups


def _demand(run: RunDir, table: RolloutTable, selection: Selection) -> None:
    """Raises ConfigError where the group or rollout is not there, or not in the query."""
    num_groups = _num_groups(run, table, selection)
    if selection.rollout_id is not None:
        only = f"id={quote(selection.rollout_id)}"
        what = f"rollout '{one_line(selection.rollout_id, 60)}' (they are named like g17-r3: the fourth of group 17)"
    else:
        only, what = f"group.id={selection.group_id}", f"group {selection.group_id}"
    query = both(selection.query, parse_query(only))
    if table.count(query, with_superseded=selection.with_superseded).groups == 0:
        others = " that the other options let through" if selection.text else ""
        raise ConfigError(
            f"{run.root} has no {what}{others} among its {num_groups} groups; without options it lists them"
        )


def _print_notes(table: RolloutTable, console: Console) -> None:
    for note in table.notes:
        console.print(Text(f"note: {one_line(note, 400)}", style="yellow"))
