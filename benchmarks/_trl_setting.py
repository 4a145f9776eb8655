"""What both sides of against_trl are given, what a step of either is, and their reward. Imported in TRL's environment, too, where
grpo_async is importable but not installed."""

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
    """Requests at the server; -1: TRL's own choice, max_staleness steps' worth, one at least."""
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
    def in_flight(self) -> int:
        """Requests at the server at most."""
        own = max(1, self.max_staleness) * self.samples_per_step
        return own if self.max_in_flight < 0 else self.max_in_flight

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
        return cls(**fields | {name: Path(fields[name]) for name in ("folder", "model", "prompts")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of either side; seconds of wall time. What no part counts is `other_s`."""

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


def low_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward of both sides: cheap, and different for every completion, so that no group is without a signal. The fraction of a
    completion's tokens whose id is below 192: [[1, 500], [2, 3]] -> [0.5, 1.0]."""
    return [sum(token < 192 for token in ids) / max(1, len(ids)) for ids in completion_ids]
