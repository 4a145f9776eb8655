"""Answers that a scorer would evaluate: formulas and lists pass, code does not."""

from __future__ import annotations

import pytest

from grpo_async.rewards.reasoning_gym import is_formula, is_harmless_literal

ATTACKS = [
    "__import__('os').system('true')",
    " __import__('os').system('true')",
    "\t\n print(1)",
    "().__class__.__bases__",
    "[x for x in ().__class__.__mro__]",
    "(lambda: 1)()",
    "exec('1')",
    "f'{print(1)}'",
    "[0] * 10**9",
    "getattr(int, 'x')",
    "(y := 1)",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_code_is_neither_a_literal_nor_a_formula(text: str) -> None:
    assert not is_harmless_literal(text)
    assert not is_formula(text)


@pytest.mark.parametrize(
    "text", ["[[0, 1], [1, 0]]", "['A', 'B']", "('_', 'Q')", "ABC", "0 1 2\n1 0 1", "-3", "{}", "", "(((("]
)
def test_lists_and_text_that_is_no_python_are_harmless(text: str) -> None:
    assert is_harmless_literal(text)


@pytest.mark.parametrize(
    "text", ["(8 - 2) * 4", "x**2/2 + sin(2*x) + C", "-31.5*X**6/7", "exp(-x)*log(x)", " 1 + 1 ", "x**(1/2)", "2**-3"]
)
def test_formulas_pass(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9**(9**9)",
        "2**1000000",
        "2**(50*99999)",
        "9" * 5000,
        "x!",
        "print(1)!",
        "0.2[1]",
        "24 # 1 2 3 4",
        "'a'",
        "sin(x, evaluate=1)",
        "x.diff",
        "1 2",
        "",
        "True",
        "a if b else c",
    ],
)
def test_what_would_compute_for_ever_or_is_rewritten_by_sympy_is_no_formula(text: str) -> None:
    assert not is_formula(text)
