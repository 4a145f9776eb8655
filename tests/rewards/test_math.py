r"""math_answer through the real math-verify."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_async.rewards.math import math_answer
from tests.rewards.helpers import loaded, score

MATH = "grpo_async.rewards.math:math_answer"


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        (r"so \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        (r"first \boxed{3}, then \boxed{4}", "3", 0.0),  # the last box counts
        (r"<think>\boxed{1}</think> \boxed{2}", "2", 1.0),
        (r"<think>\boxed{1}</think> it is 2", "1", 0.0),  # a box in the thinking is no answer
        ("The final answer is $42$.", "42", 1.0),
        ("it is 41", "42", 0.0),
        (r"\boxed{42}", "20 + 22 = <<20+22=42>>42 #### 42", 1.0),
        (r"\boxed{42}", r"Long proof. Hence \boxed{42}.", 1.0),
        (r"\boxed{12}", 12, 1.0),
        (r"\boxed{Yes}", "yes", 1.0),
        (r"\boxed{\text{No}}", "Yes", 0.0),
        ("The answer is no.", "No", 1.0),
        ("9 = 3 * 3, so it is not prime.\n\n**No**.", "No", 1.0),
        ("nothing", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{3}", "???", None),
        (r"\boxed{3}", "", None),
        (r"\boxed{3}", None, None),
    ],
)
def test_math_answer(text: str, gold: object, value: float | None) -> None:
    assert math_answer([text], [gold]) == [value]
    assert math_answer([[{"role": "assistant", "content": text}]], solution=[gold]) == [value]


ENDLESS = [
    r"\boxed{9^{9^{9^{9}}}}",
    "$9^{9^{9^{9}}}$",
    "it is 9**9**9**9",
    r"\boxed{99999999!}",
    r"\boxed{((9!)!)!}",
    r"\boxed{\binom{1000000000}{500000000}}",
    r"\boxed{10^{-1000000000}}",
    r"\boxed{(x+1)^{100000}}",
    r"\boxed{\sum_{i=1}^{1000000000} \frac{1}{i^i}}",
    r"\boxed{\{" + ",".join(map(str, range(3000))) + r"\}}",
    r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "$" + r"\frac{1}{" * 200 + "1" + "}" * 200 + "$",
    r"\boxed{" + "9" * 200_000 + "}",
]


def test_an_answer_that_would_keep_sympy_busy_for_ever_is_wrong_at_once() -> None:
    async def run() -> dict[str, list[float | None]]:
        with loaded(MATH, run_in="process", timeout_s=4.0) as reward:  # math-verify's own limit is 5 s
            return {text: (await score(reward, [text], columns={"answer": ["72"]})).values for text in ENDLESS}

    assert asyncio.run(run()) == {text: [0.0] for text in ENDLESS}


def test_an_enormous_answer_is_right_if_it_is_written_as_the_gold_is() -> None:
    assert math_answer([r"\boxed{2^{100000}}", r"\boxed{2^{100001}}"], ["2^{100000}"] * 2) == [1.0, 0.0]
    assert math_answer([r"\boxed{x^{100000}+1}", r"\boxed{1+x^{100000}}"], ["x^{100000}+1"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"\boxed{2^{10}}", "1024"),
        (r"\boxed{5!}", "120"),
        (r"\boxed{\binom{10}{3}}", "120"),
        (r"\boxed{2^{2^{3}}}", "256"),
    ],
)
def test_powers_and_factorials_of_usual_size_are_evaluated(text: str, gold: str) -> None:
    assert math_answer([text], [gold]) == [1.0]


def test_an_answer_outside_a_box_is_wrong_when_a_box_is_required() -> None:
    assert math_answer(["$3$", r"\boxed{3}", "Yes"], ["3", "3", "Yes"], require_boxed=True) == [0.0, 1.0, 0.0]


def test_it_works_in_a_thread_where_signals_do_not() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_answer, [r"\boxed{0.5}"], ["1/2"]).result(timeout=60.0) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        r"so \boxed{4}",
        r"so \boxed{4} </think> it is \boxed{4}",
        r"\boxed{4} </think> \boxed{5}",
        "</think> I do not know",
    ],
)
def test_thinking_that_the_template_began_scores_as_in_trl(completion: str) -> None:
    trl = pytest.importorskip("trl.rewards")
    given = [{"role": "assistant", "content": completion}]
    theirs = trl.reasoning_accuracy_reward([given], solution=["$4$"])
    assert math_answer([given], solution=["$4$"], opened_by_template=True) == theirs
