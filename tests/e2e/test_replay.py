"""A step of a real run, computed again: the same loss and gradient, and under other settings those of a run that had them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_async.quickstart.prepare import prepare
from tests.e2e.support import REPOSITORY, SMALL, Run, make_run, run_command

STEPS = ("training.max_steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=4", "evaluation=null")
LORA = ("model.lora={rank: 4}", "optimizer.lr=3e-3")
TWO_RANKS = ("launch.num_trainer_ranks=2",)
AGENT = (
    'rollout.agent={"function": "tests.e2e.agents:length", "reward_weight": 0.5}',
    "rollout.max_completion_tokens=24",
    "rollout.max_turn_tokens=16",
)
TOOL = ("rollout.max_completion_tokens=64",)


def _replayed(run: Run, step: int, *changes: str) -> dict[str, Any]:
    words = [word for change in changes for word in ("--set", change)]
    done = run_command("replay", str(run.folder), "--step", str(step), "--json", *words, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _assert_equal(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name in ("loss", "grad_norm", "entropy", "sampling/ess"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("quickstart.yaml", ("rollout.max_staleness=2",)),
        pytest.param("quickstart.yaml", LORA, marks=pytest.mark.nightly),
        pytest.param("quickstart.yaml", TWO_RANKS, marks=pytest.mark.nightly),
        pytest.param("tools.yaml", TOOL, marks=pytest.mark.nightly),
        pytest.param("quickstart.yaml", AGENT, marks=pytest.mark.nightly),
    ],
    ids=["asynchronous", "lora", "two ranks", "tools", "agent"],
)
def test_a_step_has_the_loss_and_the_gradient_that_the_run_recorded(
    tmp_path: Path, base: str, settings: tuple[str, ...]
) -> None:
    if base == "tools.yaml":
        prepare(REPOSITORY, task="tool")
    run = make_run(tmp_path, base, [*SMALL, *STEPS, *settings])
    run.complete()
    for step in (1, 3):
        found = _replayed(run, step)
        _assert_equal(found["own"], found["recorded"])
        assert found["other"] is None


def brevity(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    return [len(str(gold)) - len(ids) / 10 for ids, gold in zip(completion_ids, answer, strict=True)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ((), ("loss={type: cispo}", "advantage.type=none")),
        ((), ("rewards=[{function: grpo_async.rewards.text:exact_match}, {function: tests.e2e.test_replay:brevity}]",)),
        (
            ("rollout.overlong=mask", "rollout.max_completion_tokens=8", "rollout.groups_per_step=16"),
            ("rollout.overlong=train",),
        ),
    ],
    ids=["loss and advantage", "other rewards", "truncated completions"],
)
def test_with_other_settings_it_is_the_step_of_a_run_that_trained_with_them(
    tmp_path: Path, settings: tuple[str, ...], changes: tuple[str, ...]
) -> None:
    """A synchronous run, and a fork of its second step: the same rollouts."""
    run = make_run(tmp_path, "quickstart.yaml", [*SMALL, *STEPS, "rollout.max_staleness=0", *settings])
    run.complete()
    forked = Run(config=run.config, folder=tmp_path / "forked")
    words = [word for change in (*changes, "run.name=forked") for word in ("--set", change)]
    forked.end(forked.start("--fork", f"{run.folder}@2", *words))
    found = _replayed(run, 3, *changes)
    _assert_equal(found["other"], forked.metrics()[2])
    _assert_equal(found["own"], run.metrics()[2])
    assert 0.0 < abs(found["cosine"]) <= 1.0 + 1e-6
    (_, _, _, own, other), *_ = found["tokens"]
    assert abs(own - other) > 1e-6
    assert json.loads((run.folder / "replays" / "step_3.1.json").read_text())["cosine"] == found["cosine"]
