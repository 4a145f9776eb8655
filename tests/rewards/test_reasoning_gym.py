r"""task_score through the real reasoning-gym: what its scorers pay, and what is left of that."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import time
from typing import Any

import pytest

from grpo_async.data.reasoning_gym_child import as_literal
from grpo_async.rewards import reasoning_gym
from grpo_async.rewards.reasoning_gym import EVALUATED, is_harmless, task_score
from grpo_async.utils.warn_once import WarnOnce

GARBAGE = ["", " ", "garbage", "?", "!!", "\x00", "((((", "é", "no idea \n at all", "x" * 8192]

# Tasks whose answer is a text or shape that some garbage above comes near to: they pay a little for that.
LEAKS = {"figlet_font": 0.2, "letter_jumble": 0.1, "palindrome_generation": 0.05, "spell_backward": 0.2}


@functools.cache
def _rows(task: str, count: int = 3, **config: Any) -> list[tuple[str, dict[str, Any]]]:
    """(task_data, entry) of the task's first rows, made here: the library is imported by these tests anyway."""
    import reasoning_gym as library

    dataset = library.create_dataset(task, seed=7, size=count, **config)
    entries = [dataset[index] for index in range(count)]
    return [(as_literal({"config": config, "entry": entry}), entry) for entry in entries]


def _scores(task: str, *answers: str, row: int = 0, **arguments: Any) -> list[float | None]:
    data = _rows(task)[row][0]
    return task_score(list(answers), [task] * len(answers), [data] * len(answers), **arguments)


def _fake(monkeypatch: pytest.MonkeyPatch, scorer: Any) -> None:
    monkeypatch.setattr(reasoning_gym, "_scorer_of", lambda task, config: scorer)


RAN: list[int] = []  # what code in an answer could reach

DATA = repr({"config": {}, "entry": {"answer": "6", "metadata": {}}})


def test_the_known_answer_gets_the_full_score_and_a_wrong_one_nothing() -> None:
    answer = _rows("gcd")[1][1]["answer"]
    assert _scores("gcd", answer, f"<think>let me see</think> {answer}", "0", row=1) == [1.0, 1.0, 0.0]
    messages = [{"role": "assistant", "content": f"<think>no</think>{answer}"}]
    data = _rows("gcd")[1][0]
    assert task_score([messages], ["gcd"], [data]) == [1.0]


def test_text_around_the_answer_is_worth_less_until_the_answer_is_taken_out() -> None:
    answer = _rows("gcd")[1][1]["answer"]
    loose = rf"it is \boxed{{{answer}}}"
    (partly,) = _scores("gcd", loose, row=1)
    assert partly == pytest.approx(len(answer) / len(loose))  # what the library pays for an answer inside other text
    assert _scores("gcd", loose, row=1, binarize=True) == [0.0]
    assert _scores("gcd", loose, row=1, answer_from="boxed") == [1.0]
    assert _scores("gcd", f"<answer>5555</answer> <answer> {answer}\n</answer>", row=1, answer_from="tag") == [1.0]


def test_without_box_or_tag_there_is_no_answer() -> None:
    answer = _rows("gcd")[1][1]["answer"]
    for answer_from in ("boxed", "tag"):
        assert _scores("gcd", answer, row=1, answer_from=answer_from) == [0.0]
    assert _scores("gcd", f"<think><answer>{answer}</answer></think>", row=1, answer_from="tag") == [0.0]
    with pytest.raises(ValueError, match="answer_from must be"):
        _scores("gcd", answer, answer_from="box")


def test_an_exception_pays_nothing_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reasoning_gym, "_warn_once", WarnOnce(reasoning_gym.logger))
    with caplog.at_level(logging.WARNING):
        assert _scores("prime_factorization", "garbage", "more") == [0.0, 0.0]
    (record,) = caplog.records
    assert "the scorer of prime_factorization failed (ValueError: invalid literal for int()" in record.getMessage()


def test_what_text_without_an_answer_gets_is_not_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, lambda answer, entry: {"6": 1.0, "5": 0.06}.get(answer, 0.05))
    assert task_score(["6", "5", "4"], ["t"] * 3, [DATA] * 3) == [1.0, 0.06, 0.0]
    _fake(monkeypatch, lambda answer, entry: 1.0)
    assert task_score(["6", "garbage"], ["t"] * 2, [DATA] * 2) == [0.0, 0.0]


def test_a_scorer_that_computes_for_ever_is_stopped_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def scorer(answer: str, entry: Any) -> float:
        deadline = time.monotonic() + 30.0
        while answer == "loop" and time.monotonic() < deadline:
            pass
        return float(answer == "6")

    _fake(monkeypatch, scorer)
    monkeypatch.setattr(reasoning_gym, "_ANSWER_TIMEOUT_S", 0.2)
    started = time.monotonic()
    assert task_score(["loop", "6"], ["t"] * 2, [DATA] * 2) == [0.0, 1.0]
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("task", sorted(EVALUATED))
def test_code_in_an_answer_is_not_run(task: str) -> None:
    attack = f"__import__({__name__!r}, fromlist=['RAN']).RAN.append(1)"
    assert _scores(task, attack, f" {attack}", f"[{attack}]", f"{attack}!", f"{attack} # 1 2") == [0.0] * 5
    assert RAN == []


def test_the_list_of_evaluated_tasks_is_complete() -> None:
    """Every module of the library in which something evaluates text was read; a new one has to be read too."""
    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(r"\b(eval|exec|parse_expr|sympify|compile)\(|\bsympy\b")
    found = {
        name for name, (cls, _) in DATASETS.items() if evaluates.search(inspect.getsource(sys.modules[cls.__module__]))
    }
    harmless = {
        "advanced_geometry",  # sympy solves the question; the answer is read by a pattern and float()
        "basic_arithmetic",  # its own expression
        "bf",  # compiles its own program
        "bitwise_arithmetic",  # its own expression
        "codeio",  # runs the code of its dataset when rows are made; the answer is JSON
        "number_sorting",  # the known answer
        "polynomial_equations",  # float()
        "propositional_logic",  # a parser of its own
        "rubiks_cube",  # a pattern
        "simple_equations",  # compared as text
    }
    assert found - harmless == set(EVALUATED)


def test_a_config_reaches_the_scorer() -> None:
    # puzzle24 refuses numbers above the largest of its config
    wide, narrow = (_rows("puzzle24", 1, max_value=largest)[0][0] for largest in (10, 3))
    assert task_score(["1*2*3*4"] * 2, ["puzzle24"] * 2, [wide, narrow]) == [1.0, 0.0]


def _check_garbage(tasks: list[str]) -> None:
    paid: dict[str, float] = {}
    for task in tasks:
        for row, (_, entry) in enumerate(_rows(task)):
            scores = [value for value in _scores(task, *GARBAGE, row=row) if value is not None]
            assert len(scores) == len(GARBAGE)
            paid[task] = max(paid.get(task, 0.0), *scores)
            if entry["answer"] is not None and task != "game_of_life_halting":
                assert _scores(task, entry["answer"], row=row) == [1.0], task
    assert {task: value for task, value in paid.items() if value > LEAKS.get(task, 0.0)} == {}


def test_garbage_is_worth_nothing_in_some_tasks() -> None:
    # one that pays any text in full, one that raises, some that pay 0.01 or 0.05 for any text, the plain comparison
    _check_garbage(
        ["game_of_life_halting", "prime_factorization", "fraction_simplification", "sentence_reordering", "gcd"]
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_garbage_is_worth_nothing_in_all_tasks() -> None:
    """Ten texts, three rows of each of the 106 tasks but `composite`: nothing is paid for them, but for the leaks above."""
    from reasoning_gym.factory import DATASETS

    _check_garbage(sorted(DATASETS.keys() - {"composite"}))


# ------------------------------------------------------------------------------- answers that a scorer would evaluate


def test_lists_text_and_formulas_are_harmless_and_code_and_endless_powers_are_not() -> None:
    harmless = ["[[0, 1], [1, 0]]", "['A', 'B']", "('_', 'Q')", "ABC", "0 1 2\n1 0 1", "-3", "", "(8 - 2) * 4", " 1 + 1 ",
                "x**2/2 + sin(2*x) + C", "-31.5*X**6/7", "exp(-x)*log(x)", "x**(1/2)", "2**-3", "x**2*y**3"]  # fmt: skip
    code = ["__import__('os').system('true')", " __import__('os').system('true')", "\t\n print(1)", "().__class__.__bases__",
            "[x for x in ().__class__.__mro__]", "(lambda: 1)()", "f'{print(1)}'", "[0] * 10**9", "getattr(int, 'x')", "(y := 1)",
            "x!", "print(1)!", "24 # 1 2 3 4", "sin(x, evaluate=1)", "x.diff", "(print)(1)", "[[0]][0](1)"]  # fmt: skip
    endless = [
        "9**9**9",
        "9**(9**9)",
        "2**1000000",
        "2**(50*99999)",
        "9" * 5000,
        "'a' * 999999999",
        "2 ** 99.9e9",
        "9**9**-9",
    ]
    assert [text for text in harmless if not is_harmless(text)] == []
    assert [text for text in (*code, *endless) if is_harmless(text)] == []
