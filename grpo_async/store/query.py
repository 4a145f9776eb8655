"""Queries of `inspect-rollouts`, its web page and `export`: an SQL condition over `rollouts`.

DuckDB's parser checks that a text is one expression, and binds it over an empty table. What a
query may reach is not decided here: the database that runs it is locked (`database.lock`).
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_async.errors import ConfigError
from grpo_async.store.database import connect, interrupted_in_time
from grpo_async.store.names import LAST_STEP_SQL, NAMES, VIEW_SQL
from grpo_async.store.schema import NO_ROWS_SQL
from grpo_async.utils.safe_text import escape_surrogates, visible_line
from grpo_async.utils.text import clipped

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAX_CHARACTERS = 2000
"""DuckDB's parser cannot be interrupted, and takes seconds for thousands of open brackets."""


class QueryError(ConfigError):
    """The query is wrong; `problem` is what DuckDB says of it, in one line."""

    def __init__(self, text: str, problem: str) -> None:
        self.problem = visible_line(problem, 400)
        super().__init__(f"{self.problem}\n  in the query: {visible_line(escape_surrogates(text), 400)}")


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
    """Parse a query; one of spaces matches everything."""
    import duckdb

    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise QueryError(clipped(text), f"the query has {len(text)} characters, at most {MAX_CHARACTERS} are read")
    if not text:
        return EVERYTHING
    with _making:
        cursor = _empty().cursor()
    with cursor:
        try:
            text.encode()  # half a character (a surrogate) cannot be
            with interrupted_in_time(cursor):
                found = cursor.execute(f"DESCRIBE SELECT (\n{text}\n) AS found FROM rollouts").fetchall()
            duckdb.SQLExpression(text)  # "true) or (true" is none
        except (duckdb.Error, RecursionError, UnicodeError) as error:
            raise QueryError(text, str(error).partition("\n\nLINE ")[0]) from error
    if found[0][1] != "BOOLEAN":
        example = next((each.example for each in NAMES if each.name == text), "") or "reward < 0.2"
        raise QueryError(text, f"this is a value; a query needs a comparison, as in {example}")
    return Query(text)


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
