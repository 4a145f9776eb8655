"""The task `game`: demonstrations are played against the shipped environment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.config.interaction_sections import EnvironmentSection
from grpo_async.envs import load_environments
from grpo_async.envs.guessing_game import GuessingGame
from grpo_async.quickstart.demonstration import Demonstration
from grpo_async.quickstart.tasks.game import MAX_GUESSES, Game, GameTask

TASK = GameTask()


def _guesses(shown: Demonstration) -> list[int]:
    return [turn.calls[0].arguments["number"] for turn in shown.turns]


def test_searching_halves_what_is_left() -> None:
    shown = TASK.good(Game(low=231, target=235), random.Random(0))
    assert shown.prompt == "Guess my number from 231 to 237."
    assert _guesses(shown) == [234, 236, 235]
    assert [turn.results for turn in shown.turns] == [
        ("higher",),
        ("lower",),
        (),
    ]  # the end of the game is not answered


def test_searching_finds_every_number_in_three_guesses() -> None:
    for target in range(5, 12):
        guesses = _guesses(TASK.good(Game(low=5, target=target), random.Random(0)))
        assert guesses[-1] == target
        assert len(guesses) <= MAX_GUESSES == 3


def test_insisting_says_one_number_of_the_range_over_and_over_and_finds_one_in_seven() -> None:
    rng = random.Random(0)
    games = [_guesses(TASK.lazy(Game(low=5, target=7), rng)) for _ in range(700)]
    assert {len(set(guesses)) for guesses in games} == {1}
    assert {guesses[0] for guesses in games} == set(range(5, 12))
    assert {len(guesses) for guesses in games if guesses[0] != 7} == {3}
    assert 70 < sum(guesses == [7] for guesses in games) < 130  # 100 expected, standard deviation 9


def test_whole_ranges_are_held_out() -> None:
    training, held_out = TASK.training_items(), TASK.held_out_items()
    assert not {game.low for game in training} & {game.low for game in held_out}
    assert len({game.low for game in held_out}) == 9
    assert len(held_out) == 9 * 7  # what configs/environment.yaml evaluates


def test_a_row_is_all_that_the_environment_needs() -> None:
    row = TASK.row(Game(low=231, target=235))
    assert GuessingGame(max_guesses=3).reset(**row) == "Guess my number from 231 to 237."
    assert row["prompt"] == [{"role": "user", "content": ""}]


def test_the_model_is_shown_the_tools_that_the_environment_offers() -> None:
    async def schemas() -> Sequence[Mapping[str, Any]]:
        factory = "grpo_async.envs.guessing_game:GuessingGame"
        environments = load_environments({"game": EnvironmentSection(factory=factory)})
        try:
            return environments.schemas_for({})
        finally:
            await environments.close()

    assert TASK.tools() == asyncio.run(schemas())
