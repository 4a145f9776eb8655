"""Reads a rollout store by queries, page by page, also while a run writes it.

    with RolloutTable(run.rollouts) as table:
        query = parse_query("reward < 0.2 and truncated")
        table.count(query)
        table.page(query, sort="-length", offset=0, limit=50)
        ...
        if table.refresh():     # what the run wrote since
            ...

DuckDB reads sealed blocks where they are, and the open block into the table `unsealed` when it has
grown; `stored` is all of them. All methods may be called from several threads. Superseded groups
are left out unless asked for.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from grpo_async.errors import RunError
from grpo_async.records import root_id
from grpo_async.store.database import connect, interrupted_in_time, lock, quote, sql_paths
from grpo_async.store.files import Block, Metadata, find_blocks, read_metadata, whole_lines
from grpo_async.store.names import KNOWN, LAST_STEP_SQL, SMALL, VIEW_SQL
from grpo_async.store.query import EVERYTHING, Query, QueryError, parse_query
from grpo_async.store.rows import GroupRow, RolloutRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES, NO_ROWS_SQL, select_from_lines
from grpo_async.utils.files import file_stamp
from grpo_async.utils.text import count, did_you_mean, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Row: TypeAlias = dict[str, Any]

PREVIEW_CHARACTERS = 240
"""Length of `prompt_preview` and `completion_preview`, at most."""
_MAX_LISTINGS = 10  # of a folder whose blocks are sealed meanwhile
ALL = ", ".join(f'"{name}"' for name in COLUMN_NAMES)

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
    "reward_mean": "any_value(group_reward_mean)",
    "reward_std": "any_value(group_reward_std)",
    "reward_min": "min(reward)",
    "reward_max": "max(reward)",
    "num_truncated": "count_if(truncated)",
    "num_tokens_mean": "coalesce(avg(num_tokens), 0.0)",
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
    """A store, opened for reading. Use as a context, or call `close`.

    Args:
        folder: `rollouts`, or that of an evaluation. One that is empty, or not there yet, has no
            rows: `notes` says so.
        writable: a further folder, which `export` may write to.

    Attributes:
        blocks: those that can be read.
        damage: blocks and lines that cannot be read, so that their rows are missing, a sentence each.
        newest_seq: the highest seq of all groups, superseded or not; -1: there is none.
    """

    def __init__(self, folder: Path, *, writable: Path | None = None) -> None:
        self.folder = folder
        self.blocks: list[Block] = []
        self.damage: list[str] = []
        self.newest_seq = -1
        self._metadata = Metadata()
        self._state: object = None  # of the files, as they were read
        self._lock = threading.RLock()
        self._connection = connect()
        try:
            lock(self._connection, folder, *([writable] if writable else []))
            self._load(self._metadata, [])
            self._connection.execute(LAST_STEP_SQL)
            self._connection.execute(VIEW_SQL)
            self.refresh()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Allowed more than once."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def notes(self) -> list[str]:
        """What a reader must know, one sentence each: `damage`, torn lines, deleted blocks,
        sampling, superseded groups, an empty store."""
        found = [*self.damage, *self._metadata.notes(self.folder)]
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

    # -- the files

    def refresh(self) -> bool:
        """Read what was written since; whether anything changed."""
        import duckdb

        with self._lock:
            try:
                for _ in range(_MAX_LISTINGS):
                    self._metadata, blocks = read_metadata(self.folder), find_blocks(self.folder)
                    state = (self._metadata.superseded, [file_stamp(block.path) for block in blocks])
                    if state == self._state:
                        return False
                    with contextlib.suppress(FileNotFoundError, duckdb.IOException):  # one was sealed meanwhile
                        self._load(self._metadata, blocks)
                        self._state = state
                        return True
            except OSError as error:
                raise RunError(f"cannot read the rollouts in {self.folder}: {error}") from error
            raise RunError(f"the blocks in {self.folder} change faster than they can be read")

    def _load(self, metadata: Metadata, blocks: Sequence[Block]) -> None:
        """Make `stored` of these blocks; other threads see it as it was, or as it is."""
        problems = {block: problem for block in blocks if block.is_sealed and (problem := self._problem_of(block))}
        lines = [each for each in blocks if not each.is_sealed]
        num_lines = sum(whole_lines(each.path) for each in lines)
        readable = [each for each in blocks if each not in problems]
        sealed = [each.path for each in readable if each.is_sealed]
        files = f"SELECT * FROM read_parquet({sql_paths(sealed)}) UNION ALL " if sealed else ""
        rows = select_from_lines(*(each.path for each in lines)) if lines else NO_ROWS_SQL
        with self._connection.cursor() as cursor, _transaction(cursor):
            cursor.execute(f"CREATE OR REPLACE TABLE unsealed AS {rows}")
            cursor.execute(
                f"CREATE OR REPLACE VIEW stored AS SELECT *, {metadata.superseded_condition()} AS superseded "
                f"FROM ({files}SELECT * FROM unsealed)"
            )
            seqs = [seq for (seq,) in cursor.execute("SELECT DISTINCT seq FROM unsealed").fetchall()]
        self.blocks = readable
        self.newest_seq = max([-1, *(each.last_seq or 0 for each in self.blocks if each.is_sealed), *seqs])
        self.damage = [
            f"{block.path} is damaged, its rollouts are left out ({problem}; restore it from a copy, or remove it)"
            for block, problem in problems.items()
        ]
        if num_lines > len(seqs):
            names = ", ".join(str(each.path) for each in lines)
            self.damage.append(f"left out {count(num_lines - len(seqs), 'damaged line')} of {names}")

    def parts(self) -> list[str]:
        """The rows of each block as SQL, in the order of writing: a block may be sealed before one that is older."""
        superseded = self._metadata.superseded_condition()
        sources = []
        for block, end in zip(self.blocks, [*(each.first_seq for each in self.blocks[1:]), 1 << 62], strict=False):
            own_lines = f"unsealed WHERE seq >= {block.first_seq} AND seq < {end}"
            sources.append(f"read_parquet({sql_paths([block.path])})" if block.is_sealed else own_lines)
        return [f"SELECT *, {superseded} AS superseded FROM {source}" for source in sources]

    def _problem_of(self, block: Block) -> str:
        """Why a sealed block cannot be opened; empty: it can, or is gone."""
        import duckdb

        if block in self.blocks:
            return ""
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(f"SELECT count(*) FROM read_parquet({sql_paths([block.path])})").fetchall()
        except duckdb.Error as error:
            return first_line(str(error)) if block.path.exists() else ""
        return ""

    @contextlib.contextmanager
    def cursor(self, query: Query = EVERYTHING) -> Iterator[DuckDBPyConnection]:
        """A cursor for this query alone, so that threads do not wait for each other.

        Raises:
            QueryError: the query does not fit what is stored (a text that is not a number).
            RunError: a block is damaged, or was sealed or deleted meanwhile.
            TimeoutError: the deadline of `time_limit` has passed.
        """
        import duckdb

        with self._lock:
            cursor = self._connection.cursor()
        try:
            with interrupted_in_time(cursor):
                yield cursor
        except duckdb.Error as error:
            problem = first_line(str(error))
            is_of_file = isinstance(error, duckdb.IOException)
            if query.text and not is_of_file and not re.search("parquet|decompress", problem, re.I):
                raise QueryError(query.text, problem) from error
            raise RunError(f"cannot read the rollouts in {self.folder}: {problem}") from error
        finally:
            cursor.close()

    def fetch(self, sql: str, query: Query = EVERYTHING) -> list[Row]:
        """The rows of a SELECT, which is asked again where a block was sealed meanwhile. `query` is
        the one in it, for errors. Raises the errors of `cursor`."""

        def ask() -> list[Row]:
            with self.cursor(query) as cursor:
                rows = cursor.execute(sql).fetchall()
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in rows]

        try:
            return ask()
        except RunError:
            if not self.refresh():
                raise
            return ask()

    # -- pages

    def count(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Counts:
        """The number of rollouts that match the query, and of their groups."""
        counted = "count(rollout_index) AS rollouts, count(DISTINCT seq) AS groups"
        (found,) = self.fetch(f"SELECT {counted} FROM {where(query, with_superseded)}", query)
        return Counts(**found)

    def page(self, query: Query = EVERYTHING, *, sort: str = "-seq", offset: int = 0, limit: int = 50) -> list[Row]:
        """Rollouts that match the query: their small columns, and the beginning of their texts.

        Args:
            sort: names of columns with commas between, "-" before one for the highest first.
                Missing values come last either way, equal ones newest first.
        """
        keys = self.fetch(
            f"SELECT seq, rollout_index FROM {where(query)} AND rollout_index IS NOT NULL "
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
        """
        keys = self.fetch(
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

    def rollout(self, rollout_id: str) -> tuple[GroupRow, RolloutRow]:
        """One rollout, or one of its branches, with all its tokens, and its group. RunError: there
        is none."""
        what = f"rollout {rollout_id}"
        group = self.group_at(self._newest(f"rollout_id = {quote(root_id(rollout_id))}", what))
        found = group.path(rollout_id)
        if found is None:
            raise RunError(f"there is no {what} in {self.folder}")
        return group, found

    # -- below

    def _read(self, columns: str, seqs: Sequence[int], rest: str) -> list[Row]:
        """Columns of these groups."""
        if not seqs:
            return []
        listed = ", ".join(str(int(seq)) for seq in dict.fromkeys(seqs))
        return self.fetch(f"SELECT {columns} FROM stored WHERE seq IN ({listed}) {rest}")

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
        seq = self.fetch(select)[0]["seq"]
        if seq is None:
            hint = "; a resume may have left it behind: export --superseded has what is superseded"
            left = hint if self._metadata.superseded else ""
            raise RunError(f"there is no {what} in {self.folder}{left}")
        return int(seq)


# -- SQL


def where(query: Query, with_superseded: bool = False) -> str:
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
            raise QueryError(sort, what)
        found += f"{sql} {'DESC' if part.strip().startswith('-') else 'ASC'} NULLS LAST, "
    return found


@contextlib.contextmanager
def _transaction(cursor: DuckDBPyConnection) -> Iterator[None]:
    """What is done within becomes visible at once, or not at all."""
    cursor.execute("BEGIN")
    try:
        yield
    except BaseException:
        cursor.execute("ROLLBACK")
        raise
    cursor.execute("COMMIT")
