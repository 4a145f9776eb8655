"""Reads a rollout store by queries, page by page, also while a run writes it.

    with RolloutTable.open(run.rollouts) as table:
        query = parse_query("reward < 0.2 and truncated")
        table.count(query)
        table.page(query, sort="-length", offset=0, limit=50)
        ...
        if table.refresh():     # what the run wrote since
            ...

DuckDB reads the sealed blocks where they are; only the open block of lines is held in memory. All
methods may be called from several threads. Superseded groups are left out unless asked for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from grpo_async.errors import RunError
from grpo_async.records import root_id
from grpo_async.store.blocks import ALL, Blocks, Row
from grpo_async.store.database import quote
from grpo_async.store.names import KNOWN, SMALL
from grpo_async.store.query import EVERYTHING, Query, QueryError, parse_query
from grpo_async.store.rows import GroupRow, RolloutRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, PARQUET_OPTIONS
from grpo_async.utils.text import did_you_mean

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PREVIEW_CHARACTERS = 240
"""Length of `prompt_preview` and `completion_preview`, at most."""
_ROWS_AT_ONCE = 256
_ROW_KEY = "(seq * 65536 + coalesce(rollout_index, 65535))"
"""One number per row; a group without rollouts has a row of its own."""

_PROMPT = (
    f"left(json_extract_string(coalesce(reset_messages, prompt_messages), '$[#-1].content'), {PREVIEW_CHARACTERS})"
)
# as viewer.format.call_text has it; here because only the beginning of it is read
_ARGUMENTS = "coalesce(call->>'$.function.arguments', '{}')"
_CALL = f"coalesce(nullif(call->>'$.function.name', '') || '(' || {_ARGUMENTS} || ')', call::VARCHAR)"
_SAID = f"""left(array_to_string(list_transform(
  list_filter(json_extract(messages, '$[*]'), lambda each: each->>'$.origin' = 'policy'),
  lambda each: concat_ws(' ', nullif(each->>'$.content', ''), nullif(array_to_string(
    list_transform(json_extract(each, '$.tool_calls[*]'), lambda call: {_CALL}), ' '), '')
  )), chr(10)), {PREVIEW_CHARACTERS})"""
"""The beginning of what the policy wrote, its tool calls too; not what tools answered."""

_GROUP_SQL = {
    "seq": "seq",
    **{name: f"any_value({name})" for name in ("group_id", "prompt_id", "prompt_hash", "step")},
    "status": "any_value(group_status)",
    "size": "count(rollout_index)",
    "num_scored": "count(reward)",
    "reward_mean": "any_value(group_reward_mean)",
    "reward_std": "any_value(group_reward_std)",
    "reward_min": "min(reward)",
    "reward_max": "max(reward)",
    "num_truncated": "count_if(truncated)",
    "num_failed": "count_if(status = 'failed')",
    "num_tokens_mean": "coalesce(avg(num_tokens), 0.0)",
    "num_turns_mean": "coalesce(avg(num_turns), 0.0)",
    "num_tool_calls": "coalesce(sum(num_tool_calls), 0)::INTEGER",
    "num_failed_tool_calls": "coalesce(sum(num_failed_tool_calls), 0)::INTEGER",
    "tool_names": "list_sort(list_distinct(flatten(list(coalesce(tool_names, [])))))",
    "version_min": "min(version_min)",
    "version_max": "max(version_max)",
    "staleness": "max(staleness)",
    "entropy_mean": "avg(entropy_mean)",
    "ratio_max": "max(ratio_max)",
    "clipped_fraction": "avg(clipped_fraction)",
    "masked_fraction": "avg(masked_fraction)",
    "mismatch_mean": "avg(mismatch_mean)",
    "started_at": "min(started_at)",
    "total_duration_s": "max(total_duration_s)",
    "written_at": "any_value(written_at)",
    "superseded": "any_value(superseded)",
    "prompt_preview": f"arg_min({_PROMPT}, coalesce(rollout_index, 0))",
}
"""A group: its rollouts taken together."""
_GROUP_SORTS = _GROUP_SQL | {
    "id": "any_value(group_id)",
    "reward": "any_value(group_reward_mean)",
    "std": "any_value(group_reward_std)",
    "min": "min(reward)",
    "max": "max(reward)",
    "length": "avg(num_tokens)",
    "truncated": "count_if(truncated) / count(rollout_index)",
    "failed": "count_if(status = 'failed') / count(rollout_index)",
    "turns": "avg(num_turns)",
    "tool_calls": "sum(num_tool_calls)",
    "failed_tool_calls": "sum(num_failed_tool_calls)",
    "entropy": "avg(entropy_mean)",
    "mismatch": "avg(mismatch_mean)",
    "duration": "max(total_duration_s)",
    "matching": "num_matching",
}
"""What groups can be sorted by; "group_" may stand before each."""
_ROLLOUT_SORTS = {name: f'"{name}"' for name in KNOWN}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rollouts, and in how many groups."""

    rollouts: int
    groups: int


class RolloutTable:
    """A store, opened for reading. Use as a context, or call `close`."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._counts: dict[tuple[int, str], Counts] = {}  # of the newest generation

    @classmethod
    def open(cls, folder: Path, *, writable: Sequence[Path] = ()) -> Self:
        """Read what the folder `rollouts` (or that of an evaluation) holds now. One that is empty,
        or not there yet, has no rows: `notes` says so.

        Args:
            writable: folders that `write_parquet` may write to.

        Raises:
            RunError: the store is of another version, or cannot be read at all. A damaged block
                only costs its own rows; `damage` names it.
        """
        blocks = Blocks(folder, writable)
        try:
            blocks.refresh()
        except BaseException:
            blocks.close()
            raise
        return cls(blocks)

    def close(self) -> None:
        """Allowed more than once."""
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self._blocks.folder

    @property
    def newest_seq(self) -> int:
        """The highest seq of all groups, superseded or not; -1: there is none."""
        return self._blocks.newest_seq

    @property
    def damage(self) -> list[str]:
        """Blocks and lines that cannot be read, so that their rows are missing. One sentence each."""
        return self._blocks.damage

    @property
    def notes(self) -> list[str]:
        """What a reader must know, one sentence each: `damage`, torn lines, deleted blocks,
        sampling, superseded groups, an empty store."""
        found = [*self.damage, *self._blocks.torn(), *self._blocks.metadata.notes(self.folder)]
        groups = self.count(with_superseded=True).groups
        superseded = groups - self.count().groups
        if superseded:
            found.append(
                f"{superseded} of {groups} groups were written after a checkpoint that the run later "
                "went on from: they are superseded, and left out"
            )
        if not groups and not found:
            state = "holds no rollouts yet" if self.folder.is_dir() else "is not there (yet)"
            found.append(f"{self.folder} {state}")
        return found

    def refresh(self) -> bool:
        """Read what was written since; whether anything changed."""
        return self._blocks.refresh()

    # -- pages

    def count(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Counts:
        """The number of rollouts that match the query, and of their groups."""
        where = _where(query, with_superseded)
        key = (self._blocks.generation, where)
        if key not in self._counts:
            counted = "count(rollout_index) AS rollouts, count(DISTINCT seq) AS groups"
            (found,) = self._blocks.fetch(f"SELECT {counted} FROM {where}", query)
            known = {old: each for old, each in self._counts.items() if old[0] == key[0]}
            self._counts = known | {key: Counts(**found)}
        return self._counts[key]

    def page(self, query: Query = EVERYTHING, *, sort: str = "-seq", offset: int = 0, limit: int = 50) -> list[Row]:
        """Rollouts that match the query: their small columns, and the beginning of their texts.

        Args:
            sort: names of columns with commas between, "-" before one for the highest first.
                Missing values come last either way, equal ones newest first.

        Raises:
            QueryError: no such column.
        """
        keys = self._blocks.fetch(
            f"SELECT seq, rollout_index FROM {_where(query)} AND rollout_index IS NOT NULL "
            f"ORDER BY {_order(sort, _ROLLOUT_SORTS)}seq DESC, rollout_index {_window(offset, limit)}",
            query,
        )
        rows = {(row["seq"], row["rollout_index"]): row for row in self._summaries([key["seq"] for key in keys])}
        return [rows[key["seq"], key["rollout_index"]] for key in keys]

    def group_page(
        self, query: Query = EVERYTHING, *, sort: str = "-seq", offset: int = 0, limit: int = 50
    ) -> list[Row]:
        """Groups with at least one rollout that matches the query; also those without any rollout
        (they failed before one ended).

        Args:
            sort: as `page`, of the group's values: seq, step, reward, std, length, matching, ...

        Raises:
            QueryError: groups have no such value.
        """
        keys = self._blocks.fetch(
            f"SELECT seq, count(rollout_index) FILTER ({query.sql}) AS num_matching FROM rollouts "
            f"WHERE NOT superseded GROUP BY seq HAVING bool_or({query.sql}) "
            f"ORDER BY {_order(sort, _GROUP_SORTS)}seq DESC {_window(offset, limit)}",
            query,
        )
        rows = {row["seq"]: row for row in self._group_summaries([key["seq"] for key in keys])}
        return [rows[key["seq"]] | key for key in keys]

    # -- groups and rollouts

    def group(self, group_id: int) -> GroupRow:
        """One group with all its tokens. RunError: there is none."""
        return self.group_at(self._newest(f"group_id = {int(group_id)}", f"group {group_id}"))

    def group_at(self, seq: int) -> GroupRow:
        """As `group`, by its seq: for one of two with the same id. RunError: there is none."""
        rows = self._read(ALL, [seq], "ORDER BY rollout_index")
        if not rows:
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return from_columns(rows)

    def groups_of_step(self, step: int) -> list[GroupRow]:
        """The groups that an optimizer step used or dropped, in the order of writing."""
        page = self.group_page(parse_query(f"step = {step}"), sort="seq", limit=1_000_000)
        return [self.group_at(row["seq"]) for row in page]

    def group_summary_at(self, seq: int) -> Row:
        """One group, by its seq; all its rollouts count as matching. RunError: there is none."""
        found = self._group_summaries([seq])
        if not found:
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return found[0]

    def rollout_summaries_at(self, seq: int) -> list[Row]:
        """The rollouts of one group, by its seq, in their order."""
        return [row for row in self._summaries([seq]) if row["rollout_index"] is not None]

    def rollout(self, rollout_id: str) -> tuple[GroupRow, RolloutRow]:
        """One rollout, or one of its branches, with all its tokens, and its group. RunError: there
        is none."""
        what = f"rollout {rollout_id}"
        group = self.group_at(self._newest(f"rollout_id = {quote(root_id(rollout_id))}", what))
        found = group.path(rollout_id)
        if found is None:
            raise RunError(f"there is no {what} in {self.folder}")
        return group, found

    # -- of the whole store

    def errors(self, limit: int) -> list[tuple[str, int]]:
        """The most frequent errors of failed rollouts, with their numbers."""
        rows = self._blocks.fetch(
            f"SELECT error, count(*) AS number FROM {_where(EVERYTHING)} AND status = 'failed' "
            f"AND error IS NOT NULL GROUP BY error ORDER BY number DESC, error LIMIT {int(limit)}"
        )
        return [(row["error"], row["number"]) for row in rows]

    def map_names(self) -> dict[str, list[str]]:
        """Names of the entries of `rewards` and of `columns`, those of the newest groups."""
        rows = self._blocks.fetch(
            "SELECT map_keys(rewards) AS rewards, json_keys(columns) AS columns FROM stored "
            f"WHERE seq > {self.newest_seq - 8}"
        )
        return {part: sorted({name for row in rows for name in row[part] or ()}) for part in ("rewards", "columns")}

    # -- export

    def dump_json(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Iterator[str]:
        """Every column of every matching rollout and `superseded` as the text of a JSON object, in
        the order of writing. A group without rollouts is one row, without an id of a rollout."""
        with self._dumping(query, _DUMPED_JSON_SQL, with_superseded) as (cursor, selects):
            for select in selects:
                cursor.execute(f"{select} ORDER BY seq, rollout_index")
                while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                    yield from (text for (text,) in rows)

    def write_parquet(self, path: Path, query: Query = EVERYTHING, *, with_superseded: bool = False) -> None:
        """As `dump_json`, into a Parquet file (zstd). Its folder was named as `writable`. Nothing is
        sorted, because that would hold everything in memory: DuckDB keeps the order of the rows."""
        with self._dumping(query, _DUMPED_SQL, with_superseded) as (cursor, selects):
            none = f"SELECT {_DUMPED_SQL} FROM stored LIMIT 0"
            rows = " UNION ALL ".join(selects) or none
            cursor.execute(f"COPY ({rows}) TO {quote(str(path.absolute()))} ({PARQUET_OPTIONS})")

    @contextlib.contextmanager
    def _dumping(
        self, query: Query, columns: str, with_superseded: bool
    ) -> Iterator[tuple[DuckDBPyConnection, list[str]]]:
        """A cursor that knows which rows match, and one SELECT of these for each block."""
        matching = f"SELECT {_ROW_KEY} AS row_key FROM {_where(query, with_superseded)}"
        with self._blocks.cursor(query) as cursor:
            cursor.execute(f"CREATE TEMP TABLE matching AS {matching}")
            yield (
                cursor,
                [
                    f"SELECT {columns} FROM {part} WHERE {_ROW_KEY} IN (SELECT row_key FROM matching)"
                    for part in self._blocks.parts()
                ],
            )

    # -- below

    def _read(self, columns: str, seqs: Sequence[int], rest: str) -> list[Row]:
        """Columns of the blocks that these groups are in."""
        if not seqs:
            return []
        where = f"seq IN ({', '.join(str(int(seq)) for seq in dict.fromkeys(seqs))})"
        return self._blocks.fetch(lambda: f"SELECT {columns} FROM {self._blocks.of(seqs)} WHERE {where} {rest}")

    def _summaries(self, seqs: Sequence[int]) -> list[Row]:
        columns = f"{', '.join(SMALL)}, superseded, {_PROMPT} AS prompt_preview, {_SAID} AS completion_preview"
        rows = self._read(columns, seqs, "ORDER BY seq, rollout_index")
        return [{**row, "rewards": row["rewards"] or {}, "tool_names": row["tool_names"] or []} for row in rows]

    def _group_summaries(self, seqs: Sequence[int]) -> list[Row]:
        columns = ", ".join(f"{sql} AS {name}" for name, sql in _GROUP_SQL.items())
        rows = self._read(columns, seqs, "GROUP BY seq")
        return [row | {"num_matching": row["size"]} for row in rows]

    def _newest(self, condition: str, what: str) -> int:
        """The newest seq of a group that meets the condition and is not superseded."""
        select = f"SELECT max(seq) AS seq FROM stored WHERE {condition} AND NOT superseded"
        seq = self._blocks.fetch(select)[0]["seq"]
        if seq is None:
            hint = "; a resume may have left it behind: export --superseded has what is superseded"
            left = hint if self._blocks.metadata.superseded else ""
            raise RunError(f"there is no {what} in {self.folder}{left}")
        return int(seq)


# -- SQL


def _where(query: Query, with_superseded: bool = False) -> str:
    """Behind FROM: the rollouts that match."""
    return f"rollouts WHERE {query.sql}{'' if with_superseded else ' AND NOT superseded'}"


def _window(offset: int, limit: int) -> str:
    return f"LIMIT {max(int(limit), 0)} OFFSET {max(int(offset), 0)}"


def check_group_order(sort: str) -> None:
    """Raises QueryError: groups cannot be sorted like this."""
    _order(sort, _GROUP_SORTS)


def _order(sort: str, known: Mapping[str, str]) -> str:
    """The beginning of ORDER BY, from a list of names; `known` has the SQL of each. A part of the
    reward is one too: rewards['format']."""
    found = ""
    for part in sort.split(","):
        name = part.strip().lstrip("+-")
        sql = known.get(name) or known.get(name.removeprefix("group_"))
        if sql is None and known is _ROLLOUT_SORTS and re.fullmatch(r"rewards\['(?:[^']|'')+'\]", name):
            sql = name
        if sql is None:
            what = f"there is nothing to sort by that is called '{name}'{did_you_mean(name, known)}"
            raise QueryError(sort, what, max(sort.find(name), 0))
        found += f"{sql} {'DESC' if part.strip().startswith('-') else 'ASC'} NULLS LAST, "
    return found


_DUMPED_SQL = ", ".join(f'"{name}"' for name in (*COLUMN_NAMES, "superseded"))


def _as_json(name: str, type_: str) -> str:
    """The column as a JSON value: JSON text is not quoted again, and single precision has only the
    digits that it needs."""
    if type_ == "JSON":
        return f'"{name}"::JSON'
    if type_ == "FLOAT[]":
        return f"replace(\"{name}\"::VARCHAR, 'NULL', 'null')::JSON"
    return f'"{name}"'


_DUMPED_JSON_SQL = (
    "to_json({"
    + ", ".join(f"'{column.name}': {_as_json(column.name, column.type)}" for column in COLUMNS)
    + ", 'superseded': superseded})::VARCHAR"
)
