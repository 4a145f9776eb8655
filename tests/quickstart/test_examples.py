"""The tasks of examples/: their split, their two ways to answer, and the environment and reward of their runs."""

from __future__ import annotations

import random
import warnings
from typing import Any

from examples.code.prepare import TASK as CODE
from examples.code.prepare import Formula, formulas
from examples.game.prepare import MAX_GUESSES, Game
from examples.game.prepare import TASK as GAME
from grpo_async.quickstart.tasks import Demonstration


def _passes(text: str, tests: list[str]) -> bool:
    """In this process: the text is one of ours."""
    names: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # 3 (x + 2): "int is not callable, did you miss a comma?"
            exec(text.removeprefix("```python\n").removesuffix("```"), names)
        for test in tests:
            exec(test, names)
    except (SyntaxError, TypeError, AssertionError):
        return False
    return True


def test_every_translation_passes_its_tests_and_no_copy_does() -> None:
    task, item = CODE, Formula("3 (x + 2)", "3 * (x + 2)")
    assert item.tests == ["assert f(0) == 6", "assert f(3) == 15", "assert f(10) == 36"]
    assert task.row(item) == {"prompt": [{"role": "user", "content": "f(x) = 3 (x + 2)"}], "tests": item.tests}
    for item in formulas():
        assert _passes(task.good(item, random.Random(0)).turns[0].text, item.tests), item
        assert not _passes(task.lazy(item, random.Random(0)).turns[0].text, item.tests), item
    # 2 (x + 3) is 2 x + 6: 10 + 6 + 5 + 4 + 3 + 2 + 2 + 2 = 34 products of a factor (2 to 9) up to 20, with both signs 68
    assert len({tuple(item.tests) for item in formulas()}) == 680 - 68  # another formula rarely passes


def _guesses(shown: Demonstration) -> list[int]:
    return [turn.call.arguments["number"] for turn in shown.turns if turn.call is not None]


def test_searching_halves_what_is_left_and_finds_every_number_in_three_guesses() -> None:
    shown = GAME.good(Game(low=231, target=235), random.Random(0))
    assert shown.prompt == "Guess my number from 231 to 237."
    assert _guesses(shown) == [234, 236, 235]
    assert [turn.result for turn in shown.turns] == ["higher", "lower", None]  # the end is not answered
    for target in range(5, 12):
        guesses = _guesses(GAME.good(Game(low=5, target=target), random.Random(0)))
        assert guesses[-1] == target
        assert len(guesses) <= MAX_GUESSES == 3
