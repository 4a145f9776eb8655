"""The guessing game that comes with the package."""

from __future__ import annotations

from typing import Any

from grpo_async.envs import Environment
from grpo_async.envs.guessing_game import GuessingGame
from tests.envs.helpers import call, with_one

REFERENCE = "grpo_async.envs.guessing_game:GuessingGame"


def test_a_game_from_reset_to_reward() -> None:
    """R3.2, R3.3: done ends the episode; a guess after the end is an error that reaches the model."""

    async def use(environment: Environment) -> None:
        assert await environment.reset({"target": 7}) == "Guess my number from 1 to 10."
        assert [tool.name for tool in environment.tools] == ["guess"]
        answers = []
        for number in (5, 8, 7):
            assert not await environment.is_done()
            answers.append((await call(environment, "guess", number=number)).result)
        assert answers == ["higher", "lower", "correct"]
        assert await environment.is_done()
        assert await environment.get_reward() == 1.0
        assert environment.kind.reward_name == "GuessingGame"
        after = await call(environment, "guess", number=7)
        assert (after.result, after.failed) == ('{"error": "ValueError: the game is over"}', True)
        assert await environment.get_reward() == 1.0

    with_one(REFERENCE, use)


def test_a_lost_game_and_a_new_one_whose_row_is_text() -> None:
    game = GuessingGame(max_guesses=2)
    game.reset(target=1)
    assert [game.guess(9), game.guess(9)] == ["lower", "lower"]
    assert (game.is_done(), game.get_reward()) == (True, 0.0)
    assert game.reset(target="99", low="90", high="100", other=1) == "Guess my number from 90 to 100."
    assert (game.is_done(), game.guess(99), game.get_reward()) == (False, "correct", 1.0)


def test_a_seed_gives_every_rollout_of_a_group_the_same_number() -> None:
    def target(seed: Any) -> int:
        for number in range(1, 11):
            game = GuessingGame()
            game.reset(seed=seed)
            if game.guess(number) == "correct":
                return number
        raise AssertionError("no number was right")

    assert target(3) == target("3")
    assert {target(seed) for seed in range(60)} == set(range(1, 11))
