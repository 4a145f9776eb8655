"""One instance: reset, tools, is_done, get_reward, and what a fault of each does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_async.envs import Environment, EnvironmentCallError
from grpo_async.envs.environment import MAX_RESET_CHARS
from tests.envs import sample_environments as samples
from tests.envs.helpers import call, with_one
from tests.support.waiting import until


def test_is_done_is_looked_up_once_per_instance_and_reserved_names_are_no_tools() -> None:
    """R3.1"""

    async def use(environment: Environment) -> None:
        for _ in range(3):
            await environment.reset({})
            assert await environment.is_done() is False
        assert samples.events.count("looked up is_done") == 1
        assert [tool.name for tool in environment.tools] == ["look", "move", "rules", "stay"]

    with_one("Full", use)


def test_attributes_and_properties_are_never_touched_and_other_methods_work() -> None:
    async def use(environment: Environment) -> None:
        await environment.reset({})
        assert (await call(environment, "rules")).result == "3 moves"
        assert (await call(environment, "look")).result == "a wall"
        for name in ("board", "helper", "score", "_draw", "reset", "close"):
            assert "there is no tool" in (await call(environment, name)).result
        assert "board was read" not in samples.events

    with_one("Full", use)


def test_reset_with_kwargs_gets_the_whole_row_as_a_copy_of_its_own() -> None:
    row = {"prompt": [{"role": "user", "content": "Go"}], "seed": 3, "environment": "only"}

    async def use(environment: Environment) -> None:
        assert await environment.reset(row) == "Begin."
        assert environment.instance.row == row  # one environment: the column is an ordinary one
        environment.instance.row["prompt"][0]["content"] = "changed"
        assert row["prompt"][0]["content"] == "Go"  # type: ignore[index]

    with_one("Full", use)


def test_reset_without_kwargs_gets_what_it_names_seed_included() -> None:
    async def use(environment: Environment) -> None:
        assert await environment.reset({"text": "a", "seed": 7, "prompt": "p", "more": 1}) == "seed 7"
        with pytest.raises(EnvironmentCallError) as caught:
            await environment.reset({"text": "a", "prompt": "p"})
        assert "`reset` needs the column(s) ['seed'], but the row has ['prompt', 'text']" in str(caught.value)

    with_one("Database", use)


@pytest.mark.parametrize(
    ("returned", "text"),
    [(None, None), ("Go", "Go"), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab")],
)
def test_reset_returns_text_text_parts_or_nothing(returned: Any, text: str | None) -> None:
    """R1.13"""

    async def use(environment: Environment) -> str | None:
        return await environment.reset({"text": returned})

    assert with_one("Bare", use) == text


@pytest.mark.parametrize("returned", [3, "x" * (MAX_RESET_CHARS + 1)], ids=["int", "long"])
def test_an_unusable_reset_is_reported_and_breaks_the_instance(returned: Any) -> None:
    async def use(environment: Environment) -> None:
        with pytest.raises(EnvironmentCallError, match="`reset` returned"):
            await environment.reset({"text": returned})
        assert environment.broken is not None

    with_one("Bare", use)


def test_a_reward_is_a_number_or_none_and_anything_else_is_reported() -> None:
    async def use(environment: Environment) -> None:
        for usable, reward in ((None, None), (True, 1.0), (0.25, 0.25)):
            await environment.reset({"reward": usable})
            assert await environment.get_reward() == reward
        await environment.reset({"reward": float("nan")})
        with pytest.raises(EnvironmentCallError, match="`get_reward` returned nan"):
            await environment.get_reward()

    with_one("Full", use)


@pytest.mark.parametrize("method", ["wait", "wait_async"])
def test_after_a_time_out_the_instance_is_broken_and_refuses_every_call(method: str) -> None:
    async def use(environment: Environment) -> None:
        await environment.reset({})
        record = await call(environment, method)
        assert (record.result, record.failed) == ('{"error": "took longer than 0.3 s"}', True)
        for refused in (environment.is_done(), environment.reset({})):
            with pytest.raises(
                EnvironmentCallError, match=r"can no longer be used: .*raise `environments\.only\.timeout_s`"
            ):
                await refused
        assert "can no longer be used" in (await call(environment, "wait")).result

    with_one("Gated", use, timeout_s=0.3)


@pytest.mark.parametrize("second", ["wait", "wait_async"])
def test_calls_of_one_instance_never_overlap(second: str) -> None:
    """Not even with one that was given up, which goes on."""

    async def use(environment: Environment) -> None:
        given_up = asyncio.create_task(call(environment, "wait", number=1))
        await until(samples.entered.is_set)
        given_up.cancel()
        turn = asyncio.create_task(call(environment, second, number=2))
        await asyncio.sleep(0.01)  # time in which the second could begin
        samples.gate.set()
        await turn
        assert samples.events[1:] == ["begin 1", "end 1", "begin 2", "end 2"]

    with_one("Gated", use)


def test_an_instance_in_a_process_of_its_own_has_the_main_thread_there_and_its_state() -> None:
    """In a thread signal.signal raises. What hangs is killed, and the instance is not used again."""

    async def use(environment: Environment) -> Any:
        text = await environment.reset({"answer": 7})
        added, failed = await call(environment, "add", number=2), await call(environment, "add", number=0)
        assert (added.returned, failed.result) == ([4], '{"error": "ValueError: nothing to add"}')
        assert environment.instance.total == 4  # as a reward function reads it
        reward = await environment.get_reward()
        assert (await call(environment, "add", number=-1)).failed
        assert "took longer than 4 s" in (environment.broken or "")
        return text, reward, environment.kind.reward_name

    arguments = {"start": 1}
    assert with_one("Timed", use, run_in="process", timeout_s=4.0, arguments=arguments) == ("From 2.", 4.0, "Timed")
    with pytest.raises(EnvironmentCallError, match="main thread"):
        with_one("Timed", use)
