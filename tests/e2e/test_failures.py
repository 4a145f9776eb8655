"""Signals and deaths in the middle of a real run: the cause is named, nothing is left behind, --resume goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from grpo_async.store import read_groups, scan_groups
from tests.e2e.support import Run, finish, make_run, wait_for

pytestmark = pytest.mark.slow

ENDLESS = (
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "training.max_steps=5000",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=2",
    "evaluation.num_prompts=4",
)


def _run(folder: Path, *more: str) -> Run:
    return make_run(folder, "quickstart.yaml", (*ENDLESS, *more))


def _settled_prompts(run: Run) -> dict[int, list[str]]:
    """Statuses of every prompt in the order in which they were written."""
    statuses: dict[int, list[str]] = {}
    for stored in scan_groups(run.folder / "rollouts", with_superseded=True):
        statuses.setdefault(stored.row.prompt_id, []).append(stored.row.status.value)
    return statuses


def test_sigint_checkpoints_and_resume_goes_on_without_skipping_a_prompt(tmp_path: Path) -> None:
    run = _run(tmp_path)
    process = run.start()
    run.wait_for_step(3, process)
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout_s=60.0)
    assert done.returncode == 130, done.stdout[-3000:]
    run.assert_nothing_is_left()
    stopped_at = len(run.metrics())
    assert (run.folder / "checkpoints" / f"step_{stopped_at}" / "state.json").exists()
    assert run.summary()["status"] == "stopped"
    assert run.summary()["ledger_closed"]
    cancelled = {prompt for prompt, statuses in _settled_prompts(run).items() if statuses[-1] == "cancelled"}
    assert cancelled, "a run that is stopped has groups in flight"

    resumed = run.train("--resume", "--set", f"training.max_steps={stopped_at + 4}")
    assert resumed.returncode == 0, resumed.stdout[-3000:] + run.logs()[-3000:]
    assert [line["step"] for line in run.metrics()] == list(range(1, stopped_at + 5))
    statuses = _settled_prompts(run)
    assert sorted(statuses) == list(range(len(statuses)))
    assert all(len(statuses[prompt]) > 1 for prompt in cancelled), "a prompt in flight at the stop was not issued again"
    assert run.summary()["ledger_closed"]


def test_killing_the_launcher_leaves_no_process_and_resume_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = _run(tmp_path)
    process = run.start()
    run.wait_for_step(3, process)
    # it is written beside training
    wait_for(lambda: any((run.folder / "checkpoints").glob("step_*")), what="a checkpoint", timeout_s=60.0)
    process.kill()
    process.communicate(timeout=30.0)
    run.assert_nothing_is_left()
    steps = sorted(int(path.name.removeprefix("step_")) for path in (run.folder / "checkpoints").glob("step_*"))
    assert steps[-1] >= 2
    state = json.loads((run.folder / "checkpoints" / f"step_{steps[-1]}" / "state.json").read_text())
    settled_before = {stored.row.seq for stored in scan_groups(run.folder / "rollouts", with_superseded=True)}
    resumed = run.train("--resume", "--set", f"training.max_steps={steps[-1] + 2}")
    assert resumed.returncode == 0, resumed.stdout[-3000:] + run.logs()[-3000:]
    assert [line["step"] for line in run.metrics()] == list(range(1, steps[-1] + 3))
    issued = {row.prompt_id for row in read_groups(run.folder / "rollouts") if row.seq not in settled_before}
    # at most (max_staleness + 1) x 4 = 8 prompts were open at the checkpoint: all come again, then the next ones in order
    outstanding = set(state["rollouts"]["outstanding"])
    assert outstanding <= issued
    following = sorted(issued - outstanding)
    begin = state["rollouts"]["data"]["next_prompt_id"]
    assert following == list(range(begin, begin + len(following)))


def test_killing_a_server_that_may_not_be_restarted_ends_the_run_with_its_name_and_no_orphan(tmp_path: Path) -> None:
    run = _run(tmp_path, "inference.max_restarts=0")
    process = run.start()
    run.wait_for_step(2, process)
    (server,) = run.processes("serve-embedded")
    server.kill()
    done = finish(process, timeout_s=60.0)
    assert done.returncode == 1
    assert "inference server" in done.stdout
    assert "SIGKILL" in done.stdout
    run.assert_nothing_is_left()


def test_killing_a_rank_ends_the_run_with_its_number_and_no_orphan(tmp_path: Path) -> None:
    run = _run(tmp_path, "launch.num_trainer_ranks=2")
    process = run.start()
    run.wait_for_step(2, process)
    ranks = {int(p.environ()["RANK"]): p for p in run.processes("grpo_async.launch.trainer") if "RANK" in p.environ()}
    assert sorted(ranks) == [0, 1]
    ranks[1].kill()
    done = finish(process, timeout_s=90.0)
    assert done.returncode == 1
    assert "rank 1" in done.stdout
    assert "SIGKILL" in done.stdout
    run.assert_nothing_is_left()


def test_a_reward_that_always_raises_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    run = _run(tmp_path)
    config = run.config.read_text()
    run.config.write_text(config + "rewards:\n- function: tests.e2e.broken_reward:always_raises\n")
    done = run.train(timeout_s=120.0)
    assert done.returncode == 1
    assert "this reward never works" in done.stdout
    run.assert_nothing_is_left()


def test_no_process_of_a_run_listens_beyond_loopback(tmp_path: Path) -> None:
    run = _run(tmp_path, "launch.num_trainer_ranks=2")
    process = run.start()
    run.wait_for_step(1, process)
    listening = [
        (p.cmdline(), connection.laddr)
        for p in run.processes()
        for connection in p.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1")
    ]
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=60.0)
    assert listening == []
    assert done.returncode == 143


def test_a_run_with_nothing_to_learn_stops_with_the_cause_and_a_checkpoint(tmp_path: Path) -> None:
    run = _run(tmp_path, "rollout.max_rounds_without_signal=2")
    run.config.write_text(run.config.read_text() + "rewards:\n- function: tests.e2e.broken_reward:always_zero\n")
    done = run.train(timeout_s=120.0)
    assert done.returncode == 1
    assert "8 groups in a row had nothing to learn from" in done.stdout  # 2 rounds of 4
    assert (run.folder / "checkpoints" / "step_0" / "state.json").exists()
    run.assert_nothing_is_left()


def test_a_stop_before_the_server_is_ready_is_no_failure(tmp_path: Path) -> None:
    """Nothing listens there: the trainer waits for it."""
    run = _run(tmp_path, "inference.urls=[http://127.0.0.1:9]")
    process = run.start()
    assert process.stdout is not None
    while "waiting for the server" not in (line := process.stdout.readline()):
        assert line, run.logs()
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=60.0)
    assert done.returncode == 143, done.stdout
    run.assert_nothing_is_left()
