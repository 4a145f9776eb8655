"""Whole runs with agents: kill -9 of an agent, of the server, of everything; nothing is left, and the ledger balances."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.support import (
    REPOSITORY,
    SMALL,
    Run,
    assert_ledger_balances_at_every_step,
    finish,
    make_run,
    rows_of,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = REPOSITORY / "tests" / "agents" / "command_agent.py"


def _run(folder: Path, *overrides: str) -> Run:
    settings = ("rollout.max_completion_tokens=24", *overrides)
    return make_run(folder, "quickstart.yaml", (*SMALL, *settings))


def _command(seconds: float = 0.0) -> str:
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(seconds)]
    return f"rollout.agent={json.dumps({'command': command, 'timeout_s': 60.0})}"


def test_a_function_trains_and_its_branches_are_kept(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        'rollout.agent={"function": "tests.e2e.agents:length", "reward_weight": 0.5}',
        'rewards=[{"function": "tests.e2e.agents:branches_are_seen"}]',
        "rollout.max_turn_tokens=16",  # leaves some for the second call
        "training.max_steps=2",
        "evaluation=null",
    )
    run.complete()
    last = run.metrics()[-1]
    assert last["rewards/agent/mean"] > 0.0
    assert last["rewards/branches_are_seen/mean"] == 1.0
    assert_ledger_balances_at_every_step(run.metrics())
    rollouts = [each for row in rows_of(run.folder) if row["status"] == "trained" for each in row["rollouts"]]
    assert rollouts
    for each in rollouts:
        (branch,) = each["branches"]
        assert branch["rollout_id"] == each["rollout_id"] + ".b1"
        assert branch["parent"] == each["rollout_id"]
        assert branch["advantage"] == each["advantage"]
        assert len(branch["trainer_logprobs"]) == len(branch["completion_ids"])


@pytest.mark.nightly
def test_kill_nine_of_agents_fails_their_rollouts_alone_and_they_wait_for_a_killed_server(tmp_path: Path) -> None:
    """Then of the trainer and of the launcher, which leave no agent; a resume continues each time."""
    settings = (
        "rewards=[]",
        "evaluation.num_prompts=4",
        "rollout.group_size=8",
        "rollout.max_in_flight=16",
        "checkpoint.every_steps=1",
        "inference.restart_delay_s=0.2",
        "inference.max_restarts=5",
        "training.max_steps=12",
    )
    run = _run(tmp_path, _command(0.3), *settings)
    process = run.start()
    run.wait_for_step(1, process)  # an evaluation of four prompts would not stand it
    chance = random.Random(0)
    for _ in range(3):
        run.wait_for(lambda: len(run.processes("command_agent")) >= 4, process, what="agents")
        if victims := run.processes("command_agent"):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself meanwhile
                chance.choice(victims).kill()
    step = len(run.metrics())
    run.processes("serve-embedded")[0].kill()
    run.wait_for_step(step + 2, process)
    for victim in ("trainer", "launcher"):
        run.wait_for(lambda: len(run.processes("sleep 1000")) >= 2, process, what="daemons of agents")
        if victim == "launcher":
            process.send_signal(signal.SIGKILL)
        else:
            run.ranks()[0].kill()
        finish(process, timeout_s=60.0)
        assert eventually(lambda: not run.processes(), 30.0), "every process of the run to end"
        process = run.start("--resume")
    run.end(process)
    assert run.summary()["ledger_closed"]
    assert_ledger_balances_at_every_step(run.metrics())
    errors = [each["error"] for row in rows_of(run.folder) for each in row["rollouts"] if each["error"]]
    assert any("was killed by SIGKILL" in each for each in errors), errors
