"""Stands in for the trainer, alone or as a rank under torchrun: `stand_in_trainer.py MODE FOLDER`.

It leaves FOLDER/NAME.pid, written atomically, so that a test can see who has started and who is left.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.entry import run_process
from grpo_async.processes.failures import RankFailure
from grpo_async.processes.heartbeat import Heartbeat, report
from grpo_async.run_directory import write_atomically
from grpo_async.utils.processes import die_with_parent

HELPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
LIMIT_S = 120.0


def leave_pid(folder: Path, name: str, pid: int | None = None) -> None:
    write_atomically(folder / f"{name}.pid", str(pid or os.getpid()))


def summary(status: str) -> dict[str, Any]:
    return {
        "status": status,
        "steps": 2,
        "wall_s": 75.0,
        "reward_first": 0.25,
        "reward_last": 0.75,
        "ledger_closed": True,
    }


class ServedRun:
    """A trainer that takes every server as serving when it starts. It appends the news of servers to FOLDER/news, asks for a
    restart of server 0 on SIGUSR1, and finishes on SIGUSR2."""

    def __init__(self, control: ControlClient, folder: Path, *, num_servers: int) -> None:
        self._control = control
        self._num_servers = num_servers
        self._news = (folder / "news").open("a", buffering=1)
        self._is_finished = False

    def run(self) -> int:
        signal.signal(signal.SIGUSR1, lambda *_: self._ask_restart())
        signal.signal(signal.SIGUSR2, lambda *_: self._finish())
        for index in range(self._num_servers):
            self._control.send("server_serving", index=index)
        self._control.listen(self._take)
        self._control.send("phase", name="servers serve")
        self._control.stop_requested.wait(LIMIT_S)
        status = "finished" if self._is_finished else "stopped"
        failures = [{"server": "server 0", "reason": "killed", "recovery_s": 1.5}]
        self._control.send("summary", summary={**summary(status), "server_failures": failures})
        self._control.close()
        return 0

    def _take(self, message: Mapping[str, Any]) -> None:
        self._news.write(json.dumps(dict(message)) + "\n")
        if message["event"] == "starting":
            self._control.send("server_serving", index=message["index"])

    def _finish(self) -> None:
        self._is_finished = True
        self._control.stop_requested.set()

    def _ask_restart(self) -> None:
        self._control.send("restart_server", index=0, reason="it did not answer for 30 s")


def holds_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def fails_on_a_full_disk(*_: object) -> None:
    """The log cannot be written."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def preflight_checks(mode: str) -> list[dict[str, str]]:
    status = "fail" if mode == "preflight-fail" else "warn"
    return [
        {"name": "logprobs", "status": "pass", "detail": "mean 1e-6"},
        {"name": "memory", "status": status, "detail": "little is left \x1b[2J"},
    ]


def main(mode: str, folder: Path) -> int:
    die_with_parent()
    assignment = Assignment.from_environment()
    rank = assignment.rank
    if mode == "start-helper":  # a process that outlives its parent, ignores SIGTERM and leaves the session
        helper = subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
        leave_pid(folder, "helper", helper.pid)
    if mode == "full-disk" and rank == 1:
        leave_pid(folder, "rank1")
        run_process("trainer rank", fails_on_a_full_disk)
    Heartbeat(f"trainer rank {rank}", assignment.heartbeat_socket)
    leave_pid(folder, f"rank{rank}")
    if mode == "never-connect":
        threading.Event().wait(LIMIT_S)
    control = ControlClient(assignment.control_socket if rank == 0 else None)
    control.send("phase", name="training")
    if mode == "hold":
        threading.Thread(target=holds_the_interpreter, daemon=True).start()
    if mode == "fail-when-told" and rank == 1:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        leave_pid(folder, "ready")
        signal.pause()
        report(assignment.heartbeat_socket, RankFailure.of(rank, TimeoutError("rank 0 sends nothing")))
        return 1
    if mode == "kill-rank-1" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "silent":
        return 0
    if mode == "served":
        return ServedRun(control, folder, num_servers=len(assignment.server_urls)).run()
    if mode in ("preflight-pass", "preflight-fail"):
        write_atomically(folder / "preflight", assignment.purpose)
        control.send("preflight", checks=preflight_checks(mode))
        control.close()
        return int(mode == "preflight-fail")
    if mode == "finish":
        control.send("evaluation", when="before", metrics={"reward": 0.4})
        for step in (1, 2):
            control.send(
                "step", step=step, max_steps=2, metrics={"reward": 0.25 * step, "perf/generated_tokens_per_s": 99.0}
            )
        control.send("summary", summary=summary("finished"))
        control.close()
        return 0
    if mode == "obey-stop" and rank > 0:
        return 0
    if mode == "obey-stop":
        control.stop_requested.wait(LIMIT_S)
        (folder / "asked_to_stop").touch()
        control.send("summary", summary=summary("stopped"))
        control.close()
        return 0
    threading.Event().wait(LIMIT_S)  # ignores stop
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
