"""The views of `inspect-rollouts`, each from a run directory to the terminal or to JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from rich.console import Console

from grpo_async.errors import ConfigError, RunError
from grpo_async.rundir import RunDir
from grpo_async.store import GroupRow, read_group_at, scan_groups
from grpo_async.store.rows import from_json
from grpo_async.viewer.group_tables import group_page, group_table
from grpo_async.viewer.rollout_page import rollout_page
from grpo_async.viewer.selection import Filters, GroupSummary, SortKey, order, select
from grpo_async.viewer.token_text import load_token_texts


def show_groups(run: RunDir, filters: Filters, sort: SortKey | None, limit: int | None, console: Console) -> None:
    """The table of groups; `limit` None shows all."""
    found, num_read = _selected(run, filters)
    console.print(group_table(order(found, sort)[:limit], len(found), num_read))


def show_group(run: RunDir, group_id: int, filters: Filters, console: Console) -> None:
    """The rollouts of one group. A group may stand in the store more than once (a resumed run): each is shown.

    Raises:
        ConfigError: the run has no such group, or the filters leave none of it.
    """
    for row in _rows(run, filters, _wanted(filters)):
        console.print(group_page(row))
        console.print()


def show_rollout(run: RunDir, rollout_id: str, filters: Filters, console: Console) -> None:
    """One rollout with its tokens.

    Raises:
        ConfigError: the run has no such rollout, or the filters exclude it.
    """
    rows = _rows(run, filters, _wanted(filters))
    texts = load_token_texts(run)
    for row in rows:
        for rollout in row.rollouts:
            if rollout.rollout_id == rollout_id:
                console.print(rollout_page(row, rollout, texts))


def write_json(
    run: RunDir, filters: Filters, sort: SortKey | None, limit: int | None, write: Callable[[bytes], Any]
) -> None:
    """One line per group: the stored row with a `summary`; with `filters.rollout_id`, one line per such rollout.

    Raises:
        ConfigError: the group or rollout that is asked for is not there.

    `write` gets lines without their end. Rows are read again one by one: a store may be larger than the memory.
    """
    if filters.rollout_id is not None or filters.group_id is not None:
        _rows(run, filters, _wanted(filters))  # says so when there is none
    found, _ = _selected(run, filters)
    for summary in order(found, sort)[:limit]:
        content = orjson.loads(read_group_at(summary.part, summary.offset))
        if filters.rollout_id is None:
            write(orjson.dumps({**content, "summary": summary.figures()}))
            continue
        keys = ("group_id", "prompt_id", "step")
        for rollout in content["rollouts"]:
            if rollout["rollout_id"] == filters.rollout_id:
                write(orjson.dumps({**{key: content[key] for key in keys}, **rollout}))


def _selected(run: RunDir, filters: Filters) -> tuple[list[GroupSummary], int]:
    found, num_read = select(scan_groups(run.rollouts), filters)
    if num_read == 0:
        raise RunError(f"{run.root} has no rollouts yet; the first appear with the first groups that are done")
    return found, num_read


def _rows(run: RunDir, filters: Filters, what: str) -> list[GroupRow]:
    found, num_read = _selected(run, filters)
    if not found:
        others = " that the other options let through" if _has_more(filters) else ""
        raise ConfigError(
            f"{run.root} has no {what}{others} among its {num_read} groups; without options it lists them"
        )
    return [from_json(read_group_at(summary.part, summary.offset)) for summary in found]


def _wanted(filters: Filters) -> str:
    if filters.rollout_id is not None:
        return f"rollout '{filters.rollout_id}' (they are named like g17-r3: the fourth of group 17)"
    return f"group {filters.group_id}"


def _has_more(filters: Filters) -> bool:
    return filters != Filters(group_id=filters.group_id, rollout_id=filters.rollout_id)
