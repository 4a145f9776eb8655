"""Stands in for the trainer, alone or as a rank under torchrun: `stand_in_trainer.py MODE FOLDER`.

It leaves FOLDER/NAME.pid, written atomically, so that a test can see who has started and who is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from grpo_async.launch.control import ControlClient
from grpo_async.launch.failures import write_failure
from grpo_async.processes import die_with_parent
from grpo_async.rundir import write_atomically

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


def main(mode: str, folder: Path) -> int:
    die_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    if mode == "start-helper":  # a process that outlives its parent, ignores SIGTERM and leaves the session
        helper = subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
        leave_pid(folder, "helper", helper.pid)
    leave_pid(folder, f"rank{rank}")
    if mode == "never-connect":
        threading.Event().wait(LIMIT_S)
    control = ControlClient.from_environment() if rank == 0 else ControlClient(None)
    control.send("phase", name="training")
    if mode == "kill-rank-1" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "fail" and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        try:
            raise ZeroDivisionError("no samples")
        except ZeroDivisionError as error:
            write_failure(Path(os.environ["GRPO_ASYNC_ATTEMPT_DIR"]), rank, error)
        return 1
    if mode == "silent":
        return 0
    if mode == "finish":
        control.send("evaluation", when="before", metrics={"reward": 0.4})
        for step in (1, 2):
            control.send(
                "step", step=step, max_steps=2, metrics={"reward": 0.25 * step, "perf/generated_tokens_per_s": 99.0}
            )
        control.send("summary", summary=summary("finished"))
        control.close()
        return 0
    if mode == "obey-stop":
        control.stop_requested.wait(LIMIT_S)
        write_atomically(folder / "stop_reason", str(control.stop_reason))
        control.send("summary", summary=summary("stopped"))
        control.close()
        return 0
    threading.Event().wait(LIMIT_S)  # ignores stop
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
