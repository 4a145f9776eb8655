"""The tables in memory that queries run over, the names that a query may use, and the help text made from them.

    rows     one row per rollout: the small columns, and `superseded`
    groups   one row per group: its rollouts taken together (summaries.GroupSummary)
    unsealed all columns of the groups that are still JSON lines
    rollouts the view that queries see, rows JOIN groups: the small columns of the store, and the names below;
             BLOCK_NAMES (texts and maps) are joined to it when a query names one: they are read from the files

A query is an SQL condition over these names (`query`). Those of the store's own columns (schema.COLUMNS) work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from grpo_async.records import FINAL_STATUSES, GroupStatus, RolloutStatus
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, TOKEN_COLUMNS
from grpo_async.store.summaries import GroupSummary, sql_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ROW_KEY = "(seq * 65536 + coalesce(rollout_index, 65535))"
"""One number per row; a group without rollouts has a row of its own."""

NUMBER, TEXT, FLAG, LIST, MAP = "number", "text", "flag", "list", "map"

_FINAL = (*FINAL_STATUSES, GroupStatus.EVALUATED)
_TEXTS = "prompt_text prompt_messages columns completion_text messages reset_messages turns branches extra"
_KINDS = {"VARCHAR": TEXT, "BOOLEAN": FLAG, "VARCHAR[]": LIST, "MAP(VARCHAR, DOUBLE)": MAP}
INDEXED = {
    each.name: _KINDS.get(each.type, NUMBER) for each in COLUMNS if each.name not in (*_TEXTS.split(), *TOKEN_COLUMNS)
}
"""Columns of the store that are held in memory, with the kind of each; the others stay in the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A column that queries may name: `sql` computes it from `r` (rows) and `g` (groups), or from a block's columns."""

    name: str
    kind: str
    sql: str
    help: str
    values: Sequence[str] = ()  # all that a text may be; empty: anything
    example: str = ""


def _number(name: str, sql: str, text: str, example: str = "") -> Name:
    return Name(name=name, kind=NUMBER, sql=sql, help=text, example=example)


def _flag(name: str, sql: str, text: str) -> Name:
    return Name(name=name, kind=FLAG, sql=f"coalesce({sql}, false)", help=text, example=name)


FLAGS = (
    _flag("truncated", "r.truncated", "ended by a limit of tokens, turns or length"),
    _flag("finished", "r.status = 'finished'", "ended by itself"),
    _flag("done", "r.done", "its environment said that the episode is over"),
    _flag(
        "failed",
        "r.status = 'failed' OR r.num_failed_tool_calls > 0 OR (r.rollout_id IS NULL AND r.group_status = 'failed')",
        "the rollout failed, or one of its tool calls",
    ),
    _flag("trained", "r.group_status = 'trained'", "its group was trained on"),
    _flag("filtered", "r.group_status = 'filtered'", "its group had nothing to learn from"),
    _flag("stale", "r.group_status = 'stale'", "its group was too old when it was wanted"),
    _flag("cancelled", "r.group_status = 'cancelled'", "the run ended before its group did"),
    _flag("scored", "r.reward IS NOT NULL", "has a reward"),
    _flag("unscored", "r.reward IS NULL", "has no reward"),
    _flag("clipped", "r.clipped_fraction > 0", "at least one of its tokens was clipped"),
    _flag("masked", "r.masked_fraction > 0", "at least one of its tokens was left out of the loss"),
    _flag("superseded", "r.superseded", "left behind by a resume (shown where superseded rows are asked for)"),
)

_ROLLOUT = (
    _number("reward", "r.reward", "reward that the advantage was computed from", "reward < 0.2"),
    Name(name="rewards", kind=MAP, sql="r.rewards", help="parts of the reward, by the name of the function",
         example="rewards['format'] < 1"),
    _number("advantage", "r.advantage", "advantage", "advantage > 1"),
    _number("step", "r.step", "optimizer step that used, filtered or dropped it", "step = last"),
    _number("last", "last_step()", "the newest step that is done", "step >= last - 10"),
    _number("length", "r.num_tokens", "tokens that the policy sampled", "length > 1000"),
    _number("completion_length", "r.num_completion_tokens", "the same with tool results"),
    _number("prompt_length", "r.num_prompt_tokens", "tokens of the prompt"),
    Name(name="status", kind=TEXT, sql="r.status", help="how the rollout ended", values=tuple(RolloutStatus),
         example="status = 'finished'"),
    _number("turns", "r.num_turns", "generations of the policy", "turns >= 3"),
    Name(name="tools", kind=LIST, sql="r.tool_names", help="names of the tools that were called", example="'python' IN tools"),
    _number("tool_calls", "r.num_tool_calls", "calls of tools", "tool_calls = 0"),
    _number("failed_tool_calls", "r.num_failed_tool_calls", "failed calls of tools"),
    _number("staleness", "r.staleness", "optimizer steps between its oldest token and its use", "staleness >= 2"),
    _number("version_min", "r.version_min", "oldest policy version that sampled a token"),
    _number("version_max", "r.version_max", "newest policy version that sampled a token"),
    _number("entropy", "r.entropy_mean", "mean entropy of its tokens, nats", "entropy < 0.1"),
    _number("ratio", "r.ratio_mean", "mean importance weight"),
    _number("ratio_min", "r.ratio_min", "lowest importance weight of a token"),
    _number("ratio_max", "r.ratio_max", "highest importance weight of a token", "ratio_max > 5"),
    _number("clipped_fraction", "r.clipped_fraction", "fraction of its tokens that were clipped", "clipped_fraction > 0.1"),
    _number("masked_fraction", "r.masked_fraction", "fraction of its tokens that a correction or filter left out of the loss"),
    _number("mismatch", "r.mismatch_mean", "mean |trainer - sampler| log-probability"),
    _number("logprob", "r.logprob_mean", "mean sampler log-probability"),
    _number("logprob_min", "r.logprob_min", "lowest sampler log-probability of a token"),
    _number("duration", "r.total_duration_s", "seconds from its start to its end"),
    _number("generation_duration", "r.generation_duration_s", "seconds of generation"),
    _number("tool_duration", "r.tool_duration_s", "seconds in tools", "tool_duration > 5"),
    _number("started_at", "r.started_at", "start, in seconds since 1970"),
    _number("written_at", "r.written_at", "time of writing, in seconds since 1970"),
    Name(name="id", kind=TEXT, sql="r.rollout_id", help="id of the rollout", example="id = 'g17-r3'"),
    _number("index", "r.rollout_index", "its index in the group, from 0"),
    _number("seq", "r.seq", "position of its group in the order of writing"),
    Name(name="error", kind=TEXT, sql="r.error", help="why the rollout failed", example="error ILIKE '%timeout%'"),
    _number("prompt_id", "r.prompt_id", "position of the prompt in the shuffled data"),
    Name(name="prompt_hash", kind=TEXT, sql="r.prompt_hash", help="the same prompt has the same hash in every step and run"),
)  # fmt: skip

_GROUP = (
    _number("group_id", "r.group_id", "id of the group", "group_id = 17"),
    Name(name="group_status", kind=TEXT, sql="r.group_status", help="what became of the group", values=_FINAL,
         example="group_status IN ('trained', 'stale')"),
    _number("group_size", "g.size", "rollouts in the group"),
    _number("group_reward", "g.reward_mean", "mean reward", "group_reward < 0.5"),
    _number("group_std", "g.reward_std", "standard deviation of its rewards", "group_std = 0"),
    _number("group_min", "g.reward_min", "lowest reward"),
    _number("group_max", "g.reward_max", "highest reward"),
    _number("group_scored", "g.num_scored", "rollouts that have a reward"),
    _number("group_length", "g.num_tokens_mean", "mean length"),
    _number("group_truncated", "g.num_truncated / g.size", "fraction of truncated rollouts", "group_truncated > 0.5"),
    _number("group_failed", "g.num_failed / g.size", "fraction of failed rollouts"),
    _number("group_turns", "g.num_turns_mean", "mean number of turns"),
    _number("group_tool_calls", "g.num_tool_calls", "calls of tools, together"),
    _number("group_failed_tool_calls", "g.num_failed_tool_calls", "failed calls of tools, together"),
    _number("group_staleness", "g.staleness", "the highest of its rollouts"),
    _number("group_entropy", "g.entropy_mean", "mean entropy, nats"),
    _number("group_ratio_max", "g.ratio_max", "highest importance weight"),
    _number("group_clipped_fraction", "g.clipped_fraction", "mean fraction of clipped tokens"),
    _number("group_masked_fraction", "g.masked_fraction", "mean fraction of masked tokens"),
    _number("group_mismatch", "g.mismatch_mean", "mean mismatch"),
    _number("group_duration", "g.total_duration_s", "seconds of its longest rollout"),
)  # fmt: skip

_MAP_OF = "{}::JSON::MAP(VARCHAR, VARCHAR)"
BLOCK_NAMES = (
    Name(name="text", kind=TEXT, sql="concat_ws(chr(10), prompt_text, completion_text)", help="prompt and completion",
         example="text ILIKE '%what is%'"),
    Name(name="prompt", kind=TEXT, sql="prompt_text", help="contents of the prompt's messages", example="prompt LIKE '%capital%'"),
    Name(name="completion", kind=TEXT, sql="completion_text", help="contents of the completion's messages, tool results too",
         example="completion ILIKE '%i cannot%'"),
    Name(name="calls", kind=TEXT, sql="turns", help="arguments, results and errors of tool calls, as JSON",
         example="calls LIKE '%import%'"),
    Name(name="columns", kind=MAP, sql=_MAP_OF.format("columns"), help="further columns of the dataset, as text",
         example="columns['answer'] = '9'"),
    Name(name="extra", kind=MAP, sql=_MAP_OF.format("extra"), help="what reward functions noted with log_extra, as text",
         example="extra['parsed'] IS NULL"),
)  # fmt: skip

NAMES: tuple[Name, ...] = (*_ROLLOUT, *FLAGS, *_GROUP, *BLOCK_NAMES)
BY_NAME = {each.name: each for each in NAMES}
GROUP_NAMES = frozenset(
    (*(each.name for each in _GROUP), "seq", "step", "prompt_id", "prompt_hash", "written_at", "superseded")
)
"""Names that have one value for a whole group."""

BLOCK_SQL = ", ".join(f'{each.sql} AS "{each.name}"' for each in BLOCK_NAMES)
"""The SELECT list of BLOCK_NAMES, over a relation with all columns."""
GROUPS_SQL = (
    f"SELECT {', '.join(f'{sql} AS {name}' for name, sql in sql_of(GroupSummary).items())} FROM {{}} GROUP BY seq"
)
"""The SELECT that makes the table `groups` from a relation like `rows`."""
_LAST_STEP_SQL = """SELECT coalesce(max(step) FILTER (status IN ('trained', 'failed')), max(step)) FROM groups
WHERE NOT superseded"""
"""The newest step that is done: groups of the next step may be filtered or stale already. Where none was trained, the newest."""


def create_tables(connection: DuckDBPyConnection) -> None:
    """The tables, empty, and the view over them."""
    types = {column.name: column.type for column in COLUMNS}
    indexed = ", ".join(f'"{name}" {types[name]}' for name in INDEXED)
    every = ", ".join(f'"{name}" {types[name]}' for name in COLUMN_NAMES)
    connection.execute(f"CREATE TABLE rows ({indexed}, superseded BOOLEAN, row_key BIGINT)")
    connection.execute(f"CREATE TABLE unsealed ({every})")
    connection.execute("CREATE TABLE groups AS " + GROUPS_SQL.format("rows"))
    connection.execute(f"CREATE MACRO last_step() AS ({_LAST_STEP_SQL})")
    named = (*_ROLLOUT, *FLAGS, *_GROUP)
    replaced = ", ".join(f"{each.sql} AS {each.name}" for each in named if each.name in (*INDEXED, "superseded"))
    added = ", ".join(f'{each.sql} AS "{each.name}"' for each in named if each.name not in (*INDEXED, "superseded"))
    connection.execute(
        f"CREATE VIEW rollouts AS SELECT r.* REPLACE ({replaced}), {added} FROM rows AS r JOIN groups AS g ON r.seq = g.seq"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpRow:
    """`syntax` is what one writes, `meaning` one sentence; `example` (or "") is a query that can be run."""

    syntax: str
    meaning: str
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpSection:
    title: str
    rows: Sequence[HelpRow]


_EXAMPLES = (
    ("reward < 0.2 and truncated", "low rewards that a limit ended"),
    ("'python' in tools and failed", "python was called, and a call or the rollout failed"),
    ("step between 10 and 20 and group_std = 0", "groups without anything to learn from"),
    ("not finished or rewards['format'] < 1", "did not end by itself, or in the wrong form"),
    ("text ilike '%i cannot%' and advantage > 0", "refusals that were rewarded, in any case of letters"),
    ("columns['answer'] = '9' and group_reward < 0.8", "one answer of the dataset"),
    ("staleness >= 2 or clipped_fraction > 0.1", "far off policy"),
    ("step = last and group_status in ('filtered', 'stale')", "what the newest step did not use"),
    ("reward is null", "without a reward; a comparison with a missing value matches nothing"),
)


def _rows(names: Sequence[Name]) -> list[HelpRow]:
    return [
        HelpRow(
            syntax=each.name,
            meaning=f"{each.help} ({', '.join(each.values)})" if each.values else each.help,
            example=each.example,
        )
        for each in names
    ]


HELP: tuple[HelpSection, ...] = (
    HelpSection(
        title="A query is an SQL condition (DuckDB's)",
        rows=[HelpRow(syntax=query, meaning=meaning, example=query) for query, meaning in _EXAMPLES],
    ),
    HelpSection(title="True or false", rows=_rows(FLAGS)),
    HelpSection(title="Columns of a rollout", rows=_rows((*_ROLLOUT, *BLOCK_NAMES))),
    HelpSection(title="Columns of its group", rows=_rows(_GROUP)),
)


def help_text(width: int = 100) -> str:
    """HELP as plain text of at most `width` (>= 60) columns."""
    lines: list[str] = []
    for section in HELP:
        lines += [section.title, ""]
        for row in section.rows:
            wrapped = wrap(row.meaning, max(width - 30, 20)) or [""]
            if len(row.syntax) > 24:
                lines.append(f"  {row.syntax}")
            else:
                lines.append(f"  {row.syntax:<24}  {wrapped.pop(0)}")
            lines += [" " * 28 + rest for rest in wrapped]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
