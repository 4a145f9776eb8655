"""Who makes the rollouts of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError
from grpo_async.rollout.participants import load_participants
from tests.launcher.sides import open_side, side_config, steps_seen, take
from tests.launcher.support import make_config
from tests.support.local_server import Request, local_server

FUNCTION = {"function": "tests.launcher.sides:steps_seen"}
TOOL = {"function": "grpo_async.tools.calculator:calculator"}


def test_a_rollout_function_takes_the_place_of_our_own_rollouts(tiny_model: Path, tmp_path: Path) -> None:
    """R5.5: the samples are the function's, and the server is not asked for a single token."""

    async def never(request: Request) -> AsyncIterator[bytes]:
        raise AssertionError("our own rollouts ran")
        yield b""

    steps_seen.begin()
    config = side_config(tmp_path, tiny_model, rollout_function=FUNCTION)
    with local_server(never) as server, open_side(config, server) as side:
        side.source.start()
        groups = take(side, 2)
        assert groups is not None
        firsts = [sample.token_ids[2] for group in groups for sample in group.samples]
        assert firsts == [10, 11, 10, 11]
        assert server.requests == []
    assert steps_seen.steps[0] == 0


@pytest.mark.parametrize(
    "beside",
    [{"tools": [TOOL]}, {"environments": {"game": {"factory": "grpo_async.envs.guessing_game:GuessingGame"}}}],
    ids=["tools", "environments"],
)
def test_a_rollout_function_beside_tools_or_environments_is_refused_with_the_reason(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    """R4.4: such a function bypasses the tool loop, so what is configured for it would silently not be used."""
    with pytest.raises(
        ValueError, match=r"rollout_function\.function: .*`tools` and `environments` are not used.*remove one"
    ):
        make_config(tmp_path, rollout_function=FUNCTION, **beside)


def test_the_refusal_of_tools_beside_a_rollout_function_names_the_file(tmp_path: Path) -> None:
    """R4.4: refused at start, when the file is read."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "run: {name: test}\nmodel: {path: m}\ndata: {train: {path: d.jsonl}}\n"
        f"rewards: [{{function: {FUNCTION['function']}}}]\n"
        f"tools: [{{function: {TOOL['function']}}}]\n"
        f"rollout_function: {{function: {FUNCTION['function']}}}\n"
    )
    with pytest.raises(ConfigError, match=r"config\.yaml:6: rollout_function\.function: .*it makes the whole rollout"):
        load_config(file)


def test_a_rollout_function_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout_function={"function": "tests.launcher.sides:nowhere"})
    with pytest.raises(ConfigError, match=r"rollout_function\.function: tests\.launcher\.sides:nowhere: .*nowhere"):
        load_participants(config)


def one_argument(prompts: list[Any]) -> dict[str, Any]:
    return {}


def test_a_rollout_function_that_cannot_be_called_as_one_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout_function={"function": "tests.rollout.test_participants:one_argument"})
    with pytest.raises(
        ConfigError, match=r"one_argument: it is called as f\(prompts, trainer\), but: too many positional"
    ):
        load_participants(config)
