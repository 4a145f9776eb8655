"""One class for each tracker's library. Each call may block and may raise: `trackers` calls them from their own threads.

The libraries are optional extras and are imported when one of their trackers is configured.
"""

from __future__ import annotations

import importlib
import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

from grpo_async.config import ExperimentConfig
from grpo_async.config.public import public_config
from grpo_async.config.sections import (
    TensorboardTracker,
    TrackerSection,
    WandbTracker,
)
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.tracking.catalog import CATALOG
from grpo_async.utils.extras import needs
from grpo_async.utils.files import write_atomically
from grpo_async.utils.safe_text import visible
from grpo_async.utils.text import both_ends

_COMPLETIONS = "held_out/completions"
_MAX_TEXT = 2000  # characters of a text in TensorBoard, which shows all completions at once
_LINE_WIDTH = 120  # characters of a line there


TableRows: TypeAlias = Sequence[Mapping[str, str | float | None]]
"""Rows of a table; `Trackers` gives all of them the same columns. `step` is the step that was evaluated."""


class Tracker:
    """One tracker: it takes numbers, and texts where it can show them. `shown_by`: the command or the address that shows it."""

    shown_by: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def log_completions(self, step: int, rows: TableRows) -> None:
        """What held-out prompts got in the evaluations that have ended since the last time; one row at least."""

    def close(self, *, failed: bool) -> None:
        """End the tracker's run. `failed`: the run ended with an error."""


class Tensorboard(Tracker):
    """Event files."""

    def __init__(self, run_dir: RunDir) -> None:
        folder = str(run_dir.trackers / "tensorboard")
        self._writer = _library("tensorboardX").SummaryWriter(logdir=folder)
        self.shown_by = f"tensorboard --logdir {shlex.quote(folder)}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_completions(self, step: int, rows: TableRows) -> None:
        self._writer.add_text(_COMPLETIONS, "\n\n".join(map(_block, rows)), global_step=step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _block(row: Mapping[str, str | float | None]) -> str:
    """A row in Markdown: its numbers as a heading, each text below its name as code, which is indented, so that nothing in a text
    is a mark or can end it, and in lines that fit, because TensorBoard does not wrap code."""
    numbers = {name: value for name, value in row.items() if not isinstance(value, str)}
    shown = (f"{name} {'none' if value is None else f'{value:g}'}" for name, value in numbers.items())
    parts = [f"### {', '.join(shown)}"]
    for name, value in row.items():
        if isinstance(value, str):
            lines = visible(both_ends(value, _MAX_TEXT)).splitlines()
            wrapped = [part for line in lines for part in wrap(line, _LINE_WIDTH, drop_whitespace=False) or [""]]
            parts.append("\n".join([f"**{name}**", "", *(f"    {line}" for line in wrapped)]))
    return "\n\n".join(parts)


class Wandb(Tracker):
    """Weights & Biases."""

    def __init__(self, section: WandbTracker, config: ExperimentConfig, run_dir: RunDir) -> None:
        wandb = _library("wandb")
        self._table = wandb.Table
        run_dir.trackers.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            name=config.run.name,
            id=_stored_id(run_dir, "wandb_id", lambda: uuid.uuid4().hex[:16]),
            resume="allow",
            config=public_config(config),
            dir=str(run_dir.trackers),
        )
        offline = f"wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        self.shown_by = offline if section.mode == "offline" else str(self._run.url)
        for entry in CATALOG:
            if "{" not in entry.name and entry.reduction in ("min", "max", "mean"):
                self._run.define_metric(entry.name, summary=entry.reduction)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, step: int, rows: TableRows) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({_COMPLETIONS: table}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def open_tracker(section: TrackerSection, config: ExperimentConfig, run_dir: RunDir) -> Tracker:
    """Raises ConfigError where the library is missing, and what the library raises."""
    match section:
        case TensorboardTracker():
            return Tensorboard(run_dir)
        case WandbTracker():
            return Wandb(section, config, run_dir)


def _stored_id(run_dir: RunDir, file: str, make: Any) -> str:
    """The id of a run, which all its attempts share, so that a resume continues the same curves."""
    path = run_dir.trackers / file
    if not path.exists():
        write_atomically(path, make())
    return path.read_text(encoding="utf-8")


def _library(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"tracking {needs(module.partition('.')[0])}") from error
