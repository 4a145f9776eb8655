"""What the model is told of a function."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.tools.schema import UnusableError, build_spec
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
        (sample_tools.undocumented, ["has no docstring"]),
        (sample_tools.half_documented, ["no type hint for `b`", "no description of `b`, `c`"]),
        (sample_tools.by_position, ["takes `a` by position only"]),
        (sample_tools.takes_anything, ["takes `*args`", "takes `**kwargs`", "no description of `args`, `kwargs`"]),
        (sample_tools.odd_type, ["cannot be described to the model"]),
        (sample_tools.unresolvable, ["a type hint that cannot be resolved: name 'Nowhere' is not defined"]),
        (sample_tools.search, ["no description of `index`"]),
    ],
)
def test_all_that_is_wrong_with_a_function_is_said_at_once(function: Any, problems: list[str]) -> None:
    with pytest.raises(UnusableError) as caught:
        build_spec(function)
    assert len(caught.value.problems) == len(problems)
    for found, wanted in zip(caught.value.problems, problems, strict=True):
        assert wanted in found
