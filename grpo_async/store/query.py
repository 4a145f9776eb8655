"""Queries of `inspect-rollouts`, its web page and `export`: an SQL condition over `rollouts`.

DuckDB's parser checks that a text is one expression, and binds it over an empty table. What a
query may reach is not decided here: the database that runs it is locked (`database.locked`).
"""

from __future__ import annotations

import functools
import json
import threading
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from grpo_async.errors import ConfigError
from grpo_async.store.database import connect, guarded
from grpo_async.store.names import LAST_STEP_SQL, NAMES, VIEW_SQL
from grpo_async.store.schema import NO_ROWS_SQL
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import clipped

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAX_CHARACTERS = 2000
"""DuckDB's parser cannot be interrupted, and takes seconds for thousands of open brackets."""
_BEFORE = "DESCRIBE SELECT (\n"


class QueryError(ConfigError):
    """The query is wrong. `str(error)` is the problem, the query, and a caret under the mistake.

    Attributes:
        problem: one sentence.
        position: where the mistake begins, in characters from 0.
    """

    def __init__(self, text: str, problem: str, position: int = 0) -> None:
        shown = _one_line(text)
        self.problem, self.position = _one_line(problem), position
        caret = " " * cell_len(shown[:position]) + "^"
        super().__init__(f"{self.problem}\n  {shown}\n  {caret}")


@dataclass(frozen=True, slots=True)
class Query:
    """A checked condition ("" matches everything)."""

    text: str

    @property
    def sql(self) -> str:
        """In parentheses, and in a line of its own: it may end in a comment."""
        return f"({self.text or 'true'}\n)"


EVERYTHING = Query("")


def parse_query(text: str) -> Query:
    """Parse a query; one of spaces matches everything.

    Raises:
        QueryError: it is not one condition over the columns of `rollouts`.
    """
    import duckdb

    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise QueryError(clipped(text), f"the query has {len(text)} characters, at most {MAX_CHARACTERS} are read")
    if half := SURROGATE.search(text):
        raise QueryError(text, "the query has half a character (a surrogate)", half.start())
    if not text:
        return EVERYTHING
    with _making:
        cursor = _empty().cursor()
    with cursor:
        try:
            with guarded(cursor):
                cursor.execute("SET errors_as_json = true")
                found = cursor.execute(f"{_BEFORE}{text}\n) AS found FROM rollouts").fetchall()
            duckdb.SQLExpression(text)  # "true) or (true" is none
        except (duckdb.Error, RecursionError) as error:
            raise _error_of(text, error) from error
    if found[0][1] != "BOOLEAN":
        example = next((each.example for each in NAMES if each.name == text), "") or "reward < 0.2"
        raise QueryError(text, f"this is a value; a query needs a comparison, as in {example}")
    return Query(text)


def both(first: Query, second: Query) -> Query:
    """The query that matches what both match."""
    if not first.text or not second.text:
        return first if first.text else second
    return Query(f"{first.sql} and {second.sql}")


# -- checking

_making = threading.Lock()


@functools.cache
def _empty() -> DuckDBPyConnection:
    """The columns of a store without rows; reaches no file."""
    connection = connect()
    connection.execute(f"CREATE TABLE stored AS SELECT *, false AS superseded FROM ({NO_ROWS_SQL})")
    connection.execute(LAST_STEP_SQL)
    connection.execute(VIEW_SQL)
    connection.execute("SET enable_external_access = false")
    return connection


def _error_of(text: str, error: BaseException) -> QueryError:
    """DuckDB's error, with its place where it names one (`errors_as_json`, in bytes)."""
    message = str(error)
    try:
        details: dict[str, Any] = json.JSONDecoder(strict=False).raw_decode(message, message.index("{"))[0]
    except ValueError:
        return QueryError(text, message.split("\n\nLINE ", 1)[0])
    problem = details.get("exception_message", message)
    if details.get("error_subtype") == "COLUMN_NOT_FOUND":
        near = " or ".join(filter(None, details.get("candidates", "").split(",")[:2]))
        problem = f"there is no column {details['name']}" + (f"; did you mean {near}?" if near else "")
    place = int(details.get("position") or len(_BEFORE)) - len(_BEFORE)
    position = len(text.encode()[: max(place, 0)].decode(errors="ignore"))
    return QueryError(text, problem, min(position, len(text)))


def _one_line(text: str) -> str:
    """Control characters, line ends and lone surrogates become spaces."""
    hidden = ("Cc", "Cs", "Zl", "Zp")
    return "".join(" " if unicodedata.category(each) in hidden else each for each in text)
