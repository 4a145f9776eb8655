"""The SELECTs of `RolloutTable`, as pure functions of a condition over the view `rollouts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.store.index import Sql
from grpo_async.store.query import QueryError, find_value
from grpo_async.store.query_names import LIST
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS
from grpo_async.store.summaries import PREVIEW_CHARACTERS, GroupSummary, RolloutSummary, StepSummary

_PREVIEWS = ("prompt_preview", "completion_preview")
ROLLOUT_NAMES = tuple(f.name for f in dataclasses.fields(RolloutSummary) if f.name not in _PREVIEWS)
GROUP_NAMES = tuple(
    f.name for f in dataclasses.fields(GroupSummary) if f.name not in (*_PREVIEWS, "num_matching", "tool_names")
)
PROMPT_PREVIEW = (
    f"left(json_extract_string(coalesce(reset_messages, prompt_messages), '$[#-1].content'), {PREVIEW_CHARACTERS})"
)
COMPLETION_PREVIEW = f"left(completion_text, {PREVIEW_CHARACTERS})"
GROUP_PROMPT_PREVIEW = f"left(json_extract_string(prompt_messages, '$[#-1].content'), {PREVIEW_CHARACTERS})"

TOOLS = """SELECT seq, list_sort(list_distinct(flatten(list(tool_names)))) FROM rows WHERE seq IN ? AND tool_names IS NOT NULL
GROUP BY seq"""

_STEP = {
    "num_rollouts": "count(rollout_index)",
    "num_groups": "count(DISTINCT seq)",
    "num_unscored": "count(rollout_index) - count(reward)",
    "reward_mean": "avg(reward)",
    "reward_std": "stddev_samp(reward)",
    "reward_min": "min(reward)",
    "reward_q10": "quantile_cont(reward, 0.1)",
    "reward_q25": "quantile_cont(reward, 0.25)",
    "reward_median": "quantile_cont(reward, 0.5)",
    "reward_q75": "quantile_cont(reward, 0.75)",
    "reward_q90": "quantile_cont(reward, 0.9)",
    "reward_max": "max(reward)",
    "num_tokens_mean": "coalesce(avg(num_tokens), 0.0)",
    "num_tokens_q10": "coalesce(quantile_cont(num_tokens, 0.1), 0.0)::DOUBLE",
    "num_tokens_median": "coalesce(quantile_cont(num_tokens, 0.5), 0.0)::DOUBLE",
    "num_tokens_q90": "coalesce(quantile_cont(num_tokens, 0.9), 0.0)::DOUBLE",
    "num_tokens_max": "coalesce(max(num_tokens), 0)",
    "truncated_share": "coalesce(avg(truncated::INTEGER), 0.0)",
    "failed_share": "coalesce(avg((status = 'failed')::INTEGER), 0.0)",
    "num_turns_mean": "coalesce(avg(num_turns), 0.0)",
    "num_tool_calls": "coalesce(sum(num_tool_calls), 0)::BIGINT",
    "num_failed_tool_calls": "coalesce(sum(num_failed_tool_calls), 0)::BIGINT",
    "staleness_mean": "avg(staleness)",
    "staleness_max": "max(staleness)",
    "entropy_mean": "avg(entropy_mean)",
    "ratio_mean": "avg(ratio_mean)",
    "clipped_share": "avg(clipped_share)",
    "masked_share": "avg(masked_share)",
    "mismatch_mean": "avg(mismatch_mean)",
    "total_duration_mean_s": "avg(total_duration_s)",
}


def count_sql(where: Sql) -> Sql:
    return Sql("SELECT count(rollout_index), count(DISTINCT seq) FROM rollouts WHERE ") + where


def page_sql(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    select = Sql(f"SELECT {', '.join(ROLLOUT_NAMES)} FROM rollouts WHERE rollout_index IS NOT NULL AND ") + where
    return select + f" ORDER BY {_order(sort, of_groups=False)}, seq DESC, rollout_index" + _window(offset, limit)


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
    """Without `with_unfinished`: what was filtered or dropped for a step that is not done would tell a false mean."""
    is_done = "" if with_unfinished else " AND (step IS NULL OR step <= last_step())"
    values = ", ".join(f"{expression} AS {name}" for name, expression in _STEP.items())
    return (
        Sql(f"SELECT step, {values} FROM rollouts WHERE ") + where + is_done + " GROUP BY step ORDER BY step NULLS LAST"
    )


def step_rewards_sql(where: Sql) -> Sql:
    """(step, name, mean)."""
    parts = Sql("SELECT step, unnest(map_entries(rewards)) AS part FROM rollouts WHERE ") + where
    return Sql("SELECT step, part.key, avg(part.value) FROM (") + parts + ") WHERE part.value IS NOT NULL GROUP BY ALL"


def step_statuses_sql(where: Sql) -> Sql:
    """(step, status, groups)."""
    counts = Sql("SELECT step, group_status, count(DISTINCT seq) FROM rollouts WHERE ")
    return counts + where + " GROUP BY ALL ORDER BY ALL"


def step_summary(row: Sequence[Any], rewards: Mapping[str, float], statuses: Mapping[str, int]) -> StepSummary:
    return StepSummary(step=row[0], rewards=rewards, group_statuses=statuses, **dict(zip(_STEP, row[1:], strict=True)))


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
    return _keys(sort, of_groups=True)


def _order(sort: str, *, of_groups: bool) -> str:
    return ", ".join(f"{value} {direction} NULLS LAST" for value, direction in _keys(sort, of_groups=of_groups))


def _keys(sort: str, *, of_groups: bool) -> list[tuple[str, str]]:
    found = []
    for part in sort.split(","):
        name, direction = part.strip().lstrip("+-"), "DESC" if part.strip().startswith("-") else "ASC"
        if of_groups and name == "matching":
            found.append((name, direction))
            continue
        if of_groups and name == "status":
            name = "group_status"
        value = find_value(name, of_group=of_groups, text=sort)
        if value.in_blocks or value.kind == LIST:
            raise QueryError(sort, max(sort.find(name), 0), len(name), f"rollouts cannot be sorted by {name}")
        found.append((value.sql, direction))
    return found


def _window(offset: int, limit: int) -> Sql:
    return Sql(" LIMIT ? OFFSET ?", (max(limit, 0), max(offset, 0)))


# ------------------------------------------------------------------------------------------- whole rows, for an export

DUMPED = (*COLUMN_NAMES, "superseded")
DUMPED_SQL = ", ".join(f'"{name}"' for name in DUMPED)


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
