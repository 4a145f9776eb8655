"""Reads a rollout store by queries, page by page, also while a run writes it.

    with RolloutTable.open(run.rollouts) as table:
        query = parse_query("reward<0.2 and truncated")
        table.count(query)
        table.page(query, sort="-length", offset=0, limit=50)
        ...
        if table.refresh():     # what the run wrote since
            ...

Filters, sorts and counts run in memory (`index`); texts and tokens are read from the blocks for what is shown or searched. All
methods may be called from several threads. Superseded groups, which a run wrote after the checkpoint that it later went on from,
are left out: they were not trained in the run as it now is. `with_superseded` counts and exports them too.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from grpo_async.errors import RunError
from grpo_async.records import root_id
from grpo_async.store.database import quote
from grpo_async.store.index import Index
from grpo_async.store.query import EVERYTHING, Query, QueryError, find_value, parse_query
from grpo_async.store.query_names import LIST, NUMBER, ROW_KEY
from grpo_async.store.rows import GroupRow, RolloutRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, PARQUET_OPTIONS
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
_ROLLOUT_SUMMARY = tuple(each.name for each in dataclasses.fields(RolloutSummary) if not each.name.endswith("_preview"))
_GROUP_SUMMARY = tuple(sql_of(GroupSummary))
_STEP_SQL = sql_of(StepSummary)
_PREVIEW = (
    f"left(json_extract_string(coalesce(reset_messages, prompt_messages), '$[#-1].content'), {PREVIEW_CHARACTERS})"
)
# as viewer.format.call_text has it; here because only the beginning of it is read
_ARGUMENTS = "coalesce(call->>'$.function.arguments', '{}')"
_CALL = f"coalesce(nullif(call->>'$.function.name', '') || '(' || {_ARGUMENTS} || ')', call::VARCHAR)"
_SAID = f"""left(array_to_string(list_transform(
  list_filter(json_extract(messages, '$[*]'), lambda each: each->>'$.origin' = 'policy'),
  lambda each: concat_ws(' ', nullif(each->>'$.content', ''), nullif(array_to_string(
    list_transform(json_extract(each, '$.tool_calls[*]'), lambda call: {_CALL}), ' '), ''))), chr(10)), {PREVIEW_CHARACTERS})"""
"""The beginning of what the policy wrote in a rollout, its tool calls too; not what tools and environments answered."""


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
    def newest_seq(self) -> int:
        """The highest seq of all groups, superseded or not; -1: there is none."""
        ((seq,),) = self._index.fetch("SELECT coalesce(max(seq), -1) FROM groups")
        return int(seq)

    @property
    def damage(self) -> list[str]:
        """Blocks and lines that cannot be read, so that their rows are missing. One sentence each."""
        return self._index.damage()

    @property
    def notes(self) -> list[str]:
        """What a reader must know, one sentence each: `damage`, torn lines, deleted blocks, sampling, superseded groups,
        an empty store."""
        index = self._index
        found = [*index.damage(), *index.torn(), *index.metadata.notes(index.folder)]
        ((groups, superseded),) = index.fetch("SELECT count(*), count_if(superseded) FROM groups")
        if superseded:
            found.append(
                f"{superseded} of {groups} groups were written after a checkpoint that the run later went on from: they are "
                "superseded, and left out"
            )
        if not groups and not found:
            state = "holds no rollouts yet" if index.folder.is_dir() else "is not there (yet)"
            found.append(f"{index.folder} {state}")
        return found

    def refresh(self) -> bool:
        """Read what was written since; whether anything changed."""
        return self._index.refresh()

    # --------------------------------------------------------------------------------------------- pages

    def count(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Counts:
        """The number of rollouts that match the query, and of their groups."""
        where = self._where(query, with_superseded)
        select = f"SELECT count(rollout_index), count(DISTINCT seq) FROM rollouts WHERE {where}"
        ((rollouts, groups),) = self._index.fetch(select, query)
        return Counts(rollouts=rollouts, groups=groups)

    def page(
        self,
        query: Query = EVERYTHING,
        *,
        sort: str = "-seq",
        offset: int = 0,
        limit: int = 50,
    ) -> list[RolloutSummary]:
        """Rollouts that match the query.

        Args:
            sort: names of columns with commas between, "-" before one for the highest first. Missing values come last either way,
                equal ones newest first.

        Raises:
            QueryError: no such column, or one that cannot be sorted by.
        """
        where = self._where(query)
        return self._with_previews(self._index.fetch(_page(where, sort, offset, limit), query))

    def group_page(
        self,
        query: Query = EVERYTHING,
        *,
        sort: str = "-seq",
        offset: int = 0,
        limit: int = 50,
    ) -> list[GroupSummary]:
        """Groups with at least one rollout that matches the query; also those without any rollout (they failed before one ended).

        Args:
            sort: as `page`, of the group's columns, with or without "group_": seq, step, reward, std, length, truncated, ...; and
                `matching`.

        Raises:
            QueryError: no such column, or one of rollouts only.
        """
        where = self._where(query)
        return self._groups(self._index.fetch(_group_page(where, sort, offset, limit), query))

    # ------------------------------------------------------------------------------------------- groups and rollouts

    def group(self, group_id: int) -> GroupRow:
        """One group with all its tokens. RunError: there is none."""
        seq = self._newest("groups", f"group_id = {int(group_id)}")
        if seq is None:
            raise RunError(f"there is no group {group_id} in {self.folder}{self._hint()}")
        return self.group_at(seq)

    def group_at(self, seq: int) -> GroupRow:
        """As `group`, by its seq: for one of two with the same id. RunError: there is none."""
        rows = self._read(", ".join(f'"{name}"' for name in COLUMN_NAMES), [seq])
        if not rows:
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return from_columns([dict(zip(COLUMN_NAMES, row, strict=True)) for row in rows])

    def group_summary_at(self, seq: int) -> GroupSummary:
        """One group, by its seq; all its rollouts count as matching. RunError: there is none."""
        found = self._group_summaries([seq])
        if not found:
            raise RunError(f"{self.folder} has no group with seq {seq}")
        return found[0]

    def rollout_summaries_at(self, seq: int) -> list[RolloutSummary]:
        """The rollouts of one group, by its seq, in their order."""
        return self._with_previews(self._index.fetch(_page(f"seq = {int(seq)}", "index", 0, 1 << 16)))

    def rollout(self, rollout_id: str) -> tuple[GroupRow, RolloutRow]:
        """One rollout, or one of its branches, with all its tokens, and its group. RunError: there is none."""
        seq = self._newest("rows", f"rollout_id = {quote(root_id(rollout_id))}")
        group = None if seq is None else self.group_at(seq)
        found = None if group is None else group.path(rollout_id)
        if group is None or found is None:
            raise RunError(f"there is no rollout {rollout_id} in {self.folder}{self._hint()}")
        return group, found

    # --------------------------------------------------------------------------------------------- statistics

    def histogram(self, field: str, query: Query = EVERYTHING, *, bins: int = 30) -> Histogram:
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
        where = self._where(query)
        known = f"""WITH known AS (
            SELECT if(isfinite(value), value, NULL) AS value FROM (
                SELECT try_cast({value.sql} AS DOUBLE) AS value FROM rollouts WHERE rollout_index IS NOT NULL AND {where}))
            """
        figures = "SELECT count(value), min(value), max(value), bool_and(value = floor(value)), count(*) - count(value) FROM known"
        ((number, low, high, whole, missing),) = self._index.fetch(known + figures, query)
        if not number:
            return Histogram(field=field, edges=[], counts=[], num_null=missing)
        if whole and high - low < bins:
            low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
        elif low == high:
            low, high, bins = low - 0.5, high + 0.5, 1
        width = (high - low) / bins
        bin_of = f"least(greatest(floor((value - {low!r}::DOUBLE) / {width!r}::DOUBLE)::BIGINT, 0), {bins - 1})"
        counted = f"SELECT {bin_of} AS bin, count(*) FROM known WHERE value IS NOT NULL GROUP BY bin"
        counts = [0] * bins
        for index, count in self._index.fetch(known + counted, query):
            counts[index] = count
        edges = [low + width * k for k in range(bins)] + [high]
        return Histogram(field=field, edges=edges, counts=counts, num_null=missing)

    def facets(self, field: str, query: Query = EVERYTHING, *, limit: int = 20) -> list[tuple[str, int]]:
        """The most frequent values of a column (status, group_status, tools, error, ...) with the number of
        rollouts that have them; those without a value are not counted.

        Raises:
            QueryError: no such column, or one of texts.
        """
        value = find_value(field)
        if value.in_blocks:
            raise QueryError(field, 0, len(field), f"the values of {field} cannot be counted")
        each = f"unnest(list_distinct({value.sql}))" if value.kind == LIST else value.sql
        values = f"SELECT {each} AS value FROM rollouts WHERE rollout_index IS NOT NULL AND {self._where(query)}"
        counted = f"SELECT value, count(*) FROM ({values}) WHERE value IS NOT NULL GROUP BY value"
        found = self._index.fetch(f"{counted} ORDER BY 2 DESC, 1 LIMIT {int(limit)}", query)
        return [
            (str(int(value)) if isinstance(value, float) and value.is_integer() else str(value), count)
            for value, count in found
        ]

    def by_step(self, query: Query = EVERYTHING) -> list[StepSummary]:
        """A summary of each step, ascending; that of the rollouts that no step saw comes last. Steps without a matching rollout or
        group are left out, and so is the one that is not done yet."""
        where = self._where(query)
        rewards: dict[int | None, dict[str, float]] = defaultdict(dict)
        parts = f"SELECT step, unnest(map_entries(rewards)) AS part FROM rollouts WHERE {where}"
        means = f"SELECT step, part.key, avg(part.value) FROM ({parts}) WHERE part.value IS NOT NULL GROUP BY ALL"
        for step, name, mean in self._index.fetch(means, query):
            rewards[step][name] = mean
        statuses: dict[int | None, dict[str, int]] = defaultdict(dict)
        counts = f"SELECT step, group_status, count(DISTINCT seq) FROM rollouts WHERE {where} GROUP BY ALL ORDER BY ALL"
        for step, status, groups in self._index.fetch(counts, query):
            statuses[step][status] = groups
        # what was filtered or dropped for a step that is not done would give a wrong mean
        is_done = " AND (step IS NULL OR step <= last_step())"
        select = f"SELECT {', '.join(_STEP_SQL.values())} FROM rollouts WHERE {where}{is_done}"
        rows = self._index.fetch(f"{select} GROUP BY step ORDER BY step NULLS LAST", query)
        return [
            StepSummary(
                **dict(zip(_STEP_SQL, row, strict=True)),
                rewards=dict(sorted(rewards[row[0]].items())),
                group_statuses=statuses[row[0]],
            )
            for row in rows
        ]

    def same_prompt(self, prompt_hash: str) -> list[GroupSummary]:
        """All groups of one prompt, in the order of writing; none where the run never saw it."""
        query = parse_query(f"prompt_hash = {quote(prompt_hash)}")
        return self.group_page(query, sort="seq", limit=1 << 31)

    def extremes(self, query: Query = EVERYTHING, k: int = 10) -> Extremes:
        """The best and worst rollouts by reward, and the prompts whose mean reward changed most between their first group and their
        last. At most `k` of each."""
        where = self._where(query)
        scored = f"reward IS NOT NULL AND {where}"
        return Extremes(
            best=self._with_previews(self._index.fetch(_page(scored, "-reward,-advantage", 0, k), query)),
            worst=self._with_previews(self._index.fetch(_page(scored, "reward,advantage", 0, k), query)),
            improved=self._changes(where, k, "> 0", "DESC"),
            worsened=self._changes(where, k, "< 0", "ASC"),
        )

    def reward_names(self) -> list[str]:
        """The parts of the reward that occur, for rewards['NAME']."""
        return [name for (name,) in self._index.fetch("SELECT DISTINCT unnest(map_keys(rewards)) FROM rows ORDER BY 1")]

    def column_names(self) -> list[str]:
        """Names of the dataset's further columns, for columns['NAME']: those of the newest groups."""
        seqs = [seq for (seq,) in self._index.fetch("SELECT seq FROM groups ORDER BY seq DESC LIMIT 8")]
        return sorted({name for (columns,) in self._read("columns", seqs) for name in json.loads(columns)})

    # ---------------------------------------------------------------------------------------------- export

    def dump_json(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Iterator[str]:
        """Every column of every matching rollout and `superseded` as the text of a JSON object, in the order of writing, a block in
        memory at a time. A group without rollouts is one row, without an id of a rollout."""
        for select in self._dumps(query, _DUMPED_JSON_SQL, with_superseded):
            for (text,) in self._index.stream(f"{select} ORDER BY seq, rollout_index", query):
                yield text

    def write_parquet(self, path: Path, query: Query = EVERYTHING, *, with_superseded: bool = False) -> None:
        """As `dump_json`, into a Parquet file (zstd). Its folder was named as `writable`. Nothing is sorted, because that
        would hold everything in memory: DuckDB keeps the order of the blocks and, within one, of the rows."""
        none = f"SELECT {_DUMPED_SQL} FROM (SELECT *, false AS superseded FROM unsealed) LIMIT 0"
        rows = " UNION ALL ".join(self._dumps(query, _DUMPED_SQL, with_superseded)) or none
        self._index.fetch(f"COPY ({rows}) TO {quote(str(path.absolute()))} ({PARQUET_OPTIONS})", query)

    # ------------------------------------------------------------------------------------------------ below

    def _dumps(self, query: Query, columns: str, with_superseded: bool) -> list[str]:
        """One SELECT for each block, in the order of writing."""
        keys = f"SELECT row_key FROM rollouts WHERE {self._where(query, with_superseded)}"
        superseded = self._index.metadata.superseded_condition()
        return [
            f"SELECT {columns} FROM (SELECT *, {superseded} AS superseded FROM {part}) WHERE {ROW_KEY} IN ({keys})"
            for part in self._index.parts()
        ]

    def _where(self, query: Query, with_superseded: bool = False) -> str:
        condition = self._reading(lambda: self._index.condition(query))
        return condition if with_superseded else f"NOT superseded AND {condition}"

    def _reading(self, ask: Callable[[], _Answer]) -> _Answer:
        """`ask` reads blocks. One that was sealed or deleted meanwhile is found by looking again, once."""
        try:
            return ask()
        except RunError:
            if not self._index.refresh():
                raise
            return ask()

    def _read(self, columns: str, seqs: Sequence[int], condition: str = "true") -> list[tuple[Any, ...]]:
        """Columns of the blocks for some groups, in the order of writing."""
        if not seqs:
            return []
        where = f"seq IN {_listed(seqs)} AND {condition}"

        def ask() -> list[tuple[Any, ...]]:
            relation = self._index.relation(seqs)
            return self._index.fetch(f"SELECT {columns} FROM {relation} WHERE {where} ORDER BY seq, rollout_index")

        return self._reading(ask)

    def _with_previews(self, rows: Sequence[Sequence[Any]]) -> list[RolloutSummary]:
        """Summaries of `rows`, which have the columns _ROLLOUT_SUMMARY."""
        names = _ROLLOUT_SUMMARY
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
        """Summaries of `rows`, which have the columns num_matching and _GROUP_SUMMARY."""
        names = _GROUP_SUMMARY
        seq = names.index("seq") + 1
        columns = f"seq, rollout_index, {_PREVIEW}"
        seqs = sorted({row[seq] for row in rows})
        texts = {s: prompt for s, _, prompt in self._read(columns, seqs, "coalesce(rollout_index, 0) = 0")}
        tools = dict(self._index.fetch(_TOOLS.format(_listed(seqs)))) if seqs else {}
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
        return self._groups(self._index.fetch(_group_page(f"seq IN {_listed(seqs)}", "seq", 0, len(seqs))))

    def _changes(self, where: str, k: int, sign: str, order: str) -> list[PromptChange]:
        """Changes of prompts that were scored in two groups or more; `sign` and `order` of the change."""
        rows = self._index.fetch(
            "SELECT prompt_hash, count(*), arg_max(reward_mean, seq) - arg_min(reward_mean, seq) AS change, min(seq), max(seq) "
            f"FROM groups WHERE reward_mean IS NOT NULL AND seq IN (SELECT seq FROM rollouts WHERE {where}) "
            f"GROUP BY prompt_hash HAVING count(*) > 1 AND change {sign} ORDER BY change {order}, prompt_hash LIMIT {int(k)}"
        )
        seqs = sorted({seq for row in rows for seq in row[3:5]})
        groups = {group.seq: group for group in self._group_summaries(seqs)} if seqs else {}
        return [
            PromptChange(prompt_hash=hashed, num_groups=number, change=change, first=groups[first], last=groups[last])
            for hashed, number, change, first, last in rows
            if first in groups and last in groups
        ]

    def _newest(self, table: str, condition: str) -> int | None:
        """The newest seq of a table that meets the condition and is not superseded; None: there is none."""
        ((seq,),) = self._index.fetch(f"SELECT max(seq) FROM {table} WHERE {condition} AND NOT superseded")
        return None if seq is None else int(seq)

    def _hint(self) -> str:
        if not self._index.metadata.superseded:
            return ""
        return "; a resume may have left it behind: export --superseded has what is superseded"


# ------------------------------------------------------------------------------- SELECTs over the view `rollouts`


_TOOLS = """SELECT seq, list_sort(list_distinct(flatten(list(tool_names)))) FROM rows
WHERE seq IN {} AND tool_names IS NOT NULL GROUP BY seq"""


def _listed(seqs: Sequence[int]) -> str:
    return f"({', '.join(str(int(seq)) for seq in seqs)})"


def _page(where: str, sort: str, offset: int, limit: int) -> str:
    order = "".join(f"{value} {direction} NULLS LAST, " for value, direction in _order(sort, of_groups=False))
    select = f"SELECT {', '.join(_ROLLOUT_SUMMARY)} FROM rollouts WHERE rollout_index IS NOT NULL AND {where}"
    return f"{select} ORDER BY {order}seq DESC, rollout_index {_window(offset, limit)}"


def _group_page(where: str, sort: str, offset: int, limit: int) -> str:
    keys = [(value, f"key_{index}", direction) for index, (value, direction) in enumerate(group_order(sort))]
    values = "".join(
        f", {'count(rollout_index)' if value == 'matching' else f'any_value({value})'} AS {key}"
        for value, key, _ in keys
    )
    order = "".join(f"m.{key} {direction} NULLS LAST, " for _, key, direction in keys)
    names = ", ".join(f"g.{name}" for name in _GROUP_SUMMARY)
    found = f"SELECT seq, count(rollout_index) AS matching{values} FROM rollouts WHERE {where} GROUP BY seq"
    select = f"WITH found AS ({found}) SELECT m.matching, {names} FROM groups AS g JOIN found AS m USING (seq)"
    return f"{select} ORDER BY {order}g.seq DESC {_window(offset, limit)}"


def _window(offset: int, limit: int) -> str:
    return f"LIMIT {max(int(limit), 0)} OFFSET {max(int(offset), 0)}"


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
    """The column as a JSON value: JSON text is not quoted again, and single precision has only the digits that it needs."""
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
