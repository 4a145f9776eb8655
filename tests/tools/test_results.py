"""What the model gets of a tool's result."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from grpo_async.tools.results import ToolError, as_text, cut, error_text

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("", ""),
        (3, "3"),
        (True, "true"),
        (None, "null"),
        ({"a": "é", "b": [1, None]}, '{"a": "é", "b": [1, null]}'),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        ({1}, "{1}"),
        (CIRCLE, "[[...]]"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "fruit", "name": "fig"}], '[{"type": "fruit", "name": "fig"}]'),
        ("half a \ud83d pair", "half a � pair"),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    assert as_text(value) == text


def test_an_image_is_refused() -> None:
    with pytest.raises(ToolError, match="a part of type image; only text"):
        as_text([{"type": "text", "text": "see"}, {"type": "image", "image": object()}])


def test_a_cut_says_how_much_is_missing() -> None:
    assert cut("abcd", 4) == "abcd"
    assert cut("abcdef", 4) == "abcd [cut: 2 more characters]"


def test_an_error_stays_json_when_it_is_cut() -> None:
    assert json.loads(error_text('a "quoted" thing', 5)) == {"error": 'a "qu [cut: 11 more characters]'}
