"""The query language of `inspect-rollouts`, its web page and `export`: `reward<0.2 and truncated`.

    text --parse_query--> Query (the tree) --compile_expression--> SQL with parameters, in RolloutTable

Where what is: the fields and words in `query_fields`, the grammar in `query_syntax`, the SQL in `query_sql`, the help in
`query_help`.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_async.store.query_error import QueryError
from grpo_async.store.query_syntax import Both, Expression, parse_expression, quote

__all__ = ["EVERYTHING", "Query", "QueryError", "both", "parse_query", "quote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A parsed query. `text` as it was written; "" holds for everything."""

    text: str
    expression: Expression

    @property
    def is_everything(self) -> bool:
        return self.expression == Both(parts=())


EVERYTHING = Query(text="", expression=Both(parts=()))


def parse_query(text: str) -> Query:
    """The query of a text; one of spaces holds for everything.

    Raises:
        QueryError: it cannot be read. The message has the query with carets under the mistake, and the nearest names.
    """
    stripped = text.strip()
    return Query(text=stripped, expression=parse_expression(stripped))


def both(first: Query, second: Query) -> Query:
    """What both hold for."""
    if first.is_everything or second.is_everything:
        return second if first.is_everything else first
    return Query(
        text=f"({first.text}) and ({second.text})", expression=Both(parts=(first.expression, second.expression))
    )
