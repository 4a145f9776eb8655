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
from; such groups were not trained in the run as it now is. Of a group or rollout that is stored twice (it was made anew after a
resume) the one that counts is given, and without one that counts the newest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from grpo_async.errors import RunError
from grpo_async.store import dumps, missing, table_sql
from grpo_async.store.histograms import histogram_of, most_frequent
from grpo_async.store.index import Index
from grpo_async.store.query import EVERYTHING, Query, parse_query, quote
from grpo_async.store.query_sql import Sql, compile_expression
from grpo_async.store.rows import GroupRow, RolloutRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES
from grpo_async.store.summaries import (
    Counts,
    Extremes,
    GroupSummary,
    Histogram,
    PromptChange,
    RolloutSummary,
    StepSummary,
)

_Answer = TypeVar("_Answer")


class RolloutTable:
    """A store, opened for reading. Use as a context, or call `close`."""

    def __init__(self, index: Index) -> None:
        self._index = index

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        threads: int | None = None,
        memory_bytes: int | None = None,
        writable: Sequence[Path] = (),
    ) -> Self:
        """Read what the folder `rollouts` (or that of an evaluation) holds now. One that is empty, or not there yet, has no rows:
        `notes` says so.

        Args:
            threads: of the queries; None: one per core. memory_bytes: most that they take; None: half of the machine's.
            writable: folders that `write_parquet` may write to.

        Raises:
            RunError: the store is of another version, or cannot be read at all. A damaged block only costs its own rows; `notes`
                and `damage` name it.
        """
        index = Index(folder, threads=threads, memory_bytes=memory_bytes, writable=writable)
        try:
            index.refresh()
        except BaseException:
            index.close()
            raise
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
        return missing.notes(self._index)

    def refresh(self) -> bool:
        """Take up what was written since; whether anything changed."""
        return self._index.refresh()

    # --------------------------------------------------------------------------------------------- pages

    def count(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Counts:
        """Rollouts that the query holds for, and in how many groups they are."""
        where = self._where(query, with_superseded)
        ((rollouts, groups),) = self._index.fetch(table_sql.count_sql(where))
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
            sort: fields of the query language with commas between, "-" before one for the highest first. Missing values come last
                either way, equal ones newest first.

        Raises:
            QueryError: no such field, or one that cannot be sorted by.
        """
        where = self._where(query, with_superseded)
        return self._with_previews(self._index.fetch(table_sql.page_sql(where, sort, offset, limit)))

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
            sort: as `page`, of the group's fields, with or without "group.": seq, step, reward, std, length, truncated, ...; and
                `matching`.

        Raises:
            QueryError: no such field, or one of rollouts only.
        """
        where = self._where(query, with_superseded)
        return self._groups(self._index.fetch(table_sql.group_page_sql(where, sort, offset, limit)))

    # ------------------------------------------------------------------------------------------- single ones

    def group(self, group_id: int, *, with_superseded: bool = False) -> GroupRow:
        """One group with all its tokens.

        Raises:
            RunError: there is none; the message names ids that there are.
        """
        return self._whole(self._seq_of_group(group_id, with_superseded))

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
        sql = table_sql.page_sql(Sql("r.seq = ?", (seq,)), "index", 0, 1 << 16)
        return self._with_previews(self._index.fetch(sql))

    def rollout(self, rollout_id: str, *, with_superseded: bool = False) -> tuple[GroupRow, RolloutRow]:
        """One rollout with all its tokens, and its group.

        Raises:
            RunError: there is none; the message names ids that are near.
        """
        seqs = self._index.fetch(
            Sql(
                "SELECT seq FROM rows WHERE rollout_id = ?"
                + ("" if with_superseded else " AND NOT superseded")
                + " ORDER BY superseded, seq DESC LIMIT 1",
                (rollout_id,),
            )
        )
        if not seqs:
            raise RunError(missing.no_rollout(self._index, rollout_id))
        group = self._whole(seqs[0][0])
        return group, next(each for each in group.rollouts if each.rollout_id == rollout_id)

    # --------------------------------------------------------------------------------------------- figures

    def histogram(
        self, field: str, query: Query = EVERYTHING, *, bins: int = 30, with_superseded: bool = False
    ) -> Histogram:
        """How a number of the query language is distributed: reward, staleness, length, reward.NAME, group.reward, ... Whole
        numbers in a range of at most `bins` get a bin each.

        Raises:
            QueryError: no such field, or one without numbers.
        """
        value = table_sql.numeric_field(field)
        return histogram_of(self._index.fetch, field, value, self._where(query, with_superseded), bins)

    def facets(
        self, field: str, query: Query = EVERYTHING, *, limit: int = 20, with_superseded: bool = False
    ) -> list[tuple[str, int]]:
        """The most frequent values of a field (status, group.status, tool, error, columns.NAME, ...) with the number of rollouts
        that have them; those without a value are not counted.

        Raises:
            QueryError: no such field.
        """
        where = self._where(query, with_superseded)
        return self._reading(lambda: most_frequent(self._index, field, where, limit))

    def by_step(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> list[StepSummary]:
        """Ascending by step; those that no step saw last. Steps without a matching rollout or group are left out, and without
        `with_superseded` also the one that is not done yet."""
        where = self._where(query, with_superseded)
        rewards: dict[int | None, dict[str, float]] = defaultdict(dict)
        for step, name, mean in self._index.fetch(table_sql.step_rewards_sql(where)):
            rewards[step][name] = mean
        statuses: dict[int | None, dict[str, int]] = defaultdict(dict)
        for step, status, groups in self._index.fetch(table_sql.step_statuses_sql(where)):
            statuses[step][status] = groups
        return [
            table_sql.step_summary(row, dict(sorted(rewards[row[0]].items())), statuses[row[0]])
            for row in self._index.fetch(table_sql.step_sql(where, with_unfinished=with_superseded))
        ]

    def same_prompt(self, prompt_hash: str, *, with_superseded: bool = False) -> list[GroupSummary]:
        """All groups of one prompt, in the order of writing; none where the run never saw it."""
        query = parse_query(f"prompt_hash={quote(prompt_hash)}")
        return self.group_page(query, sort="seq", limit=1 << 31, with_superseded=with_superseded)

    def extremes(self, query: Query = EVERYTHING, k: int = 10) -> Extremes:
        """The best and worst rollouts by reward, and the prompts whose mean reward changed most between their first group and their
        last. At most `k` of each."""
        where = self._where(query, False)
        scored = Sql("r.reward IS NOT NULL AND ") + where
        return Extremes(
            best=self._with_previews(self._index.fetch(table_sql.page_sql(scored, "-reward,-advantage", 0, k))),
            worst=self._with_previews(self._index.fetch(table_sql.page_sql(scored, "reward,advantage", 0, k))),
            improved=self._changes(table_sql.improvement_sql(where, k, worsened=False)),
            worsened=self._changes(table_sql.improvement_sql(where, k, worsened=True)),
        )

    def reward_names(self) -> list[str]:
        """The parts of the reward that occur, for `reward.NAME`."""
        return [
            name for (name,) in self._index.fetch(Sql("SELECT DISTINCT unnest(map_keys(rewards)) FROM rows ORDER BY 1"))
        ]

    def column_names(self) -> list[str]:
        """Names of the data set's further columns, for `columns.NAME`: those of the newest groups."""
        seqs = [seq for (seq,) in self._index.fetch(Sql("SELECT seq FROM groups ORDER BY seq DESC LIMIT 8"))]
        keys = self._read("DISTINCT ON (seq) seq, rollout_index, json_keys(columns)", seqs)
        return sorted({name for _, _, names in keys for name in names or ()})

    # ---------------------------------------------------------------------------------------------- export

    def dump(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Iterator[Mapping[str, Any]]:
        """Every column of every matching rollout and `superseded`, in the order of writing, a block in memory at a time. A group
        without rollouts is one row, without an id of a rollout."""
        for row in dumps.rows(self._index, dumps.COLUMNS_SQL, self._where(query, with_superseded)):
            yield dict(zip(dumps.NAMES, row, strict=True))

    def dump_json(self, query: Query = EVERYTHING, *, with_superseded: bool = False) -> Iterator[str]:
        """As `dump`, each row as the text of a JSON object."""
        for (text,) in dumps.rows(self._index, dumps.JSON_SQL, self._where(query, with_superseded)):
            yield text

    def write_parquet(self, path: Path, query: Query = EVERYTHING, *, with_superseded: bool = False) -> None:
        """As `dump`, into a Parquet file (zstd). Its folder was named as `writable`."""
        dumps.write_parquet(self._index, path, self._where(query, with_superseded))

    # ------------------------------------------------------------------------------------------------ below

    def _where(self, query: Query, with_superseded: bool) -> Sql:
        missing.check_rewards(query, self.reward_names)
        condition = self._reading(lambda: compile_expression(query.expression, self._index.lookup))
        return condition if with_superseded else Sql("NOT r.superseded AND ") + condition

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
        columns = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
        rows = self._read(columns, [seq])
        if not rows:
            raise RunError(f"the block of seq {seq} in {self.folder} was deleted meanwhile")
        return from_columns([dict(zip(COLUMN_NAMES, row, strict=True)) for row in rows])

    def _with_previews(self, rows: Sequence[Sequence[Any]]) -> list[RolloutSummary]:
        """`rows`: (row_key, *ROLLOUT_NAMES)."""
        names = table_sql.ROLLOUT_NAMES
        seq = names.index("seq") + 1
        columns = f"seq, rollout_index, {table_sql.PROMPT_PREVIEW}, {table_sql.COMPLETION_PREVIEW}"
        texts = {
            (s, i): (prompt, answer) for s, i, prompt, answer in self._read(columns, sorted({row[seq] for row in rows}))
        }
        found = []
        for row in rows:
            values = dict(zip(names, row[1:], strict=True))
            prompt, answer = texts.get((values["seq"], values["rollout_index"]), ("", ""))
            values["rewards"] = values["rewards"] or {}
            values["tool_names"] = values["tool_names"] or []
            found.append(RolloutSummary(**values, prompt_preview=prompt or "", completion_preview=answer or ""))
        return found

    def _groups(self, rows: Sequence[Sequence[Any]]) -> list[GroupSummary]:
        """`rows`: (num_matching, *GROUP_NAMES)."""
        names = table_sql.GROUP_NAMES
        seq = names.index("seq") + 1
        columns = f"seq, rollout_index, {table_sql.GROUP_PROMPT_PREVIEW}"
        first = Sql("coalesce(rollout_index, 0) = 0")
        seqs = sorted({row[seq] for row in rows})
        texts = {s: prompt for s, _, prompt in self._read(columns, seqs, first)}
        tools = dict(self._index.fetch(Sql(table_sql.TOOLS, (seqs,)))) if seqs else {}
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
        where = Sql("r.seq IN ?", (list(seqs),))
        return self._groups(self._index.fetch(table_sql.group_page_sql(where, "seq", 0, len(seqs))))

    def _changes(self, sql: Sql) -> list[PromptChange]:
        rows = self._index.fetch(sql)
        groups = (
            {g.seq: g for g in self._group_summaries(sorted({seq for row in rows for seq in row[3:5]}))} if rows else {}
        )
        return [
            PromptChange(prompt_hash=hashed, num_groups=number, change=change, first=groups[first], last=groups[last])
            for hashed, number, change, first, last in rows
            if first in groups and last in groups
        ]

    def _seq_of_group(self, group_id: int, with_superseded: bool) -> int:
        condition = "" if with_superseded else " AND NOT superseded"
        found = self._index.fetch(
            Sql(
                f"SELECT seq FROM groups WHERE group_id = ?{condition} ORDER BY superseded, seq DESC LIMIT 1",
                (group_id,),
            )
        )
        if found:
            return int(found[0][0])
        raise RunError(missing.no_group(self._index, group_id))
