"""The runs that the page shows: the table, the token texts and the verdict of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_async.config.public import shown_config
from grpo_async.errors import ConfigError
from grpo_async.findings import Diagnosis, MetricRow, RunHistory, diagnose
from grpo_async.findings.history import read_metrics
from grpo_async.run_directory import RunDir
from grpo_async.store.table import RolloutTable
from grpo_async.utils.files import file_stamp
from grpo_async.utils.text import shortlist
from grpo_async.viewer.runs import EvaluationDir, labels_of, runs_below
from grpo_async.viewer.token_text import TokenTexts, load_token_texts

_REFRESH_EVERY_S = 0.5  # a page has several views, and a person several pages


class NotFoundError(ConfigError):
    """What an address names is not there."""


class Source:
    """One run, or one evaluation of a run. The table is opened when it is first asked for. Safe in several threads."""

    def __init__(self, name: str, run: RunDir, find: Callable[[str], Source]) -> None:
        """`find`: gives the source of another name."""
        self.name = name
        self.run = run
        self.find = find
        self._metrics: list[MetricRow] = []
        self._metrics_stamp: object = None  # of the file, as it was read without problems
        self._metrics_problems: list[str] = []
        self._lock = threading.Lock()
        self._table: RolloutTable | None = None
        self._texts: TokenTexts | None = None
        self._refreshed_at = 0.0

    def table(self) -> RolloutTable:
        """The table, with what was written until half a second ago at least."""
        with self._lock:
            if self._table is None:
                self._table = RolloutTable(self.run.rollouts)
            elif time.monotonic() - self._refreshed_at > _REFRESH_EVERY_S:
                self._table.refresh()
            else:
                return self._table
            self._refreshed_at = time.monotonic()
            return self._table

    def metrics(self) -> list[MetricRow]:
        """The lines of metrics.jsonl, which is read again when it has changed."""
        with self._lock:
            try:
                stamp = file_stamp(self.run.metrics)
            except OSError:  # a network file system that fails for a while: reading says so
                stamp = None
            if stamp is None or stamp != self._metrics_stamp:
                self._metrics_problems.clear()
                self._metrics = read_metrics(self.run, self._metrics_problems)
                self._metrics_stamp = None if self._metrics_problems else stamp
            return self._metrics

    def texts(self) -> TokenTexts | str:
        """The texts of tokens, or the sentence that says why there are none yet."""
        with self._lock:
            if self._texts is None:
                found = load_token_texts(self.run)
                if isinstance(found, str):
                    return found
                self._texts = found
            return self._texts

    def run_and_verdict(self) -> tuple[RunHistory, Diagnosis]:
        """The run's files without its rollouts (of its configuration what may be shown), and whether it learns."""
        run = RunHistory.read(self.run, self.metrics())
        problems = [*run.problems, *self._metrics_problems]
        if not run.metrics and not run.evaluation_result:
            problems.append("There are no metrics: no optimizer step was finished.")
        run = replace(run, config=shown_config(run.config), problems=problems)
        return run, diagnose(run)

    def close(self) -> None:
        with self._lock:
            if self._table is not None:
                self._table.close()
                self._table = None


class RunRegistry:
    """All sources by name: of the runs that were named, or of all below a folder. Names are those of the folders, with
    that of the parent where two are the same."""

    def __init__(self, runs: Sequence[RunDir], folder: Path | None = None) -> None:
        """`folder`: what is below it, as it is when `names` is asked for; then no run is named."""
        self.folder = folder
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        for name, run in zip(labels_of(runs), runs, strict=True):
            name += f"@{run.step}" if isinstance(run, EvaluationDir) else ""
            self._sources[name] = Source(name, run, self.source)
        self._named = list(self._sources)

    @property
    def names(self) -> list[str]:
        """Names of the runs; of those below a folder the newest first."""
        if self.folder is None:
            return self._named
        runs = {run.root.name: run for run in runs_below(self.folder)}
        with self._lock:
            for name, run in runs.items():
                if name not in self._sources:
                    self._sources[name] = Source(name, run, self.source)
        return list(runs)

    def source(self, name: str) -> Source:
        """The run of that name, or the evaluation `RUN@STEP` of one; "": the first."""
        if name not in self._sources:
            names = self.names  # with those that are new
            name = name or next(iter(names), "")
        with self._lock:
            if name not in self._sources:
                run_name, _, step = name.rpartition("@")
                parent = self._sources.get(run_name)
                if parent is None or not step.isdecimal() or int(step) not in parent.run.evaluation_steps():
                    known = shortlist(list(self._sources), ", ") or f"none below {self.folder} yet"
                    raise NotFoundError(f"there is no run '{name}' here; there are {known}")
                self._sources[name] = Source(name, EvaluationDir(parent.run.root, int(step)), self.source)
            return self._sources[name]

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
