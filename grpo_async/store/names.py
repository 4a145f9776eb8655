"""The view `rollouts`, over which queries are conditions, and its help.

    stored     every column of the store (schema.COLUMNS), and `superseded`: blocks as they are now
    rollouts   the same, one row per rollout, with the short names of NAMES in place of long ones

A query is SQL: whatever else DuckDB can compute of these columns, a query can ask for too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from grpo_async.records import FINAL_STATUSES, GroupStatus, RolloutStatus
from grpo_async.store.schema import COLUMN_NAMES, TOKEN_COLUMNS

_TEXTS = "prompt_text prompt_messages columns completion_text messages reset_messages turns branches extra"
SMALL = tuple(name for name in COLUMN_NAMES if name not in (*_TEXTS.split(), *TOKEN_COLUMNS))
"""Columns of the store without texts and tokens."""


@dataclass(frozen=True, slots=True)
class Name:
    """A column of `rollouts`. `sql` computes it from `s`, a row of `stored`; `values` are all that
    a text may be (empty: anything)."""

    name: str
    sql: str
    help: str
    example: str = ""
    values: Sequence[str] = ()


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
_ROLLOUT = (
    Name("reward", "s.reward", "reward that the advantage was computed from", "reward < 0.2"),
    Name("rewards", "s.rewards", "parts of the reward, by the name of the function",
         "rewards['format'] < 1"),
    Name("advantage", "s.advantage", "advantage", "advantage > 1"),
    Name("step", "s.step", "optimizer step that used, filtered or dropped it", "step = last"),
    Name("last", "last_step()", "the newest step that is done", "step >= last - 10"),
    Name("length", "s.num_tokens", "tokens that the policy sampled", "length > 1000"),
    Name("completion_length", "s.num_completion_tokens", "the same with tool results"),
    Name("prompt_length", "s.num_prompt_tokens", "tokens of the prompt"),
    Name("status", "s.status", "how the rollout ended", "status = 'finished'", tuple(RolloutStatus)),
    Name("turns", "s.num_turns", "generations of the policy", "turns >= 3"),
    Name("tools", "s.tool_names", "names of the tools that were called", "'python' IN tools"),
    Name("tool_calls", "s.num_tool_calls", "calls of tools", "tool_calls = 0"),
    Name("failed_tool_calls", "s.num_failed_tool_calls", "failed calls of tools"),
    Name("staleness", "s.staleness", "optimizer steps between its oldest token and its use",
         "staleness >= 2"),
    Name("version_min", "s.version_min", "oldest policy version that sampled a token"),
    Name("version_max", "s.version_max", "newest policy version that sampled a token"),
    Name("entropy", "s.entropy_mean", "mean entropy of its tokens, nats", "entropy < 0.1"),
    Name("ratio", "s.ratio_mean", "mean importance weight"),
    Name("ratio_min", "s.ratio_min", "lowest importance weight of a token"),
    Name("ratio_max", "s.ratio_max", "highest importance weight of a token", "ratio_max > 5"),
    Name("clipped_fraction", "s.clipped_fraction", "fraction of its tokens that were clipped",
         "clipped_fraction > 0.1"),
    Name("masked_fraction", "s.masked_fraction", "fraction of its tokens left out of the loss"),
    Name("mismatch", "s.mismatch_mean", "mean |trainer - sampler| log-probability"),
    Name("logprob", "s.logprob_mean", "mean sampler log-probability"),
    Name("logprob_min", "s.logprob_min", "lowest sampler log-probability of a token"),
    Name("duration", "s.total_duration_s", "seconds from its start to its end"),
    Name("generation_duration", "s.generation_duration_s", "seconds of generation"),
    Name("tool_duration", "s.tool_duration_s", "seconds in tools", "tool_duration > 5"),
    Name("started_at", "s.started_at", "start, in seconds since 1970"),
    Name("written_at", "s.written_at", "time of writing, in seconds since 1970"),
    Name("id", "s.rollout_id", "id of the rollout", "id = 'g17-r3'"),
    Name("index", "s.rollout_index", "its index in the group, from 0"),
    Name("seq", "s.seq", "position of its group in the order of writing"),
    Name("error", "s.error", "why the rollout failed", "error ILIKE '%timeout%'"),
    Name("prompt_id", "s.prompt_id", "position of the prompt in the shuffled data"),
    Name("prompt_hash", "s.prompt_hash", "the same prompt has the same in every step and run"),
    Name("text", "concat_ws(chr(10), s.prompt_text, s.completion_text)", "prompt and completion",
         "text ILIKE '%what is%'"),
    Name("prompt", "s.prompt_text", "contents of the prompt's messages", "prompt LIKE '%capital%'"),
    Name("completion", "s.completion_text", "the completion's messages, tool results too",
         "completion ILIKE '%i cannot%'"),
    Name("calls", "s.turns", "arguments, results and errors of tool calls, as JSON",
         "calls LIKE '%import%'"),
    Name("columns", _MAP.format("columns"), "further columns of the dataset, as text",
         "columns['answer'] = '9'"),
    Name("extra", _MAP.format("extra"), "what reward functions noted with log_extra, as text",
         "extra['parsed'] IS NULL"),
    Name("group_id", "s.group_id", "id of its group", "group_id = 17"),
    Name("group_status", "s.group_status", "what became of its group",
         "group_status IN ('trained', 'stale')", (*FINAL_STATUSES, GroupStatus.EVALUATED)),
    Name("group_size", "s.group_size", "rollouts in its group"),
    Name("group_reward", "s.group_reward_mean", "mean reward of its group", "group_reward < 0.5"),
    Name("group_std", "s.group_reward_std", "standard deviation of its group's rewards",
         "group_std = 0"),
)  # fmt: skip

NAMES: tuple[Name, ...] = (*_ROLLOUT, *FLAGS)
KNOWN = frozenset((*COLUMN_NAMES, *(each.name for each in NAMES)))
"""All columns of `rollouts`."""

_COLUMNS = {name: f's."{name}"' for name in COLUMN_NAMES} | {each.name: each.sql for each in NAMES}
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
    ("Columns", tuple(
        (each.name, f"{each.help} ({', '.join(each.values)})" if each.values else each.help)
        for each in _ROLLOUT
    )),
)  # fmt: skip
"""Sections of (what one writes, what it means)."""


def help_text(width: int = 100) -> str:
    """HELP as plain text of at most `width` (>= 60) columns."""
    lines: list[str] = []
    for title, rows in HELP:
        lines += [title, ""]
        for syntax, meaning in rows:
            wrapped = wrap(meaning, max(width - 30, 20))
            if len(syntax) > 24:
                lines += [f"  {line}" for line in wrap(syntax, width - 2)]
            else:
                lines.append(f"  {syntax:<24}  {wrapped.pop(0)}")
            lines += [" " * 28 + rest for rest in wrapped]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
