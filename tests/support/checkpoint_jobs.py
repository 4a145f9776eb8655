"""What the ranks of the checkpoint tests do; started by `run_on_ranks(..., module="tests.support.checkpoint_jobs")`."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def save_after_one_step(model: str, run: str, **settings: Any) -> dict[str, Any]:
    """The step after it is trained while the writer writes."""
    policy, optimizer = build(model, **settings)
    one_step(policy, optimizer, random_samples(seed=0))
    _, writer = _writer(run)
    writer.begin(1, policy, optimizer, _state(1))
    result = one_step(policy, optimizer, random_samples(seed=1))
    writer.wait()
    return {"loss": result.loss, "weights": fingerprint(policy), "metrics": writer.take_metrics()}


def find_undamaged_steps(model: str, run: str) -> dict[str, Any]:
    """Checkpoints of steps 1 and 2, a bit of the last rank's tensors flipped in that of 2: where each way to resume goes on."""
    policy, optimizer = build(model)
    run_dir, writer = _writer(run)
    for step in (1, 2):
        writer.begin(step, policy, optimizer, _state(step))
        writer.wait()
    if dist.get_rank() == 0:
        damaged = run_dir.checkpoint(2) / f"__{dist.get_world_size() - 1}_0.distcp"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    named = _error_of(lambda: checkpoint.find_undamaged(run_dir, 2, is_named=True))
    step, notes = checkpoint.find_undamaged(run_dir, 2, is_named=False)
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    left = sorted(path.name for path in run_dir.checkpoints.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        (run_dir.checkpoint(1) / "__0_0.distcp").unlink()
    dist.barrier()
    none = _error_of(lambda: checkpoint.find_undamaged(run_dir, 1, is_named=False))
    return {"named": named, "steps": steps, "notes": notes, "left": left, "none": none}


def load_and_go_on(model: str, run: str, **settings: Any) -> dict[str, Any]:
    policy, optimizer = build(model, **settings)
    one_step(policy, optimizer, random_samples(seed=9))  # somewhere else, so that loading has to change everything
    for group in optimizer.param_groups:  # a setting that the resume has changed; the step below has its own
        group["lr"] = 0.25
    run_dir = RunDir(Path(run))
    checkpoint.load_tensors(run_dir, 1, policy, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    state = checkpoint.load_state(run_dir, 1)
    result = one_step(policy, optimizer, random_samples(seed=1))
    return {
        "loss": result.loss,
        "weights": fingerprint(policy),
        "step": state.step,
        "data": state.rollouts["data"],
        "lines": list(state.lines),
        "rates": rates,
    }


def save_on_a_full_disk(model: str, run: str) -> dict[str, Any]:
    """Checkpoint 1 is written; while 2 is, no file of any rank may grow beyond 1000 bytes."""
    policy, optimizer = build(model)
    run_dir, writer = _writer(run)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.begin(1, policy, optimizer, _state(1))
    writer.wait()
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    writer.begin(2, policy, optimizer, _state(2))
    error = _error_of(writer.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    return {"error": error, "found": sorted(path.name for path in run_dir.checkpoints.iterdir())}


def save_slowly(model: str, run: str) -> dict[str, Any]:
    """What happens, in order: two writes that take a while each, with a step between them."""
    policy, optimizer = build(model)
    run_dir, writer = _writer(run)
    events: list[str] = []
    write = checkpoint._Storage.write_data

    def slowly(*arguments: Any) -> Any:
        time.sleep(2.0)
        return write(*arguments)

    checkpoint._Storage.write_data = slowly  # type: ignore[method-assign]
    for step in (1, 2):
        one_step(policy, optimizer, random_samples(seed=9))
        writer.begin(step, policy, optimizer, _state(step), on_written=partial(events.append, f"written {step}"))
        events.append(f"goes on from {step}")
    writer.wait()
    saved, (policy, optimizer) = fingerprint(policy), build(model)
    checkpoint.load_tensors(run_dir, 2, policy, optimizer)
    return {"events": events, "steps": run_dir.checkpoint_steps(), "saved": saved, "loaded": fingerprint(policy)}


def save_and_export(model: str, run: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples())
    run_dir, writer = _writer(run)
    writer.begin(1, policy, optimizer, _state(1))
    export_model(run_dir.model, policy, AutoTokenizer.from_pretrained(model), dtype="float32")
    writer.wait()
    return {"saved": fingerprint(policy)}
