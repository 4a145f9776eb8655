"""What every process of the trainer does around its work: set up logging, report a failure, end."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TextIO, cast

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.heartbeat import RankEnd, keep_alive
from grpo_async.run_directory import attempt_config
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.resilient_stream import MAX_PRINTED_CHARS, ResilientStream
from grpo_async.utils.text import clipped

logger = logging.getLogger("grpo_async")

_WARNING_INTERVAL_S = 60.0  # between two warnings of the same line of code
_MAX_CHARS = 1000


def run_process(work: Callable[[Assignment, ExperimentConfig, ControlClient], None]) -> NoReturn:
    """Do `work`, a rank's, and end this process: exit code 0 when it returned, 1 when it raised; the error is then in the log, and
    sent to the launcher.

    The process ends without the interpreter's teardown: user code may have left threads that never end, a rank that failed may be
    awaited in a collective that it will never join, and libraries that are torn down under their own threads abort.
    """
    die_with_parent()
    # the log may be on a full disk: what user code prints is not a reason to fail
    prints = ResilientStream(sys.stdout, "standard output", lambda text: None, max_chars=MAX_PRINTED_CHARS)
    errors = ResilientStream(sys.stderr, "standard error", lambda text: None)
    sys.stdout, sys.stderr = cast(TextIO, prints), cast(TextIO, errors)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    assignment = Assignment.from_environment()
    control = ControlClient(assignment.control_socket)
    if assignment.rank == 0:
        logger.addHandler(WarningForwarder(lambda text: control.send("warning", text=text)))
    code = 0
    try:
        config = load_config(attempt_config(assignment.attempt_dir))
        keep_alive(control, f"trainer rank {assignment.rank}", timeout_s=config.launch.heartbeat_timeout_s)
        work(assignment, config, control)
    except BaseException as error:
        code = 1
        RankEnd.of_error(assignment.rank, error).report(control)
        logger.exception("trainer rank %d failed", assignment.rank)
    control.close()
    logging.shutdown()
    prints.flush()  # user code may have put anything in the place of sys.stdout
    errors.flush()
    os._exit(code)


class WarningForwarder(logging.Handler):
    """Forwards this package's warnings to the launcher, since nobody reads a log while a run goes well; at most once a minute per
    source line. `tell` gets the text, from any thread, and must be quick."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told_at: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:  # logging holds the handler's lock
        source, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._told_at.get(source, -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S:
            return
        self._told_at[source] = now
        try:
            lines = [line for line in record.getMessage().splitlines() if line.strip()]
        except Exception:  # noqa: BLE001 - as logging itself does: a wrong log call must not end what it is about
            self.handleError(record)
            return
        text = "\n".join(lines) if len(lines) <= 3 else f"{lines[0]} ... {lines[-1].strip()}"
        self._tell(clipped(text, _MAX_CHARS))
