"""Queries of `inspect-rollouts`, its web page and `export`: an SQL condition over the view `rollouts`, checked before it is run.

    text --DuckDB parses and binds it over empty tables--> Query(text)

A query is one expression: statements, subqueries and parameters are rejected, so it names columns and functions and nothing else.
It runs in a database that reaches no files but those of the store (`index`), within limits of memory and time (`time_limit`).
"""

from __future__ import annotations

import functools
import json
import re
import threading
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from grpo_async.errors import ConfigError
from grpo_async.store.database import connect, quote
from grpo_async.store.query_names import (
    BLOCK_NAMES,
    BLOCK_SQL,
    BY_NAME,
    FLAG,
    INDEXED,
    MAP,
    NUMBER,
    OF_GROUPS,
    ROW_KEY,
    TEXT,
    create_tables,
)
from grpo_async.store.time_limit import interrupting
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import clipped, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAX_CHARACTERS = 4000
_MAX_DEPTH = 100
_SELECT = "SELECT 1 FROM everything WHERE ("
_NUM_SUGGESTIONS = 3
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
_MADE = """
VARCHAR TEXT STRING TINYINT SMALLINT INTEGER INT BIGINT HUGEINT FLOAT REAL DOUBLE DECIMAL NUMERIC BOOLEAN BOOL DATE TIMESTAMP
"""
TYPES = frozenset(_MADE.split())
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A checked condition; `text` "" holds for everything. `reads_blocks`: it names texts or maps. `parts`: what `both` joined."""

    text: str
    reads_blocks: bool = False
    parts: tuple[Query, ...] = ()

    @property
    def sql(self) -> str:
        """In brackets."""
        return f"({self.text}\n)" if self.text else "(TRUE)"


EVERYTHING = Query(text="")


def parse_query(text: str) -> Query:
    """The query of a text; one of spaces holds for everything.

    Raises:
        QueryError: it is not a condition over the names of `query_names`. The message has the query with carets under the mistake,
            and the nearest names.
    """
    text = text.strip()
    if not text:
        return EVERYTHING
    if len(text) > MAX_CHARACTERS:
        problem = f"the query has {len(text)} characters, at most {MAX_CHARACTERS} are read"
        raise QueryError(clipped(text), 59, 1, problem)
    _check_characters(text)
    with _database() as cursor, interrupting(cursor):
        names = _check_nodes(_parse(cursor, text), text)
        _bind(cursor, text)
    return Query(text=text, reads_blocks=not names.isdisjoint(each.name for each in BLOCK_NAMES))


def both(first: Query, second: Query) -> Query:
    """What both hold for."""
    if not first.text or not second.text:
        return first if first.text else second
    return Query(
        text=f"({first.text}) and ({second.text})",
        reads_blocks=first.reads_blocks or second.reads_blocks,
        parts=(first, second),
    )


@dataclass(frozen=True, slots=True)
class Value:
    """One column, or one entry of a map, as SQL over the view `rollouts` or, `in_blocks`, over the columns of the blocks."""

    sql: str
    kind: str
    in_blocks: bool


def find_value(name: str, *, of_group: bool = False, text: str | None = None) -> Value:
    """What a histogram or a sort order names: reward, group_std, rewards['format'].

    Args:
        of_group: a value that all rollouts of a group share; "group_" may be left out.
        text: where the name stands in, for the error.

    Raises:
        QueryError: there is no such value.
    """
    if not of_group and (entry := re.fullmatch(r"(rewards|columns|extra)\['(?:[^']|'')+'\]", name)):
        is_reward = entry[1] == "rewards"
        return Value(name, NUMBER if is_reward else TEXT, in_blocks=not is_reward)
    for candidate in (f"group_{name}", name) if of_group else (name,):
        known = BY_NAME.get(candidate)
        if known is not None and known.kind != MAP and (not of_group or candidate in OF_GROUPS):
            return Value(f'"{candidate}"', known.kind, in_blocks=known in BLOCK_NAMES)
        if candidate in INDEXED and not of_group:  # the store's own name of a column
            return Value(f'"{candidate}"', NUMBER, in_blocks=False)
    where = name if text is None else text
    names = sorted(each.removeprefix("group_") for each in OF_GROUPS) if of_group else list(BY_NAME)
    what = f"groups have no {name}; they have {', '.join(names)}" if of_group else f"there is no column {name}"
    near = get_close_matches(name, names, n=_NUM_SUGGESTIONS)
    raise QueryError(where, max(where.find(name), 0), len(name), what, near)


# ------------------------------------------------------------------------------------------------------ checking


@functools.cache
def _connection() -> DuckDBPyConnection:
    """Empty tables with the columns of the real ones; reaches no file."""
    connection = connect(threads="1", memory_limit="128MiB")
    create_tables(connection)
    connection.execute(
        f"CREATE VIEW everything AS SELECT * FROM rollouts JOIN (SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM unsealed) "
        "USING (row_key)"
    )
    for setting in (f"max_expression_depth = {_MAX_DEPTH}", "errors_as_json = true", "enable_external_access = false"):
        connection.execute(f"SET {setting}")
    connection.execute("SET lock_configuration = true")
    return connection


_making = threading.Lock()


def _database() -> DuckDBPyConnection:
    """A cursor over the empty tables, which threads do not share."""
    with _making:
        return _connection().cursor()


def _parse(cursor: DuckDBPyConnection, text: str) -> dict[str, Any]:
    """The tree of the condition, from DuckDB's own parser."""
    whole = _tree(cursor, f"{_SELECT}{text}\n)")
    alone = _tree(cursor, f"{_SELECT[:-1]} {text}\n")  # "reward > 0) or (true" must not close our bracket
    for tree in (whole, alone):
        if tree["error"]:
            raise _error_at(text, tree["error_message"], *_location(tree))
    shape = [_without_condition(each["node"]) for each in whole["statements"]]
    empty = _tree(cursor, f"{_SELECT}TRUE\n)")["statements"]
    if shape != [_without_condition(each["node"]) for each in empty]:
        raise QueryError(text, 0, len(text), "a query is one condition; it cannot hold another statement")
    found: dict[str, Any] = whole["statements"][0]["node"]["where_clause"]
    return found


def _tree(cursor: DuckDBPyConnection, statement: str) -> dict[str, Any]:
    import duckdb

    try:
        row = cursor.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
        assert row is not None
        found: dict[str, Any] = json.loads(row[0])
    except (RecursionError, duckdb.Error) as error:
        if isinstance(error, duckdb.InterruptException):
            raise
        found = {
            "error": True,
            "error_message": f"the query is nested too deep, or too large ({_message_of(error)[0]})",
        }
    return found


def _without_condition(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "where_clause"}


def _check_nodes(condition: dict[str, Any], text: str) -> set[str]:
    """The names of columns in the tree.

    Raises:
        QueryError: it holds a subquery, a parameter, a function or a type that queries do not have, or a column or a value of one
            that there is not.
    """
    names = set()
    known = {*BY_NAME, *INDEXED}
    for node in _nodes(condition):
        kind = node.get("class", "OPERATOR")
        if kind not in _CLASSES:
            raise _error_of(node, text, f"a query cannot hold a {kind.lower()}")
        if kind == "FUNCTION" and (called := str(node["function_name"]).lower()) not in FUNCTIONS | _OPERATORS:
            near = _near(called, sorted(FUNCTIONS))
            raise _error_of(node, text, f"queries have no function {called}; they have {_comma_list(FUNCTIONS)}", near)
        if kind == "CAST":
            made = (node.get("type_expr") or {}).get("type_name") or (node.get("cast_type") or {}).get("id", "")
            if made.upper() not in TYPES:
                raise _error_of(node, text, f"a query cannot cast to {made.lower()}, but to {_comma_list(TYPES)}")
        if kind == "COLUMN_REF":
            name = str(node["column_names"][0]).lower()
            names.add(name)
            if name not in known:
                raise _error_of(node, text, f"there is no column {name}", _near(name, sorted(known)))
        compared = _compared(node)
        kinds = {BY_NAME[name].kind: each for each, name in compared if name in BY_NAME}
        if {TEXT, FLAG} <= kinds.keys():  # status = finished
            near = [quote(name) for each, name in compared if each is kinds[FLAG]]
            raise _error_of(kinds[FLAG], text, "a text stands in single quotes", near)
        if node.get("type") in ("COMPARE_EQUAL", "COMPARE_NOTEQUAL", "COMPARE_IN", "COMPARE_NOT_IN"):
            for _, name in compared:
                _check_values(name, node, text)
    return names


def _compared(node: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The columns that a comparison or an IN has as its sides."""
    if node.get("class") not in ("COMPARISON", "OPERATOR"):
        return []
    return [(each, str(each["column_names"][0]).lower()) for each in _sides(node) if each["class"] == "COLUMN_REF"]


def _sides(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in (node.get("left"), node.get("right"), *node.get("children", ())) if each]


def _check_values(name: str, node: dict[str, Any], text: str) -> None:
    """A status that there is not finds nothing, which looks like an answer."""
    values = BY_NAME[name].values if name in BY_NAME else ()
    for each in _sides(node) if values else ():
        literal = each.get("literal") or each.get("value")  # the second: DuckDB 1
        value = literal and literal.get("text", literal.get("value"))
        if each["class"] == "CONSTANT" and isinstance(value, str) and value and value not in values:
            near = [quote(each) for each in get_close_matches(value.lower(), values, n=_NUM_SUGGESTIONS)]
            raise _error_of(each, text, f"{name} is never {quote(value)}, but one of {', '.join(values)}", near)


def _comma_list(names: Collection[str]) -> str:
    return ", ".join(sorted(name.lower() for name in names))


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


def _bind(cursor: DuckDBPyConnection, text: str) -> None:
    """Types and functions, as DuckDB sees them; nothing is run. WHERE rejects aggregates, the list of a SELECT tells the type."""
    import duckdb

    first, second = "DESCRIBE SELECT (", "\n) AS found FROM everything WHERE ("
    try:
        rows = cursor.execute(f"{first}{text}{second}{text}\n)").fetchall()
    except duckdb.InterruptException:
        raise
    except duckdb.Error as error:
        problem, details = _message_of(error)
        at, length = _location(details)
        if "location" in details:
            in_where = len(first) + len(text.encode()) + len(second)
            at += len(_SELECT) - (in_where if at >= in_where else len(first))
        raise _error_at(text, problem, at, length) from error
    if rows[0][1] != "BOOLEAN":
        column = BY_NAME.get(text.lower())
        example = f", as in {column.example}" if column is not None and column.example else ""
        raise QueryError(text, 0, len(text), f"this is a value; a query needs a comparison{example}")


def _message_of(error: BaseException) -> tuple[str, dict[str, Any]]:
    """The first line of DuckDB's message, and its other fields."""
    try:
        message = str(error)
        details: dict[str, Any] = json.JSONDecoder(strict=False).raw_decode(message, message.index("{"))[0]
        return first_line(str(details["exception_message"])), details
    except (ValueError, KeyError):  # no JSON
        return re.sub(r"^\w+ Error: ", "", first_line(str(error))), {}


def _location(details: dict[str, Any]) -> tuple[int, int]:
    """First byte and number of bytes in the statement; those of the whole query where DuckDB gives none."""
    first, length = json.loads(details.get("location") or f"[{len(_SELECT)}, {MAX_CHARACTERS * 4}]")
    return first, length


def _error_at(text: str, problem: str, first: int, length: int, suggestions: Sequence[str] = ()) -> QueryError:
    """`first` and `length` in bytes of the statement, `_SELECT` and the text."""
    rest = text.encode()[max(first - len(_SELECT), 0) :]
    position = len(text) - len(rest.decode(errors="replace"))
    if position >= len(text):
        return QueryError(text, len(text), 1, "the query ends where something must follow", suggestions)
    return QueryError(text, position, len(rest[:length].decode(errors="replace")), problem, suggestions)


def _error_of(node: dict[str, Any], text: str, problem: str, suggestions: Sequence[str] = ()) -> QueryError:
    """As `_error_at`, at a node of the tree; DuckDB 1 gives no length, and 2^64 - 1 is not a place."""
    first, length = node.get("query_location", 1 << 63), node.get("query_location_length", 1)
    if first >= 1 << 63:
        first, length = _location({})
    return _error_at(text, problem, first, length, suggestions)


def _near(name: str, names: Sequence[str]) -> list[str]:
    return get_close_matches(name, names, n=_NUM_SUGGESTIONS, cutoff=0.7)


_TOKENS = re.compile(
    r"'(?:[^']|'')*'|\"[^\"]*\"|[(\[{]|[)\]}]|->|--|/\*|\$|\.\.|\be'|\b(group|rewards|columns|extra)\.([a-z_]\w*)", re.I
)
"""What is quoted, brackets, and what a query may not hold: comments, parameters, ranges, group.NAME and rewards.NAME."""


def _check_characters(text: str) -> None:
    """Quotes are plain ones, so that brackets can be counted: DuckDB's parser takes minutes for thousands of open ones. Raises
    QueryError."""
    if half := SURROGATE.search(text):
        raise QueryError(text, half.start(), 1, "the query has half a character (a surrogate)")
    depth = 0
    for found in _TOKENS.finditer(text):
        if found[1]:
            near = f"group_{found[2]}" if found[1] == "group" else f"{found[1]}[{quote(found[2])}]"
            raise QueryError(text, found.start(), len(found[0]), "the name of a column has no dot", [near])
        if found[0] in ("--", "/*"):
            raise QueryError(text, found.start(), 2, "a query has no comments")
        if found[0] == "..":
            raise QueryError(text, found.start(), 2, "a range is written with BETWEEN: step BETWEEN 10 AND 20")
        if found[0] in ("$", "e'", "E'"):
            raise QueryError(text, found.start(), 1, "a text stands in single quotes, and a query has no parameters")
        depth += (found[0] in ("(", "[", "{", "->")) - (found[0] in (")", "]", "}"))
        if depth > _MAX_DEPTH:
            raise QueryError(text, found.start(), 1, f"the query is nested more than {_MAX_DEPTH} deep")
        if depth < 0:
            raise QueryError(text, found.start(), 1, "this bracket closes none")


def _one_line(text: str) -> str:
    """Control characters, line ends and lone surrogates become spaces."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text)
