"""The `environments` sections of a config, and which one a row uses."""

from __future__ import annotations

import asyncio

import pytest

from grpo_async.envs import load_environments
from grpo_async.errors import ConfigError
from tests.envs.helpers import SAMPLES, loaded, section


def test_every_problem_of_every_environment_is_in_one_error() -> None:
    sections = {name: section(name) for name in ("NoReset", "Ful")}
    sections["Extra"] = section("Full", arguments={"url": "x"})
    sections["good"] = section("Full")
    with pytest.raises(ConfigError) as caught:
        load_environments(sections)
    lines = str(caught.value).splitlines()
    starts = [
        f"environments.NoReset.factory: {SAMPLES}:NoReset: makes a NoReset, which has no method `reset(**row)`",
        f"environments.NoReset.factory: {SAMPLES}:NoReset: `nod` is a public method, so a tool, but cannot be",
        f"environments.Ful.factory: {SAMPLES}:Ful: `{SAMPLES}` has no `Ful` at the top level of its file; did you mean",
        f"environments.Extra.factory: {SAMPLES}:Full: making an instance raised TypeError: Full.__init__() got an",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_rows_select_by_the_column_and_reset_does_not_see_it() -> None:
    with loaded(full=section("Full"), bare=section("Bare")) as environments:

        async def run() -> dict[str, object]:
            row = {"environment": "full", "level": 2}
            async with environments.for_row(row).lease(1) as (environment,):
                await environment.reset(row)
                seen: dict[str, object] = environment.instance.row
                return seen

        assert asyncio.run(run()) == {"level": 2}
        assert environments.for_row({"environment": "bare"}).name == "bare"
        assert len(environments.for_row({"environment": "full"}).schemas) == 4
        assert environments.for_row({"environment": "bare"}).schemas == []


def test_rows_that_select_no_environment_are_reported_with_the_names_of_all() -> None:
    with loaded(full=section("Full"), bare=section("Bare")) as environments:
        unknown, missing = environments.check_rows([{"environment": "full"}, {"environment": "fulls"}, {"prompt": "p"}])
        assert unknown.startswith("row 1:")
        assert "says 'fulls', but the environments are ['full', 'bare']; did you mean 'full'?" in unknown
        assert "the column `environment` is missing" in missing
        with pytest.raises(ConfigError, match="says 'fulls'"):
            environments.for_row({"environment": "fulls"})


def test_reward_weights_are_by_class_and_one_class_has_one_weight() -> None:
    """R1.13"""
    sections = {"a": section("Full", reward_weight=0.5), "b": section("Full", reward_weight=0.5), "c": section("Bare")}
    with loaded(**sections) as environments:
        assert environments.reward_weights == {"Full": 0.5}
        assert not environments.all_have_rewards
    with loaded(a=section("Full")) as environments:
        assert environments.all_have_rewards
    with pytest.raises(ConfigError, match=r"a and b are both Full, .* differ"):
        load_environments({"a": section("Full", reward_weight=0.5), "b": section("Full")})
