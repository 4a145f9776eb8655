"""A trainer whose main thread hangs: `python -m tests.trainer.stalled FOLDER STOP_TIMEOUT_S`. All but the guard is a stand-in."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_async.inference.fleet import ServerState
from grpo_async.processes.control import ControlClient
from grpo_async.trainer import stall
from grpo_async.trainer.stall import StallGuard
from grpo_async.training.timing import Activity

STALL_S = 1.0


class Source:
    def __init__(self) -> None:
        self.failed = threading.Event()

    def ledger_snapshot(self) -> dict[str, dict[str, int]]:
        return {"tokens": {"started": 12}}

    def describe(self) -> str:
        return "1 groups in flight"

    def task_stacks(self) -> str:
        threading.Event().wait(timeout=600.0)  # as if the rollout thread could not even be looked at
        return ""

    def fail(self, error: BaseException) -> None:
        self.failed.set()


def hangs() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main() -> None:
    stall._REPORT_S = 1.0  # for a log that cannot be completed: see `Source.task_stacks`
    folder, stop_timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    server: Any = SimpleNamespace(state=ServerState.SERVING, since=0.0, name="server 0")
    fleet: Any = SimpleNamespace(read_counters=lambda: SimpleNamespace(generated_tokens=12), servers=lambda: [server])
    checkpoints: Any = SimpleNamespace(is_writing=False, longest_s=60.0)
    activity = Activity()
    activity.begin("training step 4")
    config: Any = SimpleNamespace(
        training=SimpleNamespace(stall_timeout_s=STALL_S),
        launch=SimpleNamespace(stop_timeout_s=stop_timeout_s),
        inference=SimpleNamespace(startup_timeout_s=60.0),
    )
    place: Any = SimpleNamespace(heartbeat_socket=folder / "heartbeat", rank=0)
    source: Any = Source()
    StallGuard(
        place, config, ControlClient(None), source=source, fleet=fleet,
        version=lambda: 3, activity=activity, checkpoints=checkpoints,
    ).start()  # fmt: skip
    hangs()


if __name__ == "__main__":
    main()
