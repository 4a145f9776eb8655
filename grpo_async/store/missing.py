"""What is said when a table has not what was asked for, or not all that was generated."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from grpo_async.errors import RunError
from grpo_async.store.facts import StoreFacts, read_facts
from grpo_async.store.index import Index
from grpo_async.store.query import Query, QueryError
from grpo_async.store.query_sql import Sql, comparisons

_NEAR = 3
_SUPERSEDED = "is superseded (a resume left it behind); ask for superseded ones to see it"


def notes(index: Index) -> list[str]:
    """See RolloutTable.notes."""
    found = index.damage()
    try:
        facts = read_facts(index.folder)
    except RunError as error:  # the rollouts can be read without them
        facts = StoreFacts()
        found.append(str(error))
    torn = [note for note in index.torn() if not any(name in note for name in facts.torn)]
    found += [*torn, *facts.notes()]
    ((groups, superseded),) = index.fetch(Sql("SELECT count(*), count_if(superseded) FROM groups"))
    if superseded:
        found.append(
            f"{superseded} of {groups} groups were written after a checkpoint that the run later went on from: they are "
            "superseded, and shown only when asked for"
        )
    if not groups and not found:
        state = "holds no rollouts yet" if index.folder.is_dir() else "is not there (yet)"
        found.append(f"{index.folder} {state}")
    return found


def no_group(index: Index, group_id: int) -> str:
    """Why there is no group of that id, and which there are."""
    if index.fetch(Sql("SELECT 1 FROM groups WHERE group_id = ?", (group_id,))):
        return f"group {group_id} {_SUPERSEDED}"
    ((low, high),) = index.fetch(Sql("SELECT min(group_id), max(group_id) FROM groups"))
    there = "it holds none" if low is None else f"it holds groups {low} to {high}, perhaps not all of them"
    return f"there is no group {group_id} in {index.folder}; {there}"


def no_rollout(index: Index, rollout_id: str) -> str:
    """Why there is no rollout of that id, and which are near."""
    if index.fetch(Sql("SELECT 1 FROM rows WHERE rollout_id = ?", (rollout_id,))):
        return f"rollout {rollout_id} {_SUPERSEDED}"
    near = index.fetch(
        Sql(
            "SELECT rollout_id FROM rows WHERE rollout_id IS NOT NULL "
            "GROUP BY rollout_id ORDER BY levenshtein(rollout_id, ?), rollout_id LIMIT ?",
            (rollout_id, _NEAR),
        )
    )
    there = f"did you mean {' or '.join(name for (name,) in near)}?" if near else "it holds none"
    return f"there is no rollout {rollout_id} in {index.folder}; {there}"


def check_rewards(query: Query, reward_names: Callable[[], list[str]]) -> None:
    """A part of the reward that no rollout has is a mistake, as soon as there are rollouts.

    Raises:
        QueryError: the query has one.
    """
    for comparison in comparisons(query.expression):
        if comparison.field.name != "reward.NAME" or comparison.name is None:
            continue
        names = reward_names()
        if names and comparison.name not in names:
            near = [f"reward.{name}" for name in get_close_matches(comparison.name, names, n=_NEAR)]
            problem = f"no rollout has a reward {comparison.name}; there are {', '.join(names)}"
            place = max(query.text.lower().find(f"reward.{comparison.name}".lower()), 0)
            raise QueryError(query.text, place, len("reward.") + len(comparison.name), problem, near)
