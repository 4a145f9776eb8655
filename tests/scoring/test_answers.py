r"""The answer of a completion: from a reward's column, from \boxed{}, after ####, or a short last line; prose has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_async.records import Origin, RolloutCompletion, RolloutStatus, TaggedMessage
from grpo_async.scoring.answers import read_answer
from tests.support.records import make_completion


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"<think>\boxed{3}?</think>\boxed{4}", "4"),
        ("<think>3+4=7</think> 7.", "7"),
        ("  Paris ", "paris"),
        ("add them\n#### 1,250", "1,250"),
        ("$7$", "7"),
        ("two  words", "two words"),
        ("", None),
        ("It is hard to say.\nMaybe seven.", None),
        ("One long sentence that goes on and on about what the answer might be, if there was one.", None),
    ],
)
def test_the_answer_of_a_text(text: str, answer: str | None) -> None:
    assert read_answer(make_completion(text=text), {}) == answer


@pytest.mark.parametrize(
    ("extra", "answer"),
    [
        ({"extracted_answer": " 9. "}, "9"),
        ({"answer_parsed": 9}, "9"),
        ({"extracted_answer": None}, None),
        ({"extracted_answer": "[none]"}, None),
        ({"extracted_answer": "[1, 2]"}, "[1, 2]"),
        ({"answer": "9"}, "7"),
    ],
)
def test_what_a_reward_says_is_the_answer_whatever_the_text(extra: dict[str, Any], answer: str | None) -> None:
    assert read_answer(make_completion(text="7"), extra) == answer


def test_a_completion_that_was_cut_or_ends_in_a_call_or_a_result_answers_only_in_a_box() -> None:
    cut = replace(make_completion(text="7"), status=RolloutStatus.TRUNCATED)
    assert read_answer(cut, {}) is None
    assert read_answer(replace(make_completion(text=r"\boxed{7} and"), status=RolloutStatus.TRUNCATED), {}) == "7"
    call = TaggedMessage(role="assistant", content="7", origin=Origin.POLICY, tool_calls=[{"function": {}}])
    assert read_answer(_ending_in(call), {}) is None
    assert read_answer(_ending_in(TaggedMessage(role="tool", content="7", origin=Origin.TOOL)), {}) is None
    assert read_answer(make_completion(failed=True), {}) is None


def _ending_in(message: TaggedMessage) -> RolloutCompletion:
    completion = make_completion(text="8")
    turn = completion.turns[0]
    return replace(completion, turns=[replace(turn, messages=[*turn.messages, message])])
