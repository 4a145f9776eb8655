"""A user's own advantage function: wrong ones are told of at the start, wrong results fail the group."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.config.loss_sections import AdvantageSection
from grpo_async.errors import ConfigError, RunError
from grpo_async.scoring.user_advantage import UserAdvantage

MODULE = "tests.scoring.own_advantages"


def _load(name: str, **arguments: Any) -> UserAdvantage:
    return UserAdvantage(AdvantageSection(type="custom", function=f"{MODULE}:{name}", arguments=arguments))


def test_it_gets_the_rewards_and_the_arguments_and_unscored_ones_stay_zero() -> None:
    assert _load("above", baseline=0.25)([1.0, None, 0.0]) == [0.75, 0.0, -0.25]


def test_any_sequence_of_numbers_will_do() -> None:
    assert _load("ranks")([0.0, 0.0, 0.0]) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("abov", {}, "did you mean"),
        ("takes_nothing", {}, "does not take"),
        ("above", {"basline": 1.0}, "basline"),
        ("is_async", {}, "is async"),
        ("not_callable", {}, "cannot be called"),
        ("Scaled", {}, "is a class"),
    ],
)
def test_one_that_cannot_be_used_is_told_of_at_the_start(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _load(name, **arguments)
    assert str(caught.value).startswith(f"advantage.function: {MODULE}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "returned 1 advantages for 2 rewards"),
        ("not_finite", "returned nan for reward 0"),
        ("words", "returned '1' for reward 0"),
        ("none_at_all", "returned a NoneType"),
        ("raises", "raised ZeroDivisionError: no baseline for 2 rewards"),
    ],
)
def test_a_wrong_result_is_an_error_that_names_the_function(name: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as caught:
        _load(name)([0.0, 1.0])
    assert f"{MODULE}:{name}" in str(caught.value)
