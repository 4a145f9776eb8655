"""The files and folders of a run directory, runs/NAME. Other modules take their paths from here."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_async.utils.files import replacing, write_atomically


class _Entry:
    """A name below a run directory; read from a RunDir it is the path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: Any, owner: type) -> Path:
        path: Path = run_dir.root / self._name
        return path


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run directory. Only `create`, `new_token` and `new_attempt` write anything."""

    root: Path

    config = _Entry("config.yaml")
    """The resolved config."""
    token = _Entry("token")
    """The bearer token of the servers (mode 0600), there while the run lasts; see `new_token`."""
    plan = _Entry("plan.txt")
    """The planned processes."""
    fork = _Entry("fork.json")
    """Of a run that `train --fork` began: the parent's directory, and the step."""
    replays = _Entry("replays")
    """Comparisons that `replay` made, a file each: step_26.1.json."""
    preflight = _Entry("preflight.json")
    """The results of the checks before step 1."""
    summary = _Entry("summary.json")
    """The results of the run, written at the end."""
    metrics = _Entry("metrics.jsonl")
    """One line per optimizer step."""
    events = _Entry("events.jsonl")
    """The timeline: one line per span."""
    trace = _Entry("trace.json.gz")
    """The timeline for Perfetto, written by `grpo-async trace`."""
    status = _Entry("status.json")
    """The state of the run, written again on every event and every second."""
    report = _Entry("report.html")
    """Plots and tables in one offline page, written at the end."""
    trackers = _Entry("trackers")
    """Files of TensorBoard, Weights & Biases."""
    evaluation_log = _Entry("evaluations.jsonl")
    """One line per evaluation: its step, its numbers."""
    evaluation_result = _Entry("evaluation.json")
    """The numbers of `grpo-async eval`, whose folder has the same layout."""
    evaluations = _Entry("evaluations")
    """step_N/: the rollouts of each evaluation, in files as in rollouts/."""
    checkpoints = _Entry("checkpoints")
    """step_N/: written under another name and renamed when it is whole."""
    model = _Entry("model")
    """The final Hugging Face export, with a model card."""
    adapter = _Entry("adapter")
    """With LoRA: the adapter alone, as peft loads it."""
    logs = _Entry("logs")
    """attempt_N/: config.yaml, trainer.log, server.log."""
    latest_logs = _Entry("logs/latest")
    """A link to the logs of the newest attempt."""

    @property
    def rollouts(self) -> Path:
        """The rollouts, in blocks: Parquet, the newest as JSON lines. A subclass for evaluations has another folder."""
        return self.root / "rollouts"

    def evaluation(self, step: int) -> Path:
        """The rollouts of the evaluation of a step."""
        return self.evaluations / f"step_{step}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a whole checkpoint, ascending. Half-written ones carry another name."""
        return _numbers(self.checkpoints, "step_")

    def unfinished_steps(self) -> list[int]:
        """Steps of which a checkpoint is being written, or was when its run was killed, ascending."""
        return _numbers(self.checkpoints, partial_of(Path("step_")).name)

    def evaluation_steps(self) -> list[int]:
        """Steps of which there are evaluated rollouts, ascending."""
        return _numbers(self.evaluations, "step_")

    def attempts(self) -> list[int]:
        """Numbers of the attempts that have logs, ascending."""
        return _numbers(self.logs, "attempt_")

    def attempt(self, number: int | str) -> Path:
        """The logs of an attempt."""
        return self.logs / f"attempt_{number}"

    def has_steps(self) -> bool:
        """Whether a step was ever trained."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def create(self, config: str | None = None) -> None:
        """Make the directory private to the user, since rollouts may be confidential; one that has a config.yaml keeps its mode,
        which the user may have opened to others since.

        Args:
            config: content of config.yaml, which is written before anything else, because `--clean` knows a run directory by it.
                Values of `${NAME}` stand resolved in it, so it is private in any case.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.config.exists():
            with contextlib.suppress(PermissionError):  # another user's, who shares it
                self.root.chmod(0o700)
        if config is not None:
            write_atomically(self.config, config, mode=0o600)
        self.rollouts.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def new_token(self, token: str | None = None) -> Iterator[str]:
        """A new secret (or `token`), which is in the file `token` too while the context is open: for the user's own requests to the
        servers, `curl -H "Authorization: Bearer $(cat runs/NAME/token)"`, and for the other machines of the run. A file that a
        killed launcher left is replaced.
        """
        token = token or secrets.token_urlsafe(32)
        # never open to others, not even for a moment, never through a link that somebody put there, and never without the token
        write_atomically(self.token, token, mode=0o600)
        try:
            yield token
        finally:
            self.token.unlink(missing_ok=True)

    def new_attempt(self) -> Path:
        """Make logs/attempt_N for the next N and point logs/latest at it. It gets a copy of config.yaml, which every process of the
        attempt reads (attempt_config): whoever edits config.yaml for a resume changes nothing for a server that restarts now."""
        attempt = self.attempt(max(self.attempts(), default=0) + 1)
        attempt.mkdir()
        if self.config.is_file():
            write_atomically(attempt_config(attempt), self.config.read_text(encoding="utf-8"), mode=0o600)
        with replacing(self.latest_logs) as link:
            link.unlink(missing_ok=True)
            link.symlink_to(attempt.name)
        return attempt


def _numbers(folder: Path, prefix: str) -> list[int]:
    """The numbers in the names of subfolders that begin with `prefix`, ascending: step_2, step_10 -> 2, 10."""
    names = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


PARTIAL_PREFIX = "writing_"
"""Prefix of the names of folders that are being written, replaced or removed."""


def partial_of(folder: Path) -> Path:
    """Where a folder is written until it is whole: step_3 -> writing_step_3."""
    return folder.with_name(f"{PARTIAL_PREFIX}{folder.name}")


def attempt_number(attempt: Path) -> str:
    """logs/attempt_3, or a link to it -> "3"."""
    return attempt.resolve().name.removeprefix("attempt_")


def attempt_config(attempt: Path) -> Path:
    """The configuration of one attempt."""
    return attempt / "config.yaml"
