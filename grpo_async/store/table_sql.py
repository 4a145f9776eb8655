"""The SELECTs of `RolloutTable`, as pure functions of a condition over the view `rollouts`."""

from __future__ import annotations

import dataclasses

from grpo_async.store.index import Sql
from grpo_async.store.query import QueryError, find_value
from grpo_async.store.query_names import LIST
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS
from grpo_async.store.summaries import PREVIEW_CHARACTERS, GroupSummary, RolloutSummary, StepSummary, sql_of

ROLLOUT_NAMES = tuple(each.name for each in dataclasses.fields(RolloutSummary) if not each.name.endswith("_preview"))
GROUP_NAMES = tuple(sql_of(GroupSummary))
STEP_SQL = sql_of(StepSummary)
PROMPT_PREVIEW = (
    f"left(json_extract_string(coalesce(reset_messages, prompt_messages), '$[#-1].content'), {PREVIEW_CHARACTERS})"
)
COMPLETION_PREVIEW = f"left(completion_text, {PREVIEW_CHARACTERS})"
GROUP_PROMPT_PREVIEW = f"left(json_extract_string(prompt_messages, '$[#-1].content'), {PREVIEW_CHARACTERS})"

TOOLS = """SELECT seq, list_sort(list_distinct(flatten(list(tool_names)))) FROM rows WHERE seq IN ? AND tool_names IS NOT NULL
GROUP BY seq"""


def count_sql(where: Sql) -> Sql:
    return Sql("SELECT count(rollout_index), count(DISTINCT seq) FROM rollouts WHERE ") + where


def page_sql(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    select = Sql(f"SELECT {', '.join(ROLLOUT_NAMES)} FROM rollouts WHERE rollout_index IS NOT NULL AND ") + where
    order = "".join(f"{value} {direction} NULLS LAST, " for value, direction in _order(sort, of_groups=False))
    return select + f" ORDER BY {order}seq DESC, rollout_index" + _window(offset, limit)


def group_page_sql(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    keys = group_order(sort)
    names = ", ".join(f"g.{name}" for name in GROUP_NAMES)
    values = "".join(
        f", any_value({value}) AS key_{place}" for place, (value, _) in enumerate(keys) if value != "matching"
    )
    found = Sql(f"SELECT seq, count(rollout_index) AS matching{values} FROM rollouts WHERE ") + where + " GROUP BY seq"
    order = ", ".join(
        f"m.{'matching' if value == 'matching' else f'key_{place}'} {direction} NULLS LAST"
        for place, (value, direction) in enumerate(keys)
    )
    select = (
        Sql("WITH found AS (") + found + f") SELECT m.matching, {names} FROM groups AS g JOIN found AS m USING (seq)"
    )
    return select + f" ORDER BY {order}, g.seq DESC" + _window(offset, limit)


def step_sql(where: Sql, *, with_unfinished: bool) -> Sql:
    """The values of STEP_SQL. Without `with_unfinished`: what was filtered or dropped for a step that is not done would give a
    wrong mean."""
    is_done = "" if with_unfinished else " AND (step IS NULL OR step <= last_step())"
    select = Sql(f"SELECT {', '.join(STEP_SQL.values())} FROM rollouts WHERE ")
    return select + where + is_done + " GROUP BY step ORDER BY step NULLS LAST"


def step_rewards_sql(where: Sql) -> Sql:
    """(step, name, mean)."""
    parts = Sql("SELECT step, unnest(map_entries(rewards)) AS part FROM rollouts WHERE ") + where
    return Sql("SELECT step, part.key, avg(part.value) FROM (") + parts + ") WHERE part.value IS NOT NULL GROUP BY ALL"


def step_statuses_sql(where: Sql) -> Sql:
    """(step, status, groups)."""
    counts = Sql("SELECT step, group_status, count(DISTINCT seq) FROM rollouts WHERE ")
    return counts + where + " GROUP BY ALL ORDER BY ALL"


def improvement_sql(where: Sql, k: int, *, worsened: bool) -> Sql:
    """(prompt_hash, groups, change, first seq, last seq) of prompts that were scored in two groups or more."""
    sign, order = ("<", "ASC") if worsened else (">", "DESC")
    select = Sql(
        "SELECT prompt_hash, count(*), arg_max(reward_mean, seq) - arg_min(reward_mean, seq) AS change, min(seq), max(seq) "
        "FROM groups WHERE reward_mean IS NOT NULL AND seq IN (SELECT seq FROM rollouts WHERE "
    )
    having = f") GROUP BY prompt_hash HAVING count(*) > 1 AND change {sign} 0 ORDER BY change {order}, prompt_hash"
    return select + where + having + Sql(" LIMIT ?", (k,))


def group_order(sort: str) -> list[tuple[str, str]]:
    """(SQL, ASC or DESC) of a list of values of groups: "-reward,step".

    Raises:
        QueryError: groups cannot be sorted by one of them.
    """
    return _order(sort, of_groups=True)


def _order(sort: str, *, of_groups: bool) -> list[tuple[str, str]]:
    found = []
    for part in sort.split(","):
        name, direction = part.strip().lstrip("+-"), "DESC" if part.strip().startswith("-") else "ASC"
        if of_groups and name == "matching":
            found.append((name, direction))
            continue
        value = find_value("group_status" if of_groups and name == "status" else name, of_group=of_groups, text=sort)
        if value.in_blocks or value.kind == LIST:
            raise QueryError(sort, max(sort.find(name), 0), len(name), f"rollouts cannot be sorted by {name}")
        found.append((value.sql, direction))
    return found


def _window(offset: int, limit: int) -> Sql:
    return Sql(" LIMIT ? OFFSET ?", (max(limit, 0), max(offset, 0)))


# ------------------------------------------------------------------------------------------- whole rows, for an export

DUMPED_SQL = ", ".join(f'"{name}"' for name in (*COLUMN_NAMES, "superseded"))


def _as_json(name: str, type_: str) -> str:
    """The column as JSON has it: JSON as what it stands for, single precision with the digits that it needs."""
    if type_ == "JSON":
        return f'"{name}"::JSON'
    if type_ == "FLOAT[]":
        return f"replace(\"{name}\"::VARCHAR, 'NULL', 'null')::JSON"
    return f'"{name}"'


DUMPED_JSON_SQL = (
    "to_json({"
    + ", ".join(f"'{column.name}': {_as_json(column.name, column.type)}" for column in COLUMNS)
    + ", 'superseded': superseded})::VARCHAR"
)
