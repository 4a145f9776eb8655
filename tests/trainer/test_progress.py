"""What rank 0 tells the launcher of its progress."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.inference.fleet import ServerState
from grpo_async.processes.heartbeat import MAX_DATAGRAM
from grpo_async.trainer.progress import ProgressReporter
from grpo_async.training.timing import Activity

TIMEOUT_S = 0.5


class _Run:
    """A run whose tokens the test counts, and the launcher's socket."""

    def __init__(self, folder: Path) -> None:
        self.tokens = 0
        self.server = SimpleNamespace(state=ServerState.SERVING, since=0.0, name="server 0")
        self.launcher = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.launcher.bind(str(folder / "heartbeat"))
        self.launcher.settimeout(30.0)
        activity = Activity()
        activity.begin("training step 4")
        config: Any = SimpleNamespace(
            training=SimpleNamespace(stall_timeout_s=TIMEOUT_S), inference=SimpleNamespace(startup_timeout_s=60.0)
        )
        assignment: Any = SimpleNamespace(heartbeat_socket=folder / "heartbeat")
        source: Any = SimpleNamespace(
            ledger_snapshot=lambda: {"tokens": {"started": self.tokens}},
            describe=lambda: "1 groups in flight",
            task_stacks=lambda: "",
        )
        fleet: Any = SimpleNamespace(
            servers=lambda: [self.server], read_counters=lambda: SimpleNamespace(generated_tokens=self.tokens)
        )
        publisher: Any = SimpleNamespace(version=3)
        self.reporter = ProgressReporter(
            assignment, config, source=source, publisher=publisher, activity=activity, fleet=fleet
        )

    def next_report(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.launcher.recv(MAX_DATAGRAM))
        return message


@pytest.fixture
def run(tmp_path: Path) -> Iterator[_Run]:
    run = _Run(tmp_path)
    with run.reporter:
        yield run
    run.launcher.close()


def test_a_run_that_stands_still_says_for_how_long_and_what_waits_for_what(run: _Run) -> None:
    while (report := run.next_report())["unchanged_s"] < TIMEOUT_S:
        pass
    assert report["kind"] == "progress"
    for part in ("has finished step 3 and is training step 4, for", "1 groups in flight", "server 0 has been serving"):
        assert part in report["text"]


def test_a_run_that_moves_in_every_timeout_makes_progress(run: _Run) -> None:
    ends_at = time.monotonic() + 4 * TIMEOUT_S
    while time.monotonic() < ends_at:
        assert run.next_report()["unchanged_s"] < TIMEOUT_S
        run.tokens += 1


@pytest.mark.parametrize(
    ("state", "age_s", "is_excused"),
    [
        (ServerState.STARTING, 100.0, True),
        (ServerState.DOWN, 100.0, True),  # the restart may take 60 s to begin and 60 s to be done
        (ServerState.DOWN, 130.0, False),
        (ServerState.GONE, 0.0, False),
    ],
)
def test_a_server_that_loads_or_is_restarted_is_an_excuse_for_as_long_as_that_may_take(
    run: _Run, state: ServerState, age_s: float, is_excused: bool
) -> None:
    run.server.state, run.server.since = state, time.monotonic() - age_s
    reports = [run.next_report() for _ in range(8)]
    assert all(report["unchanged_s"] == 0.0 for report in reports) == is_excused
