"""What both sides are given, in one record: model, prompts, batch, optimizer, threads, server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One training run of either side. Lengths are in tokens, `folder` is the run's own."""

    folder: Path
    model: Path
    prompts: Path
    """JSON lines with a `prompt` of messages."""
    server_url: str
    group_size: int
    groups_per_step: int
    completion_tokens: int
    max_model_len: int
    max_staleness: int
    max_in_flight: int
    """Requests at the server; -1: TRL's own choice."""
    push_mode: str
    """weights.mode of our side; TRL knows "recompute" only."""
    warm_up: int
    """Steps before those that are measured."""
    steps: int
    """Steps that are measured."""
    learning_rate: float
    seed: int
    threads: int
    """Of the trainer; the server has as many."""

    @property
    def samples_per_step(self) -> int:
        """group_size x groups_per_step."""
        return self.group_size * self.groups_per_step

    @property
    def last_measured(self) -> int:
        """warm_up + steps."""
        return self.warm_up + self.steps

    @property
    def max_steps(self) -> int:
        """Steps of the run. Our side stops generating as many steps before the end as it may run ahead, and trains faster then:
        those steps are not measured, on either side."""
        return self.last_measured + self.max_staleness + 1

    @property
    def steps_file(self) -> Path:
        """Where TRL's side writes a line for each step."""
        return self.folder / "steps.jsonl"

    def write(self) -> Path:
        """The setting as a file for another process."""
        path = self.folder / "setting.json"
        path.write_text(json.dumps(asdict(self), default=str, indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Setting:
        """Inverse of `write`."""
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("folder", "model", "prompts"):
            fields[name] = Path(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of either side; seconds of wall time. What no part counts is `other_s`."""

    ended_at: float
    """Seconds since 1970."""
    wall_s: float
    samples: float
    tokens: float
    """Trained ones."""
    waiting_s: float
    """For samples."""
    forward_s: float
    backward_s: float
    optimizer_s: float
    """The optimizer's own step."""
    sync_s: float
    """Weight push, pause and resume included."""
    staleness: float
    """Mean, in optimizer steps."""
    thrown_away: float
    """Samples generated and never trained, since the run began."""

    @property
    def other_s(self) -> float:
        """What is left of the step."""
        known = self.waiting_s + self.forward_s + self.backward_s + self.optimizer_s + self.sync_s
        return max(0.0, self.wall_s - known)
