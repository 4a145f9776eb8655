"""What bounds a run, in one sentence, and the setting to change: a pure function of measured figures. No I/O.

    metrics of the last steps --figures_of--> PipelineFigures --advise--> Advice

With t = seconds that the trainer works in a step (trains, pushes, copies a checkpoint) and g = seconds that the servers generate:

    step_s = 10, trainer_idle = 0.6, generator_idle = 0.4  ->  t = 4, g = 6; overlapped, a step would take max(4, 6) = 6 s

The rules stand in `advice_rules`; the first that has something to say is taken.
"""

from __future__ import annotations

from grpo_async.tracking.advice_rules import RULES, Advice
from grpo_async.tracking.pipeline_figures import PipelineFigures, PipelineSetup, figures_of, setup_of

__all__ = ["Advice", "PipelineFigures", "PipelineSetup", "advise", "figures_of", "setup_of"]

_LEAST_STEPS = 3
"""Fewer say nothing: the first steps of a run are unlike the others."""


def advise(figures: PipelineFigures, setup: PipelineSetup) -> Advice | None:
    """What bounds the run and what to change; None while too little is measured to say anything."""
    if figures.num_steps < _LEAST_STEPS or not figures.step_s:
        return None
    if figures.trainer_idle is None or figures.generator_idle is None:
        return None
    for rule in RULES:
        if (advice := rule(figures, setup)) is not None:
            return advice
    return None
