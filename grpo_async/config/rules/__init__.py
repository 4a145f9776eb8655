"""The rules that span sections: combinations that make no sense, each with its reason and what to change.

A rule is one text, `path: what is wrong; what to do`. All are told at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_async.config.rules import evaluation, loss, pipeline, scale

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def conflicts(config: ExperimentConfig) -> list[str]:
    """What does not go together in this experiment; empty when everything does."""
    parts = (pipeline, loss, evaluation, scale)
    return [problem for part in parts for problem in part.conflicts(config)]
