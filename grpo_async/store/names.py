"""The view `rollouts`, over which queries are conditions, and its help.

    stored     every column of the store (schema.COLUMNS), and `superseded`: blocks as they are now
    rollouts   the same, one row per rollout, also under their short names, and what NAMES adds

A query is SQL: whatever else DuckDB can compute of these columns, a query can ask for too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, TOKEN_COLUMNS

_TEXTS = "prompt_text prompt_messages columns completion_text messages reset_messages turns branches extra"
SMALL = tuple(name for name in COLUMN_NAMES if name not in (*_TEXTS.split(), *TOKEN_COLUMNS))
"""Columns of the store without texts and tokens."""


@dataclass(frozen=True, slots=True)
class Name:
    """A column of `rollouts`. `sql` computes it from `s`, a row of `stored`."""

    name: str
    sql: str
    help: str
    example: str = ""


def _flag(name: str, sql: str, text: str) -> Name:
    return Name(name, f"coalesce({sql}, false)", text, name)


FLAGS = (
    _flag("truncated", "s.truncated", "ended by a limit of tokens, turns or length"),
    _flag("finished", "s.status = 'finished'", "ended by itself"),
    _flag("done", "s.done", "its environment said that the episode is over"),
    _flag(
        "failed",
        "s.status = 'failed' OR s.num_failed_tool_calls > 0 OR (s.rollout_id IS NULL AND s.group_status = 'failed')",
        "the rollout failed, or one of its tool calls",
    ),
    _flag("trained", "s.group_status = 'trained'", "its group was trained on"),
    _flag("filtered", "s.group_status = 'filtered'", "its group had nothing to learn from"),
    _flag("stale", "s.group_status = 'stale'", "its group was too old when it was wanted"),
    _flag("cancelled", "s.group_status = 'cancelled'", "the run ended before its group did"),
    _flag("scored", "s.reward IS NOT NULL", "has a reward"),
    _flag("unscored", "s.reward IS NULL", "has no reward"),
    _flag("clipped", "s.clipped_fraction > 0", "at least one of its tokens was clipped"),
    _flag("masked", "s.masked_fraction > 0", "some of its tokens were left out of the loss"),
    _flag("superseded", "s.superseded", "left behind by a resume (export --superseded has them)"),
)

_MAP = "s.{}::JSON::MAP(VARCHAR, VARCHAR)"
_COMPUTED = (
    Name("last", "last_step()", "the newest step that is done", "step >= last - 10"),
    Name("text", "concat_ws(chr(10), s.prompt_text, s.completion_text)", "prompt and completion",
         "text ILIKE '%what is%'"),
    Name("columns", _MAP.format("columns"), "further columns of the dataset, as text",
         "columns['answer'] = '9'"),
    Name("extra", _MAP.format("extra"), "what reward functions noted with log_extra, as text",
         "extra['parsed'] IS NULL"),
)  # fmt: skip
_STORED = tuple(
    Name(each.short or each.name, f's."{each.name}"', each.description)
    for each in COLUMNS
    if each.short or each.name in SMALL
)
NAMES: tuple[Name, ...] = tuple({each.name: each for each in (*_STORED, *_COMPUTED, *FLAGS)}.values())

_COLUMNS = {name: f's."{name}"' for name in COLUMN_NAMES} | {each.name: each.sql for each in NAMES}
KNOWN = _COLUMNS.keys()
"""All columns of `rollouts`."""
VIEW_SQL = (
    "CREATE VIEW rollouts AS SELECT "
    + ", ".join(f'{sql} AS "{name}"' for name, sql in _COLUMNS.items())
    + " FROM stored AS s"
)
LAST_STEP_SQL = """CREATE MACRO last_step() AS (SELECT
coalesce(max(step) FILTER (group_status IN ('trained', 'failed')), max(step))
FROM stored WHERE NOT superseded)"""
"""The newest step that is done: groups of the next one may be filtered or stale already."""

HELP: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    ("A query is an SQL condition (DuckDB's)", (
        ("reward < 0.2 and truncated", "low rewards that a limit ended"),
        ("'python' in tools and failed", "python was called, and a call or the rollout failed"),
        ("step between 10 and 20 and group_std = 0", "groups without anything to learn from"),
        ("not finished or rewards['format'] < 1", "did not end by itself, or in the wrong form"),
        ("text ilike '%i cannot%' and advantage > 0", "refusals that were rewarded"),
        ("columns['answer'] = '9' and group_reward < 0.8", "one answer of the dataset"),
        ("staleness >= 2 or clipped_fraction > 0.1", "far off policy"),
        ("seq in (select seq from rollouts group by seq having avg(length) > 500)",
         "groups with long answers: any SQL expression, also over all rollouts"),
        ("reward is null", "no reward; a comparison with a missing value matches nothing"),
    )),
    ("True or false", tuple((each.name, each.help) for each in FLAGS)),
    ("Columns", tuple((each.name, each.help) for each in NAMES if each not in FLAGS)),
)  # fmt: skip
"""Sections of (what one writes, what it means)."""
