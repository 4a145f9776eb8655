"""The text of a query: its tree, and what is said about mistakes. What the trees find is in test_query_results.py."""

from __future__ import annotations

import pytest

from grpo_async.errors import ConfigError
from grpo_async.store.query import EVERYTHING, QueryError, both, parse_query, quote
from grpo_async.store.query_fields import FIELDS, WORDS, Kind
from grpo_async.store.query_help import HELP, help_text
from grpo_async.store.query_sql import Sql, compile_expression
from grpo_async.store.query_syntax import Both, Comparison, Either, Expression, Opposite, Range, Standing


def _tree(text: str) -> Expression:
    return parse_query(text).expression


def _shape(expression: Expression) -> str:
    """The tree on one line, every node in brackets."""
    match expression:
        case Both(parts=parts):
            return "(" + " & ".join(map(_shape, parts)) + ")"
        case Either(parts=parts):
            return "(" + " | ".join(map(_shape, parts)) + ")"
        case Opposite(part=part):
            return f"!{_shape(part)}"
        case Standing(word=word):
            return word.name
        case Comparison():
            name = expression.field.name.replace("NAME", expression.name or "")
            return f"{name}{expression.operator}{','.join(map(str, expression.values))}"


def _sql(text: str) -> Sql:
    return compile_expression(_tree(text), lambda condition: Sql("FOUND(") + condition + ")")


def _mistake(text: str) -> QueryError:
    with pytest.raises(QueryError) as caught:
        parse_query(text)
    return caught.value


def test_an_empty_query_holds_for_everything() -> None:
    assert parse_query("  ").is_everything
    assert parse_query("") == EVERYTHING
    assert _sql("") == Sql("TRUE")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("truncated or done and stale", "(truncated | (done & stale))"),
        ("truncated and done or stale", "((truncated & done) | stale)"),
        ("not truncated and done", "(!truncated & done)"),
        ("not (truncated and done)", "!(truncated & done)"),
        ("not not done", "!!done"),
        ("(truncated or done) and stale", "((truncated | done) & stale)"),
        ("truncated done", "(truncated & done)"),  # side by side: and
        ("truncated done or stale", "((truncated & done) | stale)"),
        ("truncated (done or stale)", "(truncated & (done | stale))"),
        ("TRUNCATED And DONE Or Not Stale", "((truncated & done) | !stale)"),
        ("reward<0.2and_so", None),
        ("reward<0.2 and truncated", "(reward<0.2 & truncated)"),
        ("reward <= -1e-3", "reward<=-0.001"),
        ("reward==1", "reward=1.0"),
        ("step in 1,2,3", "stepin1.0,2.0,3.0"),
        ("step not in (1, 2)", "!stepin1.0,2.0"),
        ("reward.exact<1", "reward.exact<1.0"),
        ('reward."odd name"<1', "reward.odd name<1.0"),
        ("columns.a.b=x", "columns.a.b=x"),
        ("REWARD<1", "reward<1.0"),
        ("num_tokens>3", "length>3.0"),  # the name of the column is an alias
        ('"what is"', "text~what is"),
        ("'what is'", "text~what is"),
        (r'"say \"hi\" \\ there"', 'text~say "hi" \\ there'),
        ("status=Finished", "status=finished"),
        ("prompt~and", None),  # a word of the language wants quotes
        ('prompt~"and"', "prompt~and"),
        ("length>1k", "length>1000.0"),
        ("length<2.5M", "length<2500000.0"),
        ("clipped_share>5%", "clipped_share>0.05"),
        ("reward=none", "reward=None"),
        ("step=last", "step=last"),
        ("step>=last", "step>=last"),
        ("columns.answer=9", "columns.answer=9"),
        ("id=g17-r3", "id=g17-r3"),
    ],
)
def test_the_tree_of_a_query(text: str, shape: str | None) -> None:
    if shape is None:
        _mistake(text)
    else:
        assert _shape(_tree(text)) == shape


def test_ranges_have_both_ends_one_or_an_error() -> None:
    def bounds(text: str) -> Range:
        tree = _tree(text)
        assert isinstance(tree, Comparison)
        (value,) = tree.values
        assert isinstance(value, Range)
        return value

    assert bounds("step=10..20") == bounds("step in 10..20") == Range(low=10, high=20)
    assert bounds("reward=-0.5..0.5") == Range(low=-0.5, high=0.5)
    assert bounds("step=10..") == Range(low=10, high=None)
    assert bounds("step=..20") == Range(low=None, high=20)
    assert "the lower end stands first" in _mistake("step=20..10").problem
    assert "10..20" in _mistake("step=..").problem


@pytest.mark.parametrize(
    ("text", "position", "length", "problem", "suggestions"),
    [
        ("rewrad<1", 0, 6, "there is no field rewrad", ("reward",)),
        ("done and trunkated", 9, 9, "there is no word trunkated", ("truncated",)),
        ("status=finshed", 7, 7, "status is one of finished, truncated, failed", ("finished",)),
        ("reward<abc", 7, 3, "reward < wants a number, not abc", ()),
        ('reward<"1"', 7, 3, "reward is a number, not a text", ()),
        ("status<3", 6, 1, "takes = != ~ !~ in, not <", ()),
        ("reward~1", 6, 1, "takes = != < <= > >= in, not ~", ()),
        ("reward<", 7, 1, "a value must follow <", ()),
        ("reward", 0, 6, "reward needs an operator and a value, as in reward<0.2", ()),
        ("truncated=1", 9, 1, "truncated stands alone", ()),
        ("(done", 0, 1, "this ( has no )", ()),
        ("done)", 4, 1, "there is no ( for this )", ()),
        ("done and", 8, 1, "the query ends where something must follow", ()),
        ("and done", 0, 3, "and cannot stand here", ()),
        ("done && stale", 5, 2, "there is no &&; write and", ()),
        ("reward=<1", 6, 2, "there is no operator =<; write <=", ()),
        ('prompt~"what', 7, 1, 'the quoted text has no closing "', ()),
        ("step=(1,2", 5, 1, "this ( has no )", ()),
        ("reward.=1", 0, 7, "reward needs a name: reward.NAME", ()),
        ("zyzzyva", 0, 7, 'to search for it in the texts write "zyzzyva"', ()),
        ("error>none", 5, 1, "not >", ()),
        ("reward<none", 7, 4, "none can only be compared by = and !=", ()),
        ("length=10..x", 7, 5, "a range is written 10..20", ()),
    ],
)
def test_a_mistake_is_pointed_at(
    text: str, position: int, length: int, problem: str, suggestions: tuple[str, ...]
) -> None:
    error = _mistake(text)
    assert (error.position, error.length) == (position, length)
    assert problem in error.problem
    assert set(suggestions) <= set(error.suggestions)
    assert str(error).splitlines()[1:] == [f"  {text}", "  " + " " * position + "^" * length]


def test_a_mistake_is_an_error_of_the_user_with_three_lines() -> None:
    error = _mistake("done and trunkated")
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "there is no word trunkated; did you mean truncated?\n"
        "  done and trunkated\n"
        "           ^^^^^^^^^"
    )  # fmt: skip


def test_carets_stand_below_wide_and_combining_characters() -> None:
    """漢 takes two columns of a terminal; e with a combining accent one."""
    lines = str(_mistake('prompt~"漢" rewrad<1')).splitlines()
    assert lines[2] == "  " + " " * 12 + "^" * 6


def test_a_query_with_control_characters_is_shown_on_one_line_without_them() -> None:
    error = _mistake("done\n\x1b[2J rewrad<1")
    assert "\x1b" not in str(error)
    assert len(str(error).splitlines()) == 3


@pytest.mark.parametrize("text", ["(" * 5000, "(" * 60 + "done" + ")" * 60, "not " * 60 + "done", "a" * 100_000])
def test_a_query_that_is_too_long_or_too_deep_is_an_error(text: str) -> None:
    error = _mistake(text)
    assert "deep" in error.problem or "at most" in error.problem


@pytest.mark.parametrize(
    "value", ["", "a b", 'say "hi"', "back\\slash", "'; DROP TABLE rows; --", "a\nb", "漢字", "..", "none", "%_"]
)
def test_a_quoted_value_means_exactly_itself(value: str) -> None:
    tree = _tree(f"prompt_hash={quote(value)}")
    assert isinstance(tree, Comparison)
    assert tree.values == [value]


@pytest.mark.parametrize(
    "text",
    [
        'id="x\'; DROP TABLE rows; --"',
        'columns."a\'] FROM rows; --"=1',
        'reward."x\'] OR 1=1 --"<1',
        "prompt~\"%' OR '1'='1\"",
        'tool="\'); DELETE FROM rows; --"',
    ],
)
def test_what_a_user_writes_never_becomes_sql(text: str) -> None:
    compiled = _sql(text)
    for hostile in ("DROP", "DELETE", "--", "1=1", "'1'", "a']"):
        assert hostile not in compiled.text
    assert any(isinstance(value, str) and ("--" in value or "OR" in value) for value in compiled.parameters)
    assert compiled.text.count("?") == len(compiled.parameters)


def test_both_joins_two_queries() -> None:
    joined = both(parse_query("done or stale"), parse_query("truncated"))
    assert joined.text == "(done or stale) and (truncated)"
    assert _shape(joined.expression) == "((done | stale) & truncated)"
    assert _shape(parse_query(joined.text).expression) == _shape(joined.expression)
    assert both(EVERYTHING, joined) == both(joined, EVERYTHING) == joined


def test_the_help_has_every_field_and_word_and_only_examples_that_parse() -> None:
    syntaxes = {row.syntax for section in HELP for row in section.rows}
    assert {field.name for field in FIELDS} | {word.name for word in WORDS} <= syntaxes
    for section in HELP:
        for row in section.rows:
            assert row.meaning
            parse_query(row.example)
    text = help_text(80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in ("reward.NAME", "group.std", "truncated", "=none"))


def test_fields_have_names_of_their_own() -> None:
    names = [name for field in FIELDS for name in (field.name, *field.aliases)]
    assert len(names) == len(set(names))
    assert not {word.name for word in WORDS} & set(names)
    assert all(name == name.lower() or name.endswith(".NAME") for name in names)
    assert all(not field.values or field.kind is Kind.WORD for field in FIELDS)


def test_half_a_character_is_an_error() -> None:
    error = _mistake('prompt~"\ud83d"')
    assert "surrogate" in error.problem
    str(error).encode()
