"""A file of environments, tools and reward functions written for TRL runs unchanged."""

from __future__ import annotations

import asyncio

from grpo_async.config.sections import ToolSection
from grpo_async.envs import Environment, load_environments
from grpo_async.tools import load_tools
from tests.envs import trl_style_environment
from tests.envs.helpers import TRL, call, section, with_one


def test_the_echo_environment_of_the_documentation() -> None:
    async def use(environment: Environment) -> None:
        assert await environment.reset({"prompt": [{"role": "user", "content": "Echo hi"}]}) is None
        assert [tool.name for tool in environment.tools] == ["echo"]
        assert (await call(environment, "echo", message="hi")).result == "hi"
        assert await environment.is_done() is False
        assert await environment.get_reward() is None
        assert environment.reward_name is None
        assert trl_style_environment.reward_func([environment.instance], completions=["x"]) == [0.2]

    with_one(f"{TRL}:EchoToolEnv", use)


def test_game_over_reaches_the_model() -> None:
    """R3.3: an exception from a tool of a finished environment."""

    async def use(environment: Environment) -> None:
        assert await environment.reset({"word": "crane"}) == "You have 6 tries to guess a word of 5 letters."
        assert (await call(environment, "guess", guess="[caves]")).result == "C A V E S\nG Y X Y X"
        assert (await call(environment, "guess", guess="[crane]")).result == "C R A N E\nG G G G G"
        after = await call(environment, "guess", guess="[crane]")
        assert (after.result, after.failed) == ('{"error": "ValueError: Game over."}', True)
        assert trl_style_environment.reward_func([environment.instance]) == [1.0]

    with_one(f"{TRL}:WordleEnv", use)


def test_tools_beside_an_environment() -> None:
    tools = load_tools([ToolSection(function=f"{TRL}:{name}") for name in ("multiply", "async_add")])
    environments = load_environments({"word": section(f"{TRL}:WordleEnv")}, tools)
    names = [schema["function"]["name"] for schema in environments.schemas_for({})]
    assert names == ["multiply", "async_add", "guess"]
    assert environments.for_row({}).schemas == environments.schemas_for({})
    asyncio.run(environments.close())
