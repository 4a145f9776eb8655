"""Signals and deaths in the middle of a real run: the cause is named, nothing is left behind, --resume goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.support import SMALL, Run, make_run, rewards, status_of
from tests.support.stored import read_groups, scan_groups

pytestmark = pytest.mark.slow

ENDLESS = (*SMALL, "training.max_steps=5000", "checkpoint.every_steps=2", "evaluation.num_prompts=4")


def _run(folder: Path, *more: str) -> Run:
    return make_run(folder, "quickstart.yaml", (*ENDLESS, *more))


def _statuses(run: Run) -> dict[int, list[str]]:
    """Statuses of every prompt in the order in which they were written."""
    statuses: dict[int, list[str]] = {}
    for stored in scan_groups(run.folder / "rollouts"):
        statuses.setdefault(stored.row.prompt_id, []).append(stored.row.status.value)
    return statuses


def test_after_ctrl_c_and_after_a_kill_of_the_launcher_a_resume_goes_on_without_skipping_a_prompt(
    tmp_path: Path,
) -> None:
    """One run of three lives: interrupted, its launcher killed, finished."""
    run = _run(tmp_path, "record.report=true")
    process = run.start()
    run.wait_for_step(2, process)
    process.send_signal(signal.SIGINT)
    run.end(process, 130, timeout_s=60.0)
    stopped_at = len(run.metrics())
    assert run.checkpoints()[-1] == stopped_at
    assert run.summary()["status"] == "stopped"
    assert run.summary()["ledger_closed"]
    assert "The run was stopped after" in (run.folder / "report.html").read_text(encoding="utf-8")
    cancelled = {prompt for prompt, statuses in _statuses(run).items() if statuses[-1] == "cancelled"}
    assert cancelled, "a run that is stopped has groups in flight"

    process = run.start("--resume")
    run.wait_for_step(stopped_at + 2, process)
    # it is written beside training
    run.wait_for(lambda: run.checkpoints()[-1] > stopped_at, process, what="a checkpoint of the second life")
    code, status = status_of(run.folder)
    assert (code, status["state"], status["pid"]) == (0, "running", process.pid)
    process.kill()
    process.communicate(timeout=30.0)
    run.assert_nothing_is_left()
    code, status = status_of(run.folder)
    assert (code, status["state"]) == (4, "killed")
    assert f"its launcher (pid {process.pid}) is no longer running" in status["why"]
    last = run.checkpoints()[-1]
    state = json.loads((run.folder / "checkpoints" / f"step_{last}" / "state.json").read_text())
    written_before = {stored.row.seq for stored in scan_groups(run.folder / "rollouts")}

    run.complete("--resume", "--set", f"training.max_steps={last + 2}")
    issued = {row.prompt_id for row in read_groups(run.folder / "rollouts") if row.seq not in written_before}
    # at most (max_staleness + 1) x 4 = 8 prompts were open at the checkpoint: all come again, then the next ones in order
    outstanding = set(state["rollouts"]["outstanding"])
    assert outstanding <= issued
    following = sorted(issued - outstanding)
    begin = state["rollouts"]["data"]["next_prompt_id"]
    assert following == list(range(begin, begin + len(following)))
    statuses = _statuses(run)
    assert sorted(statuses) == list(range(len(statuses)))
    assert all(len(statuses[prompt]) > 1 for prompt in cancelled), "a prompt in flight at the stop was not issued again"


def test_a_run_that_makes_no_progress_names_what_it_waits_for_and_saves_before_it_ends(tmp_path: Path) -> None:
    """The rollouts wait for a reward that never comes, and the event loop is free."""
    still = ("training.stall_timeout_s=6", "launch.stop_timeout_s=8", "checkpoint.every_steps=1000", "evaluation=null")
    run = _run(tmp_path, *still, rewards("user_rewards:never_answers"))
    printed = run.fail()
    for part in ("no step was finished and no token generated", "is waiting for the samples of step", "being scored"):
        assert part in printed
    assert run.checkpoints() == [len(run.metrics())] != [0]
