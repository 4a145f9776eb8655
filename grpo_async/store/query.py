"""Queries of `inspect-rollouts`, its web page and `export`: an SQL condition over the view `rollouts`, checked before it is run.

    text --DuckDB parses and binds it over empty tables--> Query(text, sql)

A query is one expression: statements, subqueries and parameters are rejected, so it names columns and functions and nothing else.
It runs in a database that reaches no files but those of the store (`index`), within limits of memory and time (`time_limit`).
"""

from __future__ import annotations

import functools
import json
import re
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from grpo_async.errors import ConfigError
from grpo_async.store.database import connect, interrupting
from grpo_async.store.query_names import (
    BLOCK_NAMES,
    BLOCK_SQL,
    BY_NAME,
    GROUP_NAMES,
    INDEXED,
    MAP,
    NUMBER,
    ROW_KEY,
    TEXT,
    create_tables,
)
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import clipped, first_line, nearest

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAX_CHARACTERS = 4000
_MAX_BRACKETS = 100
"""DuckDB's parser takes minutes for thousands of open ones."""
_SELECT = "SELECT 1 FROM everything WHERE "
_NUM_SUGGESTIONS = 2
_CLASSES = frozenset(
    ("COMPARISON", "CONJUNCTION", "OPERATOR", "CONSTANT", "COLUMN_REF", "FUNCTION", "BETWEEN", "CAST", "CASE", "TYPE")
)
_FUNCTIONS = """
last_step lower upper trim length len left right substring strip_accents contains starts_with ends_with prefix suffix regexp_matches
regexp_full_match concat abs sign round floor ceil ceiling trunc sqrt ln log2 log10 least greatest isnan isfinite isinf coalesce
ifnull nullif if list_value row list_contains list_has list_has_any list_has_all array_extract list_extract element_at map_extract
map_contains map_keys map_values cardinality to_timestamp
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""What a query may call. The cost is bounded by the length of the query: DuckDB works constants out while it checks a query, with
no limit of time."""
_CALLED_OPERATORS = "+ - * / // % ** ^ || ~~ !~~ ~~* !~~* like_escape not_like_escape ilike_escape not_ilike_escape"
_OPERATORS = frozenset(_CALLED_OPERATORS.split())
_TYPES = """
VARCHAR TEXT STRING TINYINT SMALLINT INTEGER INT BIGINT HUGEINT FLOAT REAL DOUBLE DECIMAL NUMERIC BOOLEAN BOOL DATE TIMESTAMP
"""
TYPES = frozenset(_TYPES.split())
"""What a query may cast to."""


class QueryError(ConfigError):
    """The query is wrong. `str(error)` is three lines: the problem, the query, and carets under the mistake.

    Attributes:
        text: the query, on one line.
        position: where the mistake begins, in characters from 0; `length` (>= 1) is its extent.
        problem: one sentence.
        suggestions: names that were perhaps meant, the nearest first.
    """

    def __init__(self, text: str, position: int, length: int, problem: str, suggestions: Sequence[str] = ()) -> None:
        self.text = _one_line(text)
        self.position, self.length = position, max(length, 1)
        self.suggestions = tuple(suggestions)
        self.problem = _one_line(problem) + (
            f"; did you mean {' or '.join(self.suggestions)}?" if self.suggestions else ""
        )
        indent, carets = cell_len(self.text[:position]), cell_len(self.text[position : position + self.length])
        super().__init__(f"{self.problem}\n  {self.text}\n  {' ' * indent}{'^' * max(carets, 1)}")


@dataclass(frozen=True, slots=True)
class Query:
    """A checked condition. `sql` is what DuckDB's parser made of `text` ("" matches everything); `reads_blocks`: it names texts
    or maps."""

    text: str
    sql: str
    reads_blocks: bool = False


EVERYTHING = Query("", "(TRUE)")


def parse_query(text: str) -> Query:
    """Parse a query; one of spaces matches everything.

    Raises:
        QueryError: it is not a condition over the names of `query_names`. The message has the query with carets under the mistake,
            and the nearest names.
    """
    text = text.strip()
    if not text:
        return EVERYTHING
    if len(text) > MAX_CHARACTERS:
        raise QueryError(
            clipped(text), 59, 1, f"the query has {len(text)} characters, at most {MAX_CHARACTERS} are read"
        )
    if half := SURROGATE.search(text):
        raise QueryError(text, half.start(), 1, "the query has half a character (a surrogate)")
    if len(re.findall(r"[(\[{]|->", text)) > _MAX_BRACKETS:
        raise QueryError(text, 0, 1, f"the query has more than {_MAX_BRACKETS} opening brackets")
    with _making:
        cursor = _database().cursor()
    with cursor, interrupting(cursor):
        cursor.execute("SET errors_as_json = true")
        cursor.execute("SET max_expression_depth = 200")
        statement = _parse(cursor, text)
        names = _check_nodes(statement["node"]["where_clause"], text)
        _bind(cursor, text)
        sql = _sql_of(cursor, statement)
    return Query(text, sql, reads_blocks=not names.isdisjoint(each.name for each in BLOCK_NAMES))


def both(first: Query, second: Query) -> Query:
    """The query that matches what both match."""
    if not first.text or not second.text:
        return first if first.text else second
    text, sql = f"({first.text}) and ({second.text})", f"({first.sql} AND {second.sql})"
    return Query(text, sql, reads_blocks=first.reads_blocks or second.reads_blocks)


@dataclass(frozen=True, slots=True)
class Value:
    """One column, or one entry of a map, as SQL over the view `rollouts` or, `in_blocks`, over the columns of the blocks."""

    sql: str
    kind: str
    in_blocks: bool = False


def find_value(name: str, *, of_group: bool = False, text: str | None = None) -> Value:
    """What a histogram or a sort order names: reward, group_std, rewards['format'].

    Args:
        of_group: a value that all rollouts of a group share; "group_" may be left out.
        text: the text in which the name stands, for the error.

    Raises:
        QueryError: there is no such value.
    """
    if not of_group and (entry := re.fullmatch(r"(rewards|columns|extra)\['(?:[^']|'')+'\]", name)):
        is_reward = entry[1] == "rewards"
        return Value(name, NUMBER if is_reward else TEXT, in_blocks=not is_reward)
    for candidate in (f"group_{name}", name) if of_group else (name,):
        known = BY_NAME.get(candidate)
        if known is not None and known.kind != MAP and (not of_group or candidate in GROUP_NAMES):
            return Value(f'"{candidate}"', known.kind, in_blocks=known in BLOCK_NAMES)
        if known is None and candidate in INDEXED and not of_group:  # the store's own name of a column
            return Value(f'"{candidate}"', INDEXED[candidate])
    where = name if text is None else text
    if of_group:
        names = sorted(each.removeprefix("group_") for each in GROUP_NAMES)
        what = f"groups have no {name}; they have {', '.join(names)}"
    else:
        names = [each.name for each in BY_NAME.values() if each.kind != MAP]
        what = f"{name} has a value for each name: {name}['NAME']" if name in BY_NAME else f"there is no column {name}"
    raise QueryError(where, max(where.find(name), 0), len(name), what, nearest(name, names, limit=_NUM_SUGGESTIONS))


# ------------------------------------------------------------------------------------------------------ checking

_making = threading.Lock()


@functools.cache
def _database() -> DuckDBPyConnection:
    """Empty tables with the columns of the real ones; reaches no file."""
    connection = connect(threads="1", memory_limit="128MiB")
    create_tables(connection)
    connection.execute(
        f"CREATE VIEW everything AS SELECT * FROM rollouts JOIN (SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM unsealed) "
        "USING (row_key)"
    )
    connection.execute("SET enable_external_access = false")
    return connection


def _parse(cursor: DuckDBPyConnection, text: str) -> dict[str, Any]:
    """The statement of a condition, from DuckDB's own parser."""
    import duckdb

    def tree(condition: str) -> dict[str, Any]:
        """The tree of the condition in brackets."""
        row = cursor.execute("SELECT json_serialize_sql(?)", [f"{_SELECT}({condition}\n)"]).fetchone()
        assert row is not None
        found: dict[str, Any] = json.loads(row[0])
        if found["error"]:
            first, length = _place(found, len(_SELECT) + 1)
            raise _error_at(text, found["error_message"], first - len(_SELECT) - 1, length)
        return found

    def around(statements: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**each["node"], "where_clause": None} for each in statements["statements"]]

    try:
        whole = tree(text)
        if around(whole) != around(tree("TRUE")):  # true) LIMIT (1
            raise QueryError(text, 0, len(text), "a query is one condition")
    except duckdb.InterruptException:
        raise
    except (RecursionError, duckdb.Error) as error:
        raise QueryError(text, 0, len(text), "the query is nested too deep, or too large") from error
    statement: dict[str, Any] = whole["statements"][0]
    return statement


def _check_nodes(condition: dict[str, Any], text: str) -> set[str]:
    """The names of columns in the tree."""
    names = set()
    for node in _nodes(condition):
        kind = node.get("class", "OPERATOR")
        problem = ""
        if kind not in _CLASSES:
            problem = f"a query cannot hold a {kind.lower()}"
        elif kind == "FUNCTION" and (called := str(node["function_name"]).lower()) not in FUNCTIONS | _OPERATORS:
            problem = f"queries have no function {called}; they have {', '.join(sorted(FUNCTIONS))}"
        elif kind == "CAST":
            made = (node.get("type_expr") or {}).get("type_name") or (node.get("cast_type") or {}).get("id", "")
            if made.upper() not in TYPES:
                problem = f"a query cannot cast to {made.lower()}, but to {', '.join(sorted(TYPES)).lower()}"
        elif kind == "COLUMN_REF":
            names.add(str(node["column_names"][0]).lower())
        if problem:
            place = node.get("query_location", 1 << 63)
            first = 0 if place >= 1 << 63 else place - len(_SELECT) - 1
            raise _error_at(text, problem, first, node.get("query_location_length", 1))
    return names


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object of the tree, without recursion."""
    rest = [tree]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            yield each
            rest.extend(reversed(list(each.values())))
        elif isinstance(each, list):
            rest.extend(reversed(each))


def _sql_of(cursor: DuckDBPyConnection, statement: dict[str, Any]) -> str:
    """The condition as DuckDB writes it, in brackets: nothing of it reaches beyond them."""
    row = cursor.execute(
        "SELECT json_deserialize_sql(?)", [json.dumps({"error": False, "statements": [statement]})]
    ).fetchone()
    assert row is not None
    return f"({row[0].removeprefix(_SELECT)})"


def _bind(cursor: DuckDBPyConnection, text: str) -> None:
    """Have DuckDB check names and types; nothing is run."""
    import duckdb

    before = "DESCRIBE SELECT (\n"
    try:
        rows = cursor.execute(f"{before}{text}\n) AS found FROM everything").fetchall()
    except duckdb.InterruptException:
        raise
    except duckdb.Error as error:
        details = _details(error)
        first, length = _place(details, len(before))
        candidates = [name for name in details.get("candidates", "").split(",") if name]
        problem = first_line(details["exception_message"])
        if details.get("error_subtype") == "COLUMN_NOT_FOUND":
            problem = f"there is no column {details['name']}"
        raise _error_at(text, problem, first - len(before), length, candidates[:_NUM_SUGGESTIONS]) from error
    if rows[0][1] != "BOOLEAN":
        column = BY_NAME.get(text.lower())
        example = f", as in {column.example}" if column is not None and column.example else ""
        raise QueryError(text, 0, len(text), f"this is a value; a query needs a comparison{example}")


def _details(error: BaseException) -> dict[str, Any]:
    """The fields of DuckDB's error (`errors_as_json`)."""
    message = str(error)
    try:
        found: dict[str, Any] = json.JSONDecoder(strict=False).raw_decode(message, message.index("{"))[0]
        return {"exception_message": message, **found}
    except ValueError:  # no JSON
        return {"exception_message": message}


def _place(details: dict[str, Any], default: int) -> tuple[int, int]:
    """First byte and number of bytes of a mistake in a statement; DuckDB 1 gives no length, and sometimes there is none."""
    first, length = json.loads(details.get("location") or f"[{details.get('position') or default}, 1]")
    return first, length


def _error_at(text: str, problem: str, first: int, length: int, suggestions: Sequence[str] = ()) -> QueryError:
    """`first` and `length` in bytes of the text."""
    encoded = text.encode()
    position = len(encoded[: max(first, 0)].decode(errors="ignore"))
    if position >= len(text):
        return QueryError(text, len(text), 1, "the query ends where something must follow", suggestions)
    extent = len(encoded[max(first, 0) :][:length].decode(errors="ignore"))
    return QueryError(text, position, extent, problem, suggestions)


def _one_line(text: str) -> str:
    """Control characters, line ends and lone surrogates become spaces."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text)
