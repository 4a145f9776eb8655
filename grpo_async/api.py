"""For notebooks and scripts: `load_config`, `train`, and `Run`, whose rollouts and metrics are data frames of pandas.

from grpo_async import Run, load_config, train

run = train(load_config("configs/quickstart.yaml", ["training.max_steps=10"]))
run.metrics().plot(x="step", y="reward")
run.rollouts("step = 10 and reward < 0.5")[["prompt_text", "completion_text", "reward"]]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError, RunError
from grpo_async.findings import Diagnosis, RunHistory, diagnose
from grpo_async.findings.history import read_metrics
from grpo_async.store.export import export_rollouts
from grpo_async.store.query import parse_query
from grpo_async.utils.extras import needs
from grpo_async.utils.files import read_objects
from grpo_async.utils.processes import die_with_parent
from grpo_async.viewer.runs import find_evaluation, find_run

if TYPE_CHECKING:
    import pandas

__all__ = ["Run", "load_config", "train"]


def train(config: ExperimentConfig, *, resume: int | bool = False, clean: bool = False) -> Run:
    """Run an experiment to its end, as `grpo-async train` does. Call it from the main thread. Inside a running event loop, as in
    a cell of a notebook, a child process launches the run; a script that does so needs `if __name__ == "__main__":`.

    Args:
        config: what `load_config(path, overrides)` returns.
        resume: True continues from the newest checkpoint, a number from the checkpoint of that step.
        clean: remove an old run of the same name first.

    Raises:
        ConfigError: the configuration, or what it names, is wrong; nothing was started.
        RunError: the run failed or was stopped; its folder holds what was saved.
    """
    wanted = None if resume is False else "latest" if resume is True else str(resume)
    code = (_launch_in_child if _in_event_loop() else _launch)(config, wanted, clean)
    folder = config.run_path
    if code != 0:
        raise RunError(f"{folder}: the run ended with exit code {code}; logs/ in it and `grpo-async status` say why")
    return Run(folder)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _launch(config: ExperimentConfig, resume: str | None, clean: bool) -> int:
    from grpo_async.launch.start import launch

    return launch(config, resume=resume, clean=clean)


def _launch_in_child(config: ExperimentConfig, resume: str | None, clean: bool) -> int:
    """The launcher needs an event loop and the signals of a main thread for itself. It ends by itself after a Ctrl-C, which goes to
    the whole process group."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=die_with_parent) as child:
        try:
            return child.submit(_launch, config, resume, clean).result()
        except BrokenProcessPool as error:
            raise RunError(
                f"{config.run_path}: the launcher was killed; `grpo-async status` says how far the run is"
            ) from error


class Run:
    """A run, also while it runs: everything is read again at each call. `run`: its folder, or its name in `runs/`.

    Raises:
        ConfigError: there is no such run.
    """

    def __init__(self, run: str | Path) -> None:
        self._dir = find_run(str(run))

    @property
    def folder(self) -> Path:
        return self._dir.root

    def rollouts(self, where: str = "", *, evaluation: int | str | None = None) -> pandas.DataFrame:
        """One row for each rollout; docs/reference/columns.md describes the columns.

        Args:
            where: an SQL condition, as `grpo-async inspect-rollouts` takes it: "reward < 0.2 and truncated".
            evaluation: those of an evaluation, by its step, or "latest"; None: those of training.
        """
        import duckdb

        _pandas()
        source = self._dir if evaluation is None else find_evaluation(self._dir, str(evaluation))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rollouts.parquet"
            export_rollouts(source.rollouts, file, "parquet", parse_query(where))
            return duckdb.read_parquet(str(file)).df()

    def metrics(self) -> pandas.DataFrame:
        """One row for each step: the lines of metrics.jsonl, a column for each metric (NaN where a step lacks it)."""
        problems: list[str] = []
        return _frame(read_metrics(self._dir, problems), problems)

    def evaluations(self) -> pandas.DataFrame:
        """One row for each evaluation: the lines of evaluations.jsonl."""
        problems: list[str] = []
        return _frame(read_objects(self._dir.evaluation_log, problems), problems)

    def diagnosis(self) -> Diagnosis:
        """Whether the run learns, by how much, what stands in the way and what to do about it."""
        history = RunHistory.read(self._dir)
        for problem in history.problems:
            warnings.warn(problem, stacklevel=2)
        return diagnose(history)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def _frame(rows: Iterable[Mapping[str, Any]], problems: list[str]) -> pandas.DataFrame:
    frame: pandas.DataFrame = _pandas().DataFrame([dict(row) for row in rows])
    for problem in problems:  # found while the rows were read
        warnings.warn(problem, stacklevel=3)
    return frame


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigError(f"a data frame {needs('pandas')}") from error
    return pandas
