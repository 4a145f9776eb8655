"""Inference servers that die or hang in the middle of a run: the run goes on, and nothing is lost or trained twice.

Each test ends with the same accounts (`_assert_accounts`): exit code 0, every step once, the ledger balanced, no prompt trained
twice, no process left; the time to recover stands in summary.json.
"""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import RECOVERY_S, SMALL, Run, make_run, rewards, serving_alone
from tests.support.ports import free_port
from tests.support.stored import scan_groups

pytestmark = pytest.mark.slow

SETTINGS = (
    *SMALL,
    "evaluation.num_prompts=8",
    "checkpoint.every_steps=1000",
    "inference.restart_delay_s=0.2",
    "inference.max_restarts=5",
)
# A busy machine of two cores delays an engine: vLLM was silent for more than 10 s while it scored at the start of a run. What
# hangs is waited for longer than that, by the run and by the tests' own questions.
HEARTBEAT_S = 12.0
VLLM_HEARTBEAT_S = 60.0
SLOW_STEPS = rewards("user_rewards:by_place_in_no_hurry")
"""A server needs some seconds to start; a run that need not wait for it makes few steps meanwhile."""


def _assert_accounts(run: Run, process: subprocess.Popen[str], *, failures: int) -> dict[str, Any]:
    """The end of a run that lost servers on its way; its summary."""
    run.end(process, timeout_s=600.0)
    summary = run.summary()
    assert summary["status"] == "finished"
    assert summary["ledger_closed"], summary["ledger"]
    assert [line["step"] for line in run.metrics()] == list(range(1, summary["steps"] + 1))
    rows = [stored.row for stored in scan_groups(run.folder / "rollouts")]
    trained = Counter(row.prompt_id for row in rows if row.status.value == "trained")
    assert trained, "nothing was trained"
    assert set(trained.values()) == {1}, "a prompt was trained twice"
    assert max(Counter(row.group_id for row in rows).values()) == 1, "a group was written twice"
    assert summary["ledger"]["groups"]["failed"] == 0, "a server's death is no failure of a rollout"
    assert len(summary["server_failures"]) == failures, summary["server_failures"]
    for failure in summary["server_failures"]:
        print(f"{failure['server']}: {failure['reason']}: serving again after {failure['recovery_s']:.1f} s")
    return summary


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("base", "heartbeat_s"),
    [
        ("quickstart.yaml", HEARTBEAT_S),
        pytest.param("quickstart-vllm.yaml", VLLM_HEARTBEAT_S, marks=[pytest.mark.nightly, pytest.mark.vllm]),
    ],
)
def test_a_server_that_is_killed_or_hangs_comes_back_and_the_run_finishes(
    tmp_path: Path, base: str, heartbeat_s: float, request: pytest.FixtureRequest
) -> None:
    """kill -9 while it generates, kill -9 between pause and resume of a push, SIGSTOP: one after the other."""
    if base == "quickstart-vllm.yaml":
        request.getfixturevalue("needs_vllm")
    limits = (f"inference.heartbeat_timeout_s={heartbeat_s}", "weights.timeout_s=60")
    run = make_run(tmp_path, base, (*SETTINGS, "training.max_steps=36", *limits))
    process = run.start()
    run.wait_for_step(2, process, timeout_s=RECOVERY_S)

    run.server().kill()  # generating is what it does nearly all the time
    run.wait_for_servers(process, restarts=1)

    run.kill_server_in_a_push()
    run.wait_for_servers(process, restarts=2)

    hung = run.server()
    for stopped in [hung, *hung.children(recursive=True)]:
        stopped.send_signal(signal.SIGSTOP)
    run.wait_for_servers(process, restarts=3)
    assert not hung.is_running(), "the hung server was left behind"

    summary = _assert_accounts(run, process, failures=3)
    assert all(failure["recovery_s"] > 0.0 for failure in summary["server_failures"])


@pytest.mark.nightly
def test_external_servers_may_join_late_hang_and_come_back(tmp_path: Path) -> None:
    """`inference.urls`: the second server starts when the run is under way, then the first hangs for a while."""
    ports = [free_port(), free_port()]
    urls = ", ".join(f"http://127.0.0.1:{port}" for port in ports)
    settings = (
        *SETTINGS,
        SLOW_STEPS,
        "training.max_steps=120",
        f"inference.urls=[{urls}]",
        f"inference.heartbeat_timeout_s={HEARTBEAT_S}",
        "weights.timeout_s=10",
    )
    run = make_run(tmp_path, "quickstart.yaml", settings)
    with serving_alone(run.config, ports[0], "secret") as first:
        process = run.start(environment={"GRPO_ASYNC_TOKEN": "secret"})
        run.wait_for_step(2, process, timeout_s=RECOVERY_S)
        assert run.metrics()[-1]["servers/serving"] == 1
        with serving_alone(run.config, ports[1], "secret"):
            run.wait_for_servers(process, serving=2)
            first.send_signal(signal.SIGSTOP)
            run.wait_for_servers(process, serving=1)
            first.send_signal(signal.SIGCONT)
            run.wait_for_servers(process, serving=2)
            summary = _assert_accounts(run, process, failures=1)
    # whichever notices first: a heartbeat, or a push that it takes part in
    reason = summary["server_failures"][0]["reason"]
    assert "answer" in reason or "timed out" in reason, reason
