"""A run that stalls: its message, and how the process ends when its main thread does not."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.inference.fleet import ServerState
from grpo_async.processes.heartbeat import MAX_DATAGRAM, RankFailure, explain, from_json
from grpo_async.trainer.stall import StallGuard
from tests.launcher.support import REPOSITORY


@pytest.mark.slow
def test_a_process_whose_main_thread_hangs_is_ended_and_leaves_its_words(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "heartbeat"))
        done = subprocess.run(
            [sys.executable, "-m", "tests.trainer.stalled", str(tmp_path), "1.0"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120.0,
        )
        assert done.returncode == 1, done.stderr
        failure = from_json(json.loads(launcher.recv(MAX_DATAGRAM)))
    assert isinstance(failure, RankFailure)
    assert failure.is_expected
    cause = explain([failure])
    assert cause is not None
    told = cause.text
    words = r"trainer rank 0 failed: no step was finished and no token generated for \d+ s"
    assert re.match(words, told), told
    assert "has finished step 3 and is training step 4, for" in told
    assert "1 groups in flight" in told
    assert "server 0 has been serving for" in told
    assert "did not end the process within launch.stop_timeout_s = 1 s" in told
    assert "thread MainThread:" in done.stderr
    assert "in hangs" in done.stderr


def _guard(state: ServerState = ServerState.SERVING, since: float = 0.0, *, timeout_s: float = 10.0) -> Any:
    server = SimpleNamespace(state=state, since=since, name="server 0")
    config: Any = SimpleNamespace(
        training=SimpleNamespace(stall_timeout_s=timeout_s), inference=SimpleNamespace(startup_timeout_s=60.0)
    )
    fleet: Any = SimpleNamespace(servers=lambda: [server])
    anything: Any = None
    return StallGuard(
        anything,
        config,
        anything,
        source=anything,
        fleet=fleet,
        version=anything,
        activity=anything,
        checkpoints=anything,
    )


TIMEOUT_S = 0.5


def _watched(monkeypatch: pytest.MonkeyPatch, progress: Callable[[], object]) -> tuple[Any, threading.Event]:
    """A guard on a counter that the test moves; the event is set when it sees a stall."""
    guard, stalled = _guard(timeout_s=TIMEOUT_S), threading.Event()
    monkeypatch.setattr(guard, "_progress", progress)
    monkeypatch.setattr(guard, "_is_excused", lambda: False)
    monkeypatch.setattr(guard, "_on_stall", lambda stalled_s: stalled.set())
    guard.start()
    return guard, stalled


def test_a_slow_run_that_moves_and_a_guard_that_was_stopped_notice_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves in the last third of each timeout."""
    began = time.monotonic()
    moving, stalled = _watched(monkeypatch, lambda: int((time.monotonic() - began) / (TIMEOUT_S * 0.7)))
    stopped, stalled_later = _watched(monkeypatch, lambda: 1)
    stopped.stop()
    assert not stalled.wait(timeout=4 * TIMEOUT_S)
    assert not stalled_later.is_set()
    moving.stop()


@pytest.mark.parametrize(
    ("state", "age_s", "excused"),
    [
        (ServerState.STARTING, 100.0, True),
        (ServerState.DOWN, 100.0, True),  # the restart may take 60 s to begin and 60 s to be done
        (ServerState.DOWN, 130.0, False),
        (ServerState.SERVING, 0.0, False),
    ],
)
def test_a_server_that_loads_or_is_restarted_is_an_excuse_for_as_long_as_that_may_take(
    state: ServerState, age_s: float, excused: bool
) -> None:
    assert _guard(state, time.monotonic() - age_s)._is_excused() == excused
