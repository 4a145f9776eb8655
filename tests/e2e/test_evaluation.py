"""Evaluations of real runs: beside training, pinned, over a kill, and of the models that came out of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import GoldenRun
from tests.e2e.support import REPOSITORY, make_run, rows_of, run_command
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

# 2 groups of 4 per step; evaluations that last for some steps: 12 prompts x 4 samples, 8 at once
SMALL = (
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.zero_variance=train",
    "optimizer.warmup_steps=0",
    "optimizer.lr=0.001",
    "evaluation.num_prompts=12",
    "evaluation.samples_per_prompt=4",
    "evaluation.temperature=1.0",
    "evaluation.every_steps=2",
    "evaluation.max_in_flight=8",
    "evaluation.group_by=answer",
)
STEPS = 16
NUMBERS = ("num_prompts", "reward", "pass@1", "mean_length", "truncated")


def test_training_goes_on_while_an_evaluation_runs_and_its_numbers_stay_apart(tmp_path: Path) -> None:
    keep = ("checkpoint.every_steps=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    run = make_run(
        tmp_path, "quickstart.yaml", (*SMALL, *keep, f"training.max_steps={STEPS}", "rollout.max_staleness=2")
    )
    summary, _ = run.complete()
    lines, log = run.metrics(), run.evaluations()
    # the step that reports an evaluation, and the one at whose end it began: those between were made meanwhile
    reported = [(line["step"], int(line["eval/step"])) for line in lines if "eval/step" in line]
    meanwhile = [step - began - 1 for step, began in reported if began > 0]
    assert max(meanwhile, default=0) >= 1
    done = {record["step"]: record["metrics"] for record in log if "metrics" in record and record["when"] == "during"}
    # it begins with the version of its step; training, which goes on meanwhile, may have pushed the next before its first token
    assert all(metrics["version_min"] in (step, step + 1) for step, metrics in done.items())
    assert any(metrics["version_min"] == step for step, metrics in done.items())
    assert any(metrics["mixed"] == 1.0 and metrics["version_max"] > step for step, metrics in done.items())
    # every due step is in the log once: done, or left out because another ran
    assert sorted(record["step"] for record in log) == list(range(0, STEPS + 1, 2))
    assert all("still running" in record["skipped"] for record in log if "metrics" not in record)
    # the last checkpoint, and the one with the best evaluation during training (of equal ones the newer)
    best = max((metrics["reward"], step) for step, metrics in done.items())[1]
    assert set(run.checkpoints()) == {best, STEPS}
    # the tokens of evaluations are none of training's
    generated = sum(line["perf/generated_tokens_per_s"] * line["step_time"] for line in lines)
    assert generated == pytest.approx(lines[-1]["ledger/tokens/started"], rel=0.15)
    # parts of the data
    after = summary["evaluation"]["after"]
    by_answer = summary["evaluation"]["by_group"]["after"]
    assert sum(part["num_prompts"] for part in by_answer.values()) == after["num_prompts"] == 12
    rows = rows_of(run.folder, "--evaluation", "latest")
    assert len(rows) == 12
    mean = sum(rollout["reward"] for row in rows for rollout in row["rollouts"]) / 48
    assert mean == pytest.approx(after["reward"])


@pytest.mark.nightly
def test_a_pinned_evaluation_is_answered_by_one_version_and_nothing_of_training_is_lost(tmp_path: Path) -> None:
    # completions of nearly one length: a group that is done before an older one would leave that to go stale, evaluation or not
    even = ("rollout.max_completion_tokens=6", "evaluation.num_prompts=64")
    settings = (*SMALL, *even, "training.max_steps=9", "rollout.max_staleness=1", "evaluation.pin_version=true")
    run = make_run(tmp_path, "quickstart.yaml", settings)
    summary, _ = run.complete()
    lines = run.metrics()
    during = [record for record in run.evaluations() if record["when"] == "during" and "metrics" in record]
    assert during
    for record in during:
        metrics = record["metrics"]
        assert metrics["mixed"] == 0.0
        assert metrics["version_min"] == metrics["version_max"] == record["step"]
    assert any("sync/held" in line for line in lines)  # the trainer made steps meanwhile
    assert all(line.get("async/staleness_max", 0.0) <= 1 for line in lines)
    assert summary["ledger"]["groups"]["stale"] == 0
    assert summary["ledger"]["groups"]["trained"] == 18
    assert summary["evaluation"]["after"]["version_min"] == 9


def test_eval_finds_in_the_last_checkpoint_what_the_run_found(golden_run: GoldenRun) -> None:
    """Greedy, float32 throughout: what is exported from the checkpoint is the policy of the run's last evaluation."""
    done = run_command("eval", str(golden_run.run.config), "--json-logs", "--checkpoint", "latest")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert found["evaluated"] == "step_6"
    after = golden_run.run.summary()["evaluation"]["after"]
    assert [found["metrics"][name] for name in NUMBERS] == [after[name] for name in NUMBERS]


@pytest.mark.nightly
def test_eval_that_is_interrupted_ends_at_once_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    settings = ("evaluation.samples_per_prompt=8", "evaluation.temperature=1.0", "evaluation.max_in_flight=1")
    run = make_run(tmp_path, "quickstart.yaml", settings)
    model = REPOSITORY / ".cache" / "quickstart" / "seed_0" / "model"
    process = run.start("--checkpoint", str(model), command="eval")
    folder = tmp_path / "run.eval-model"
    blocks = folder / "evaluations" / "step_0"
    assert eventually(lambda: any(path.stat().st_size for path in blocks.glob("block-*")), 120.0), "rollouts"
    process.send_signal(signal.SIGINT)
    run.end(process, 130, timeout_s=60.0)
    assert not (folder / "evaluation.json").exists()
    assert not (folder / "token").exists()
