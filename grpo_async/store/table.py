"""Reads a rollout store by queries, page by page, also while a run writes it.

    with RolloutTable.open(run.rollouts) as table:
        query = parse_query("reward<0.2 and truncated")
        table.count(query)
        table.page(query, sort="-length", offset=0, limit=50)
        ...
        if table.refresh():     # what the run wrote since
            ...

Filters, sorts and counts run in memory (`index`); texts and tokens are read from the blocks for what is shown or searched. All
methods may be called from several threads. `with_superseded`: also what a run wrote after the checkpoint that it later went on
from; such groups were not trained in the run as it now is. Of a group or rollout that is stored twice (generated again after a
resume) the one that counts is given, and without one that counts the newest.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from grpo_async.errors import RunError
from grpo_async.records import root_id
from grpo_async.store.database import quote
from grpo_async.store.index import Index, Sql, of_query
from grpo_async.store.metadata import StoreMetadata, read_metadata
from grpo_async.store.query import EVERYTHING, Query, QueryError, find_value, parse_query
from grpo_async.store.query_names import BLOCK_SQL, LIST, NUMBER, ROW_KEY
from grpo_async.store.rows import GroupRow, RolloutRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, SCHEMA
from grpo_async.store.seal import ROWS_PER_GROUP
from grpo_async.store.summaries import (
    PREVIEW_CHARACTERS,
    Counts,
    Extremes,
    GroupSummary,
    Histogram,
    PromptChange,
    RolloutSummary,
    StepSummary,
    sql_of,
)

_Answer = TypeVar("_Answer")
_ROWS_AT_ONCE = 256
_NUM_NEAR = 3
_ROLLOUT_NAMES = tuple(each.name for each in dataclasses.fields(RolloutSummary) if not each.name.endswith("_preview"))
_GROUP_NAMES = tuple(sql_of(GroupSummary))
_STEP_SQL = sql_of(StepSummary)
_PREVIEW = (
    f"left(json_extract_string(coalesce(reset_messages, prompt_messages), '$[#-1].content'), {PREVIEW_CHARACTERS})"
)
_CALL = "(call->>'$.function.name') || '(' || coalesce(call->>'$.function.arguments', '') || ')'"
_SAID = f"""left(array_to_string(list_transform(
  list_filter(json_extract(messages, '$[*]'), lambda each: each->>'$.origin' = 'policy'),
  lambda each: concat_ws(' ', nullif(each->>'$.content', ''), nullif(array_to_string(
    list_transform(json_extract(each, '$.tool_calls[*]'), lambda call: {_CALL}), ' '), ''))), chr(10)), {PREVIEW_CHARACTERS})"""
"""The beginning of what the policy wrote in a rollout, its tool calls too; not what tools and environments answered."""
_SUPERSEDED = "is superseded (a resume left it behind); ask for superseded ones to see it"


class RolloutTable:
    """A store, opened for reading. Use as a context, or call `close`."""

    def __init__(self, index: Index) -> None:
        self._index = index

    @classmethod
    def open(cls, folder: Path, *, writable: Sequence[Path] = ()) -> Self:
        """Read what the folder `rollouts` (or that of an evaluation) holds now. One that is empty, or not there yet, has no rows:
        `notes` says so.

        Args:
            writable: folders that `write_parquet` may write to.

        Raises:
            RunError: the store is of another version, or cannot be read at all. A damaged block only costs its own rows; `notes`
                and `damage` name it.
        """
        with ExitStack() as opened:
            index = Index(folder, writable=writable)
            opened.callback(index.close)
            index.refresh()
            opened.pop_all()
        return cls(index)

    def close(self) -> None:
        """Allowed more than once."""
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self._index.folder

    @property
    def generation(self) -> int:
        """Grows whenever `refresh` found something new: a key for caches."""
        return self._index.generation

    @property
    def damage(self) -> list[str]:
        """Blocks and lines that cannot be read, so that their rows are missing. One sentence each."""
        return self._index.damage()

    @property
    def notes(self) -> list[str]:
        """All that a reader must know, one sentence each: `damage`, torn lines, deleted blocks, sampling, superseded groups,
        an empty store."""
        index, found = self._index, self._index.damage()
        try:
            metadata = read_metadata(index.folder)
        except RunError as error:  # the rollouts can be read without it
            metadata = StoreMetadata()
            found.append(str(error))
        torn = [note for note in index.torn() if not any(name in note for name in metadata.torn)]
        found += [*torn, *metadata.notes()]
        ((groups, superseded),) = index.fetch(Sql("SELECT count(*), count_if(superseded) FROM groups"))
        if superseded:
            found.append(
                f"{superseded} of {groups} groups were written after a checkpoint that the run later went on from: they are "
                "superseded, and shown only when asked for"
            )
        if not groups and not found:
            state = "holds no rollouts yet" if index.folder.is_dir() else "is not there (yet)"
            found.append(f"{index.folder} {state}")
        return found

    def refresh(self) -> bool:
        """Ingest what was written since; whether anything changed."""
        return self._index.refresh()

    # --------------------------------------------------------------------------------------------- pages

    def count(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Counts:
        """Rollouts that the query holds for, and in how many groups they are."""
        where = self._where(query, with_superseded)
        select = Sql("SELECT count(rollout_index), count(DISTINCT seq) FROM rollouts WHERE ")
        ((rollouts, groups),) = self._fetch(query, select + where)
        return Counts(rollouts=rollouts, groups=groups)

    def page(
        self,
        query: Query = EVERYTHING,
        *,
        sort: str = "-seq",
        offset: int = 0,
        limit: int = 50,
        with_superseded: bool = False,
    ) -> list[RolloutSummary]:
        """Rollouts that the query holds for.

        Args:
            sort: names of columns with commas between, "-" before one for the highest first. Missing values come last either way,
                equal ones newest first.

        Raises:
            QueryError: no such column, or one that cannot be sorted by.
        """
        where = self._where(query, with_superseded)
        return self._with_previews(self._fetch(query, _page(where, sort, offset, limit)))

    def group_page(
        self,
        query: Query = EVERYTHING,
        *,
        sort: str = "-seq",
        offset: int = 0,
        limit: int = 50,
        with_superseded: bool = False,
    ) -> list[GroupSummary]:
        """Groups with at least one rollout that the query holds for; also those without any rollout (they failed before one ended).

        Args:
            sort: as `page`, of the group's columns, with or without "group_": seq, step, reward, std, length, truncated, ...; and
                `matching`.

        Raises:
            QueryError: no such column, or one of rollouts only.
        """
        where = self._where(query, with_superseded)
        return self._groups(self._fetch(query, _group_page(where, sort, offset, limit)))

    # ------------------------------------------------------------------------------------------- single ones

    def group(self, group_id: int, *, with_superseded: bool = False) -> GroupRow:
        """One group with all its tokens.

        Raises:
            RunError: there is none; the message names ids that there are.
        """
        seq = self._newest("groups", "group_id", group_id, with_superseded)
        if seq is None:
            raise RunError(self._no_group(group_id))
        return self._whole(seq)

    def group_at(self, seq: int) -> GroupRow:
        """As `group`, by the number of its line: for one of two with the same id. RunError: there is none."""
        if not self._index.fetch(Sql("SELECT 1 FROM groups WHERE seq = ?", (seq,))):
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return self._whole(seq)

    def group_summary_at(self, seq: int) -> GroupSummary:
        """One group, by the number of its line; all its rollouts count as matching. RunError: there is none."""
        found = self._group_summaries([seq])
        if not found:
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return found[0]

    def rollout_summaries_at(self, seq: int) -> list[RolloutSummary]:
        """The rollouts of one group, by the number of its line, in their order."""
        sql = _page(Sql("seq = ?", (seq,)), "index", 0, 1 << 16)
        return self._with_previews(self._index.fetch(sql))

    def rollout(self, rollout_id: str, *, with_superseded: bool = False) -> tuple[GroupRow, RolloutRow]:
        """One rollout, or one of its branches, with all its tokens, and its group.

        Raises:
            RunError: there is none; the message names ids that are near.
        """
        seq = self._newest("rows", "rollout_id", root_id(rollout_id), with_superseded)
        group = None if seq is None else self._whole(seq)
        found = None if group is None else group.path(rollout_id)
        if group is None or found is None:
            raise RunError(self._no_rollout(rollout_id))
        return group, found

    # --------------------------------------------------------------------------------------------- figures

    def histogram(
        self, field: str, query: Query = EVERYTHING, *, bins: int = 30, with_superseded: bool = False
    ) -> Histogram:
        """How a number is distributed: reward, staleness, length, rewards['NAME'], group_reward, ... Whole numbers in a range of at
        most `bins` get a bin each.

        Worked example: values 0, 1, 1, 3 with at most 30 bins: edges -0.5, 0.5, 1.5, 2.5, 3.5, counts 1, 2, 0, 1. Values 0.0, 0.5,
        1.0 with 2 bins: edges 0.0, 0.5, 1.0, counts 1, 2.

        Raises:
            QueryError: no such column, or one without numbers.
        """
        value = find_value(field)
        if value.kind != NUMBER:
            raise QueryError(field, 0, len(field), f"{field} holds no numbers")
        where = self._where(query, with_superseded)
        values = f"SELECT try_cast({value.sql} AS DOUBLE) AS value FROM rollouts WHERE rollout_index IS NOT NULL AND "
        finite = Sql("WITH known AS (SELECT if(isfinite(value), value, NULL) AS value FROM (" + values) + where + ")) "
        figures = "SELECT count(value), min(value), max(value), bool_and(value = floor(value)), count(*) - count(value) FROM known"
        ((number, low, high, whole, missing),) = self._fetch(query, finite + figures)
        if not number:
            return Histogram(field=field, edges=[], counts=[], num_null=missing)
        if whole and high - low < bins:
            low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
        elif low == high:
            low, high, bins = low - 0.5, high + 0.5, 1
        width = (high - low) / bins
        counted = Sql(
            "SELECT least(greatest(floor((value - ?) / ?)::BIGINT, 0), ?) AS bin, count(*) FROM known "
            "WHERE value IS NOT NULL GROUP BY bin",
            (low, width, bins - 1),
        )
        counts = [0] * bins
        for index, count in self._fetch(query, finite + counted):
            counts[index] = count
        edges = [low + width * k for k in range(bins)] + [high]
        return Histogram(field=field, edges=edges, counts=counts, num_null=missing)

    def facets(
        self, field: str, query: Query = EVERYTHING, *, limit: int = 20, with_superseded: bool = False
    ) -> list[tuple[str, int]]:
        """The most frequent values of a column (status, group_status, tools, error, columns['NAME'], ...) with the number of
        rollouts that have them; those without a value are not counted.

        Raises:
            QueryError: no such column.
        """
        value = find_value(field)
        where = Sql("rollout_index IS NOT NULL AND ") + self._where(query, with_superseded)
        if value.in_blocks:
            keys = Sql("SELECT row_key FROM rollouts WHERE ") + where
            source = self._index.source(self._index.sealed_blocks())
            texts = Sql(f"(SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM ") + source + ")"
            values = Sql(f"SELECT {value.sql} AS value FROM ") + texts + " WHERE row_key IN (" + keys + ")"
        else:
            each = f"unnest(list_distinct({value.sql}))" if value.kind == LIST else value.sql
            values = Sql(f"SELECT {each} AS value FROM rollouts WHERE ") + where
        order = Sql(") WHERE value IS NOT NULL GROUP BY value ORDER BY 2 DESC, 1 LIMIT ?", (limit,))
        found = self._reading(lambda: self._fetch(query, Sql("SELECT value, count(*) FROM (") + values + order))
        return [
            (str(int(value)) if isinstance(value, float) and value.is_integer() else str(value), count)
            for value, count in found
        ]

    def by_step(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> list[StepSummary]:
        """Ascending by step; those that no step saw last. Steps without a matching rollout or group are left out, and without
        `with_superseded` also the one that is not done yet."""
        where = self._where(query, with_superseded)
        rewards: dict[int | None, dict[str, float]] = defaultdict(dict)
        parts = Sql("SELECT step, unnest(map_entries(rewards)) AS part FROM rollouts WHERE ") + where
        means = "SELECT step, part.key, avg(part.value) FROM ("
        for step, name, mean in self._fetch(query, Sql(means) + parts + ") WHERE part.value IS NOT NULL GROUP BY ALL"):
            rewards[step][name] = mean
        statuses: dict[int | None, dict[str, int]] = defaultdict(dict)
        counts = Sql("SELECT step, group_status, count(DISTINCT seq) FROM rollouts WHERE ")
        for step, status, groups in self._fetch(query, counts + where + " GROUP BY ALL ORDER BY ALL"):
            statuses[step][status] = groups
        # what was filtered or dropped for a step that is not done would give a wrong mean
        is_done = "" if with_superseded else " AND (step IS NULL OR step <= last_step())"
        select = Sql(f"SELECT {', '.join(_STEP_SQL.values())} FROM rollouts WHERE ")
        rows = self._fetch(query, select + where + is_done + " GROUP BY step ORDER BY step NULLS LAST")
        return [
            StepSummary(
                **dict(zip(_STEP_SQL, row, strict=True)),
                rewards=dict(sorted(rewards[row[0]].items())),
                group_statuses=statuses[row[0]],
            )
            for row in rows
        ]

    def same_prompt(self, prompt_hash: str, *, with_superseded: bool = False) -> list[GroupSummary]:
        """All groups of one prompt, in the order of writing; none where the run never saw it."""
        query = parse_query(f"prompt_hash = {quote(prompt_hash)}")
        return self.group_page(query, sort="seq", limit=1 << 31, with_superseded=with_superseded)

    def extremes(self, query: Query = EVERYTHING, k: int = 10) -> Extremes:
        """The best and worst rollouts by reward, and the prompts whose mean reward changed most between their first group and their
        last. At most `k` of each."""
        where = self._where(query, False)
        scored = Sql("reward IS NOT NULL AND ") + where
        return Extremes(
            best=self._with_previews(self._fetch(query, _page(scored, "-reward,-advantage", 0, k))),
            worst=self._with_previews(self._fetch(query, _page(scored, "reward,advantage", 0, k))),
            improved=self._changes(where, k, "> 0", "DESC"),
            worsened=self._changes(where, k, "< 0", "ASC"),
        )

    def reward_names(self) -> list[str]:
        """The parts of the reward that occur, for rewards['NAME']."""
        return [
            name for (name,) in self._index.fetch(Sql("SELECT DISTINCT unnest(map_keys(rewards)) FROM rows ORDER BY 1"))
        ]

    def column_names(self) -> list[str]:
        """Names of the dataset's further columns, for columns['NAME']: those of the newest groups."""
        seqs = [seq for (seq,) in self._index.fetch(Sql("SELECT seq FROM groups ORDER BY seq DESC LIMIT 8"))]
        keys = self._read("DISTINCT ON (seq) seq, rollout_index, json_keys(columns)", seqs)
        return sorted({name for _, _, names in keys for name in names or ()})

    # ---------------------------------------------------------------------------------------------- export

    def dump_json(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Iterator[str]:
        """Every column of every matching rollout and `superseded` as the text of a JSON object, in the order of writing, a block in
        memory at a time. A group without rollouts is one row, without an id of a rollout."""
        for select in self._dumps(query, _DUMPED_JSON_SQL, with_superseded):
            for (text,) in self._index.stream(select + " ORDER BY seq, rollout_index", _ROWS_AT_ONCE, query):
                yield text

    def write_parquet(self, path: Path, query: Query = EVERYTHING, *, with_superseded: bool = False) -> None:
        """As `dump_json`, into a Parquet file (zstd). Its folder was named as `writable`. Without a sort, which would hold
        everything in memory: DuckDB keeps the order of the blocks and, within one, of the rows."""
        selects = self._dumps(query, _DUMPED_SQL, with_superseded)
        none = f"SELECT {_DUMPED_SQL} FROM (SELECT *, false AS superseded FROM unsealed) LIMIT 0"
        whole = selects[0] if selects else Sql(none)
        for select in selects[1:]:
            whole = whole + " UNION ALL " + select
        options = (
            f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROWS_PER_GROUP}, "
            f"KV_METADATA {{grpo_async_schema: '{SCHEMA}'}}"
        )
        for _ in self._index.stream(
            Sql("COPY (") + whole + f") TO {quote(str(path.absolute()))} ({options})", 1, query
        ):
            pass  # the number of rows

    # ------------------------------------------------------------------------------------------------ below

    def _dumps(self, query: Query, columns: str, with_superseded: bool) -> list[Sql]:
        """One SELECT for each block, in the order of writing."""
        keys = Sql("SELECT row_key FROM rollouts WHERE ") + self._where(query, with_superseded)
        whole = f"SELECT {columns} FROM (SELECT *, {self._index.superseded()} AS superseded FROM "
        return [Sql(whole) + part + f") WHERE {ROW_KEY} IN (" + keys + ")" for part in self._index.parts()]

    def _where(self, query: Query, with_superseded: bool) -> Sql:
        self._check_rewards(query)
        condition = self._reading(lambda: self._index.condition(query))
        return condition if with_superseded else Sql("NOT superseded AND ") + condition

    def _fetch(self, query: Query, sql: Sql) -> list[tuple[Any, ...]]:
        with of_query(query):
            return self._index.fetch(sql)

    def _check_rewards(self, query: Query) -> None:
        """A part of the reward that no rollout has is a mistake, as soon as there are rollouts. Raises QueryError."""
        asked = [found.replace("''", "'") for found in re.findall(r"\brewards\['((?:[^']|'')*)'\]", query.sql, re.I)]
        names = self.reward_names() if asked else []
        for name in asked:
            if names and name not in names:
                near = [f"rewards[{quote(each)}]" for each in get_close_matches(name, names, n=_NUM_NEAR)]
                problem = f"no rollout has a reward {name}; there are {', '.join(names)}"
                raise QueryError(query.text, max(query.text.find(name), 0), len(name), problem, near)

    def _reading(self, ask: Callable[[], _Answer]) -> _Answer:
        """`ask` reads blocks. One that was sealed or deleted meanwhile is found by looking again, once."""
        try:
            return ask()
        except RunError:
            if not self._index.refresh():
                raise
            return ask()

    def _read(self, columns: str, seqs: Sequence[int], condition: Sql | None = None) -> list[tuple[Any, ...]]:
        """Columns of the blocks for some groups, in the order of writing."""
        if not seqs:
            return []
        wanted = Sql("seq IN ?", (list(seqs),))
        if condition is not None:
            wanted = wanted + Sql(" AND ") + condition
        return self._reading(lambda: self._index.read_blocks(columns, wanted, self._index.blocks_of(seqs)))

    def _whole(self, seq: int) -> GroupRow:
        rows = self._read(", ".join(f'"{name}"' for name in COLUMN_NAMES), [seq])
        if not rows:
            raise RunError(f"the block of seq {seq} in {self.folder} was deleted meanwhile")
        return from_columns([dict(zip(COLUMN_NAMES, row, strict=True)) for row in rows])

    def _with_previews(self, rows: Sequence[Sequence[Any]]) -> list[RolloutSummary]:
        """`rows`: ROLLOUT_NAMES."""
        names = _ROLLOUT_NAMES
        seq = names.index("seq")
        columns = f"seq, rollout_index, {_PREVIEW}, {_SAID}"
        texts = {
            (s, i): (prompt, answer) for s, i, prompt, answer in self._read(columns, sorted({row[seq] for row in rows}))
        }
        found = []
        for row in rows:
            values = dict(zip(names, row, strict=True))
            prompt, answer = texts.get((values["seq"], values["rollout_index"]), ("", ""))
            values["rewards"] = values["rewards"] or {}
            values["tool_names"] = values["tool_names"] or []
            found.append(RolloutSummary(**values, prompt_preview=prompt or "", completion_preview=answer or ""))
        return found

    def _groups(self, rows: Sequence[Sequence[Any]]) -> list[GroupSummary]:
        """`rows`: (num_matching, *GROUP_NAMES)."""
        names = _GROUP_NAMES
        seq = names.index("seq") + 1
        columns = f"seq, rollout_index, {_PREVIEW}"
        first = Sql("coalesce(rollout_index, 0) = 0")
        seqs = sorted({row[seq] for row in rows})
        texts = {s: prompt for s, _, prompt in self._read(columns, seqs, first)}
        tools = dict(self._index.fetch(Sql(_TOOLS, (seqs,)))) if seqs else {}
        return [
            GroupSummary(
                num_matching=row[0],
                **dict(zip(names, row[1:], strict=True)),
                tool_names=tools.get(row[seq]) or [],
                prompt_preview=texts.get(row[seq]) or "",
            )
            for row in rows
        ]

    def _group_summaries(self, seqs: Sequence[int]) -> list[GroupSummary]:
        where = Sql("seq IN ?", (list(seqs),))
        return self._groups(self._index.fetch(_group_page(where, "seq", 0, len(seqs))))

    def _changes(self, where: Sql, k: int, sign: str, order: str) -> list[PromptChange]:
        """Of prompts that were scored in two groups or more; `sign` and `order` of the change."""
        select = Sql(
            "SELECT prompt_hash, count(*), arg_max(reward_mean, seq) - arg_min(reward_mean, seq) AS change, min(seq), "
            "max(seq) FROM groups WHERE reward_mean IS NOT NULL AND seq IN (SELECT seq FROM rollouts WHERE "
        )
        having = f") GROUP BY prompt_hash HAVING count(*) > 1 AND change {sign} ORDER BY change {order}, prompt_hash"
        rows = self._index.fetch(select + where + having + Sql(" LIMIT ?", (k,)))
        groups = (
            {g.seq: g for g in self._group_summaries(sorted({seq for row in rows for seq in row[3:5]}))} if rows else {}
        )
        return [
            PromptChange(prompt_hash=hashed, num_groups=number, change=change, first=groups[first], last=groups[last])
            for hashed, number, change, first, last in rows
            if first in groups and last in groups
        ]

    def _newest(self, table: str, column: str, value: object, with_superseded: bool) -> int | None:
        """The seq of what has this id; None: there is none that counts."""
        condition = "" if with_superseded else " AND NOT superseded"
        select = f"SELECT seq FROM {table} WHERE {column} = ?{condition} ORDER BY superseded, seq DESC LIMIT 1"
        found = self._index.fetch(Sql(select, (value,)))
        return int(found[0][0]) if found else None

    def _no_group(self, group_id: int) -> str:
        """Why there is no group of that id, and which there are."""
        index = self._index
        if index.fetch(Sql("SELECT 1 FROM groups WHERE group_id = ?", (group_id,))):
            return f"group {group_id} {_SUPERSEDED}"
        ((low, high),) = index.fetch(Sql("SELECT min(group_id), max(group_id) FROM groups"))
        there = "it holds none" if low is None else f"it holds groups {low} to {high}, perhaps not all of them"
        return f"there is no group {group_id} in {index.folder}; {there}"

    def _no_rollout(self, rollout_id: str) -> str:
        """Why there is no rollout of that id, and which are near."""
        index = self._index
        if index.fetch(Sql("SELECT 1 FROM rows WHERE rollout_id = ?", (rollout_id,))):
            return f"rollout {rollout_id} {_SUPERSEDED}"
        near = index.fetch(
            Sql(
                "SELECT rollout_id FROM rows WHERE rollout_id IS NOT NULL "
                "GROUP BY rollout_id ORDER BY levenshtein(rollout_id, ?), rollout_id LIMIT ?",
                (rollout_id, _NUM_NEAR),
            )
        )
        there = f"did you mean {' or '.join(name for (name,) in near)}?" if near else "it holds none"
        return f"there is no rollout {rollout_id} in {index.folder}; {there}"


# ------------------------------------------------------------------------------- SELECTs over the view `rollouts`


_TOOLS = """SELECT seq, list_sort(list_distinct(flatten(list(tool_names)))) FROM rows WHERE seq IN ? AND tool_names IS NOT NULL
GROUP BY seq"""


def _page(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    select = Sql(f"SELECT {', '.join(_ROLLOUT_NAMES)} FROM rollouts WHERE rollout_index IS NOT NULL AND ") + where
    order = "".join(f"{value} {direction} NULLS LAST, " for value, direction in _order(sort, of_groups=False))
    return select + f" ORDER BY {order}seq DESC, rollout_index" + _window(offset, limit)


def _group_page(where: Sql, sort: str, offset: int, limit: int) -> Sql:
    keys = group_order(sort)
    names = ", ".join(f"g.{name}" for name in _GROUP_NAMES)
    values = "".join(
        f", any_value({value}) AS key_{index}" for index, (value, _) in enumerate(keys) if value != "matching"
    )
    found = Sql(f"SELECT seq, count(rollout_index) AS matching{values} FROM rollouts WHERE ") + where + " GROUP BY seq"
    order = ", ".join(
        f"m.{'matching' if value == 'matching' else f'key_{index}'} {direction} NULLS LAST"
        for index, (value, direction) in enumerate(keys)
    )
    select = (
        Sql("WITH found AS (") + found + f") SELECT m.matching, {names} FROM groups AS g JOIN found AS m USING (seq)"
    )
    return select + f" ORDER BY {order}, g.seq DESC" + _window(offset, limit)


def _window(offset: int, limit: int) -> Sql:
    return Sql(" LIMIT ? OFFSET ?", (max(limit, 0), max(offset, 0)))


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


_DUMPED_SQL = ", ".join(f'"{name}"' for name in (*COLUMN_NAMES, "superseded"))


def _as_json(name: str, type_: str) -> str:
    """The column as JSON has it: JSON as what it stands for, single precision with the digits that it needs."""
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
