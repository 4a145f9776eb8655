"""Sums, their steps, and which of them are held out."""

from __future__ import annotations

from grpo_async.quickstart.sums import ChainSum, guess, is_held_out, thinking

ITEM = ChainSum.of(3, 4, -2, 1)


def test_a_sum_reads_and_adds_up_as_worked_out_by_hand() -> None:
    assert ITEM.text == "3 + 4 - 2 + 1"
    assert ITEM.answer == 6
    assert ITEM.steps == ["3 + 4 = 7", "7 - 2 = 5", "5 + 1 = 6"]


def test_minus_nought_and_results_below_nought_are_written_as_they_are() -> None:
    item = ChainSum((4, 0, 7), ("-", "-"))
    assert item.text == "4 - 0 - 7"
    assert item.terms == (4, 0, -7)
    assert item.steps == ["4 - 0 = 4", "4 - 7 = -3"]
    assert item.answer == -3


def test_every_order_of_the_same_terms_is_on_the_same_side() -> None:
    assert ChainSum.of(3, 4, -2).is_held_out == ChainSum.of(4, -2, 3).is_held_out == ChainSum.of(4, 3, -2).is_held_out


def test_about_one_key_in_eight_is_held_out_and_always_the_same() -> None:
    held_out = [number for number in range(4000) if is_held_out(str(number))]
    assert 430 < len(held_out) < 570  # 500 expected, standard deviation 21
    assert held_out[:5] == [0, 9, 10, 21, 32]  # other ones would silently move rows between the sides


def test_thinking_shows_each_step_and_then_the_answer_and_a_guess_shows_none() -> None:
    assert thinking(ITEM) == "<think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6"
    assert guess(ITEM, -8) == "<think></think>-2"
