"""What the model is told of a function, and what it may write as arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

import pytest

from grpo_async.tools.results import ToolError
from grpo_async.tools.schema import UnusableError, build_spec, check_arguments
from tests.tools import sample_tools


def test_the_schema_of_a_plain_function_is_that_of_transformers_and_its_templates_take_it() -> None:
    """R3.4"""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import render_jinja_template

    spec = build_spec(sample_tools.multiply)
    assert spec.schema == get_json_schema(sample_tools.multiply)
    rendered, _ = render_jinja_template(
        conversations=[[{"role": "user", "content": "2 * 3"}]],
        tools=[spec.schema],
        chat_template="{% for tool in tools %}{{ tool.function.name }}:{{ tool.function.parameters.required }}{% endfor %}",
    )
    assert rendered == ["multiply:['a', 'b']"]


def test_a_bound_method_is_described_without_self() -> None:
    """R3.4"""
    spec = build_spec(sample_tools.greeter.shout)
    assert spec.name == "shout"
    assert spec.parameters == {
        "type": "object",
        "properties": {"name": {"type": "string", "description": "Whom."}},
        "required": ["name"],
    }


@pytest.mark.parametrize(("function", "hidden"), [(sample_tools.search, {"index"}), (sample_tools.search_books, set())])
def test_arguments_that_config_or_partial_fix_are_hidden_and_need_no_text_or_type(
    function: Any, hidden: set[str]
) -> None:
    spec = build_spec(function, hidden=hidden)
    assert spec.name == "search"
    assert list(spec.parameters["properties"]) == ["query", "limit", "order"]
    assert spec.parameters["required"] == ["query"]
    assert spec.parameters["properties"]["order"]["enum"] == ["asc", "desc"]


@pytest.mark.parametrize(
    ("function", "problems"),
    [
        (sample_tools.undocumented, ["because it has no docstring"]),
        (sample_tools.half_documented, ["b is missing a type hint"]),
        (sample_tools.by_position, ["takes `a` by position only"]),
        (sample_tools.takes_anything, ["takes `*args`", "takes `**kwargs`"]),
        (sample_tools.unresolvable, ["a type hint that cannot be resolved: name 'Nowhere' is not defined"]),
    ],
)
def test_everything_that_is_wrong_with_a_function_is_reported_at_once(function: Any, problems: list[str]) -> None:
    with pytest.raises(UnusableError) as caught:
        build_spec(function)
    assert len(caught.value.problems) == len(problems)
    for found, wanted in zip(caught.value.problems, problems, strict=True):
        assert wanted in found


def tool(
    count: int,
    ratio: float = 1.0,
    text: str | None = None,
    flags: list[bool] = [],  # noqa: B006
    pair: tuple[int, str] = (0, ""),
    table: dict[str, int] = {},  # noqa: B006
    either: int | list[str] = 0,
    anything: Any = None,
    unit: Literal["m", "ft"] = "m",
) -> None:
    """Takes many kinds.

    Args:
        count: An integer.
        ratio: A number.
        text: Text.
        flags: Flags.
        pair: A pair.
        table: A table.
        either: This or that.
        anything: Anything (really).
        unit: A unit.
    """


SPEC = build_spec(tool)


def _taking(hint: Any) -> Any:
    def take(thing: Any) -> None:
        """Takes a thing.

        Args:
            thing: The thing.
        """

    take.__annotations__ = {"thing": hint, "return": None}
    return take


@pytest.mark.parametrize("hint", [Callable[[int], int], list[sample_tools.Greeter], datetime], ids=str)
def test_a_type_that_json_has_not_is_refused_with_the_argument(hint: Any) -> None:
    with pytest.raises(UnusableError, match=r"cannot be described to the model: the types of \['thing'\]"):
        build_spec(_taking(hint))


def check(**arguments: Any) -> dict[str, Any]:
    return check_arguments(SPEC.validator, SPEC.parameters, {"count": 1, **arguments})


def test_what_fits_passes_and_a_whole_number_is_an_integer_however_json_wrote_it() -> None:
    arguments = {"text": None, "flags": [True, False], "table": {"x": 1}, "either": ["a"], "anything": {"deep": [None]}}
    assert check(**arguments, pair=[1, "a"], ratio=1) == {**arguments, "count": 1, "pair": (1, "a"), "ratio": 1.0}
    checked = check(count=3.0, either=4.0)
    assert checked == {"count": 3, "either": 4}
    assert type(checked["count"]) is type(checked["either"]) is int


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"count": "3"}, 'argument "count": input should be a valid integer, not "3"'),
        ({"flags": [True, 1]}, 'argument "flags" at 1: input should be a valid boolean, not 1'),
        ({"either": "a"}, 'argument "either" at list[str]: input should be a valid array, not "a"'),
        ({"unit": "km"}, """argument "unit": input should be 'm' or 'ft', not "km\""""),
        ({"ration": 1}, "unknown argument \"ration\"; did you mean 'ratio'? It takes "),
        ({"text": "x" * 99 + "\n", "count": "y" * 99}, 'valid integer, not "' + "y" * 58 + "…"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolError) as caught:
        check(**arguments)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
