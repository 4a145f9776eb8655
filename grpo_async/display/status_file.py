"""status.json: where a run stands, replaced as a whole on every event and every other second.

A launcher that is killed leaves `state: running`: who reads it compares `pid` and `pid_started_at`
(see `run_state`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from grpo_async.display.display import View
from grpo_async.display.progress import StatusContent
from grpo_async.errors import message_of
from grpo_async.utils.files import json_safe, write_atomically
from grpo_async.utils.run_state import FAILED, RUNNING

_INTERVAL_S, _MIN_INTERVAL_S = 2.0, 0.2
_END_TIMEOUT_S = 10.0


class StatusFile(View):
    """Keeps status.json. `end` says how the run went; an exception
    that leaves the context does too."""

    def __init__(self, status: StatusContent) -> None:
        self._status = status
        self._changed = threading.Event()
        self._ended = threading.Event()
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
        """Say how the run went; the first call wins. Written when the context is left, or at once
        when it is over."""
        if self._status.result[0] == RUNNING:
            self._status.result = (state, exit_code, error)
        if self._ended.is_set():
            self._write()

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        self._changed.set()

    def _keep(self) -> None:
        while not self._ended.is_set():  # leaving the context ends it; a daemon thread
            self._changed.wait(_INTERVAL_S)
            self._changed.clear()
            self._write()
            self._ended.wait(_MIN_INTERVAL_S)

    def _write(self) -> None:
        text = json.dumps(json_safe(self._status.content()), indent=1)
        with suppress(OSError):  # a full disk ends the run elsewhere, with better words
            write_atomically(self._status.run_dir.status, text)
