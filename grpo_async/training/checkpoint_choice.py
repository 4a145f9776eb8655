"""Which checkpoint of a run a name means, for `train --resume`, `eval` and `export-model`; and which are the best, for pruning too.

Loads no torch: commands ask before they start anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import read_evaluations, scores_by_step


def find_checkpoint(run_dir: RunDir, name: str, *, option: str) -> int:
    """The step of the checkpoint that `name` means.

    Args:
        name: "latest"; "best", by the run's own checkpoint.best_metric, of those that were kept; a step; or the path
            RUN/checkpoints/step_N.
        option: for messages, such as "--checkpoint".

    Raises:
        ConfigError: the run has no such checkpoint; the message lists those that it has. Or its config.yaml, which "best" goes by,
            cannot be read.
    """
    steps = run_dir.checkpoint_steps()
    if not steps:
        raise ConfigError(f"{option} {name}: {run_dir.checkpoints} has no checkpoint")
    known = ", ".join(map(str, steps))
    if name == "latest":
        return steps[-1]
    if name == "best":
        from grpo_async.config.loader import load_config

        best_metric = load_config(run_dir.config).checkpoint.best_metric
        ranked = best_first(steps, scores_by_step(read_evaluations(run_dir.evaluation_log, []), best_metric))
        if not ranked:
            raise ConfigError(
                f"{option} best: no checkpoint of {run_dir.root} was evaluated by {best_metric!r}; choose one of the steps {known}"
            )
        return ranked[0]
    for step in steps:
        if (name.isdecimal() and int(name) == step) or run_dir.checkpoint(step).resolve() == Path(name).resolve():
            return step
    raise ConfigError(
        f"{option} {name}: {run_dir.checkpoints} has no such checkpoint; there are latest, best, and the steps {known}"
    )


def best_first(steps: Collection[int], scores: Mapping[int, float]) -> list[int]:
    """Those of `steps` that have a finite score, the largest first; of equal scores the newer step first.

    steps 5 10 15, scores 5: .9, 10: .9, 15: nan, 20: 1. -> [10, 5]
    """
    scored = [(score, step) for step, score in scores.items() if step in steps and math.isfinite(score)]
    return [step for _, step in sorted(scored, reverse=True)]
