"""RewardFunction on the event loop and in threads; what it takes and what it refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import RewardError, RewardFunction, load_rewards
from tests.rewards.helpers import FAULTY, TRL, loaded, score

_release = threading.Event()


async def _blocks(completions: list[Any]) -> list[float]:
    """As one that calls time.sleep or a plain HTTP client."""
    if completions[0] == "block":
        _release.wait(30)
    return [1.0] * len(completions)


@pytest.mark.parametrize(("arguments", "value"), [({}, 1.0), ({"opened_by_template": False}, 0.0)])
def test_a_reward_that_names_it_learns_whether_the_template_began_the_thinking(
    arguments: dict[str, Any], value: float
) -> None:
    sections = [
        RewardSection(function="grpo_async.rewards.format:think_format", arguments=arguments),
        RewardSection(function=f"{TRL}:length_in_tokens"),
    ]
    rewards = load_rewards(sections, opened_by_template=True)
    outcomes = [asyncio.run(score(reward, ["so</think>x"])) for reward in rewards]
    assert [outcome.values for outcome in outcomes] == [[value], [1.0]]


def test_an_async_function_that_blocks_misses_its_limit_and_is_named_with_its_line() -> None:
    reward = RewardFunction(_blocks, timeout_s=0.2)

    async def run() -> None:
        started = time.monotonic()
        with pytest.raises(RewardError, match="took longer than") as caught:
            await score(reward, ["block"])
        assert time.monotonic() - started < 10  # and not when it is released
        line = _blocks.__code__.co_firstlineno + 3
        assert f"{__file__}:{line} in _blocks > " in str(caught.value)
        assert (await score(reward, ["x"])).values == [1.0]  # on a new loop

    asyncio.run(run())
    _release.set()
    reward.close()


def _returning(raw: Any, count: int) -> Any:
    return asyncio.run(score(RewardFunction(lambda completions: raw, name="odd"), ["x"] * count)).values


def test_numbers_of_every_kind_are_taken() -> None:
    import torch

    assert _returning([1, 0.5, True, None, np.float32(0.25), torch.tensor(2)], 6) == [1.0, 0.5, 1.0, None, 0.25, 2.0]
    # whatever TRL's loop over the result takes
    for made in (
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1.0], [2.0]]),
        np.array([1, 2]),
        map(float, (1, 2)),
        [torch.tensor([1.0]), np.array([[2]])],
    ):
        assert _returning(made, 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, float("nan")], "returned for completion 1: nan"),
        ([1.0, "good"], "returned for completion 1: 'good' (str)"),
        (None, "returned None (NoneType); it must return a list"),
    ],
)
def test_an_unusable_result_is_an_error_that_names_function_and_index(raw: Any, text: str) -> None:
    with pytest.raises(RewardError) as caught:
        _returning(raw, 2)
    assert str(caught.value).startswith("reward `odd`: ")
    assert text in str(caught.value)


def test_async_rewards_of_a_run_share_a_loop_as_in_trl() -> None:
    """An HTTP client that two of them share belongs to one loop."""
    rewards = load_rewards([RewardSection(function=f"{FAULTY}:its_loop", name=name) for name in "ab"])
    first, second = (asyncio.run(score(reward, ["x"])).values for reward in rewards)
    for reward in rewards:
        reward.close()
    assert first == second


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_function_logs_columns_and_metrics_and_sees_the_state(run_in: str) -> None:
    with loaded(f"{FAULTY}:logs", run_in=run_in) as reward:
        outcome = asyncio.run(score(reward, ["ab"], step=4))
    assert outcome.values == [4.0]
    assert outcome.extra_columns == {"upper": ["AB"]}
    assert outcome.metrics == {"share": 0.75}  # (1.0 + 0.5) / 2; NaN is left out


@pytest.mark.parametrize("name", ["reward", "rewards/my/judge/std", "eval/custom"])
def test_a_function_cannot_log_in_the_place_of_the_runs_own_metrics(name: str) -> None:
    def logs(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("mine/reward", 0.5)
        log_metric(name, 0.5)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=f"logs/{name}"):
        asyncio.run(score(RewardFunction(logs), ["ab"]))


# -- as the sections of a config name them


@pytest.mark.parametrize(
    ("function", "section", "text"),
    [
        ("tests.rewards.trl_style_reward:x", {}, "there is no module `tests.rewards.trl_style_reward`"),
        (f"{TRL}:boxed_rewards", {}, "did you mean 'boxed_reward'?"),
        (f"{TRL}:LengthTarget", {}, "is a class; make an instance"),
        (f"{FAULTY}:logs", {"arguments": {"fact": 1.0}}, "arguments.fact: "),
        (f"{TRL}:scaled", {"arguments": {"prompts": []}}, "arguments.prompts: every reward gets `prompts`"),
        (f"{TRL}:counter_reward", {"run_in": "process"}, "run_in: process: "),
        (
            "grpo_async.rewards.text:regex_match",
            {"arguments": {"pattern": "(a"}},
            "pattern: '(a' is not a regular expression",
        ),
        (
            "grpo_async.rewards.code:code_tests",
            {"arguments": {"wall_s": -1}},
            "wall_s: -1: Input should be greater than 0",
        ),
    ],
)
def test_what_cannot_be_a_reward_is_refused(function: str, section: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rewards([RewardSection.model_validate({"function": function, **section})])
    assert text in str(caught.value)


def test_missing_columns_and_environments_are_known_before_the_run() -> None:
    (reward,) = load_rewards([RewardSection(function=f"{TRL}:counter_reward")])
    assert reward.live_inputs == ["environments"]
    assert "the run has none" in (reward.missing_inputs(["answer"]) or "")
    assert reward.missing_inputs(["answer"], has_environments=True) is None
    (reward,) = load_rewards([RewardSection(function=f"{TRL}:counter_if_there_is_one")])
    assert reward.live_inputs == []
    (reward,) = load_rewards([RewardSection(function=f"{TRL}:boxed_reward")])
    assert "needs the column(s) ['ground_truth'], but the data has ['answer']" in (
        reward.missing_inputs(["answer"]) or ""
    )
    assert reward.missing_inputs(["ground_truth"]) is None


# -- Functions written for TRL run unchanged.


@pytest.mark.parametrize(
    ("function", "completions", "columns", "values"),
    [
        ("documented_spelling", ["a", "b"], {}, [1.0, 2.0]),
        ("all_three", ["ab", ""], {}, [14.0, 13.0]),  # "What is it?" has 11 characters: 11 + 2 + 1 and 11 + 0 + 2
        ("boxed_reward", [r"It is \boxed{2}.", r"It is \boxed{6}."], {"ground_truth": ["2", "5"], "unrelated": [0, 0]},
         [1.0, 0.0]),
        ("async_reward", ["is 4", "is 5"], {"ground_truth": ["4", "4"]}, [1.0, 0.0]),
        ("async_partial", ["4"], {"ground_truth": ["4"]}, [1.0]),
    ],
)  # fmt: skip
def test_functions_of_the_documentation_get_what_they_ask_for(
    function: str, completions: list[Any], columns: dict[str, list[Any]], values: list[float | None]
) -> None:
    """R1.11: sync or async, functions or partials; those of trl.rewards are in test_trl."""
    with loaded(f"{TRL}:{function}") as reward:
        assert asyncio.run(score(reward, completions, columns=columns)).values == values


class Counting:
    def __init__(self, counter: int) -> None:
        self.counter = counter


def _with_environments(function: str, environments: list[object] | None, **section: object) -> list[float | None]:
    with loaded(f"{TRL}:{function}", **section) as reward:
        call = reward.score(["p"] * 2, ["a", "b"], [[1], [1]], {}, environments=environments)
        return asyncio.run(call).values


@pytest.mark.parametrize(
    "function", ["counter_reward", "counter_from_kwargs", "counter_if_there_is_one", "async_counter_reward"]
)
def test_environments_arrive_as_the_users_own_objects(function: str) -> None:
    assert _with_environments(function, [Counting(3), Counting(5)]) == [3.0, 5.0]


def test_without_environments_and_in_a_process_the_keyword_is_absent() -> None:
    assert _with_environments("counter_if_there_is_one", None) == [None, None]
    assert _with_environments("counter_if_there_is_one", [Counting(3), Counting(5)], run_in="process") == [None, None]


def test_names_of_functions_partials_and_objects_and_an_async_call_is_awaited() -> None:
    """R1.11: names of functions, partials and callable objects; an async `__call__` is awaited. The section's name wins."""
    cases = {
        "scaled_by_ten": ("scaled", [30]),
        "length_target": ("LengthTarget", [-2.0]),
        "async_judge": ("AsyncJudge", [0.0]),
    }
    for attribute, (name, values) in cases.items():
        with loaded(f"{TRL}:{attribute}") as reward:
            assert reward.name == name
            assert asyncio.run(score(reward, ["abc"])).values == values
    with loaded(f"{TRL}:scaled", name="judge", arguments={"factor": 3}) as reward:
        assert reward.name == "judge"
        assert asyncio.run(score(reward, ["ab"])).values == [6.0]
