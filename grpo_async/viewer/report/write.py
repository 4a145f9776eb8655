"""Run directories in, one HTML file out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from grpo_async import __version__
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import write_atomically
from grpo_async.viewer.report.page import render
from grpo_async.viewer.report.plots import MAX_SERIES
from grpo_async.viewer.report.run_data import labels_of, read_run

MAX_RUNS = MAX_SERIES
"""Each run has its color."""


def write_report(run_dirs: Sequence[RunDir], out: Path | None = None) -> Path:
    """Write the report of these runs and return where it is.

    Args:
        out: the file; None: `report.html` in the run's directory, for several runs `report-A-B.html` beside that of the first.

    Raises:
        ConfigError: a run is named twice, there are more than MAX_RUNS, or the file cannot be written.
    """
    page = render_report(run_dirs)
    out = out or _default_out(run_dirs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page, mode=0o600)  # it quotes rollouts, which are as private
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    return out


def render_report(run_dirs: Sequence[RunDir]) -> str:
    """The page of that file. Raises ConfigError: a run is named twice, or there are more than MAX_RUNS."""
    _check(run_dirs)
    runs = [read_run(run_dir, label) for run_dir, label in zip(run_dirs, labels_of(run_dirs), strict=True)]
    return render(runs, made_at=time.strftime("%Y-%m-%d %H:%M:%S %Z"), version=__version__)


def _check(run_dirs: Sequence[RunDir]) -> None:
    if len({run_dir.root.resolve() for run_dir in run_dirs}) < len(run_dirs):
        raise ConfigError("a run is named twice; name each once")
    if len(run_dirs) > MAX_RUNS:
        raise ConfigError(f"{len(run_dirs)} runs are too many for one report, at most {MAX_RUNS} can be told apart")


def _default_out(run_dirs: Sequence[RunDir]) -> Path:
    first = run_dirs[0]
    if len(run_dirs) == 1:
        return first.report
    names = "-".join(label.replace("/", "-") for label in labels_of(run_dirs))
    return first.root.parent / f"report-{names}.html"
