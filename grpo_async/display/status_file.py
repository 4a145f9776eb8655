"""status.json: where a run stands, for machines, replaced as a whole on every event and every other second.

Written by a thread of the launcher; `StatusFile.content` says what is in it. A launcher that is killed leaves `state: running`: who
reads it compares `pid` and `pid_started_at` (see `run_state`).
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

import psutil

from grpo_async.display.display import View
from grpo_async.display.progress import Checkpoints, Progress
from grpo_async.errors import message_of
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import json_safe, write_atomically
from grpo_async.utils.run_state import FAILED, RUNNING

VERSION = 1
INTERVAL_S = 2.0
_MIN_INTERVAL_S = 0.2
_END_TIMEOUT_S = 10.0


class StatusFile(View):
    """See the module. Open during the run. `end` says how it went; an exception that leaves the context does, too."""

    def __init__(
        self,
        run_dir: RunDir,
        progress: Progress,
        *,
        run_name: str,
        attempt: str,
        engine: str | None = None,
        on_gpu: bool | None = None,
        num_gpus: int | None = None,
        precision: str | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._progress = progress
        self._run_name = run_name
        self._attempt = attempt
        self._engine, self._on_gpu, self._num_gpus, self._precision = engine, on_gpu, num_gpus, precision
        self._started_at = time.time()
        self._pid_started_at = psutil.Process().create_time()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._result: tuple[str, int | None, str | None] = (RUNNING, None, None)
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            self.end(FAILED, exit_code=1, error=message_of(error[1]))
        self._ended.set()
        self._changed.set()
        self._thread.join(_END_TIMEOUT_S)
        self._write()

    def end(self, state: str, *, exit_code: int, error: str | None) -> None:
        """How the run went; the first call wins. Written when the context is left, or at once when it is over."""
        if self._result[0] == RUNNING:
            self._result = (state, exit_code, error)
        if self._ended.is_set():
            self._write()

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        self._changed.set()

    def content(self) -> dict[str, Any]:
        """Times are seconds since 1970; what is not known yet is null."""
        checkpoints = Checkpoints.read(self._run_dir)
        with self._progress.lock:
            self._progress.checkpoints = checkpoints
            progress, (state, exit_code, error) = self._progress.as_dict(), self._result
        return {
            "version": VERSION,  # of this layout
            "run": self._run_name,
            "directory": str(self._run_dir.root),
            "state": state,  # running, finished, stopped (by a signal, after a checkpoint) or failed
            "started_at": self._started_at,  # of this attempt
            "updated_at": time.time(),
            "host": platform.node(),  # of the launcher
            "pid": os.getpid(),
            "pid_started_at": self._pid_started_at,  # a later process may have the same number
            "attempt": self._attempt,  # folder of its logs
            "engine": self._engine,  # embedded, vllm or external: what generates
            "on_gpu": self._on_gpu,  # whether the trainer has a GPU
            "num_gpus": self._num_gpus,  # of the machine with the first trainer ranks
            "precision": self._precision,  # dtypes of master weights, computation, servers and logits, in words
            "exit_code": exit_code,
            "error": error,  # why it failed
            **progress,
            "eta_s": progress["eta_s"] if state == RUNNING else None,
        }

    def _keep(self) -> None:
        while not self._ended.is_set():  # leaving the context ends it; a daemon thread
            self._changed.wait(INTERVAL_S)
            self._changed.clear()
            self._write()
            self._ended.wait(_MIN_INTERVAL_S)

    def _write(self) -> None:
        with suppress(OSError):  # a full disk ends the run elsewhere, with better words
            write_atomically(self._run_dir.status, json.dumps(json_safe(self.content()), indent=1))
