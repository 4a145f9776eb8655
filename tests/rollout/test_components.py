"""Who makes the rollouts of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from grpo_async.errors import ConfigError
from grpo_async.rollout.components import load_components
from tests.launcher.support import make_config
from tests.support.local_server import Request, local_server
from tests.trainer.sides import open_side, side_config, steps_seen, take

FUNCTION = {"function": "tests.trainer.sides:steps_seen"}


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
        assert side.first_prompt_ids == []
    assert steps_seen.steps[0] == 0


def one_argument(prompts: list[Any]) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tests.trainer.sides:nowhere", r"rollout_function\.function: tests\.trainer\.sides:nowhere: .*nowhere"),
        (
            "tests.rollout.test_components:one_argument",
            r"one_argument: does not take \(prompts, trainer\): too many positional .* called as f\(prompts, trainer\)$",
        ),
        ("builtins:max", r"max: has no signature that can be read; wrap it in a `def`"),
    ],
)
def test_a_rollout_function_that_cannot_be_found_or_called_is_named_before_anything_starts(
    tmp_path: Path, function: str, message: str
) -> None:
    config = make_config(tmp_path, rollout_function={"function": function})
    with pytest.raises(ConfigError, match=message):
        load_components(config)
