"""Writes report.html when a run has ended, however it ended; whatever goes wrong with it, the run keeps its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.launch.output import Output
from grpo_async.launch.wording import plain
from grpo_async.rundir import RunDir

_TIMEOUT_S = 120.0
_MOST_WORDS = 400  # characters of what the child said


def write_final_report(config: ExperimentConfig, run_dir: RunDir, output: Output) -> Path | None:
    """The report of the run, written by a child process that has two minutes; None where there is none, and the user was told why.

    A child: reading a large store takes memory and may fail in a library, and neither is to touch the end of the run.
    """
    if not config.record.report:
        return None
    command = [sys.executable, "-m", "grpo_async", "report", str(run_dir.root)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            start_new_session=True,  # a Ctrl-C now is for this process, which then ends the child
            check=False,
        )
    except subprocess.TimeoutExpired:
        _warn(output, run_dir, f"it was not done after {_TIMEOUT_S:g} s")
        return None
    except OSError as error:
        _warn(output, run_dir, str(error))
        return None
    except KeyboardInterrupt:
        _warn(output, run_dir, "interrupted")
        return None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        _warn(output, run_dir, last[:_MOST_WORDS])
        return None
    return run_dir.report


def _warn(output: Output, run_dir: RunDir, why: str) -> None:
    output.warn(f"there is no report.html: {plain(why)}; try again: grpo-async report {run_dir.root}")
