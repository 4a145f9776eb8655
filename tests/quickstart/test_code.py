"""The task `code`: formulas as people write them and as Python does."""

from __future__ import annotations

import random
import warnings
from typing import Any

from grpo_async.quickstart.tasks.code import CodeTask, Formula, all_formulas

TASK = CodeTask()
EVERY = list(all_formulas())


def _passes(text: str, tests: list[str]) -> bool:
    """In this process: the text is one of ours."""
    code = text.removeprefix("```python\n").removesuffix("```")
    names: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # 3 (x + 2): "int is not callable, did you miss a comma?"
            exec(code, names)
        for test in tests:
            exec(test, names)
    except (SyntaxError, TypeError, AssertionError):
        return False
    return True


def test_the_tests_are_worked_out_by_hand() -> None:
    item = Formula("3 (x + 2)", "3 * (x + 2)")
    assert item.tests == ["assert f(0) == 6", "assert f(3) == 15", "assert f(10) == 36"]
    assert TASK.row(item) == {"prompt": [{"role": "user", "content": "f(x) = 3 (x + 2)"}], "tests": item.tests}


def test_every_translation_passes_its_tests_and_no_copy_does() -> None:
    for item in EVERY:
        tests = TASK.row(item)["tests"]
        assert _passes(TASK.good(item, random.Random(0)).turns[0].text, tests), item
        assert not _passes(TASK.lazy(item, random.Random(0)).turns[0].text, tests), item


def test_few_formulas_share_their_tests_so_another_formula_rarely_passes() -> None:
    # 2 (x + 3) is 2 x + 6: 10 + 6 + 5 + 4 + 3 + 2 + 2 + 2 = 34 products of a factor (2 to 9) up to 20, with both signs 68
    assert len({tuple(item.tests) for item in EVERY}) == 680 - 68


def test_the_split_covers_every_formula_once() -> None:
    training, held_out = list(TASK.training_items()), list(TASK.held_out_items())
    assert len(EVERY) == 680  # 20 constants x 2 signs x (8 factors x 2 forms + 1 square)
    assert sorted(f.written for f in training + held_out) == sorted(f.written for f in EVERY)
    assert len(held_out) >= 60
