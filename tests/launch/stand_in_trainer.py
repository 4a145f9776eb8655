"""Replaces the trainer, alone or as a rank under torchrun: `stand_in_trainer.py MODE FOLDER`.

It leaves FOLDER/NAME.pid, written atomically, so that a test can see who has started and who is left. What it does in each mode is
`Modes.MODE`, with underscores.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.entry import run_process
from grpo_async.utils.files import write_atomically

HELPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
LIMIT_S = 120.0
SUMMARY = {"steps": 2, "wall_s": 75.0, "reward_first": 0.25, "reward_last": 0.75, "ledger_closed": True}


def leave_pid(folder: Path, name: str, pid: int | None = None) -> None:
    write_atomically(folder / f"{name}.pid", str(pid or os.getpid()))


class Modes:
    """A rank that has begun."""

    def __init__(self, folder: Path, assignment: Assignment, control: ControlClient) -> None:
        self.folder = folder
        self.assignment = assignment
        self.control = control
        leave_pid(folder, f"rank{assignment.rank}")

    def say(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, and send it."""
        write_atomically(self.assignment.run_dir.summary, json.dumps(summary))
        self.control.send("summary", summary=summary)

    def ignore_stop(self) -> None:
        threading.Event().wait(LIMIT_S)

    def obey_stop(self) -> None:
        if self.assignment.rank == 0:
            self.control.stop_requested.wait(LIMIT_S)
            (self.folder / "asked_to_stop").touch()
            self.say({"status": "stopped", **SUMMARY})

    def start_helper(self) -> None:
        """A process that outlives its parent, ignores SIGTERM and leaves the session."""
        if self.assignment.rank == 0:
            helper = subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
            leave_pid(self.folder, "helper", helper.pid)
        self.ignore_stop()

    def hold(self) -> None:
        threading.Thread(target=holds_the_gil, daemon=True).start()
        self.ignore_stop()

    def served(self) -> None:
        """It takes every server as serving when it starts. It appends the news of servers to FOLDER/news, asks for a restart of
        server 0 on SIGUSR1, and finishes on SIGUSR2."""
        control, news, status = self.control, (self.folder / "news").open("a", buffering=1), "stopped"

        def take(message: Mapping[str, Any]) -> None:
            news.write(json.dumps(dict(message)) + "\n")
            if message["event"] == "starting":
                control.send("server_serving", index=message["index"])

        def obey() -> None:
            nonlocal status
            while signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}) == signal.SIGUSR1:
                control.send("restart_server", index=0, reason="it did not answer for 30 s")
            status = "finished"
            control.stop_requested.set()

        threading.Thread(target=obey, daemon=True).start()
        for index in range(len(self.assignment.server_urls)):
            control.send("server_serving", index=index)
        control.listen(take)
        control.send("phase", name="servers serve")
        control.stop_requested.wait(LIMIT_S)
        failures = [{"server": "server 0", "reason": "killed", "recovery_s": 1.5}]
        self.say({"status": status, **SUMMARY, "server_failures": failures})


def holds_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def main(mode: str, folder: Path) -> None:
    if mode == "never-connect":
        leave_pid(folder, "rank0")
        threading.Event().wait(LIMIT_S)

    # in every thread: a signal is kept for sigwait, while a handler in Python may run only when the main thread's wait ends
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, *([signal.SIGUSR2] if mode == "served" else [])})

    def work(assignment: Assignment, config: ExperimentConfig, control: ControlClient) -> None:
        modes = Modes(folder, assignment, control)
        if assignment.rank == 0:
            control.send("phase", name="training")
        getattr(modes, mode.replace("-", "_"))()

    run_process(work)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
