"""When rank 0 tells the launcher that the run makes no progress."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.inference.fleet import ServerState
from grpo_async.trainer.progress import StallWatch
from grpo_async.training.pipeline import Activity

TIMEOUT_S = 0.5


class _Run:
    """A run whose tokens the test counts, and what the launcher hears."""

    def __init__(self) -> None:
        self.tokens = 0
        self.server = SimpleNamespace(state=ServerState.SERVING, since=0.0, name="server 0")
        self.heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        activity = Activity()
        activity.begin("training step 4")
        config: Any = SimpleNamespace(
            training=SimpleNamespace(stall_timeout_s=TIMEOUT_S), inference=SimpleNamespace(startup_timeout_s=60.0)
        )
        control: Any = SimpleNamespace(send=lambda kind, **content: self.heard.put({"kind": kind, **content}))
        source: Any = SimpleNamespace(
            ledger_snapshot=lambda: {"tokens": {"started": self.tokens}},
            describe=str,
            task_stacks=str,
        )
        fleet: Any = SimpleNamespace(
            servers=lambda: [self.server], read_counters=lambda: SimpleNamespace(generated_tokens=self.tokens)
        )
        publisher: Any = SimpleNamespace(version=3)
        self.watch = StallWatch(control, config, source=source, publisher=publisher, activity=activity, fleet=fleet)


@pytest.fixture
def run() -> Iterator[_Run]:
    run = _Run()
    with run.watch:
        yield run


def test_a_run_that_moves_in_every_timeout_makes_progress(run: _Run) -> None:
    ends_at = time.monotonic() + 4 * TIMEOUT_S
    while time.monotonic() < ends_at:
        run.tokens += 1
        time.sleep(TIMEOUT_S / 20)
    assert run.heard.empty()


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
    if is_excused:
        time.sleep(3 * TIMEOUT_S)
        assert run.heard.empty()
    else:
        assert run.heard.get(timeout=30.0)["kind"] == "stalled"
