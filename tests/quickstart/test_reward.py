"""The quickstart's reward, case by case."""

from __future__ import annotations

import pytest

from grpo_async.quickstart.reward import exact_answer


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<think>3 + 4 = 7\n7 - 2 = 5</think>5", "5", 1.0),
        ("<think>3 + 4 = 7</think> 5 \n", "5", 1.0),  # spaces around the answer do not matter
        ("5", "5", 1.0),  # a lucky guess is right
        ("-5", "-5", 1.0),
        ("<think>5</think>-5", "5", 0.0),
        ("<think>3 + 4 = 7\n7 - 2 = 5", "5", 0.0),  # cut while thinking: the last line alone is no answer
        ("<think>5</think>", "5", 0.0),
        ("<think>5</think>5 5", "5", 0.0),
        ("<think>5</think>05", "5", 0.0),
        ("</think>4</think>5", "5", 1.0),  # what follows the last one counts
        ("", "5", 0.0),
    ],
)
def test_only_the_text_after_the_thinking_counts(completion: str, answer: str, expected: float) -> None:
    assert exact_answer(["p"], [completion], [[1]], [answer]) == [expected]


def test_conversational_completions_are_judged_one_by_one_and_other_columns_are_ignored() -> None:
    completions = [[{"role": "assistant", "content": text}] for text in ("<think>1</think>7", "8", "7")]
    assert exact_answer(["p"] * 3, completions, [[1]] * 3, ["7", "7", "7"], level=[1, 2, 3]) == [1.0, 0.0, 1.0]


def test_a_conversation_is_judged_by_the_last_message_and_only_if_the_assistant_said_it() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculator", "arguments": {}}}]}
    result = {"role": "tool", "content": "7"}
    completions = [
        [call, result, {"role": "assistant", "content": "7"}],
        [call, result, {"role": "assistant", "content": "8"}],
        [call, result],  # the turns ran out: what the tool says is not the model's answer
        [{**call, "content": "7"}],  # an answer beside a call that nobody made any more
        [{"role": "assistant", "content": None}],
        [],
    ]
    assert exact_answer(["p"] * 6, completions, [[1]] * 6, ["7"] * 6) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
