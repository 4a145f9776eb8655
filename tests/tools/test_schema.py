"""What the model is told of a function, and what it may write as arguments."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from grpo_async.tools.results import ToolError
from grpo_async.tools.schema import UnusableError, build_spec, check_arguments
from tests.tools import sample_tools


def test_the_schema_of_a_plain_function_is_that_of_transformers() -> None:
    """R3.4"""
    from transformers.utils import get_json_schema

    assert build_spec(sample_tools.multiply).schema == get_json_schema(sample_tools.multiply)


@pytest.mark.parametrize(("function", "hidden"), [(sample_tools.search, {"index"}), (sample_tools.search_books, set())])
def test_arguments_that_config_or_partial_fix_are_hidden_and_need_no_text_or_type(
    function: Any, hidden: set[str]
) -> None:
    spec = build_spec(function, hidden=hidden)
    assert spec.name == "search"
    assert list(spec.parameters["properties"]) == ["query", "limit", "order"]
    assert spec.parameters["required"] == ["query"]
    assert spec.parameters["properties"]["order"]["enum"] == ["asc", "desc"]


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


def test_a_type_that_json_has_not_is_refused_with_the_argument() -> None:
    def take(thing: sample_tools.Greeter) -> None:
        """Takes a thing.

        Args:
            thing: The thing.
        """

    with pytest.raises(UnusableError, match=r"cannot be described to the model: the types of \['thing'\]"):
        build_spec(take)


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
        ({"unit": "km"}, """argument "unit": input should be 'm' or 'ft', not "km\""""),
        ({"ration": 1}, "unknown argument \"ration\"; did you mean 'ratio'? It takes "),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolError) as caught:
        check(**arguments)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
