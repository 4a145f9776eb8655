"""The SELECTs of `RolloutTable`, as pure functions of a compiled condition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from grpo_async.store.query import QueryError
from grpo_async.store.query_fields import FIELDS, Field, Kind, Place, find_field
from grpo_async.store.query_sql import LAST_STEP, Sql, field_sql
from grpo_async.store.query_syntax import Comparison
from grpo_async.store.summaries import PREVIEW_CHARACTERS, GroupSummary, RolloutSummary, StepSummary

JOINED = "rows AS r JOIN groups AS g ON r.seq = g.seq"

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
    "num_rollouts": "count(r.rollout_index)",
    "num_groups": "count(DISTINCT r.seq)",
    "num_unscored": "count(r.rollout_index) - count(r.reward)",
    "reward_mean": "avg(r.reward)",
    "reward_std": "stddev_samp(r.reward)",
    "reward_min": "min(r.reward)",
    "reward_q10": "quantile_cont(r.reward, 0.1)",
    "reward_q25": "quantile_cont(r.reward, 0.25)",
    "reward_median": "quantile_cont(r.reward, 0.5)",
    "reward_q75": "quantile_cont(r.reward, 0.75)",
    "reward_q90": "quantile_cont(r.reward, 0.9)",
    "reward_max": "max(r.reward)",
    "num_tokens_mean": "coalesce(avg(r.num_tokens), 0.0)",
    "num_tokens_q10": "coalesce(quantile_cont(r.num_tokens, 0.1), 0.0)::DOUBLE",
    "num_tokens_median": "coalesce(quantile_cont(r.num_tokens, 0.5), 0.0)::DOUBLE",
    "num_tokens_q90": "coalesce(quantile_cont(r.num_tokens, 0.9), 0.0)::DOUBLE",
    "num_tokens_max": "coalesce(max(r.num_tokens), 0)",
    "truncated_share": "coalesce(avg(r.truncated::INTEGER), 0.0)",
    "failed_share": "coalesce(avg((r.status = 'failed')::INTEGER), 0.0)",
    "num_turns_mean": "coalesce(avg(r.num_turns), 0.0)",
    "num_tool_calls": "coalesce(sum(r.num_tool_calls), 0)::BIGINT",
    "num_failed_tool_calls": "coalesce(sum(r.num_failed_tool_calls), 0)::BIGINT",
    "staleness_mean": "avg(r.staleness)",
    "staleness_max": "max(r.staleness)",
    "entropy_mean": "avg(r.entropy_mean)",
    "ratio_mean": "avg(r.ratio_mean)",
    "clipped_share": "avg(r.clipped_share)",
    "masked_share": "avg(r.masked_share)",
    "mismatch_mean": "avg(r.mismatch_mean)",
    "total_duration_mean_s": "avg(r.total_duration_s)",
}


def count_sql(where: Sql) -> Sql:
    return Sql(f"SELECT count(r.rollout_index), count(DISTINCT r.seq) FROM {JOINED} WHERE ") + where


def page_sql(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    names = ", ".join(f"r.{name}" for name in ROLLOUT_NAMES)
    select = Sql(f"SELECT r.row_key, {names} FROM {JOINED} WHERE r.rollout_index IS NOT NULL AND ") + where
    return select + rollout_order(sort) + _window(offset, limit)


def group_page_sql(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    matching = Sql(f"SELECT r.seq AS seq, count(r.rollout_index) AS num_matching FROM {JOINED} WHERE ") + where
    names = ", ".join(f"g.{name}" for name in GROUP_NAMES)
    select = Sql("WITH matching AS (") + matching + " GROUP BY r.seq) "
    select += f"SELECT m.num_matching, {names} FROM groups AS g JOIN matching AS m ON g.seq = m.seq"
    return select + group_order(sort) + _window(offset, limit)


def step_sql(where: Sql, *, with_unfinished: bool) -> Sql:
    """Without `with_unfinished`: what was filtered or dropped for a step that is not done would tell a false mean."""
    is_done = Sql("" if with_unfinished else f" AND (r.step IS NULL OR r.step <= {LAST_STEP})")
    values = ", ".join(f"{expression} AS {name}" for name, expression in _STEP.items())
    return (
        Sql(f"SELECT r.step AS step, {values} FROM {JOINED} WHERE ")
        + where
        + is_done
        + " GROUP BY r.step ORDER BY r.step ASC NULLS LAST"
    )


def step_rewards_sql(where: Sql) -> Sql:
    """(step, name, mean)."""
    inner = Sql(f"SELECT r.step AS step, unnest(map_entries(r.rewards)) AS part FROM {JOINED} WHERE ") + where
    return Sql("SELECT step, part.key, avg(part.value) FROM (") + inner + ") WHERE part.value IS NOT NULL GROUP BY ALL"


def step_statuses_sql(where: Sql) -> Sql:
    """(step, status, groups)."""
    return (
        Sql(f"SELECT r.step, r.group_status, count(DISTINCT r.seq) FROM {JOINED} WHERE ")
        + where
        + " GROUP BY ALL ORDER BY ALL"
    )


def step_summary(row: Sequence[Any], rewards: Mapping[str, float], statuses: Mapping[str, int]) -> StepSummary:
    return StepSummary(step=row[0], rewards=rewards, group_statuses=statuses, **dict(zip(_STEP, row[1:], strict=True)))


def improvement_sql(where: Sql, k: int, *, worsened: bool) -> Sql:
    """(prompt_hash, groups, change, first seq, last seq) of prompts that were scored in two groups or more."""
    seqs = Sql(f"SELECT DISTINCT r.seq FROM {JOINED} WHERE ") + where
    sign, order = ("<", "ASC") if worsened else (">", "DESC")
    return (
        Sql(
            "SELECT prompt_hash, count(*), arg_max(reward_mean, seq) - arg_min(reward_mean, seq) AS change, "
            "min(seq), max(seq) FROM groups WHERE reward_mean IS NOT NULL AND seq IN ("
        )
        + seqs
        + f") GROUP BY prompt_hash HAVING count(*) > 1 AND change {sign} 0 ORDER BY change {order}, prompt_hash"
        + Sql(" LIMIT ?", (k,))
    )


def numeric_field(name: str) -> Sql:
    """The value of a field that holds numbers, over `r` and `g`.

    Raises:
        QueryError: there is no such field, or it holds no numbers.
    """
    field, further = _field(name, name)
    if field.kind is not Kind.NUMBER:
        raise QueryError(name, 0, len(name), f"{field.name} holds no numbers")
    return field_sql(Comparison(field=field, name=further, operator="=", values=()))


def words_field(name: str) -> tuple[Field, Sql]:
    """The field, and its value over `r` and `g`, or over the columns of a block.

    Raises:
        QueryError: there is no such field.
    """
    field, further = _field(name, name)
    return field, field_sql(Comparison(field=field, name=further, operator="=", values=()))


def rollout_order(sort: str) -> Sql:
    """ " ORDER BY ..." of a list of fields: "-reward,step". Missing values stand last; what is equal, newest first."""
    return _order(sort, lambda name: _sortable(name, sort, only_group=False), "r.seq DESC, r.rollout_index")


def group_order(sort: str) -> Sql:
    return _order(sort, lambda name: _sortable(name, sort, only_group=True), "g.seq DESC")


def _order(sort: str, expression: Any, tie: str) -> Sql:
    whole = Sql(" ORDER BY ")
    for part in sort.split(","):
        name = part.strip()
        descending = name.startswith("-")
        direction = "DESC" if descending else "ASC"
        whole = whole + expression(name.lstrip("+-")) + f" {direction} NULLS LAST, "
    return whole + tie


def _sortable(name: str, sort: str, *, only_group: bool) -> Sql:
    if only_group and name == "matching":
        return Sql("m.num_matching")
    found = find_field(f"group.{name}") if only_group else None
    field, further = found or _field(name, sort)
    names = [f.name for f in FIELDS if _is_sortable(f, only_group=only_group)]
    if not _is_sortable(field, only_group=only_group):
        place = max(sort.find(name), 0)
        listed = ", ".join(each.removeprefix("group.") if only_group else each for each in names)
        what = "groups" if only_group else "rollouts"
        raise QueryError(sort, place, len(name), f"{what} cannot be sorted by {name}; they can by {listed}")
    text = field_sql(Comparison(field=field, name=further, operator="=", values=()))
    return Sql(text.text.replace("r.group_id", "g.group_id").replace("r.group_status", "g.status"), text.parameters)


def _is_sortable(field: Field, *, only_group: bool) -> bool:
    if field.place is Place.BLOCKS or field.kind is Kind.LIST:
        return False
    return not only_group or field.name.startswith("group.")


def _field(name: str, text: str) -> tuple[Field, str | None]:
    found = find_field(name)
    if found is None:
        names = [field.name for field in FIELDS]
        raise QueryError(
            text, max(text.find(name), 0), len(name), f"there is no field {name}", get_close_matches(name, names, n=3)
        )
    return found


def _window(offset: int, limit: int) -> Sql:
    return Sql(" LIMIT ? OFFSET ?", (max(limit, 0), max(offset, 0)))
