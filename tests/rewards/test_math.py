r"""math_answer through the real math-verify."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from grpo_async.rewards.math import math_answer
from tests.rewards.helpers import loaded, score

MATH = "grpo_async.rewards.math:math_answer"


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        (r"so \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"first \boxed{3}, then \boxed{4}", "3", 0.0),  # the last box counts
        (r"<think>\boxed{1}</think> \boxed{2}", "2", 1.0),
        (r"\boxed{42}", "20 + 22 = <<20+22=42>>42 #### 42", 1.0),
        ("nothing", "3", 0.0),
        (r"\boxed{3}", "???", 0.0),  # no mathematics: compared as text
        (r"\boxed{???}", "???", 1.0),
        (r"\boxed{3}", "", None),
        (r"\boxed{3}", None, None),
    ],
)
def test_math_answer(text: str, gold: object, value: float | None) -> None:
    assert math_answer([text], [gold]) == [value]
    assert math_answer([[{"role": "assistant", "content": text}]], solution=[gold]) == [value]


SAME = [  # answer, gold; each is boxed
    ("42.", "42"), ("x = 5", "5"), ("30°", "30"), (r"90^{\circ}", "90°"), ("−5", "-5"), ("0.00001", 0.00001), ("3", 3.0),
    (r"12\,000", "12000"), ("12 000", "12,000"), (r"\frac12", "0.5"), ("1 1/2", "1.5"), ("0.333333", r"\frac13"),
    ("5", "5 cm"), (r"5\text{ cm}^2", "5"), (r"\$5.00", "5"), ("5 percent", r"5\%"), ("1/0", "1/0"), ("東", "東"),
    ("B", "(B)"), (r"\textbf{(B) }12", "B"), ("b", "B"), ("June 20", r"\text{June 20}"), ("YES.", "yes"),
    ("2, 1", [1, 2]), (r"\{2,1\}", "1,2"), ("5>x", "x<5"), (r"2\sqrt2", r"\sqrt{8}"),
    (r"\begin{bmatrix}1&2\end{bmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}"),
]  # fmt: skip
OTHER = [
    ("0.000012", 1e-5), ("10000000000000001", 1e16), ("12:01", "12:00"), ("-5", "5"), ("142", "42"), (r"\pm 4", "4"),
    ("3 or 4", "4"), ("1,2,3", "1,2"), ("1", "1,2"), ("[1,2]", "[1,2)"), (r"x\le 5", "x<5"), ("y=5", "x=5"),
    ("A", "B"), ("A or B", "A"), ("A, B", "B"), ("AB", "A"), ("(A)(B)", "A"), ("(A) 12", "B"), ("on", "no"),
    ("odd or even", "odd"), (r"A \cap B", r"A \cup B"), ("2^{100001}", "2^{100000}"), ("11/2", "1 1/2"), ("", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "value"), [(SAME, 1.0), (OTHER, 0.0)], ids=["same", "other"])
def test_answers_are_compared_as_text_as_choices_and_as_mathematics(pairs: list[tuple[str, Any]], value: float) -> None:
    scores = math_answer([rf"\boxed{{{text}}}" for text, _ in pairs], [gold for _, gold in pairs])
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score != value] == []


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        (r"\boxed{1} and \boxed{2}", "2, 1", 1.0),
        (r"\boxed{1,2}", r"\boxed{1} and \boxed{2}", 1.0),
        (r"\boxed{1} and \boxed{3}", "1,2", 0.0),
        (r"\boxed{3} or \boxed{4}", "4", 0.0),
        (r"$\boxed{3}$, $\boxed{4}$", "4", 0.0),
        (r"\boxed{3}. No: \boxed{4}", "4", 1.0),
        (r"\boxed{4} so \boxed{4}.", "4", 1.0),
        (r"\boxed 42.", "42", 1.0),
        ("The answer is A.", "A", 1.0),
        ("A is wrong, so the answer is B", "A", 0.0),
        ("The answer is A or B.", "B", 0.0),
        ("It is not odd.", "odd", 0.0),
        ("odd or even", "even", 0.0),
        (r"It is $2\begin{pmatrix}1\\2\end{pmatrix}$", r"\begin{pmatrix}2\\4\end{pmatrix}", 1.0),
        ("#### 42\nThat took 3 steps.", "42", 1.0),
        ("Wow! Oh! Yes! It is 42!", "42", 1.0),
        (r"$85 + 12,\!000,\!003 - 65 = 12,\!000,\!023$", "12000023", 1.0),
    ],
)
def test_the_answer_of_a_text_is_its_last_and_only_one(text: str, gold: str, value: float) -> None:
    assert math_answer([text], [gold]) == [value]


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


def test_powers_and_factorials_of_usual_size_are_evaluated() -> None:
    texts = [r"\boxed{2^{10}}", r"\boxed{5!}", r"\boxed{\binom{10}{3}}"]
    assert math_answer(texts, ["1024", "120", "120"]) == [1.0] * 3


def test_an_answer_outside_a_box_is_wrong_when_a_box_is_required() -> None:
    assert math_answer(["$3$", r"\boxed{3}", "Yes"], ["3", "3", "Yes"], require_boxed=True) == [0.0, 1.0, 0.0]


def test_it_works_in_a_thread_where_signals_do_not() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_answer, [r"\boxed{0.5}"], ["1/2"]).result(timeout=60.0) == [1.0]


@pytest.mark.parametrize("completion", [r"so \boxed{4} </think> it is \boxed{4}", r"\boxed{4} </think> \boxed{5}"])
def test_thinking_that_the_template_began_scores_as_in_trl(completion: str) -> None:
    trl = pytest.importorskip("trl.rewards")
    given = [{"role": "assistant", "content": completion}]
    theirs = trl.reasoning_accuracy_reward([given], solution=["$4$"])
    assert math_answer([given], solution=["$4$"], opened_by_template=True) == theirs
