"""The benchmark of asynchrony: its arithmetic by hand, the command of its runs, and its report."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import _asynchrony_workload as workload
from benchmarks import asynchrony
from benchmarks._contention import Loops, Slowdown
from benchmarks.asynchrony import RunFigures, _together_s, figures
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
    monkeypatch.setattr(workload, "MAX_COMPLETION_TOKENS", 4)
    assert workload.digits(["p"] * 4, ["12a7", "", "9012", [{"role": "assistant", "content": "a5"}]]) == [
        0.5 * 3 / 4 + 0.5 * 1 / 4,
        0.0,
        0.5 * 4 / 4 + 0.5 * 3 / 4,
        0.5 * 1 / 4,
    ]


def test_the_command_of_a_run_could_start_and_only_the_staleness_differs(tmp_path: Path) -> None:
    config = workload.make_compute(tmp_path, workload.Shape(hidden=32, layers=1), seed=0)
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


@pytest.mark.nightly
def test_the_benchmark_measures_the_machine_and_compares_step_with_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(config: Path, rundir: Path, variant: str, options: Namespace) -> list[dict[str, float]]:
        if variant == asynchrony.SYNCHRONOUS:  # waits 2 s of 5, works 3
            return [_line(n, 5.0, trainer_idle=0.4, generator_idle=0.6, reward=0.1 * n) for n in range(1, 6)]
        # the last two steps: nothing is left to generate
        walls = [1.0, 3.2, 3.2, 1.0, 1.0]
        return [_line(n, wall, trainer_idle=0.05, generator_idle=0.2, reward=0.1) for n, wall in enumerate(walls, 1)]

    monkeypatch.setattr(asynchrony, "_run", lines)
    file = tmp_path / "report.json"
    sizes = ["--hidden", "64", "--layers", "1", "--pairs", "1", "--steps", "5", "--skip", "1", "--contention-s", "0.1"]
    code = asynchrony.main([*sizes, "--target-reward", "0.35", "--json", str(file)])
    report = json.loads(file.read_text(encoding="utf-8"))
    assert code == (0 if all(target["met"] for target in report["targets"]) else 1)
    rows = {row["name"]: row["median"] for row in report["rows"]}
    assert rows["speed-up"] == pytest.approx(5.0 / 3.2)
    assert rows["speed-up in trained tokens"] == 1.0  # the same in these lines, whatever the seconds
    assert rows["ideal speed-up, (g + t) / max(g, t)"] == pytest.approx(5.0 / 3.0)
    assert rows["speed-up / ideal"] == pytest.approx(3.0 / 3.2)
    by = Slowdown(
        training=rows["slow-down of a training loop beside a generating one"],
        generation=rows["slow-down of a generating loop beside a training one"],
    )
    assert rows["ideal speed-up on this machine"] == pytest.approx(5.0 / _together_s(2.0, 3.0, by))
    assert rows["synchronous: time to reward 0.35"] == 25.0  # (0.3 + 0.4 + 0.5) / 3 >= 0.35 after the fifth
    assert report["targets"][2]["value"] == pytest.approx(0.95)
    assert any("asynchronous: 0 of 1 runs reached" in note for note in report["notes"])


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
    slowdowns = [Slowdown(training=1.0, generation=1.0), *2 * [Slowdown(training=1.5, generation=1.5)]]
    asynchrony._tell(report, runs, slowdowns, Namespace(target_reward=0.5))
    rows = {row.name: row.values for row in report.rows}
    assert rows["speed-up"] == pytest.approx([5 / 4, 4 / 4, 5 / 3])
    assert rows["speed-up in trained tokens"] == pytest.approx([1.5] * 3)
    assert rows["ideal speed-up, (g + t) / max(g, t)"] == pytest.approx([5 / 3, 4 / 3, 5 / 3])
    assert rows["speed-up / ideal"] == pytest.approx([0.75, 0.75, 1.0])
    assert rows["synchronous: steps"] == pytest.approx([720.0, 900.0, 720.0])
    found = [(target.what, target.value, target.met) for target in report.targets]
    # on this machine: 5 / 3; 1 s and 3 s slowed by 1.5 take 3.5 s; 2 s and 3 s take 4 s
    here = [5 / 4 / (5 / 3), 1.0 / (4 / 3.5), 5 / 3 / (5 / 4)]
    assert found == [
        ("speed-up / ideal", pytest.approx(0.75), False),
        ("speed-up / ideal on this machine", pytest.approx(sorted(here)[1]), False),
        ("overlap efficiency", 0.95, True),
    ]


def test_a_slow_down_is_the_speed_alone_over_the_speed_beside_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training: 9 iterations a second alone, 11 at the end, 8 together. Generation: 10, 10 and 5."""
    told = iter([{"training": 9.0}, {"generation": 10.0}, {"training": 8.0, "generation": 5.0}, {"training": 11.0},
                 {"generation": 10.0}])  # fmt: skip
    monkeypatch.setattr(Loops, "__init__", lambda self: None)
    monkeypatch.setattr(Loops, "_run", lambda self, kinds, seconds: next(told))
    assert Loops().measure(1.0) == Slowdown(training=1.25, generation=2.0)


def test_only_the_time_that_both_compute_is_slowed_down() -> None:
    by = Slowdown(training=1.3, generation=1.3)
    assert _together_s(0.3, 0.7, by) == pytest.approx(0.79)
    assert _together_s(0.7, 0.3, by) == pytest.approx(0.79)
    assert _together_s(0.5, 0.5, by) == pytest.approx(0.65)
    assert _together_s(0.3, 0.7, Slowdown(training=1.0, generation=1.0)) == pytest.approx(0.7)
