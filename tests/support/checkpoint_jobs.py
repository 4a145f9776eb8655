"""What the ranks of the checkpoint tests do; started by `run_on_ranks(..., module="tests.support.checkpoint_jobs")`."""

from __future__ import annotations

import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_async.errors import CheckpointError
from grpo_async.run_directory import RunDir
from grpo_async.training import checkpoint
from grpo_async.training.checkpoint import CheckpointWriter
from grpo_async.training.export import export_model
from tests.support.rank_jobs import build, fingerprint, one_step, random_samples


def _writer(run: str) -> tuple[RunDir, CheckpointWriter]:
    run_dir = RunDir(Path(run))
    if dist.get_rank() == 0:
        run_dir.create()
    dist.barrier()
    return run_dir, CheckpointWriter(run_dir, timeout_s=60.0)


def _state(step: int) -> checkpoint.CheckpointState | None:
    """Rank 0's."""
    rollouts = {"data": {"next": 5}}
    return checkpoint.CheckpointState(step=step, rollouts=rollouts, lines=["{}"]) if dist.get_rank() == 0 else None


def _draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def _gathered(values: list[float]) -> list[list[float]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def save_after_one_step(model: str, run: str) -> dict[str, Any]:
    """The step after it is trained while the writer writes."""
    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples(seed=0))
    saved = fingerprint(policy)
    _, writer = _writer(run)
    checkpoint.seed_rng(17 + dist.get_rank())
    _draws()
    writer.begin(1, policy, optimizer, _state(1))
    drawn = _gathered(_draws())
    result = one_step(policy, optimizer, random_samples(seed=1))
    writer.wait()
    return {
        "loss": result.loss,
        "weights": fingerprint(policy),
        "saved": saved,
        "draws": drawn,
        "metrics": writer.take_metrics(),
    }


def save_and_load_with_a_parameter_without_gradient(model: str, run: str) -> dict[str, Any]:
    """As one that the chosen data never reach."""
    policy, optimizer = build(model)
    step, left_out = optimizer.step, optimizer.param_groups[0]["params"][-1]

    def step_without(*arguments: Any) -> Any:
        left_out.grad = None
        return step(*arguments)

    optimizer.step = step_without  # type: ignore[method-assign]
    one_step(policy, optimizer, random_samples())
    optimizer.step = step  # type: ignore[method-assign]
    had_state = left_out in optimizer.state
    run_dir, writer = _writer(run)
    writer.begin(1, policy, optimizer, _state(1))
    writer.wait()
    dist.barrier()  # rank 0 has given it its name
    saved, (policy, optimizer) = fingerprint(policy), build(model)
    checkpoint.load_tensors(run_dir, 1, policy, optimizer)
    return {"had_state": had_state, "saved": saved, "loaded": fingerprint(policy)}


def load_and_go_on(model: str, run: str) -> dict[str, Any]:
    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples(seed=9))  # somewhere else, so that loading has to change everything
    run_dir = RunDir(Path(run))
    checkpoint.load_tensors(run_dir, 1, policy, optimizer)
    state = checkpoint.load_state(run_dir, 1)
    drawn = _gathered(_draws())
    result = one_step(policy, optimizer, random_samples(seed=1))
    return {
        "loss": result.loss,
        "weights": fingerprint(policy),
        "step": state.step,
        "data": state.rollouts["data"],
        "lines": list(state.lines),
        "draws": drawn,
    }


def save_on_a_full_disk(model: str, run: str) -> dict[str, Any]:
    """Checkpoint 1 is written; while 2 is, no file of any rank may grow beyond 1000 bytes."""
    policy, optimizer = build(model)
    run_dir, writer = _writer(run)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    one_step(policy, optimizer, random_samples())
    writer.begin(1, policy, optimizer, _state(1))
    writer.wait()
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    writer.begin(2, policy, optimizer, _state(2))
    error = None
    try:
        writer.wait()
    except CheckpointError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    found = sorted(path.name for path in run_dir.checkpoints.iterdir())
    dist.barrier()
    writer.begin(3, policy, optimizer, _state(3))  # it goes on after a failure
    writer.wait()
    dist.barrier()
    return {"error": error, "found": found, "after": run_dir.checkpoint_steps()}


def save_slowly(model: str, run: str) -> dict[str, Any]:
    """What happens, in order: two writes that take a while each, a step while each goes on, and looks without waiting."""
    policy, optimizer = build(model)
    run_dir, writer = _writer(run)
    events: list[str] = []
    save = checkpoint.dcp.save

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(2.0)
        return save(*arguments, **named)

    def note(event: str) -> None:
        events.append(event)

    checkpoint.dcp.save = slowly
    for step in (1, 2):
        one_step(policy, optimizer, random_samples(seed=9))
        writer.begin(step, policy, optimizer, _state(step), on_written=lambda step=step: note(f"written {step}"))
        note(f"begun {step}")
        writer.poll()
        note("goes on" if writer.is_writing else "waited")
    writer.wait()
    return {"events": events, "steps": run_dir.checkpoint_steps()}


def save_and_export(model: str, run: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples())
    run_dir, writer = _writer(run)
    writer.begin(1, policy, optimizer, _state(1))
    export_model(run_dir.model, policy, AutoTokenizer.from_pretrained(model), dtype="float32")
    writer.wait()
    return {"saved": fingerprint(policy)}
