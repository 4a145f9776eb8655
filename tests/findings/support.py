"""Labeled runs, as the files that they leave; each with the numbers that it was made from."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_async.run_directory import RunDir

ROLLOUTS = 64  # of a step
# a launcher that has just written, however late the test comes
ELSEWHERE = {"host": "another", "updated_at": time.time() + 86_400.0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run was like: `reward` and `held_out` are the true chances of a reward of 1 (else 0) by step."""

    reward: Callable[[float], float] | None = None  # of the share of the run that is done
    num_steps: int = 60
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[int, float] = field(default_factory=dict)  # step -> chance
    num_prompts: int = 100
    samples: int = 2
    baseline: float | None = None
    failed_evaluations: Mapping[int, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = "finished"
    error: str | None = None

    def write(self, folder: Path, seed: int) -> RunDir:
        dice, run_dir = random.Random(seed), RunDir(folder / "run")
        run_dir.create()
        run_dir.config.write_text(json.dumps({"training": {"max_steps": self.num_steps}, **self.config}))
        run_dir.status.write_text(json.dumps({"version": 1, "state": self.state, "error": self.error, **ELSEWHERE}))
        lines = [self._step(step, dice) for step in range(1, self.num_steps + 1)] if self.reward is not None else []
        run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        hard = [dice.gauss(0.0, 1.5) for _ in range(self.num_prompts)]  # some prompts are harder, in every evaluation
        told = [self._evaluation(step, chance, hard, dice) for step, chance in self.held_out.items()]
        told += [{"step": step, "when": "during", "error": error} for step, error in self.failed_evaluations.items()]
        run_dir.evaluation_log.write_text("".join(json.dumps(line) + "\n" for line in told))
        return run_dir

    def _step(self, step: int, dice: random.Random) -> dict[str, float]:
        assert self.reward is not None
        chance = self.reward((step - 1) / max(1, self.num_steps - 1))
        hits = [float(dice.random() < chance) for _ in range(ROLLOUTS)]
        return {
            "step": step, "lr": 1e-5, "grad_norm": 0.5, "reward": math.fsum(hits) / ROLLOUTS, "reward_min": min(hits),
            "reward_max": max(hits), "frac_reward_zero_std": 0.2, **self.metrics,
        }  # fmt: skip

    def _evaluation(self, step: int, chance: float, hard: Sequence[float], dice: random.Random) -> dict[str, Any]:
        logit = math.log(chance / (1 - chance)) * 1.4  # the mean over prompts is about `chance`
        chances = [1 / (1 + math.exp(-logit - each)) for each in hard]
        means = [sum(dice.random() < p for _ in range(self.samples)) / self.samples for p in chances]
        mean = math.fsum(means) / len(means)
        spread = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1))
        metrics = {"num_prompts": len(means), "reward": mean, "reward_stderr": spread / math.sqrt(len(means))}
        metrics |= {} if self.baseline is None else {"majority_baseline": self.baseline}
        return {"step": step, "when": "during", "metrics": metrics, "by_group": {}, "prompt_rewards": means}


def line(first: float, last: float) -> Callable[[float], float]:
    return lambda done: first + (last - first) * done


def peak(first: float, best: float, last: float) -> Callable[[float], float]:
    return lambda done: first + (best - first) * 2 * done if done < 0.5 else best + (last - best) * (2 * done - 1)
