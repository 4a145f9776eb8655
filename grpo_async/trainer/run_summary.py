"""What summary.json says of a run; summary.py shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.buffer.ledger import is_closed
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.findings import Verdict
from grpo_async.inference.server import ServerFailure
from grpo_async.processes.assignment import Assignment


def run_summary(
    assignment: Assignment,
    config: ExperimentConfig,
    *,
    engine: str,
    on_gpu: bool,
    steps: int,
    failures: Sequence[ServerFailure],
    meter: Mapping[str, float],
    evaluation: Mapping[str, Any] | None,
    learning: Verdict,
    ledger: dict[str, dict[str, int]],
    memory: Mapping[str, Any],
) -> dict[str, Any]:
    """Of a run that ends after `steps` finished steps.

    Args:
        meter: PipelineMeter.summary.
        evaluation: RunEvaluations.summary.
        learning: whether it did.
        ledger: Ledger.snapshot.
        memory: bytes: peaks of the ranks after their first step (none where there was no step), estimated.
    """
    is_finished = steps == config.training.max_steps
    return {
        "status": "finished" if is_finished else "stopped",
        "steps": steps,
        "model": str(assignment.run_dir.model) if is_finished else None,
        "num_devices": assignment.world_size,
        "engine": engine,
        "on_gpu": on_gpu,
        "server_failures": [
            {"server": failure.name, "reason": failure.reason, "recovery_s": failure.recovery_s} for failure in failures
        ],
        **meter,
        "learning": learning.as_dict(),
        "evaluation": evaluation,
        "ledger": ledger,
        "ledger_closed": is_closed(ledger),
        "memory": {"peaks": memory["peaks"], "estimated": memory["estimated"]},
    }
