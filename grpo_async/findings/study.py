"""A study: one task under several settings and seeds; what each setting reached, what it cost, and which one to use.

    study.json in a folder of runs -> Study.read -> table, advice

A setting is called safe where it loses no more than the tolerance to the best one with 95% confidence (non-inferiority), by the
differences of runs with the same seed, and none of its runs failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_async.findings.statistics import t_quantile
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import numbers, read_object
from grpo_async.utils.run_state import FAILED, FINISHED, state_of
from grpo_async.utils.text import count, duration, finite

STUDY_FILE = "study.json"
_MIN_SEEDS = 3  # the confidence interval of two values is too wide to say anything


class StudyPlan(BaseModel):
    """Content of study.json: what is varied. `base`: the configuration, flat. `settings`: labels on the axes, and overrides.
    `own`: the labels that the configuration has itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str
    base: dict[str, str]
    axes: list[str]
    settings: list[tuple[list[str], list[str]]]
    own: list[str] | None
    seeds: list[int]
    tolerance: float

    def runs(self) -> Iterator[tuple[str, list[str], int]]:
        """Name, overrides and seed of each run, seed by seed, so that a study that is stopped early has compared all settings."""
        for seed in self.seeds:
            yield from ((run_name(labels, seed), overrides, seed) for labels, overrides in self.settings)


def run_name(labels: Sequence[str], seed: int) -> str:
    """(["4", "token mask"], 1) -> "4_token-mask_seed-1": the folder of the run."""
    words = ("".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in label) for label in labels)
    return "_".join([*(word.strip("-.") or "-" for word in words), f"seed-{seed}"]).lstrip("-._")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the runs of one setting reached. `rewards`: held-out reward after training, by seed."""

    labels: Sequence[str]
    rewards: Mapping[int, float]
    errors: Sequence[str]
    seconds: float | None  # of training, median of the runs
    staleness: float | None  # of the trained tokens, in steps, mean of the runs

    @classmethod
    def of_runs(cls, labels: Sequence[str], runs: Mapping[int, RunDir]) -> Self:
        """Read the runs of a setting, by seed; those that have not ended count for nothing."""
        rewards: dict[int, float] = {}
        errors: list[str] = []
        summaries = []
        for seed, run in runs.items():
            status, summary = read_object(run.status, []), read_object(run.summary, [])
            state = state_of(status, summary).state
            after = (summary.get("evaluation") or {}).get("after") or {}
            if state == FAILED:
                errors.append(str(status.get("error") or "it failed"))
            elif state == FINISHED and (reward := finite(after.get("reward"))) is not None:
                rewards[seed] = reward
                summaries.append(numbers(summary))
        seconds, staleness = ([s[name] for s in summaries if name in s] for name in ("wall_s", "staleness_mean"))
        return cls(
            labels=labels,
            rewards=rewards,
            errors=errors,
            seconds=median(seconds) if seconds else None,
            staleness=fmean(staleness) if staleness else None,
        )

    @property
    def mean(self) -> float:
        return fmean(self.rewards.values()) if self.rewards else -math.inf

    def __str__(self) -> str:
        return ", ".join(self.labels)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of a mean, by Student's t."""
    count = len(values)
    return t_quantile(count - 1) * stdev(values) / math.sqrt(count) if count >= _MIN_SEEDS else math.inf


@dataclass(frozen=True, slots=True)
class Study:
    plan: StudyPlan
    settings: Sequence[Setting]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The study of a folder, as far as its runs have come. None: there is none, or its file is damaged."""
        try:
            plan = StudyPlan.model_validate(read_object(folder / STUDY_FILE, []))
        except ValidationError:
            return None
        runs = [
            Setting.of_runs(labels, {seed: RunDir(folder / run_name(labels, seed)) for seed in plan.seeds})
            for labels, _ in plan.settings
        ]
        return cls(plan, runs)

    @property
    def best(self) -> Setting:
        """The setting with the highest mean, of those that have all their runs if there are any."""
        whole = [setting for setting in self.settings if len(setting.rewards) == len(self.plan.seeds)]
        return max(whole or self.settings, key=lambda setting: setting.mean)

    def loss_to_best(self, setting: Setting) -> float:
        """The most that a setting may lose to the best one, with 95% confidence. Infinite: it cannot be said."""
        best = self.best
        if setting is best:
            return 0.0
        lost = [best.rewards[seed] - reward for seed, reward in setting.rewards.items() if seed in best.rewards]
        return fmean(lost) + _half_width(lost) if lost else math.inf

    def is_safe(self, setting: Setting) -> bool | None:
        """None: it cannot be said yet."""
        if setting.errors:
            return False
        if len(setting.rewards) < len(self.plan.seeds) or len(setting.rewards) < _MIN_SEEDS:
            return None
        return self.loss_to_best(setting) <= self.plan.tolerance

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows, as text."""
        rows = []
        for setting in self.settings:
            rewards, ended = list(setting.rewards.values()), len(setting.rewards) + len(setting.errors)
            width = _half_width(rewards)
            rows.append(
                [
                    *setting.labels,
                    {True: "yes", False: "no", None: "?"}[self.is_safe(setting)],
                    f"{ended} of {len(self.plan.seeds)}"
                    + (f", {len(setting.errors)} failed" if setting.errors else ""),
                    f"{setting.mean:.3f}" if rewards else "",
                    f"±{width:.3f}" if math.isfinite(width) else "–",
                    f"{min(rewards):.3f}" if rewards else "",
                    "" if setting.staleness is None else f"{setting.staleness:.1f}",
                    "" if setting.seconds is None else duration(round(setting.seconds)),
                ]
            )
        return [*self.plan.axes, "safe", "runs", "held out", "95%", "lowest", "mean staleness", "time"], rows

    def advice(self) -> str:
        """One sentence: which setting to use."""
        best = self.best
        if not best.rewards:
            return "No run has finished yet."
        safe = [setting for setting in self.settings if self.is_safe(setting)]
        if not safe:
            return (
                f"The highest mean is that of {best} ({best.mean:.3f}); which settings are safe cannot be said yet: "
                f"that takes at least {_MIN_SEEDS} seeds whose runs have all finished."
            )
        cheapest = min(safe, key=lambda setting: setting.seconds or math.inf)
        others = [str(setting) for setting in safe if setting is not cheapest]
        number = f"the {count(len(safe), 'setting')} that lose" if others else "it is the only one that loses"
        why = f"the fastest of {number}" if others else number
        return (
            f"Use {cheapest}: {why} at most {self.plan.tolerance:g} to the best one, with 95% confidence.{self._own()}"
        )

    def _own(self) -> str:
        """What the configuration's own setting is worth; empty where it is not in the table."""
        own = next((setting for setting in self.settings if setting.labels == self.plan.own), None)
        if own is None:
            return ""
        lost = self.loss_to_best(own)
        verdicts = {
            True: "is safe, too" if own is not self.best else "is the best one",
            False: f"may lose {lost:.3f}" if math.isfinite(lost) and not own.errors else "fails",
            None: "cannot be judged yet",
        }
        return f" Your own setting ({own}) {verdicts[self.is_safe(own)]}."

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        settings = [
            {
                "labels": list(setting.labels),
                "rewards": {str(seed): reward for seed, reward in setting.rewards.items()},
                "errors": list(setting.errors),
                "mean": setting.mean if setting.rewards else None,
                "seconds": setting.seconds,
                "staleness": setting.staleness,
                "safe": self.is_safe(setting),
            }
            for setting in self.settings
        ]
        return {"axes": self.plan.axes, "settings": settings, "advice": self.advice()}
