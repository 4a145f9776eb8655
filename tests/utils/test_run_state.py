"""Whether a run lives, as its status.json and the processes of this machine say; one set of words for all who show it."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil
import pytest

from grpo_async.utils.run_state import LEVELS, SILENT_S, state_of

NOW = 1_000_000.0


def _status(**changes: Any) -> dict[str, Any]:
    mine = {"host": platform.node(), "pid": os.getpid(), "pid_started_at": psutil.Process().create_time()}
    return {"version": 1, "state": "running", "updated_at": NOW, **mine, **changes}


def test_a_launcher_of_this_machine_is_looked_for_however_old_its_file_is() -> None:
    assert state_of(_status(), now=NOW + 1e6).state == "running"
    assert state_of(_status(pid_started_at=psutil.Process().create_time() - 60), now=NOW).state == "killed"
    assert state_of(_status(pid=2**22 + 1), now=NOW + 90).why == (
        f"its launcher (pid {2**22 + 1}) is no longer running: it was killed, 1:30 ago or less"
    )


def test_a_launcher_of_another_machine_is_believed_for_a_while() -> None:
    assert state_of(_status(host="far", pid=1), now=NOW + SILENT_S - 1).state == "running"
    assert state_of(_status(host="far", pid=1), now=NOW + SILENT_S + 1).state == "silent"


@pytest.mark.parametrize("odd", [None, "", "x", [], {}, True, -1, 1e300, float("nan"), 2**80])
@pytest.mark.parametrize("field", ["host", "pid", "pid_started_at", "updated_at", "state"])
def test_nothing_that_a_file_holds_is_an_error(field: str, odd: object) -> None:
    assert state_of(_status(**{field: odd})).state in (*LEVELS, "?", "", "x")
