"""The tool, the agent and the examples learn: reward clearly above the start, on sampled and on held-out rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.code.prepare import TASK as CODE
from examples.game.prepare import TASK as GAME
from grpo_async.quickstart.prepare import prepare
from grpo_async.quickstart.tasks import Task
from tests.e2e.support import REPOSITORY, Run, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), pytest.mark.nightly]


def _train(config: str, task: str | Task, folder: Path) -> Run:
    prepare(REPOSITORY, task=task)
    run = make_run(folder, config)
    summary, _ = run.complete(timeout_s=900.0)
    assert summary["reward_last"] > summary["reward_first"] + 0.2, summary
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    assert after["reward"] > before["reward"] + 0.1, summary["evaluation"]
    return run


def test_a_model_learns_to_use_a_tool_in_two_turns(tmp_path: Path) -> None:
    run = _train("tools.yaml", "tool", tmp_path)
    first, last = run.metrics()[0], run.metrics()[-1]
    assert last["tools/call_frequency"] > first["tools/call_frequency"] + 0.3
    assert last["tools/failure_frequency"] < 0.2
    after = run.summary()["evaluation"]["after"]
    assert after["num_turns"] > 1.5
    assert after["reward"] > run.summary()["evaluation"]["majority_baseline"] + 0.4


def test_a_model_learns_inside_of_an_agent(tmp_path: Path) -> None:
    run = _train("../examples/agent/train.yaml", "tool", tmp_path)
    first, last = run.metrics()[0], run.metrics()[-1]
    assert last["rollout/num_turns"] > first["rollout/num_turns"] + 0.3  # it asks its calculator
    assert last["rewards/agent/mean"] == pytest.approx(last["reward"])
    assert run.summary()["evaluation"]["after"]["num_turns"] > 1.5


def test_a_model_learns_to_play_a_game_of_several_turns(tmp_path: Path) -> None:
    run = _train("../examples/game/train.yaml", GAME, tmp_path)
    last = run.metrics()[-1]
    assert last["rollout/done"] > 0.9
    assert last["rollout/num_turns"] > 1.5
    assert "rewards/GuessingGame/mean" in last


def test_a_model_learns_to_write_code_that_passes_its_tests(tmp_path: Path) -> None:
    _train("../examples/code/train.yaml", CODE, tmp_path)
