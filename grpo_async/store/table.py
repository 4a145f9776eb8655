"""Reads a rollout store by queries, page by page, also while a run writes it.

    block-N-M.parquet, ...        read where they are, by every query     -+
    block-N.jsonl (the open one)  read into the table `unsealed` anew     -+-> view `stored` -> view `rollouts` (names)

A `refresh` makes `stored` anew if a file came, went or grew: other threads see it as it was or as it is.
A query that meets a block which was sealed or deleted meanwhile is asked again.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from grpo_async.errors import RunError
from grpo_async.records import root_id
from grpo_async.store.database import connect, interrupting, lock, quote, sql_paths
from grpo_async.store.files import MAX_LISTINGS, Block, Metadata, find_blocks, has_writer, read_metadata, torn_bytes
from grpo_async.store.names import KNOWN, LAST_STEP_SQL, SMALL, VIEW_SQL
from grpo_async.store.query import EVERYTHING, Query, QueryError
from grpo_async.store.rows import GroupRow, RolloutRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, NO_ROWS_SQL, PARQUET_OPTIONS, select_from_lines
from grpo_async.utils.files import file_stamp
from grpo_async.utils.text import count, did_you_mean, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Row: TypeAlias = dict[str, Any]

_ALL = ", ".join(f'"{name}"' for name in COLUMN_NAMES)

PREVIEW_CHARACTERS = 240
"""Length of `prompt_preview` and `completion_preview`, at most."""
_ROWS_AT_ONCE = 256

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
    """A store, opened for reading. Use as a context, or call `close`. Safe to use from several threads.

    Args:
        folder: the folder `rollouts` of a run (or of an evaluation). One that is empty, or not there
            yet, has no rows: `notes` says so.
        writable: folders that `write_parquet` may write to.

    Attributes:
        damage: blocks and lines that cannot be read, a sentence each.
        newest_seq: the highest seq of all groups, superseded or not; -1: there is none.

    Raises:
        RunError: the store is of another version, or cannot be read at all. A damaged block only
            costs its own rows.
    """

    def __init__(self, folder: Path, *, writable: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.damage: list[str] = []
        self.newest_seq = -1
        self._metadata = Metadata()
        self._state: object = None  # of the files, as they were read
        self._looked_at: dict[object, str] = {}  # stamps of sealed blocks, and why one cannot be read
        self._lock = threading.RLock()
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-async-rollouts-"))
        self._connection = connect()
        try:
            lock(self._connection, (folder, *writable), self._scratch)
            self._load(Metadata(), [])
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
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def notes(self) -> list[str]:
        """What a reader must know, one sentence each: `damage`, torn lines, deleted blocks,
        sampling, superseded groups, an empty store."""
        found = [*self.damage, *self._torn(), *self._metadata.notes(self.folder)]
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

    def _torn(self) -> Iterator[str]:
        """Last lines that are not whole, and not being written."""
        lines = [block for block in find_blocks(self.folder) if not block.is_sealed]
        for block in lines[:-1] if has_writer(self.folder) else lines:
            with contextlib.suppress(OSError):  # sealed meanwhile, or in `damage`
                if rest := torn_bytes(block.path):
                    yield (
                        f"the last line of {block.path.name} is torn (the writer was killed, or the "
                        f"disk was full): {rest} bytes are left out, at most one group"
                    )

    # -- files

    def refresh(self) -> bool:
        """Read what was written since; whether anything changed.

        Raises:
            RunError: the folder cannot be read, or is of a version with another format.
        """
        import duckdb

        with self._lock:
            try:
                for _ in range(MAX_LISTINGS):
                    metadata, blocks = read_metadata(self.folder), find_blocks(self.folder)
                    state = (metadata.superseded, [file_stamp(block.path) for block in blocks])
                    if state == self._state:
                        self._metadata = metadata
                        return False
                    with contextlib.suppress(FileNotFoundError, duckdb.IOException):
                        self._load(metadata, blocks)
                        self._state = state
                        return True
            except OSError as error:
                raise RunError(f"cannot read the rollouts in {self.folder}: {error}") from error
            raise RunError(f"the blocks in {self.folder} change faster than they can be read")

    def _load(self, metadata: Metadata, blocks: Sequence[Block]) -> None:
        """Make `stored` of these blocks. FileNotFoundError, or DuckDB's IOException: one was sealed
        or deleted meanwhile."""
        sealed = [each for each in blocks if each.is_sealed]
        self._look_at(sealed)
        damage = [why for each in sealed if (why := self._looked_at[file_stamp(each.path)])]
        sealed = [each for each in sealed if not self._looked_at[file_stamp(each.path)]]
        with self._connection.cursor() as cursor, _transaction(cursor):
            cursor.execute(f"CREATE OR REPLACE TABLE unsealed AS {NO_ROWS_SQL}")
            for block in blocks:
                if not block.is_sealed:
                    damage += _load_lines(cursor, block.path)
            files = f" UNION ALL SELECT {_ALL} FROM unsealed"
            if sealed:
                files = f"SELECT {_ALL} FROM read_parquet({sql_paths([each.path for each in sealed])}){files}"
            files = files.removeprefix(" UNION ALL ")
            superseded = f"{metadata.superseded_condition()} AS superseded"
            cursor.execute(f"CREATE OR REPLACE VIEW stored AS SELECT *, {superseded} FROM ({files})")
            (newest,) = cursor.execute("SELECT max(seq) FROM unsealed").fetchone() or (None,)
        lasts = [each.last_seq for each in sealed if each.last_seq is not None]
        self.newest_seq = max([-1, *lasts, *([] if newest is None else [newest])])
        self._metadata, self.damage = metadata, damage

    def _look_at(self, sealed: Sequence[Block]) -> None:
        """Try to read blocks that were not looked at yet: all at once, which is fast, or one by one."""
        import duckdb

        new = [each for each in sealed if file_stamp(each.path) not in self._looked_at]
        for some in [new, *([each] for each in new)] if new else []:
            try:
                with self._connection.cursor() as cursor:
                    paths = sql_paths([each.path for each in some])
                    cursor.execute(f"SELECT count(*) FROM read_parquet({paths})").fetchall()
            except duckdb.Error as error:
                if some is not new and some[0].path.exists():
                    self._looked_at[file_stamp(some[0].path)] = (
                        f"{some[0].path} is damaged, its rollouts are left out ({first_line(str(error))}); "
                        "restore it from a copy, or remove it"
                    )
                continue
            self._looked_at |= dict.fromkeys((file_stamp(each.path) for each in some), "")
            if some is new:
                return

    # -- questions

    def fetch(self, sql: str, query: Query = EVERYTHING) -> list[Row]:
        """The rows of a SELECT. `query` is the one in it, for errors. Raises the errors of `cursor`."""

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
            with interrupting(cursor):
                yield cursor
        except duckdb.Error as error:
            problem = first_line(str(error))
            is_of_file = isinstance(error, duckdb.IOException)
            if query.text and not is_of_file and not re.search("parquet|decompress", problem, re.I):
                raise QueryError(query.text, problem) from error
            raise RunError(f"cannot read the rollouts in {self.folder}: {problem}") from error
        finally:
            cursor.close()

    # -- pages

    def count(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Counts:
        """The number of rollouts that match the query, and of their groups."""
        counted = "count(rollout_index) AS rollouts, count(DISTINCT seq) AS groups"
        (found,) = self.fetch(f"SELECT {counted} FROM {_where(query, with_superseded)}", query)
        return Counts(**found)

    def page(self, query: Query = EVERYTHING, *, sort: str = "-seq", offset: int = 0, limit: int = 50) -> list[Row]:
        """Rollouts that match the query: their small columns, and the beginning of their texts.

        Args:
            sort: names of columns with commas between, "-" before one for the highest first.
                Missing values come last either way, equal ones newest first.

        Raises:
            QueryError: no such column.
        """
        keys = self.fetch(
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
        rows = self._read(_ALL, [seq], "ORDER BY rollout_index")
        if not rows:
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return from_columns(rows)

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
        rows = self.fetch(
            f"SELECT error, count(*) AS number FROM {_where(EVERYTHING)} AND status = 'failed' "
            f"AND error IS NOT NULL GROUP BY error ORDER BY number DESC, error LIMIT {int(limit)}"
        )
        return [(row["error"], row["number"]) for row in rows]

    def map_names(self) -> dict[str, list[str]]:
        """Names of the entries of `rewards` and of `columns`, those of the newest groups."""
        rows = self.fetch(
            "SELECT map_keys(rewards) AS rewards, json_keys(columns) AS columns FROM stored "
            f"WHERE seq > {self.newest_seq - 8}"
        )
        return {part: sorted({name for row in rows for name in row[part] or ()}) for part in ("rewards", "columns")}

    # -- export

    def dump_json(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Iterator[str]:
        """Every column of every matching rollout and `superseded` as the text of a JSON object, block
        by block. A group without rollouts is one row, without an id of a rollout."""
        with self.cursor(query) as cursor:
            cursor.execute(_matching(_DUMPED_JSON_SQL, query, with_superseded))
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                yield from (text for (text,) in rows)

    def write_parquet(self, path: Path, query: Query = EVERYTHING, *, with_superseded: bool = False) -> None:
        """As `dump_json`, into a Parquet file (zstd). Its folder was named as `writable`."""
        rows = _matching(_DUMPED_SQL, query, with_superseded)
        with self.cursor(query) as cursor:
            cursor.execute(f"COPY ({rows}) TO {quote(str(path.absolute()))} ({PARQUET_OPTIONS})")

    # -- below

    def _read(self, columns: str, seqs: Sequence[int], rest: str) -> list[Row]:
        """Columns of all rows of these groups."""
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


def _load_lines(cursor: DuckDBPyConnection, path: Path) -> Iterator[str]:
    """Put a block of lines into `unsealed`; what is damaged, a sentence each."""
    try:
        num_lines = path.read_bytes().count(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        yield f"{path} is damaged, its rollouts are left out ({error}); make it readable"
        return
    before = _num_unsealed(cursor)
    cursor.execute(f"INSERT INTO unsealed {select_from_lines(path)}")
    damaged = num_lines - (_num_unsealed(cursor) - before)
    if damaged > 0:
        yield f"{path}: left out {count(damaged, 'damaged line')}"


def _num_unsealed(cursor: DuckDBPyConnection) -> int:
    (number,) = cursor.execute("SELECT count(DISTINCT seq) FROM unsealed").fetchone() or (0,)
    return int(number)


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


def _matching(columns: str, query: Query, with_superseded: bool) -> str:
    """A SELECT of these columns of `stored`, of the rows that match. Nothing is sorted, because that
    would hold everything in memory: DuckDB keeps the order of the files."""
    return f"SELECT {columns} FROM (SELECT unnest(stored) FROM {_where(query, with_superseded)})"


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
