"""The frame of every process that works on a run's rollouts: logging, the report of a failure, the end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO, cast

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.failures import RankFailure, write_failure
from grpo_async.processes.heartbeat import Heartbeat
from grpo_async.processes.resilient_stream import ResilientStream
from grpo_async.processes.warnings_forward import forwarding_warnings
from grpo_async.run_directory import attempt_config
from grpo_async.utils.lifetime import die_with_parent

logger = logging.getLogger("grpo_async")

_MAX_PRINTED_CHARS = 16 * 2**20
"""Of what rewards, tools and environments print into the log of a process; our own log goes to standard error."""


def run_process(name: str, work: Callable[[Assignment, ExperimentConfig, ControlClient], None]) -> NoReturn:
    """Do `work` and end this process: exit code 0 when it returned, 1 when it raised, which is then in the log, in the attempt's
    folder and sent to the launcher. Only rank 0 has a line to the launcher.

    It ends without the interpreter's teardown: user code may have left threads that never end, a rank that failed may be awaited
    in a collective that it will never join, and libraries that are torn down under their own threads abort.
    """
    die_with_parent()
    # the log may be on a full disk: what user code prints is not a reason to fail
    prints = ResilientStream(sys.stdout, "standard output", lambda text: None, max_chars=_MAX_PRINTED_CHARS)
    sys.stdout = cast(TextIO, prints)
    sys.stderr = cast(TextIO, ResilientStream(sys.stderr, "standard error", lambda text: None))
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    assignment = Assignment.from_environment()
    heartbeat = Heartbeat(f"{name} {assignment.rank}", assignment.heartbeat_socket)
    control = ControlClient(assignment.control_socket if assignment.rank == 0 else None)
    code = 0
    try:
        with forwarding_warnings(lambda text: control.send("warning", text=text)):
            work(assignment, load_config(attempt_config(assignment.attempt_dir)), control)
    except BaseException as error:
        code = 1
        failure = RankFailure.of(assignment.rank, error)
        heartbeat.failed(failure)  # first, because it needs no disk: that may be full
        write_failure(assignment.attempt_dir, failure)
        logger.exception("%s %d failed", name, assignment.rank)
    if prints.num_dropped:
        logger.warning(
            "%s %d: %d characters of what was printed are not in this log", name, assignment.rank, prints.num_dropped
        )
    control.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
