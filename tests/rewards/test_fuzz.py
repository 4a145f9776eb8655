"""The inputs of check-reward."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.data import make_prompt
from grpo_async.records import Prompt
from grpo_async.rewards.fuzz import Case, CaseKind, make_cases, same_shape


def _prompt(prompt: Any = "What is 12 + 60?", number: int = 0) -> Prompt:
    return make_prompt({"prompt": prompt}, number, None)


def _texts(cases: list[Case], kind: CaseKind) -> list[Any]:
    return [case.completion for case in cases if case.kind is kind]


def test_gold_is_tried_in_every_rendering_with_a_twin_for_each() -> None:
    cases = make_cases(_prompt(), gold="72", other_gold="5", seed=0)
    gold = _texts(cases, CaseKind.GOLD)
    assert gold[:4] == ["72", r"\boxed{72}", "<answer>72</answer>", "```python\n72\n```"]
    assert gold[4:] == [f"<think>Let me see.</think>\n{text}" for text in gold[:4]]
    assert _texts(cases, CaseKind.LOOKALIKE) == [text.replace("72", "83") for text in gold]
    assert _texts(cases, CaseKind.WRONG) == [text.replace("72", "5") for text in gold]


def test_a_conversational_row_gets_messages_and_some_shapes_of_its_own() -> None:
    cases = make_cases(_prompt([{"role": "user", "content": "Hi?"}]), gold="72", other_gold=None, seed=0)
    assert cases[0].completion == [{"role": "assistant", "content": "72"}]
    (call,) = [case for case in cases if case.name == "a tool call without text"]
    assert call.kind is CaseKind.EMPTY
    assert call.completion[0]["tool_calls"][0]["function"]["name"] == "look_up"
    assert _texts(cases, CaseKind.ECHO) == [[{"role": "assistant", "content": "Hi?"}]]


@pytest.mark.parametrize(
    ("text", "lookalike"),
    [
        ("72 km", "83 ln"),
        ("Yes", "Zft"),
        ("z9", "a1"),
        ("100", "211"),
        (r"\{1, 2\}", r"\{2, 3\}"),
        ("∞", None),
        ("", None),
    ],
)
def test_a_twin_has_the_same_shape_and_other_characters(text: str, lookalike: str | None) -> None:
    assert same_shape(text) == lookalike
