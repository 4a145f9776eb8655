"""From the tree of a query to SQL over the tables of `index`: `r` (rollouts) and `g` (groups).

Every comparison is true or false, never NULL: with a missing value (an unscored rollout's reward) it is false, so `not X` holds for
exactly what `X` does not hold for, and `a!=b` is `not a=b`. Values are parameters.

Worked example: `reward<0.2 and not truncated` -> ("(coalesce(r.reward < ?, false) AND NOT coalesce(r.truncated, false))", [0.2]).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grpo_async.store.query_fields import Kind, Place
from grpo_async.store.query_syntax import (
    LAST,
    Both,
    Comparison,
    Either,
    Expression,
    Opposite,
    Range,
    Standing,
    Value,
)

LAST_STEP = """(SELECT coalesce(max(step) FILTER (status IN ('trained', 'failed')), max(step)) FROM groups WHERE NOT superseded)"""
"""The newest step that is done: of the one after it groups may be filtered or stale already. Where none was trained, the newest."""


@dataclass(frozen=True, slots=True)
class Sql:
    """A piece of SQL and the values of its question marks, in order."""

    text: str
    parameters: tuple[object, ...] = ()

    def __add__(self, other: Sql | str) -> Sql:
        if isinstance(other, str):
            return Sql(self.text + other, self.parameters)
        return Sql(self.text + other.text, self.parameters + other.parameters)


Lookup: TypeAlias = Callable[[Sql], Sql]
"""From a condition over the columns of a block to one over `r`: by a table of the rollouts that it holds for."""


def compile_expression(expression: Expression, lookup: Lookup) -> Sql:
    """The condition of a query. `lookup` is asked for what only the blocks know."""
    match expression:
        case Both(parts=parts) | Either(parts=parts):
            if not parts:
                return Sql("TRUE")
            between = " AND " if isinstance(expression, Both) else " OR "
            compiled = [compile_expression(part, lookup) for part in parts]
            return _parenthesised(_joined(compiled, between))
        case Opposite(part=part):
            return Sql("(NOT ") + compile_expression(part, lookup) + ")"
        case Standing(word=word):
            return Sql(f"coalesce({word.sql}, false)")
        case Comparison():
            condition = compare(expression)
            return lookup(condition) if expression.field.place is Place.BLOCKS else condition


def comparisons(expression: Expression) -> Iterator[Comparison]:
    """Every comparison of a query, from left to right."""
    match expression:
        case Both(parts=parts) | Either(parts=parts):
            for part in parts:
                yield from comparisons(part)
        case Opposite(part=part):
            yield from comparisons(part)
        case Comparison():
            yield expression
        case Standing():
            return


def field_sql(comparison: Comparison) -> Sql:
    """The value of the comparison's field: over `r` and `g`, or over a block's columns. Of JSON: as text."""
    field = comparison.field
    if field.kind is Kind.JSON:
        return Sql(f"json_extract_string({field.sql}, ?)", (_path(comparison.name or ""),))
    if field.dynamic:
        return Sql(field.sql, (comparison.name,))
    return Sql(field.sql)


def compare(comparison: Comparison) -> Sql:
    """One comparison; never NULL."""
    negated = comparison.operator.startswith("!")
    operator = comparison.operator.removeprefix("!")
    each = [_one(comparison, "=" if operator == "in" else operator, value) for value in comparison.values]
    condition = Sql("coalesce(") + _joined(each, " OR ") + ", false)"
    return Sql("(NOT ") + condition + ")" if negated else condition


def _one(comparison: Comparison, operator: str, value: Value) -> Sql:
    kind, left = comparison.field.kind, field_sql(comparison)
    if value is None:
        return _parenthesised(left + " IS NULL" if kind is not Kind.LIST else Sql("len(") + left + ") = 0")
    if operator == "~":
        return _contains(left, str(value), is_list=kind is Kind.LIST)
    if kind is Kind.LIST:
        return Sql("list_contains(") + left + Sql(", ?)", (value,))
    if kind is Kind.JSON:
        return _json(left, operator, value)
    if isinstance(value, Range):
        return _between(left, value)
    if value == LAST and kind is Kind.NUMBER:
        return left + f" {operator} {LAST_STEP}"
    return left + Sql(f" {operator} ?", (value,))


def _between(left: Sql, bounds: Range) -> Sql:
    ends = [
        left + Sql(f" {operator} ?", (end,))
        for operator, end in ((">=", bounds.low), ("<=", bounds.high))
        if end is not None
    ]
    return _parenthesised(_joined(ends, " AND "))


def _json(left: Sql, operator: str, value: Value) -> Sql:
    """9 finds 9, 9.0 and "9"; ranges and < > see numbers only."""
    number = Sql("try_cast(") + left + " AS DOUBLE)"
    if isinstance(value, Range):
        return _between(number, value)
    if operator != "=":
        return number + Sql(f" {operator} ?", (value,))
    return _parenthesised(left + Sql(" = ? OR ", (value,)) + number + Sql(" = try_cast(? AS DOUBLE)", (value,)))


def _contains(left: Sql, text: str, *, is_list: bool) -> Sql:
    """Any case; the text is taken as it is, without wildcards."""
    if is_list:
        return Sql("len(list_filter(") + left + Sql(", lambda each: contains(lower(each), lower(?)))) > 0", (text,))
    return Sql("contains(lower(") + left + Sql("), lower(?))", (text,))


def _path(name: str) -> str:
    """The JSON path of one key, whatever it is made of: 'a.b' -> '$."a.b"'."""
    return f"$.{json.dumps(name, ensure_ascii=False)}"


def _joined(pieces: Sequence[Sql], between: str) -> Sql:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + between + piece
    return whole


def _parenthesised(piece: Sql) -> Sql:
    return Sql("(") + piece + ")"
