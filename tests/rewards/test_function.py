"""RewardFunction on the event loop and in threads; what it takes and what it refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.rewards import RewardError, RewardFunction, load_rewards
from tests.rewards import faulty_rewards
from tests.rewards.helpers import FAULTY, loaded, score
from tests.support.waiting import until


@pytest.fixture
def released() -> Iterator[None]:
    """Lets the threads that `blocks` holds end after the test."""
    faulty_rewards.release.clear()
    yield
    faulty_rewards.release.set()


async def _blocks(completions: list[Any]) -> list[float]:
    """As one that calls time.sleep or a plain HTTP client."""
    if completions[0] == "block":
        faulty_rewards.release.wait(30)
    return [1.0] * len(completions)


def test_an_async_function_that_blocks_misses_its_limit_and_is_named_with_its_line(released: None) -> None:
    reward = RewardFunction(_blocks, timeout_s=0.2)

    async def run() -> None:
        started = time.monotonic()
        with pytest.raises(RewardError, match="took longer than") as caught:
            await score(reward, ["block"])
        assert time.monotonic() - started < 10  # and not when it is released
        line = _blocks.__code__.co_firstlineno + 3
        assert f"{__file__}:{line} in _blocks > " in str(caught.value)
        assert "`rewards.run_in: process`" in str(caught.value)
        assert (await score(reward, ["x"])).values == [1.0]  # on a new loop
        for _ in range(3):
            with pytest.raises(RewardError, match="took longer than"):
                await score(reward, ["block"])
        with pytest.raises(RewardError, match="4 of its event loops are still held"):
            await score(reward, ["x"])
        faulty_rewards.release.set()
        await until(lambda: not any("reward-_blocks" in thread.name for thread in threading.enumerate()[1:]))
        assert (await score(reward, ["x"])).values == [1.0]

    asyncio.run(run())
    reward.close()
    assert not any("reward-_blocks" in thread.name for thread in threading.enumerate())


def _returning(raw: Any, count: int) -> Any:
    return asyncio.run(score(RewardFunction(lambda completions: raw, name="odd"), ["x"] * count)).values


def test_numbers_of_every_kind_are_taken() -> None:
    import numpy
    import torch

    assert _returning([1, 0.5, True, None, numpy.float32(0.25), torch.tensor(2)], 6) == [1.0, 0.5, 1.0, None, 0.25, 2.0]
    assert _returning(torch.tensor([1.0, 2.0]), 2) == [1.0, 2.0]
    assert _returning(numpy.array([1, 2]), 2) == [1.0, 2.0]
    assert _returning((1, 2), 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, float("nan")], "for completion 1 it returned nan"),
        ([1e308, 1.0], "for completion 0 it returned 1e+308"),
        ([10**400, 1.0], "for completion 0 it returned inf"),
        ([1.0, "good"], "for completion 1 it returned 'good' (str)"),
        (1.0, "returned 1.0 (float); it must return a list"),
        ("ab", "returned 'ab' (str); it must return a list"),
        (None, "returned None (NoneType); it must return a list"),
    ],
)
def test_an_unusable_result_is_an_error_that_names_function_and_index(raw: Any, text: str) -> None:
    with pytest.raises(RewardError) as caught:
        _returning(raw, 2)
    assert str(caught.value).startswith("reward `odd`: ")
    assert text in str(caught.value)


def test_only_accepted_columns_are_passed_and_arguments_win_over_columns() -> None:
    def strict(completions: list[str], level: int) -> list[float]:
        return [float(level)] * len(completions)

    reward = RewardFunction(strict, arguments={"level": 2})
    assert asyncio.run(score(reward, ["a"], columns={"level": [7], "other": [1]})).values == [2.0]


def test_a_function_that_empties_its_lists_does_not_disturb_the_caller() -> None:
    def greedy(completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(completions.pop()) + len(answer.pop())) for _ in range(2)]

    completions, answers = ["a", "b"], ["c", "d"]
    asyncio.run(score(RewardFunction(greedy), completions, columns={"answer": answers}))
    assert (completions, answers) == (["a", "b"], ["c", "d"])


def test_async_rewards_of_a_run_share_a_loop_as_in_trl_and_the_calls_of_a_worker_too() -> None:
    """An HTTP client that two of them share belongs to one loop."""
    sections = [RewardSection(function=f"{FAULTY}:its_loop", name=name) for name in "ab"]
    rewards = load_rewards([*sections, RewardSection(function=f"{FAULTY}:its_loop", name="c", run_in="process")])

    async def run() -> None:
        first, second, third, again = [(await score(rewards[index], ["x"])).values for index in (0, 1, 2, 2)]
        assert first == second
        assert third == again == [0.0]

    try:
        asyncio.run(run())
    finally:
        for reward in rewards:
            reward.close()


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_function_logs_columns_and_metrics_and_sees_the_state(run_in: str) -> None:
    with loaded(f"{FAULTY}:logs", run_in=run_in) as reward:
        outcome = asyncio.run(score(reward, ["ab"], step=4))
    assert outcome.values == [4.0]
    assert outcome.extra_columns == {"upper": ["AB"]}
    assert outcome.metrics == {"share": 0.75}  # (1.0 + 0.5) / 2; NaN is left out


def test_an_async_function_that_swallows_its_cancellation_does_not_outlast_the_time_limit() -> None:
    async def run() -> float:
        with loaded(f"{FAULTY}:swallows_cancellation", timeout_s=0.05) as reward:
            start = time.monotonic()
            with pytest.raises(RewardError, match="took longer than"):
                await score(reward, ["a"])
            return time.monotonic() - start

    assert asyncio.run(run()) < 2.0  # 0.05 s and the margin of a busy machine; having swallowed, it sleeps 5 s
