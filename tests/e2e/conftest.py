"""The quickstart's model and data, made once, and one finished run of them for all tests that look at what a run leaves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.e2e.support import REPOSITORY, Run, make_run, run_command


@pytest.fixture(scope="session", autouse=True)
def quickstart_files() -> None:
    from grpo_async.quickstart.prepare import prepare

    prepare(REPOSITORY)


@dataclass(frozen=True, slots=True)
class GoldenRun:
    """Four steps with `--json-logs`, then a resume to six: two evaluations and checkpoints in it, two updates a step of which the
    second clips. Read only."""

    run: Run
    json_logs: str


@pytest.fixture(scope="session")
def golden_run(quickstart_files: None, tmp_path_factory: pytest.TempPathFactory) -> GoldenRun:
    settings = (
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "evaluation.num_prompts=16",
        "evaluation.every_steps=3",
        "checkpoint.every_steps=2",
        "training.micro_batch_tokens=512",
        "training.minibatches=2",
        "optimizer.warmup_steps=0",
        "optimizer.lr=1.0e-3",
        "loss.epsilon=0.02",
        "loss.epsilon_high=0.02",
        "record.advise_every_steps=2",
        "record.report=true",
        "training.max_steps=4",
    )
    run = make_run(tmp_path_factory.mktemp("golden"), "quickstart.yaml", settings)
    first = run_command("train", str(run.config), "--json-logs")
    assert first.returncode == 0, first.stderr[-3000:] + run.logs()[-3000:]
    again = run_command("train", str(run.config), "--resume", "latest", "--set", "training.max_steps=6")
    assert again.returncode == 0, again.stderr[-3000:] + run.logs()[-3000:]
    return GoldenRun(run, first.stdout)
