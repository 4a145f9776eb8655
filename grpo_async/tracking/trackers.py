"""Trackers help, never harm: one that cannot be set up stops the run before it begins, a failed call later only warns.

Their libraries are optional extras and are imported when a tracker of theirs is configured.
"""

from __future__ import annotations

import importlib
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.public import public_config
from grpo_async.config.record_sections import TensorboardTracker, WandbTracker
from grpo_async.errors import ConfigError
from grpo_async.rundir import RunDir

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place that numbers go to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run, by the name of their type."""

    def __init__(self, trackers: Sequence[tuple[str, Tracker]]) -> None:
        self._trackers = trackers
        self._warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a step's metrics to every tracker; values that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, tracker in self._trackers:
            self._call(name, partial(tracker.log, step, finite))

    def close(self) -> None:
        for name, tracker in self._trackers:
            self._call(name, tracker.close)

    def _call(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - a tracker's failure is not the run's
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("tracker %s failed (further failures of it are not shown): %s", name, error)


class _Tensorboard:
    def __init__(self, rundir: RunDir) -> None:
        self._writer = _library("tensorboardX", "tensorboard").SummaryWriter(
            logdir=str(rundir.trackers / "tensorboard")
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, section: WandbTracker, config: ExperimentConfig, rundir: RunDir) -> None:
        wandb = _library("wandb", "wandb")
        rundir.trackers.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            name=config.run.name,
            id=_run_id(rundir),
            resume="allow",
            config=public_config(config),
            dir=str(rundir.trackers),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(config: ExperimentConfig, rundir: RunDir) -> Trackers:
    """Set up what `tracking` names.

    Raises:
        ConfigError: a library is missing or a tracker refuses (no login, no network).
    """
    trackers: list[tuple[str, Tracker]] = []
    for number, section in enumerate(config.tracking):
        try:
            match section:
                case TensorboardTracker():
                    trackers.append((section.type, _Tensorboard(rundir)))
                case WandbTracker():
                    trackers.append((section.type, _Wandb(section, config, rundir)))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"tracking.{number}: {section.type} cannot be set up: {error}") from error
    return Trackers(trackers)


def _run_id(rundir: RunDir) -> str:
    """The same for every attempt of a run, so that a resume goes on in the same curves."""
    path = rundir.trackers / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking needs {module}, which is not installed: pip install 'grpo-async[{extra}]'"
        ) from error
