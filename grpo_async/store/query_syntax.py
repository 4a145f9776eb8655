"""From the text of a query to its tree.

    either    = both ("or" both)*
    both      = opposite ("and"? opposite)*              side by side is "and"
    opposite  = "not" opposite | "(" either ")" | term
    term      = FIELD operator value | FIELD "not"? "in" value | WORD | QUOTED
    operator  = "=" "!=" "<" "<=" ">" ">=" "~" "!~"
    value     = QUOTED | plain | A..B | a,b,c | (a, b, c)

Worked example: `reward<0.2 and not truncated` -> Both([Comparison(reward, "<", [0.2]), Opposite(Standing(truncated))]).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Final, TypeAlias

from grpo_async.store.query_error import QueryError
from grpo_async.store.query_fields import PREFIXES, WORD_BY_NAME, Field, Kind, Word, find_field, known_names

MOST_CHARACTERS = 4000
MOST_NESTING = 40
LAST: Final = "last"
NONE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From `low` to `high`, both included; None: no end."""

    low: float | None
    high: float | None


Value: TypeAlias = float | str | Range | None
"""A number, a text, a range; None for `none`. The text "last" of the field `step` is `LAST`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`name` is the further name of a dynamic field. Several values: any of them."""

    field: Field
    name: str | None
    operator: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    word: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """All of the parts hold; none: everything."""

    parts: Sequence[Expression]


@dataclass(frozen=True, slots=True, kw_only=True)
class Either:
    parts: Sequence[Expression]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opposite:
    part: Expression


Expression: TypeAlias = Comparison | Standing | Both | Either | Opposite

_ORDER = ("<", "<=", ">", ">=")
_OPERATORS: dict[Kind, Sequence[str]] = {
    Kind.NUMBER: ("=", "!=", *_ORDER, "in"),
    Kind.WORD: ("=", "!=", "~", "!~", "in"),
    Kind.TEXT: ("=", "!=", "~", "!~"),
    Kind.LIST: ("=", "!=", "~", "!~", "in"),
    Kind.JSON: ("=", "!=", *_ORDER, "~", "!~", "in"),
}
_INSTEAD = {"&": "and", "&&": "and", "|": "or", "||": "or", "!": "not", "<>": "!=", "=<": "<=", "=>": ">=", "=~": "~"}

_BETWEEN = ("&", "&&", "|", "||")

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<unclosed>["'].*)
    |(?P<operator>==|!=|<=|>=|!~|<>|=<|=>|=~|&&|\|\||[=<>~!&|])
    |(?P<mark>[(),])
    |(?P<word>(?:[^\s()=!<>~"',&|]|(?<=\.)"(?:[^"\\]|\\.)*")+)
    """,
    re.VERBOSE | re.DOTALL,
)
_SUFFIX = {"k": 1e3, "m": 1e6, "%": 0.01}
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([km%]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # quoted | operator | mark | word | end
    text: str  # of a quoted one without the quotes
    position: int
    length: int

    def is_word(self, word: str) -> bool:
        return self.kind == "word" and self.text.lower() == word


def parse_expression(text: str) -> Expression:
    """The tree of a query; that of an empty one holds for everything.

    Raises:
        QueryError: it cannot be read; says where and what was perhaps meant.
    """
    if len(text) > MOST_CHARACTERS:
        raise QueryError(
            text[:60] + "...", 60, 3, f"the query has {len(text)} characters, at most {MOST_CHARACTERS} are read"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QueryError(text, error.start, 1, "the query has half a character (a surrogate)") from error
    return _Parser(text).whole()


def quote(text: str) -> str:
    """`text` as a value of a query that means exactly it: 'say "hi"' -> '"say \\"hi\\""'."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _unquoted(quoted: str) -> str:
    return re.sub(r"\\(.)", r"\1", quoted[1:-1], flags=re.DOTALL)


def _tokens(text: str) -> list[_Token]:
    found = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None, text[position:]
        kind, content = match.lastgroup or "", match[0]
        if kind == "unclosed":
            raise QueryError(text, position, 1, f"the quoted text has no closing {content[0]}")
        if kind != "space":
            shown = _unquoted(content) if kind == "quoted" else content
            found.append(_Token(kind, shown, position, len(content)))
        position = match.end()
    return [*found, _Token("end", "", len(text), 1)]


class _Parser:
    """Reads the tokens once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._nesting = 0

    def whole(self) -> Expression:
        if self._peek().kind == "end":
            return Both(parts=())
        expression = self._either()
        token = self._peek()
        if token.kind != "end":
            raise self._error(token, "there is no ( for this )" if token.text == ")" else self._unexpected(token))
        return expression

    def _either(self) -> Expression:
        parts = [self._both()]
        while self._peek().is_word("or"):
            self._take()
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Either(parts=parts)

    def _both(self) -> Expression:
        parts = [self._opposite()]
        while True:
            token = self._peek()
            if token.is_word("and"):
                self._take()
            elif (token.kind not in ("word", "quoted") and token.text != "(") or token.is_word("or"):
                return parts[0] if len(parts) == 1 else Both(parts=parts)
            parts.append(self._opposite())

    def _opposite(self) -> Expression:
        token = self._peek()
        opens = token.kind == "mark" and token.text == "("
        if not opens and not token.is_word("not"):
            return self._term()
        self._take()
        self._nesting += 1
        if self._nesting > MOST_NESTING:
            raise self._error(token, f"nested more than {MOST_NESTING} deep")
        if opens:
            part = self._either()
            if self._peek().text != ")" or self._peek().kind != "mark":
                raise self._error(
                    token, "this ( has no )" if self._peek().kind == "end" else self._unexpected(self._peek())
                )
            self._take()
        else:
            part = Opposite(part=self._opposite())
        self._nesting -= 1
        return part

    def _term(self) -> Expression:
        token = self._take()
        if token.kind == "quoted":
            found = find_field("text")
            assert found is not None
            return Comparison(field=found[0], name=None, operator="~", values=(token.text,))
        if token.kind != "word" or token.text.lower() in ("and", "or", "in"):
            raise self._error(token, self._unexpected(token))
        following = self._peek()
        if (following.kind == "operator" and following.text not in _BETWEEN) or following.is_word("in"):
            return self._comparison(token)
        if following.is_word("not") and self._tokens[self._next + 1].is_word("in"):
            self._take()
            return Opposite(part=self._comparison(token))
        word = WORD_BY_NAME.get(token.text.lower())
        if word is not None:
            return Standing(word=word)
        raise self._unknown_word(token)

    def _comparison(self, token: _Token) -> Expression:
        operator = self._take()
        name = token.text.split(".", 1)
        plain = f"{name[0]}.{_unquoted(name[1])}" if len(name) == 2 and name[1][:1] in "\"'" and name[1] else token.text
        found = find_field(plain)
        if found is None:
            raise self._unknown_field(token)
        field, further = found
        sign = "=" if operator.text == "==" else operator.text.lower()
        if sign in _INSTEAD:
            raise self._error(operator, f"there is no operator {sign}; write {_INSTEAD[sign]}")
        if sign not in _OPERATORS[field.kind]:
            known = " ".join(_OPERATORS[field.kind])
            raise self._error(operator, f"{field.name} ({field.help}) takes {known}, not {sign}")
        values = self._values(field, sign)
        return Comparison(field=field, name=further, operator=sign, values=values)

    def _values(self, field: Field, sign: str) -> list[Value]:
        """One value, `a,b,c` or `(a, b, c)`."""
        several = sign in ("=", "!=", "in")
        opened = self._peek() if several and self._peek().text == "(" and self._peek().kind == "mark" else None
        if opened is not None:
            self._take()
        values = [self._value(field, sign)]
        while several and self._peek().kind == "mark" and self._peek().text == ",":
            self._take()
            values.append(self._value(field, sign))
        if opened is not None:
            if self._peek().kind != "mark" or self._peek().text != ")":
                raise self._error(opened, "this ( has no )")
            self._take()
        return values

    def _value(self, field: Field, sign: str) -> Value:
        token = self._take()
        if token.kind not in ("word", "quoted") or (
            token.kind == "word" and token.text.lower() in ("and", "or", "not")
        ):
            raise self._error(token, f"a value must follow {sign}; a text with spaces or signs stands in quotes")
        if token.kind == "quoted":
            if field.kind is Kind.NUMBER:
                raise self._error(token, f"{field.name} is a number, not a text")
            return token.text if sign in ("~", "!~") else self._one_of(field, token)
        lower = token.text.lower()
        if lower == NONE:
            if sign not in ("=", "!=", "in"):
                raise self._error(token, f"none can only be compared by = and !=, not by {sign}")
            return None
        if sign in ("~", "!~"):
            return token.text
        if field.kind in (Kind.TEXT, Kind.WORD, Kind.LIST):
            return self._one_of(field, token)
        if ".." in lower and sign in ("=", "!=", "in"):
            return self._range(field, token)
        if lower == LAST and field.name in ("step", "group.step"):
            return LAST
        number = _number(token.text)
        if number is not None:
            # the data set's 007 is not 7: the text is compared too, where the field may hold one
            return number if field.kind is Kind.NUMBER or sign in _ORDER else token.text
        if field.kind is Kind.NUMBER or sign in _ORDER:
            raise self._error(token, f"{field.name} {sign} wants a number, not {token.text}")
        return token.text

    def _one_of(self, field: Field, token: _Token) -> str:
        if not field.values:
            return token.text
        if token.text.lower() not in field.values:
            near = get_close_matches(token.text.lower(), field.values, n=2)
            known = ", ".join(field.values)
            raise self._error(token, f"{field.name} is one of {known}", near)
        return token.text.lower()

    def _range(self, field: Field, token: _Token) -> Value:
        low_text, _, high_text = token.text.partition("..")
        low, high = _number(low_text), _number(high_text)
        wrong = (low is None and low_text) or (high is None and high_text) or not (low_text or high_text)
        if wrong:
            if field.kind is Kind.JSON:
                return token.text
            raise self._error(token, "a range is written 10..20, 10.. or ..20")
        if low is not None and high is not None and low > high:
            raise self._error(token, f"nothing lies in {token.text}; the lower end stands first")
        return Range(low=low, high=high)

    def _unknown_field(self, token: _Token) -> QueryError:
        if token.text.lower() in WORD_BY_NAME:
            return self._error(self._peek_back(), f"{token.text} stands alone, without an operator and a value")
        if token.text.lower().rstrip(".") + "." in PREFIXES:
            prefix = token.text.lower().rstrip(".")
            return self._error(token, f"{prefix} needs a name: {prefix}.NAME")
        names = [name for name in known_names() if name not in WORD_BY_NAME]
        return self._error(token, f"there is no field {token.text}", _near(token.text, names))

    def _unknown_word(self, token: _Token) -> QueryError:
        if find_field(token.text) is not None:
            field = find_field(token.text)
            assert field is not None
            example = field[0].example or f"{token.text}=none"
            return self._error(token, f"{token.text} needs an operator and a value, as in {example}")
        near = _near(token.text, known_names())
        if near:
            return self._error(token, f"there is no word {token.text}", near)
        return self._error(token, f'there is no word {token.text}; to search for it in the texts write "{token.text}"')

    def _unexpected(self, token: _Token) -> str:
        if token.kind == "end":
            return "the query ends where something must follow"
        if token.text in _INSTEAD:
            return f"there is no {token.text}; write {_INSTEAD[token.text]}"
        return f"{token.text} cannot stand here"

    def _error(self, token: _Token, problem: str, suggestions: Sequence[str] = ()) -> QueryError:
        return QueryError(self._text, token.position, token.length, problem, suggestions)

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _peek_back(self) -> _Token:
        return self._tokens[self._next - 1]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        if token.kind != "end":
            self._next += 1
        return token


def _number(text: str) -> float | None:
    """1.5, -2, 1k, 5%, 1e-3; None: not a number."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    number = float(match[1]) * _SUFFIX.get(match[2].lower(), 1.0)
    return number if math.isfinite(number) else None


def _near(name: str, names: Sequence[str]) -> list[str]:
    """The names that were perhaps meant, without those that are much farther than the nearest."""
    lower = name.lower()
    of_its_kind = [each for each in names if ("." in each) == ("." in lower)]
    found = get_close_matches(lower, of_its_kind, n=3, cutoff=0.6)
    nearness = [SequenceMatcher(None, lower, each).ratio() for each in found]
    return [each for each, near in zip(found, nearness, strict=True) if near > nearness[0] - 0.12]
