"""The definition of a stored rollout: the columns of the view `rollouts`, and the SELECT that makes them from JSON lines.

    block-N.jsonl   one line per group  --\\
                                           SELECT (here) --> one row per rollout   = the columns of block-N-M.parquet
    block-N-M.parquet, sealed by the same SELECT ---------->

A group without any rollout (it failed or was cancelled before one ended) has one row, in which `rollout_index` and everything
else of a rollout is NULL. Nothing is computed when a line is written that this SELECT can compute later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_async.records import TokenFlag
from grpo_async.store.database import sql_paths

SCHEMA = 5
"""Version of the lines and of the columns. A change that an older reader would get wrong raises it."""
PARQUET_OPTIONS = (
    f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048, KV_METADATA {{grpo_async_schema: '{SCHEMA}'}}"
)
"""Options of DuckDB's COPY. The size of a row group, in rollouts, bounds what is decompressed to show one of them."""

_MIN_BUFFER = 1 << 24  # bytes; DuckDB's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the view `rollouts`.

    Attributes:
        type: of DuckDB, as in the Parquet files (JSON columns are text there).
        unit: "" for a column without one.
        expression: how it is made of a line: `g` is the group, `r` the rollout, `i` its index.
        short: the name that a query may use instead.
    """

    name: str
    type: str
    description: str
    unit: str = ""
    expression: str = ""
    short: str = ""


def _group(name: str, type_: str, description: str, **more: str) -> Column:
    return Column(name=name, type=type_, description=description, **{"expression": f'g."{name}"', **more})


def _rollout(name: str, type_: str, description: str, **more: str) -> Column:
    return Column(name=name, type=type_, description=description, **{"expression": f'r."{name}"', **more})


_ALL_VERSIONS = "list_concat(r.versions, json_extract(r.branches, '$[*].versions[*]')::INTEGER[])"
_VERSIONS = f"list_filter({_ALL_VERSIONS}, lambda version: version >= 0)"
_SAMPLED_LOGPROBS = "list_filter(r.logprobs, lambda logprob, k: r.mask[k] = 1)"
_MISMATCHES = "list_transform(r.trainer_logprobs, lambda logprob, k: abs(logprob - r.logprobs[k]))"
_CALLS_FAILED = "json_extract_string(r.turns, '$[*].tool_calls[*].failed')"
_TEXTS = "array_to_string(json_extract_string({}, '$[*].content'), chr(10))"
_ENDED_AT = "nullif(r.started_at, 0) + r.total_duration_s"


def _fraction_flagged(flags: TokenFlag) -> str:
    """The fraction of the tokens with a flag (the others are NULL) that have one of `flags`."""
    return f"list_avg(list_transform(r.token_flags, lambda flag: if(flag & {flags.value} > 0, 1.0, if(flag IS NULL, NULL, 0.0))))"


COLUMNS: tuple[Column, ...] = (
    _group("seq", "BIGINT", "Number of the stored group: ascending in the order of writing, never used twice"),
    _group("group_id", "BIGINT", "The group. After a resume the same id may come again, with another seq; the last one counts"),
    _group("prompt_id", "BIGINT", "Position in the endless shuffled stream of prompts"),
    _group("step", "BIGINT", "The optimizer step that used, filtered or dropped the group: the metric `reward` of a step is the"
           " mean over its rows. Of an evaluation, the step that it was made after. NULL: no step saw it"),
    _group("group_status", "VARCHAR", "trained, filtered (equal rewards), stale, failed, cancelled; evaluated: of held-out prompts",
           expression="g.status"),
    _group("group_size", "INTEGER", "Rollouts of the group", unit="rollouts", expression="len(g.rollouts)"),
    _rollout("rollout_index", "INTEGER", "Index in the group, from 0; NULL: the group has no rollout",
             expression="if(r IS NULL, NULL, i)", short="index"),
    _group("prompt_hash", "VARCHAR", "Hash of the prompt's messages: the same prompt has the same in every step and run"),
    _group("prompt_text", "VARCHAR", "Contents of the messages of the prompt, as the policy saw them, joined by line feeds",
           expression=_TEXTS.format("coalesce(r.reset_messages, g.messages)"), short="prompt"),
    _group("prompt_messages", "JSON", "Messages of the prompt as the data has them: objects with role, content, origin, tool_calls,"
           " name, tool_call_id", expression="g.messages"),
    _group("columns", "JSON", "The other columns of the data: object"),
    _rollout("rollout_id", "VARCHAR", "The rollout. It may come again after a resume, as the group's id", short="id"),
    _rollout("status", "VARCHAR", "finished, truncated, failed"),
    _rollout("truncated", "BOOLEAN", "Cut by a limit of tokens, turns or length"),
    _rollout("done", "BOOLEAN", "The environment said that the episode is over"),
    _rollout("error", "VARCHAR", "Why it failed, or why its group did, such as the error of a reward"),
    _rollout("reward", "DOUBLE", "The weighted sum; NULL: never scored"),
    _rollout("advantage", "DOUBLE", "NULL: no sample was made of it"),
    _rollout("rewards", "MAP(VARCHAR, DOUBLE)", "Value of each reward function, by its name; NULL: it does not apply"),
    _group("group_reward_mean", "DOUBLE", "Mean of the group's rewards", expression="g.reward_mean",
             short="group_reward"),
    _group("group_reward_std", "DOUBLE", "Their standard deviation (n - 1), as in the advantages", expression="g.reward_std",
             short="group_std"),
    _rollout("num_prompt_tokens", "INTEGER", "Length of prompt_ids", unit="tokens",
             expression="if(r IS NULL, NULL, len(coalesce(r.prompt_ids, g.prompt_ids)))", short="prompt_length"),
    _rollout("num_tokens", "INTEGER", "Tokens that the policy sampled, in branches too", unit="tokens",
             short="length"),
    _rollout("num_completion_tokens", "INTEGER", "Length of completion_ids: with tokens of tools and environments", unit="tokens",
             expression="len(r.completion_ids)", short="completion_length"),
    _rollout("num_turns", "INTEGER", "Generations, without those of branches", unit="turns",
             expression="json_array_length(r.turns)", short="turns"),
    _rollout("num_tool_calls", "INTEGER", "Tool calls made", unit="calls", expression=f"len({_CALLS_FAILED})",
             short="tool_calls"),
    _rollout("num_failed_tool_calls", "INTEGER", "Failed tool calls; 0 where an agent made them", unit="calls",
             expression=f"len(list_filter({_CALLS_FAILED}, lambda failed: failed = 'true'))",
             short="failed_tool_calls"),
    _rollout("tool_names", "VARCHAR[]", "Name of the tool of each call, in order",
             expression="json_extract_string(r.turns, '$[*].tool_calls[*].name')", short="tools"),
    _rollout("completion_text", "VARCHAR", "Contents of `messages`, joined by line feeds", expression=_TEXTS.format("r.messages"),
             short="completion"),
    _rollout("messages", "JSON", "Messages of the completion, as prompt_messages; origin: policy, tool, environment"),
    _rollout("reset_messages", "JSON", "The prompt as an environment's reset changed it or an agent wrote it; NULL: as in the"
             " data"),
    _rollout("turns", "JSON", "One object per generation: num_tokens, finish_reason, stop_reason (a stop string that ended it),"
             " started_at, generation_duration_s, tool_execution_duration_s, parse_error, tool_calls (tool_call_id, name,"
             " arguments, result, failed, duration_s, returned: the list that reward functions got in place of `result`)",
             short="calls"),
    _rollout("branches", "JSON", "Further paths of an agent that changed its history: objects with rollout_id (g7-r0.b1), parent"
             " (the path whose beginning it shares), reward, advantage, num_tokens, reset_messages, messages, turns, and the lists"
             " below"),
    _rollout("extra", "JSON", "What reward functions noted with log_extra, what a rollout function or an agent returned: object"),
    _rollout("version_min", "INTEGER", "Oldest policy version that sampled a token, in branches too",
             expression=f"list_min({_VERSIONS})"),
    _rollout("version_max", "INTEGER", "Newest policy version that sampled a token, in branches too",
             expression=f"list_max({_VERSIONS})"),
    _rollout("staleness", "INTEGER", "step - 1 - version_min: how many policies older than the one trained; NULL in an evaluation",
             unit="versions", expression=f"if(g.status = 'evaluated', NULL, g.step - 1 - list_min({_VERSIONS}))"),
    _rollout("logprob_mean", "DOUBLE", "Mean log-probability of the sampled tokens in the sampler", unit="nats",
             expression=f"list_avg({_SAMPLED_LOGPROBS})", short="logprob"),
    _rollout("logprob_min", "DOUBLE", "Log-probability of the least likely sampled token in the sampler", unit="nats",
             expression=f"list_min({_SAMPLED_LOGPROBS})"),
    _rollout("entropy_mean", "DOUBLE", "Mean entropy of the policy at the sampled tokens, in the trainer", unit="nats",
             expression="list_avg(r.entropies)", short="entropy"),
    _rollout("ratio_mean", "DOUBLE", "Mean of `weights`", expression="list_avg(r.weights)", short="ratio"),
    _rollout("ratio_min", "DOUBLE", "Lowest of `weights`", expression="list_min(r.weights)"),
    _rollout("ratio_max", "DOUBLE", "Highest of `weights`", expression="list_max(r.weights)"),
    _rollout("clipped_fraction", "DOUBLE", "Fraction of the sampled tokens that were clipped",
             expression=_fraction_flagged(TokenFlag.CLIPPED_LOW | TokenFlag.CLIPPED_HIGH)),
    _rollout("masked_fraction", "DOUBLE", "Fraction of the sampled tokens left out for another reason (flags 4, 8, 32)",
             expression=_fraction_flagged(TokenFlag.IMPORTANCE_MASKED | TokenFlag.OFF_POLICY_MASKED | TokenFlag.SKIPPED)),
    _rollout("mismatch_mean", "DOUBLE", "Mean of abs(trainer's - sampler's log-probability)", unit="nats",
             expression=f"list_avg({_MISMATCHES})", short="mismatch"),
    _rollout("started_at", "DOUBLE", "When its first request was made; NULL: not known", unit="s since 1970",
             expression="nullif(r.started_at, 0)"),
    _rollout("total_duration_s", "DOUBLE", "From start to end, without scoring", unit="s", short="duration"),
    _rollout("generation_duration_s", "DOUBLE", "Generation time of all its turns", unit="s",
             expression="list_sum(json_extract(r.turns, '$[*].generation_duration_s')::DOUBLE[])",
             short="generation_duration"),
    _rollout("tool_duration_s", "DOUBLE", "Time in tools of all its turns", unit="s",
             expression="list_sum(json_extract(r.turns, '$[*].tool_execution_duration_s')::DOUBLE[])",
             short="tool_duration"),
    _rollout("waiting_duration_s", "DOUBLE", "From its end to written_at: the rest of its group, scoring, queue, step; NULL:"
             " not known", unit="s", expression=f"g.written_at - ({_ENDED_AT})"),
    _group("written_at", "DOUBLE", "When the group was finalized and stored", unit="s since 1970"),
    _rollout("prompt_ids", "INTEGER[]", "Token ids of the prompt",
             expression="if(r IS NULL, NULL, coalesce(r.prompt_ids, g.prompt_ids))"),
    _rollout("completion_ids", "INTEGER[]", "Token ids of the completion; the lists below have its length"),
    _rollout("mask", "UTINYINT[]", "1: sampled by the policy, 0: of a tool or environment, or not to be trained"),
    _rollout("logprobs", "FLOAT[]", "Log-probabilities in the sampler; 0 where the mask is 0", unit="nats"),
    _rollout("versions", "INTEGER[]", "Policy version that sampled the token; -1 where the mask is 0"),
    _rollout("trainer_logprobs", "FLOAT[]", "Log-probabilities of the trained policy before its update; NULL where the mask is"
             " 0, the whole list NULL where the trainer never saw the rollout (so in the four below)", unit="nats"),
    _rollout("proximal_logprobs", "FLOAT[]", "What the ratio of the loss is taken against", unit="nats"),
    _rollout("weights", "FLOAT[]", "Importance weight: the off-policy correction's, or else the ratio of the loss"),
    _rollout("entropies", "FLOAT[]", "Entropy of the policy at the token", unit="nats"),
    _rollout("token_flags", "UTINYINT[]", "Bits: 1 clipped low, 2 clipped high, 4 masked by the correction, 8 off_policy_mask,"
             " 32 the update was skipped"),
)  # fmt: skip

COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)
_NULLS = ", ".join(f'NULL::{column.type} AS "{column.name}"' for column in COLUMNS)
NO_ROWS_SQL = f"SELECT {_NULLS} LIMIT 0"
"""A SELECT of all columns without a row."""
TOKEN_COLUMNS = tuple(column.name for column in COLUMNS if column.type in ("INTEGER[]", "UTINYINT[]", "FLOAT[]"))
"""The lists with an entry for each token."""

_TYPES = {column.name: column.type for column in COLUMNS}
_TYPES |= {"schema": "INTEGER", "status": "VARCHAR"}
_ROLLOUT_FIELDS = """rollout_id status truncated done error num_tokens reward advantage rewards messages reset_messages turns
branches extra started_at total_duration_s"""
_ROLLOUT_COLUMNS = (*_ROLLOUT_FIELDS.split(), *TOKEN_COLUMNS)
_ROLLOUT_TYPE = "STRUCT(" + ", ".join(f'"{name}" {_TYPES[name]}' for name in _ROLLOUT_COLUMNS) + ")[]"
_GROUP_FIELDS = "schema seq group_id prompt_id step status written_at prompt_hash messages columns prompt_ids"
_LINE_FIELDS = {name: _TYPES[name] for name in _GROUP_FIELDS.split()} | {"rollouts": _ROLLOUT_TYPE}
"""What a line holds, by name and type."""


def select_from_lines(*paths: Path) -> str:
    """The SELECT that makes COLUMNS from files of JSON lines, in the order of seq and rollout. It leaves out torn and damaged
    lines: compare the number of groups with that of the lines."""
    fields = ", ".join(f"\"{name}\": '{type_}'" for name, type_ in _LINE_FIELDS.items())
    made = ",\n    ".join(f'({column.expression})::{column.type} AS "{column.name}"' for column in COLUMNS)
    longest = max(*(path.stat().st_size + 1 for path in paths), _MIN_BUFFER)
    return f"""
WITH lines AS (
    SELECT *, list_transform(rollouts, lambda rollout: rollout.reward) AS rewards
    FROM read_json({sql_paths(paths)}, format = 'newline_delimited', ignore_errors = true,
                   maximum_object_size = {longest}, columns = {{{fields}}})
    WHERE schema = {SCHEMA} AND seq IS NOT NULL AND rollouts IS NOT NULL
), groups AS (
    SELECT * EXCLUDE (rewards), list_avg(rewards) AS reward_mean, list_aggregate(rewards, 'stddev_samp') AS reward_std
    FROM lines
), rows AS (
    SELECT g, unnest(if(len(g.rollouts) = 0, [NULL], g.rollouts)) AS r, unnest(range(greatest(len(g.rollouts), 1))) AS i
    FROM groups AS g
)
SELECT
    {made}
FROM rows
ORDER BY seq, rollout_index
"""
