from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from grpo_async.rewards.format import think_format
from grpo_async.rewards.length import soft_overlong
from grpo_async.rewards.text import (
    after_thinking,
    exact_match,
    final_text,
    last_boxed,
    last_number,
    number_match,
    regex_match,
)


def _chat(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content} for content in contents]


def test_final_text_is_the_last_assistant_message() -> None:
    tool = {"role": "tool", "content": "7"}
    assert final_text("plain") == "plain"
    assert final_text([*_chat("first", "last"), tool]) == "last"
    assert final_text([tool]) == ""
    assert final_text([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert final_text([{"role": "assistant", "content": parts}]) == "ab"
    with pytest.raises(ValueError, match="part 2 is of type 'image'"):
        final_text([{"role": "assistant", "content": [*parts, {"type": "image"}]}])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and then \boxed{cut o", "5"),
        (r"\boxed{never closed", None),
        (r"\boxed 7. \boxed {", "7."),
        (r"\\boxed{6}", "6"),  # written twice as escaped as it should be
        (r"\boxed{1} \boxed{2 \boxed{3}", "3"),
    ],
)
def test_last_boxed_balances_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("part", [r"\boxed{", r"\boxed{a}"])
def test_last_boxed_takes_time_in_proportion_to_the_text(part: str) -> None:
    """10 s for 4,000 boxes that were cut off; now some 0.03 s for 100,000."""
    began = time.process_time()
    last_boxed(part * 100_000)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it costs $1,250.00 a year.", 1250),
        ("... #### 72", 72),
        ("-5", -5),
        ("x = \N{MINUS SIGN}5", -5),
        ("between 3-5", 5),
        ("3/4 of it", Fraction(3, 4)),
        ("72 g of H2O", 72),
        ("72 m^2", 72),
        ("1e999999999", None),
        pytest.param("9" * 5000, None, id="5000 digits"),
    ],
)
def test_last_number_reads_numbers_as_people_write_them(text: str, number: Any) -> None:
    assert last_number(text) == number


def test_exact_match_ignores_outer_space_and_thinking() -> None:
    completions = ["  Paris\n", "<think>Rome?</think>Paris", "[THINK]Rome?[/THINK]Paris", "paris", _chat("Paris"), "x"]
    answers = ["Paris", "Paris", "Paris", "Paris", "Paris", None]
    assert exact_match(completions, answers) == [1.0, 1.0, 1.0, 0.0, 1.0, None]
    # the answer is what the parser of tool calls takes for it: it begins where the thinking ends first
    assert after_thinking("<think>1</think>2</think>3") == after_thinking("1</think>2</think>3") == "2</think>3"
    assert exact_match(["paris"], ["Paris"], ignore_case=True) == [1.0]
    assert exact_match(["<think>1</think>2</think>3", "<think>7", "7 7", ""], ["3", "7", "7", "7"]) == [0.0] * 4
    assert regex_match(["say 12 times", _chat("never")], pattern=r"\d{2}") == [1.0, 0.0]


def test_number_match_compares_the_last_numbers() -> None:
    completions = ["3 + 4 is 7.", "7.0 apples", "8", "none", _chat("<think>9</think> so $7"), "7", "7"]
    answers = ["7", 7, "7", "7", "a = 3, b = 7", "unknown", None]
    assert number_match(completions, answers) == [1.0, 1.0, 0.0, 0.0, 1.0, None, None]
    assert number_match(["1500001", "1500000.0"], ["1500000"] * 2) == [0.0, 1.0]  # whole numbers exactly
    assert number_match(["1500001"], ["1500000"], relative_tolerance=1e-6) == [1.0]
    assert number_match(["1500002"], ["1500000"], relative_tolerance=1e-6) == [0.0]
    assert number_match(["0.333333333", "0.3333"], ["1/3"] * 2) == [1.0, 0.0]  # off by 1e-9 and by 1e-4 relative
    marked = ["#### 42\nin 3 steps", "#### 42 (3 steps)", r"\boxed{42} in 3 steps", "#### 41\n42"]
    assert number_match(marked, ["42", "#### 42\n7", 42, "42"]) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>why</think>because", 1.0),
        ("<think>\nwhy\n</think>\n\nbecause\n", 1.0),
        ("<think>a</think>b</think>c", 1.0),
        ("\n<think>why</think>because", 0.0),
        ("why</think>because", 0.0),
        ("<think>why", 0.0),
        ("<think>a<think>b</think>c", 0.0),
    ],
)
def test_think_format_is_that_of_trl_whoever_opens_the_thinking(text: str, value: float) -> None:
    trl = pytest.importorskip("trl.rewards")
    assert think_format([text, _chat(text)]) == trl.think_format_reward([_chat(text)] * 2) == [value, value]
    assert think_format([text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")]) == [value]
    rest = text.removeprefix("<think>")
    if rest != text:  # somebody has begun: the template, a prompt of plain text, or a message that is continued
        question, begun = [{"role": "user", "content": "2+2?"}], {"role": "assistant", "content": "<think>\n"}
        assert think_format([_chat(rest)], prompts=[question], opened_by_template=True) == [value]
        assert think_format([rest], prompts=["Think first. <think>\n"]) == [value]
        assert think_format([_chat(rest)], prompts=[[*question, begun]]) == [value]
        assert think_format([_chat(text)], prompts=[question], opened_by_template=True) == [0.0]


@pytest.mark.parametrize(
    ("completion", "value"), [("so 4 </think> 4", 1.0), ("so 4 </think> 5", 0.0), ("so it is 4", 0.0), ("", 0.0)]
)
def test_thinking_that_the_template_began_and_that_does_not_end_has_no_answer(completion: str, value: float) -> None:
    for reward in (exact_match, number_match):
        assert reward([_chat(completion)], answer=["4"], opened_by_template=True) == [value]
    continued = [{"role": "assistant", "content": "The answer is "}]  # and not begun with thinking
    assert exact_match(["4"], answer=["4"], prompts=[continued], opened_by_template=True) == [1.0]
    turns = [*_chat("<think>so"), {"role": "tool", "content": "4"}, *_chat(completion)]
    assert exact_match([turns], answer=["4"], prompts=[continued], opened_by_template=True) == [value]


def _ids(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def test_soft_overlong_falls_linearly_within_the_cache() -> None:
    # M = 100, C = 20: up to 80 nothing; (80 - 85) / 20 = -0.25; (80 - 90) / 20 = -0.5; (80 - 100) / 20 = -1; beyond: -1
    scores = soft_overlong(_ids(0, 80, 85, 90, 100, 130), max_completion_tokens=100, cache_tokens=20)
    assert scores == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
