"""Which checkpoints stay: the newest, every N-th, and those with the best evaluations. On rank 0.

What an evaluation found is noted in checkpoints/evaluations.json, so that a resume and `grpo-async eval` know it.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Collection, Mapping

from grpo_async.config.sections import CheckpointSection
from grpo_async.errors import CheckpointError
from grpo_async.rundir import RunDir, write_atomically
from grpo_async.training.checkpoint import set_aside

_NAME = "evaluations.json"


def steps_to_keep(
    steps: Collection[int],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int = 0,
    scores: Mapping[int, float] | None = None,
) -> set[int]:
    """Which of `steps` stay. Larger scores are better; of equal ones the newer step stays. A step without a score is not among the
    best, and one whose score is not finite neither.

    steps 5 10 15 20, keep_last 1, keep_every 10, keep_best 1, scores 5: .9, 10: .2 -> {20} and {10, 20} and {5} = {5, 10, 20}
    """
    kept = set(sorted(steps)[-keep_last:])
    if keep_every is not None:
        kept |= {step for step in steps if step > 0 and step % keep_every == 0}
    if keep_best:
        scored = [(score, step) for step, score in (scores or {}).items() if step in steps and math.isfinite(score)]
        kept |= {step for _, step in sorted(scored)[-keep_best:]}
    return kept


class CheckpointKeeper:
    """Removes checkpoints that need not stay. `note_evaluation` and `prune` may be called from different threads.

    Args:
        resumed_step: the checkpoint that the run goes on from; evaluations of later steps are forgotten: those steps come again.

    Raises:
        CheckpointError: evaluations.json is damaged.
    """

    def __init__(self, rundir: RunDir, section: CheckpointSection, *, resumed_step: int | None = None) -> None:
        self._rundir = rundir
        self._section = section
        self._lock = threading.Lock()
        self._evaluated_now: int | None = None
        self._evaluations = self._read()
        if resumed_step is not None:
            self._evaluations = {step: found for step, found in self._evaluations.items() if step <= resumed_step}

    @property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Metrics of every evaluation, by step."""
        with self._lock:
            return dict(self._evaluations)

    def expect_evaluation(self, step: int | None) -> None:
        """The policy of `step` is being evaluated: with `keep_best`, its checkpoint stays until the result is known. None: no
        policy is."""
        with self._lock:
            self._evaluated_now = step

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy of `step` was evaluated. Its checkpoint need not exist, or not yet.

        Raises:
            OSError: it cannot be written down.
        """
        with self._lock:
            self._evaluations[step] = dict(metrics)
            content = {str(step): found for step, found in sorted(self._evaluations.items())}
            self._rundir.checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomically(self._rundir.checkpoints / _NAME, json.dumps(content))

    def prune(self) -> None:
        """Remove what need not stay. The newest always stays, so the one that the run goes on from does until there is a newer one;
        what is being written has no such name yet. Call it after a checkpoint has been written."""
        section = self._section
        with self._lock:
            steps = self._rundir.checkpoint_steps()
            metric = section.best_metric
            kept = steps_to_keep(
                steps,
                keep_last=section.keep_last,
                keep_every=section.keep_every,
                keep_best=section.keep_best,
                scores={step: found[metric] for step, found in self._evaluations.items() if metric in found},
            )
            if section.keep_best and self._evaluated_now is not None:
                kept.add(self._evaluated_now)
            for step in set(steps) - kept:
                # renamed first: a kill in the middle must not leave a part of it under the name of a whole one
                shutil.rmtree(set_aside(self._rundir.checkpoint(step), "writing_removed"), ignore_errors=True)

    def _read(self) -> dict[int, dict[str, float]]:
        path = self._rundir.checkpoints / _NAME
        if not path.is_file():
            return {}
        try:
            return {int(step): dict(found) for step, found in json.loads(path.read_text(encoding="utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; remove it to go on without the evaluations") from error
