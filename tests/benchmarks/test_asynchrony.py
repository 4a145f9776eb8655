"""The benchmark of asynchrony: its arithmetic by hand, the command of its runs, and its report."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import asynchrony
from benchmarks.asynchrony import RunFigures, figures
from benchmarks.report import Report


def _line(step: int, wall: float, *, trainer_idle: float, generator_idle: float, reward: float) -> dict[str, float]:
    return {
        "step": step,
        "step_time": wall,
        "pipeline/trainer_idle_ratio": trainer_idle,
        "pipeline/generator_idle_ratio": generator_idle,
        "pipeline/training_share": 0.5,
        "pipeline/pushing_share": 0.1,
        "perf/trained_tokens_per_s": 100.0 * step,
        "async/staleness_mean": 1.0,
        "reward": reward,
    }


def test_the_steady_state_is_weighted_by_time_and_the_target_counts_from_the_first_step() -> None:
    lines = [
        _line(1, 9.0, trainer_idle=0.9, generator_idle=0.0, reward=0.0),
        _line(2, 2.0, trainer_idle=0.5, generator_idle=0.25, reward=0.3),
        _line(3, 4.0, trainer_idle=0.0, generator_idle=0.375, reward=0.6),
        _line(4, 1.0, trainer_idle=0.0, generator_idle=1.0, reward=0.9),
    ]
    found = figures(lines, skip=1, last=1, target=0.6)
    assert found.step_s == 3.0  # (2 + 4) / 2
    assert found.wait_s == 0.5  # 2 x 0.5 / 2
    assert found.work_s == 2.5
    assert found.busy_s == 2.0  # (1.5 + 2.5) / 2
    assert found.generator_idle == pytest.approx(1 / 3)
    assert found.trainer_idle == pytest.approx(1 / 6)
    assert found.overlap == pytest.approx(5 / 6)  # the trainer's 5 s of 6
    assert found.tokens_per_s == pytest.approx((200 * 2 + 300 * 4) / 6)
    assert found.training_s == pytest.approx(1.5)
    assert found.push_s == pytest.approx(0.3)
    assert found.target_s == 16.0  # (0.3 + 0.6 + 0.9) / 3 after the last step
    assert found.wall_s == 16.0
    assert figures(lines, skip=1, last=1, target=0.7).target_s is None


def test_the_reward_counts_digits_and_those_that_follow_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchrony, "MAX_COMPLETION_TOKENS", 4)
    assert asynchrony.digits(["p"] * 4, ["12a7", "", "9012", [{"role": "assistant", "content": "a5"}]]) == [
        0.5 * 3 / 4 + 0.5 * 1 / 4,
        0.0,
        0.5 * 4 / 4 + 0.5 * 3 / 4,
        0.5 * 1 / 4,
    ]


@pytest.mark.nightly
def test_the_command_of_a_run_could_start_and_only_the_staleness_differs(tmp_path: Path) -> None:
    config = asynchrony.make_compute(tmp_path, asynchrony.Shape(hidden=32, layers=1), seed=0)
    options = Namespace(seed=3, staleness=2, steps=4, engine="embedded", set=["training.micro_batch_tokens=512"])
    synchronous, asynchronous = (
        asynchrony.command(config, tmp_path / "one", variant, options)
        for variant in (asynchrony.SYNCHRONOUS, asynchrony.ASYNCHRONOUS)
    )
    assert set(synchronous) ^ set(asynchronous) == {"rollout.max_staleness=0", "rollout.max_staleness=2"}
    done = subprocess.run(
        [*asynchronous, "--dry-run"], cwd=asynchrony.ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _figures(**changed: float) -> RunFigures:
    figures = {"step_s": 5.0, "wait_s": 2.0, "busy_s": 2.0, "training_s": 2.5, "push_s": 0.5, "tokens_per_s": 100.0,
               "generator_idle": 0.6, "trainer_idle": 0.4, "overlap": 0.6, "staleness": 0.0, "ess": 1.0,
               "wall_s": 60.0}  # fmt: skip
    return RunFigures(**{**figures, **changed}, target_s=None)


def test_the_median_of_the_pairs_decides_with_the_ideal_of_each_pair() -> None:
    """Pairs of 5 s (2 waiting) and of 4 s (1 waiting), whose ideals are 5/3 and 4/3."""
    runs = {
        asynchrony.SYNCHRONOUS: [_figures(), _figures(step_s=4.0, wait_s=1.0), _figures()],
        asynchrony.ASYNCHRONOUS: [
            _figures(step_s=seconds, tokens_per_s=150.0, overlap=overlap)
            for seconds, overlap in ((4.0, 0.95), (4.0, 0.8), (3.0, 0.99))
        ],
    }
    report = Report("asynchrony", {"seed": 0})
    asynchrony._tell(report, runs, 0.5)
    rows = {row.name: row.values for row in report.rows}
    assert rows["speed-up"] == pytest.approx([5 / 4, 4 / 4, 5 / 3])
    assert rows["speed-up in trained tokens"] == pytest.approx([1.5] * 3)
    assert rows["ideal speed-up, (g + t) / max(g, t)"] == pytest.approx([5 / 3, 4 / 3, 5 / 3])
    assert rows["speed-up / ideal"] == pytest.approx([0.75, 0.75, 1.0])
    assert rows["synchronous: steps"] == pytest.approx([720.0, 900.0, 720.0])
    found = [(target.what, target.value, target.met) for target in report.targets]
    assert found == [
        ("speed-up / ideal", pytest.approx(0.75), False),
        ("overlap efficiency", 0.95, True),
    ]
