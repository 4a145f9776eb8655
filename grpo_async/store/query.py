"""Queries of `inspect-rollouts`, its web page and `export`: an SQL condition over the view `rollouts`, checked before it is run.

    text --short forms--> SQL --DuckDB parses and binds it over empty tables--> Query(sql)

A query is one expression: statements, subqueries and parameters are rejected, so it names columns and functions and nothing else.
It runs in a database that reaches no files but those of the store (`tables`), within limits of memory and time (`time_limit`).
"""

from __future__ import annotations

import functools
import json
import re
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from grpo_async.errors import ConfigError
from grpo_async.store.query_names import (
    BLOCK_NAMES,
    BLOCK_SQL,
    BY_NAME,
    FLAG,
    INDEXED,
    MAP,
    NUMBER,
    OF_GROUPS,
    TEXT,
    Name,
)
from grpo_async.store.tables import ROW_KEY, create_tables
from grpo_async.store.time_limit import interrupting

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_CHARACTERS = 4000
_MOST_DEPTH = 100
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
        indent, carets = _width(self.text[:position]), _width(self.text[position : position + self.length])
        super().__init__(f"{self.problem}\n  {self.text}\n  {' ' * indent}{'^' * max(carets, 1)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A checked query. `text` as it was written; "" holds for everything. `reads_blocks`: it names texts or maps. `parts`: what
    `both` joined."""

    text: str
    sql: str
    reads_blocks: bool = False
    parts: tuple[Query, ...] = ()

    @property
    def is_everything(self) -> bool:
        return not self.text


EVERYTHING = Query(text="", sql="TRUE")


def parse_query(text: str) -> Query:
    """The query of a text; one of spaces holds for everything.

    Raises:
        QueryError: it is not a condition over the names of `query_names`. The message has the query with carets under the mistake,
            and the nearest names, or for a form of earlier versions the SQL to write.
    """
    text = text.strip()
    if not text:
        return EVERYTHING
    if len(text) > MOST_CHARACTERS:
        problem = f"the query has {len(text)} characters, at most {MOST_CHARACTERS} are read"
        raise QueryError(text[:60] + "...", 60, 3, problem)
    _check_characters(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QueryError(text, error.start, 1, "the query has half a character (a surrogate)") from error
    try:
        return _checked(text)
    except QueryError as error:
        if (meant := _in_sql(text)) != text:
            try:
                _checked(meant)
            except QueryError:
                raise error from None
            problem = f"{re.split('; (?:did you mean|they have)', error.problem)[0]}; in SQL this is: {meant}"
            raise QueryError(text, error.position, error.length, problem) from None
        raise


def both(first: Query, second: Query) -> Query:
    """What both hold for."""
    if first.is_everything or second.is_everything:
        return second if first.is_everything else first
    return Query(
        text=f"({first.text}) and ({second.text})",
        sql=f"({first.sql}\n) AND ({second.sql}\n)",
        reads_blocks=first.reads_blocks or second.reads_blocks,
        parts=(first, second),
    )


def quote(text: str) -> str:
    """`text` as a literal: "it's" -> "'it''s'"."""
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True, slots=True)
class Value:
    """One column, or one entry of a map, as SQL over the view `rollouts` or, `in_blocks`, over the columns of the blocks."""

    sql: str
    kind: str
    in_blocks: bool


def find_value(name: str, *, of_group: bool = False, text: str | None = None) -> Value:
    """What a figure or a sort order names: reward, group_std, rewards['format'], reward.format.

    Args:
        of_group: a value that all rollouts of a group share; "group_" may be left out.
        text: where the name stands in, for the error.

    Raises:
        QueryError: there is no such value.
    """
    prefix, _, rest = name.partition(".")
    entry = re.fullmatch(r"(rewards|columns|extra)\['((?:[^']|'')+)'\]", name)
    if not of_group and (entry or (rest and prefix in ("reward", "columns", "extra"))):
        map_name = entry[1] if entry else prefix.replace("reward", "rewards")
        key = entry[2] if entry else rest.replace("'", "''")
        return Value(f"{map_name}['{key}']", NUMBER if map_name == "rewards" else TEXT, map_name != "rewards")
    plain = name.replace("group.", "group_", 1)
    candidates = (f"group_{plain}", plain) if of_group else (plain,)
    for candidate in candidates:
        known = BY_NAME.get(candidate)
        if known is None and candidate in INDEXED and not of_group:  # the store's own name of a column
            known = Name(name=candidate, kind=NUMBER, sql="", help="")
        if known is not None and known.kind != MAP and (not of_group or candidate in OF_GROUPS):
            return Value(f'"{candidate}"', known.kind, known in BLOCK_NAMES)
    where = name if text is None else text
    names = [each.removeprefix("group_") for each in OF_GROUPS] if of_group else list(BY_NAME)
    near = get_close_matches(plain, names, n=_NUM_SUGGESTIONS)
    what = f"groups have no {name}; they have {', '.join(sorted(names))}" if of_group else f"there is no column {name}"
    raise QueryError(where, max(where.find(name), 0), len(name), what, near)


# ------------------------------------------------------------------------------------------------------ checking


def _checked(text: str) -> Query:
    sql = _without_short_forms(text)
    statement = f"{_SELECT}{sql}\n)"
    with _database() as cursor, interrupting(cursor):
        condition = _parse(cursor, text, sql, statement)
        names = _check_nodes(condition, text, sql)
        _bind(cursor, text, sql)
    return Query(text=text, sql=sql, reads_blocks=bool(names & {each.name for each in BLOCK_NAMES}))


@functools.cache
def _connection() -> DuckDBPyConnection:
    """Empty tables with the columns of the real ones; reaches no file."""
    import duckdb

    options = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    connection = duckdb.connect(":memory:", config={**options, "threads": "1", "memory_limit": "128MiB"})
    create_tables(connection)
    connection.execute(
        f"CREATE VIEW everything AS SELECT * FROM rollouts JOIN (SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM unsealed) "
        "USING (row_key)"
    )
    for setting in (f"max_expression_depth = {_MOST_DEPTH}", "errors_as_json = true", "enable_external_access = false"):
        connection.execute(f"SET {setting}")
    connection.execute("SET lock_configuration = true")
    return connection


_making = threading.Lock()


def _database() -> DuckDBPyConnection:
    """A cursor over the empty tables, which threads do not share."""
    with _making:
        return _connection().cursor()


def _parse(cursor: DuckDBPyConnection, text: str, sql: str, statement: str) -> dict[str, Any]:
    """The tree of the condition, from DuckDB's own parser."""
    whole = _tree(cursor, statement)
    alone = _tree(cursor, f"{_SELECT[:-1]} {sql}\n")  # "reward > 0) or (true" must not close our bracket
    for tree in (whole, alone):
        if tree["error"]:
            raise _error_at(text, sql, tree["error_message"], tree.get("location"))
    shape = [_without_condition(each["node"]) for each in whole["statements"]]
    empty = _tree(cursor, f"{_SELECT}TRUE\n)")["statements"]
    if shape != [_without_condition(each["node"]) for each in empty]:
        raise QueryError(text, 0, len(text), "a query is one condition; it cannot hold a statement of its own")
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
        found = {"error": True, "error_message": f"the query is nested too deep, or too large ({_said(error)[0]})"}
    return found


def _without_condition(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "where_clause"}


def _check_nodes(condition: dict[str, Any], text: str, sql: str) -> set[str]:
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
            raise _error_at(text, sql, f"a query cannot hold a {kind.lower()}", node)
        if kind == "FUNCTION" and (called := str(node["function_name"]).lower()) not in FUNCTIONS | _OPERATORS:
            near = _near(called, sorted(FUNCTIONS))
            raise _error_at(text, sql, f"queries have no function {called}; they have {_and(FUNCTIONS)}", node, near)
        if kind == "CAST":
            made = (node.get("type_expr") or {}).get("type_name") or (node.get("cast_type") or {}).get("id", "")
            if made.upper() not in TYPES:
                raise _error_at(text, sql, f"a query cannot cast to {made.lower()}, but to {_and(TYPES)}", node)
        if kind == "COLUMN_REF":
            name = str(node["column_names"][0]).lower()
            names.add(name)
            if name not in known:
                raise _error_at(text, sql, f"there is no column {name}", node, _near(name, sorted(known)))
        compared = _compared(node)
        kinds = {BY_NAME[name].kind: each for each, name in compared if name in BY_NAME}
        if {TEXT, FLAG} <= kinds.keys():  # status = finished
            raise _error_at(text, sql, "a text stands in single quotes", kinds[FLAG])
        if node.get("type") in ("COMPARE_EQUAL", "COMPARE_NOTEQUAL", "COMPARE_IN", "COMPARE_NOT_IN"):
            for _, name in compared:
                _check_values(name, node, text, sql)
    return names


def _compared(node: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The columns that a comparison or an IN has as its sides."""
    if node.get("class") not in ("COMPARISON", "OPERATOR"):
        return []
    return [(each, str(each["column_names"][0]).lower()) for each in _sides(node) if each["class"] == "COLUMN_REF"]


def _sides(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in (node.get("left"), node.get("right"), *node.get("children", ())) if each]


def _check_values(name: str, node: dict[str, Any], text: str, sql: str) -> None:
    """A status that there is not finds nothing, which looks like an answer."""
    values = BY_NAME[name].values if name in BY_NAME else ()
    for each in _sides(node) if values else ():
        literal = each.get("literal") or each.get("value")  # the second: DuckDB 1
        said = literal and literal.get("text", literal.get("value"))
        if each["class"] == "CONSTANT" and isinstance(said, str) and said and said not in values:
            near = [quote(value) for value in get_close_matches(said.lower(), values, n=_NUM_SUGGESTIONS)]
            raise _error_at(text, sql, f"{name} is never {quote(said)}, but one of {', '.join(values)}", each, near)


def _and(names: Collection[str]) -> str:
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


def _bind(cursor: DuckDBPyConnection, text: str, sql: str) -> None:
    """Types and functions, as DuckDB sees them; nothing is run. WHERE rejects aggregates, the list of a SELECT tells the type."""
    import duckdb

    first, second = "DESCRIBE SELECT (", "\n) AS found FROM everything WHERE ("
    try:
        rows = cursor.execute(f"{first}{sql}{second}{sql}\n)").fetchall()
    except duckdb.InterruptException:
        raise
    except duckdb.Error as error:
        problem, details = _said(error)
        if (place := details.get("location")) is not None:
            at, length = json.loads(place)
            behind = len(first) + len(sql.encode()) + len(second)
            details = {
                "query_location": at - (behind if at >= behind else len(first)) + len(_SELECT),
                "query_location_length": length,
            }
        raise _error_at(text, sql, problem, details) from None
    if rows[0][1] != "BOOLEAN":
        column = BY_NAME.get(sql.lower())
        example = f", as in {column.example}" if column is not None and column.example else ""
        raise QueryError(text, 0, len(text), f"this is a value; a query needs a comparison{example}")


def _said(error: BaseException) -> tuple[str, dict[str, Any]]:
    """The first line of DuckDB's message, and what else it says of the place."""
    try:
        said = str(error)
        details: dict[str, Any] = json.JSONDecoder(strict=False).raw_decode(said, said.index("{"))[0]
        return str(details["exception_message"]).split("\n", 1)[0], details
    except (ValueError, KeyError):  # no JSON
        return re.sub(r"^\w+ Error: ", "", str(error).split("\n", 1)[0]), {}


def _error_at(text: str, sql: str, problem: str, place: object, suggestions: Sequence[str] = ()) -> QueryError:
    """`place`: a node or "[first, length]" in bytes of the statement. In `text` it stands where it stands in `sql`, but for short
    forms before it."""
    if isinstance(place, str):
        first, length = json.loads(place)
    elif isinstance(place, dict) and place.get("query_location", 1 << 63) < 1 << 63:  # what has no place says 2^64 - 1
        first, length = place["query_location"], place.get("query_location_length", 1)  # DuckDB 1 has no length
    else:
        first, length = len(_SELECT), len(sql.encode()) + 1
    behind = sql.encode()[max(first - len(_SELECT), 0) :]
    position = len(sql) - len(behind.decode(errors="replace"))
    extent = len(behind[:length].decode(errors="replace"))
    same = next((i for i, (a, b) in enumerate(zip(text, sql, strict=False)) if a != b), min(len(text), len(sql)))
    if position > same:
        position = max(position + len(text) - len(sql), same)
    if position >= len(text):
        return QueryError(text, len(text), 1, "the query ends where something must follow", suggestions)
    return QueryError(text, position, min(extent, len(text) - position), problem, suggestions)


def _near(name: str, names: Sequence[str]) -> list[str]:
    return get_close_matches(name, names, n=_NUM_SUGGESTIONS, cutoff=0.7)


# --------------------------------------------------------------------------------------------------- short forms

_QUOTED = re.compile(r"('(?:[^']|'')*'|\"[^\"]*\")")
_SHORT_FORMS = (
    (re.compile(r"\bgroup\.(\w+)", re.I), r"group_\1"),
    (re.compile(r"\breward\.(\w+)", re.I), r"rewards['\1']"),
    (re.compile(r"\b(columns|extra)\.(\w+)", re.I), r"\1['\2']"),
    (re.compile(r"([=<>])\s*last\b(?!\s*\()", re.I), r"\1 last_step()"),
    (re.compile(r"(?:=|\bin\b)\s*(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)", re.I), r" BETWEEN \1 AND \2"),
    (re.compile(r"(?:=|\bin\b)\s*(-?\d+(?:\.\d+)?)\.\.(?![\d.])", re.I), r">= \1"),
    (re.compile(r"(?:=|\bin\b)\s*\.\.(-?\d+(?:\.\d+)?)", re.I), r"<= \1"),
)
"""Forms of earlier versions that are still read: step=last, step=10..20, group.std, reward.NAME, columns.NAME."""
_AS_NUMBER = re.compile(
    r"\b((?:columns|extra)\['(?:[^']|'')*'\])(?=\s*(?:[=<>!]=?|<>|(?:not\s+)?between\b|(?:not\s+)?in\s*\()\s*[-+]?\.?\d)"
    r"|'(?:[^']|'')*'|\"[^\"]*\"",
    re.I,
)
"""A column of the data is text, and is compared with a number as a number where it is one. Or what is quoted."""

_OLD_FORMS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"(\"[^\"]*\")|\s*(?:(&&?)|\|\|?)\s*"),
        lambda found: found[1] or (" and " if found[2] else " or "),
    ),
    (re.compile(r"\bversion\b(?=\s*[=<>!])"), "version_min"),
    (re.compile(r"\btokens\b(?=\s*[=<>!])"), "length"),
    (re.compile(r"\bhash\s*=\s*\"?(\w+)\"?"), r"prompt_hash = '\1'"),
    (re.compile(r"\bgroup\b(?=\s*[=<>!])"), "group_id"),
    (re.compile(r"\bgroup\.(seq|step|prompt_id|prompt_hash|written_at)\b"), r"\1"),
    (re.compile(r"\b(?:tool|tools|tool_names)\s*(?:=|~)\s*\"?([\w-]+)\"?"), r"'\1' IN tools"),
    (re.compile(r"([\w.\[\]']+)\s*!~\s*(?:\"([^\"]*)\"|([\w.-]+))"), r"\1 NOT ILIKE '%\2\3%'"),
    (re.compile(r"([\w.\[\]']+)\s*~\s*(?:\"([^\"]*)\"|([\w.-]+))"), r"\1 ILIKE '%\2\3%'"),
    (re.compile(r"!=\s*none\b"), " IS NOT NULL"),
    (re.compile(r"=\s*none\b"), " IS NULL"),
    (re.compile(r"=\s*\"([^\"]*)\""), r"= '\1'"),
    (re.compile(r"\b(columns|extra)\.\"([^\"]*)\""), r"\1['\2']"),
    (re.compile(r"\breward\.\"([^\"]*)\""), r"rewards['\1']"),
    (re.compile(r"(?<![\w'%])\"([^\"]*)\""), r"text ILIKE '%\1%'"),
    (re.compile(r"=\s*([\w-]+(?:,\s*[\w-]+)+)(?!\s*\()"), lambda found: f" IN ({_listed(found[1].replace(' ', ''))})"),
    (re.compile(r"=\s*(?!last_step|last\b|true\b|false\b|null\b)([A-Za-z][\w-]*)(?!\w|\s*[\[(])", re.I),
     lambda found: f"= {quote(_known(found[1]))}"),
    (re.compile(r"\b(\d+(?:\.\d+)?)k\b", re.I), lambda found: _thousands(found[1])),
    (re.compile(r"\b(\d+(?:\.\d+)?)%"), lambda found: f"{float(found[1]) / 100:g}"),
)  # fmt: skip
"""Forms of earlier versions that are shown as SQL in the error: tool=python, prompt~word, reward=none, "words", 1k, 5%."""


def _without_short_forms(text: str) -> str:
    """SQL of what stands outside quotes: step=last -> step= last_step()."""
    parts = _QUOTED.split(text)
    for place in range(0, len(parts), 2):
        for pattern, replacement in _SHORT_FORMS:
            parts[place] = pattern.sub(replacement, parts[place])
    return _AS_NUMBER.sub(lambda found: f"try_cast({found[1]} AS DOUBLE)" if found[1] else found[0], "".join(parts))


def _check_characters(text: str) -> None:
    """Quotes are plain ones, so that brackets can be counted: DuckDB's parser takes minutes for thousands of open ones. Raises
    QueryError."""
    depth = 0
    for found in re.finditer(r"'(?:[^']|'')*'|\"[^\"]*\"|[(\[{]|[)\]}]|->|--|/\*|\$|\be'", text, re.I):
        if found[0] in ("--", "/*"):
            raise QueryError(text, found.start(), 2, "a query has no comments")
        if found[0] in ("$", "e'", "E'"):
            raise QueryError(text, found.start(), 1, "a text stands in single quotes, and a query has no parameters")
        depth += (found[0] in ("(", "[", "{", "->")) - (found[0] in (")", "]", "}"))
        if depth > _MOST_DEPTH:
            raise QueryError(text, found.start(), 1, f"the query is nested more than {_MOST_DEPTH} deep")
        if depth < 0:
            raise QueryError(text, found.start(), 1, "this bracket closes none")


def _in_sql(text: str) -> str:
    """What a query of an earlier version says, as SQL where that is known."""
    quoted: list[str] = []

    def put_away(found: re.Match[str]) -> str:
        if not found[0].startswith("'"):
            return found[0]
        quoted.append(found[0][1:-1])
        return f"'\u01c1{len(quoted) - 1}\u01c1'"  # a letter, as the patterns expect

    text = _QUOTED.sub(put_away, text)
    for pattern, replacement in _OLD_FORMS:
        text = pattern.sub(replacement, text)
    return re.sub("\u01c1(\\d+)\u01c1", lambda found: quoted[int(found[1])], text)


def _listed(words: str) -> str:
    return ", ".join(
        "last_step()" if word == "last" else word if re.fullmatch(r"-?\d+(\.\d+)?", word) else quote(_known(word))
        for word in words.split(",")
    )


def _known(word: str) -> str:
    """A status in any case of letters, as it is written."""
    return word.lower() if any(word.lower() in name.values for name in BY_NAME.values()) else word


def _thousands(number: str) -> str:
    """1.5 -> 1500."""
    value = round(float(number) * 1000, 6)
    return str(int(value)) if value.is_integer() else repr(value)


def _one_line(text: str) -> str:
    """Control characters, line ends and halves of characters become spaces."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text)


def _width(text: str) -> int:
    """Columns that a terminal gives `text`."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )
