"""Arguments that models write, against schemas."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.tools.arguments import check_arguments
from grpo_async.tools.results import ToolError
from grpo_async.tools.schema import build_spec


def tool(
    count: int,
    ratio: float = 1.0,
    text: str | None = None,
    flags: list[bool] = [],  # noqa: B006
    pair: tuple[int, str] = (0, ""),
    table: dict[str, int] = {},  # noqa: B006
    either: int | list[str] = 0,
    anything: Any = None,
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
    """


PARAMETERS = build_spec(tool).parameters


def check(**arguments: Any) -> dict[str, Any]:
    return check_arguments("tool", PARAMETERS, {"count": 1, **arguments})


def test_a_whole_number_is_an_integer_however_json_wrote_it() -> None:
    checked = check(count=3.0, either=4.0)
    assert checked == {"count": 3, "either": 4}
    assert type(checked["count"]) is int
    assert type(checked["either"]) is int


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"count": "3"}, 'argument "count" must be an integer, not "3"'),
        ({"count": 3.5}, 'argument "count" must be an integer, not 3.5'),
        ({"count": True}, 'argument "count" must be an integer, not true'),
        ({"count": None}, 'argument "count" must be an integer, not null'),
        ({"ratio": "half"}, 'argument "ratio" must be a number, not "half"'),
        ({"text": 3}, 'argument "text" must be a string, not 3'),
        ({"flags": "yes"}, 'argument "flags" must be a list, not "yes"'),
        ({"flags": [True, 1]}, 'argument "flags" at 1 must be true or false, not 1'),
        ({"pair": [1]}, 'argument "pair" must have 2 items, not 1'),
        ({"pair": ["a", "b"]}, 'argument "pair" at 0 must be an integer, not "a"'),
        ({"table": {"x": "y"}}, 'argument "table" at "x" must be an integer, not "y"'),
        ({"either": "a"}, 'argument "either" must be an integer, not "a", or must be a list, not "a"'),
        ({"ration": 1}, 'unknown argument "ration", did you mean "ratio"?'),
        ({"text": "x" * 99 + "\n", "count": "y" * 99}, 'must be an integer, not "' + "y" * 56 + "..."),
    ],
)
def test_a_misfit_is_said_in_words(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolError) as caught:
        check(**arguments)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_everything_wrong_is_said_at_once_with_what_the_tool_takes() -> None:
    parameters = {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "unit": {"type": "string", "enum": ["m", "ft"]}},
        "required": ["number"],
    }
    with pytest.raises(ToolError) as caught:
        check_arguments("measure", parameters, {"numbr": 1, "unit": "km"})
    assert str(caught.value) == (
        'missing argument "number"; unknown argument "numbr", did you mean "number"?; argument "unit" must be one of '
        '"m", "ft", not "km". measure takes number: integer, unit?: string'
    )
