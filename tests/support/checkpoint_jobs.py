"""What the ranks of the checkpoint tests do; started by `run_on_ranks(..., module="tests.support.checkpoint_jobs")`."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from grpo_async.errors import CheckpointError
from grpo_async.run_directory import RunDir
from grpo_async.training import checkpoint
from grpo_async.training.checkpoint import CheckpointWriter
from grpo_async.training.export import export_model
from grpo_async.training.model import Reference
from tests.support.loss_inputs import loss_section
from tests.support.rank_jobs import build, fingerprint, one_step, random_samples
from tests.training import shard_jobs


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


def _gathered(values: list[float]) -> list[list[float]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def save_after_one_step(model: str, run: str, **settings: Any) -> dict[str, Any]:
    """The step after it is trained while the writer writes."""
    policy, optimizer = build(model, **settings)
    one_step(policy, optimizer, random_samples(seed=0))
    _, writer = _writer(run)
    writer.begin(1, policy, optimizer, _state(1))
    result = one_step(policy, optimizer, random_samples(seed=1))
    writer.wait()
    return {"loss": result.loss, "weights": fingerprint(policy), "metrics": writer.take_metrics()}


def save_adapters_and_go_on(model: str, run: str) -> dict[str, Any]:
    """Two steps, a checkpoint and a third step; and the third step again by what the checkpoint and the model's folder hold."""
    run_dir, writer = _writer(run)
    found: list[dict[str, Any]] = []
    for is_first in (True, False):
        policy, optimizer = build(model, lora={"rank": 4})
        for seed in (0, 1) if is_first else (9,):
            one_step(policy, optimizer, random_samples(seed=seed))
        if is_first:
            writer.begin(2, policy, optimizer, _state(2))
            writer.wait()
            dist.barrier()
        else:
            checkpoint.load_tensors(run_dir, 2, policy, optimizer)
        result = one_step(policy, optimizer, random_samples(seed=2))
        weights = {name: float(tensor.double().sum()) for name, tensor in shard_jobs.weights_of(policy).items()}
        found.append({"loss": result.loss, "norm": result.grad_norm, "weights": weights})
    first, again = found
    names = dcp.FileSystemReader(run_dir.checkpoint(2)).read_metadata().state_dict_metadata
    return {
        "first": first,
        "again": again,
        "names": [name for name in names if name.startswith("model.")],
    }


def save_a_reference_that_moves(model: str, run: str) -> dict[str, Any]:
    """A step, the reference moves, a checkpoint and a second step; and the second step again by what the checkpoint holds."""
    run_dir, writer = _writer(run)
    section = loss_section(beta=0.5, sync_ref_model=True)
    found: list[dict[str, Any]] = []
    for is_first in (True, False):
        policy, optimizer = build(model)
        reference = Reference(build(model)[0])
        if is_first:
            before = shard_jobs.weights_of(reference.policy)
            one_step(policy, optimizer, random_samples(seed=0), loss=section, reference=reference)
            reference.sync(policy, alpha=0.25)
            policy_weights, mixed = (shard_jobs.weights_of(each) for each in (policy, reference.policy))
            is_synced = [
                torch.allclose(mixed[name], 0.25 * policy_weights[name] + 0.75 * before[name], atol=1e-7)
                for name in before
            ]
            writer.begin(1, policy, optimizer, _state(1), reference=reference.policy)
            writer.wait()
            dist.barrier()
        else:
            checkpoint.load_tensors(run_dir, 1, policy, optimizer, reference=reference.policy)
        result = one_step(policy, optimizer, random_samples(seed=1), loss=section, reference=reference)
        found.append({"loss": result.loss, "kl": result.metrics["kl"], "weights": fingerprint(reference.policy)})
    return {"first": found[0], "again": found[1], "is_synced": all(is_synced)}


def find_undamaged_steps(model: str, run: str) -> dict[str, Any]:
    """Checkpoints of steps 1 to 3, a bit of the last rank's tensors flipped in those of 2 and 3: where each way to resume goes
    on."""
    policy, optimizer = build(model)
    run_dir, writer = _writer(run)
    for step in (1, 2, 3):
        writer.begin(step, policy, optimizer, _state(step))
        writer.wait()
    if dist.get_rank() == 0:
        for step in (2, 3):
            damaged = run_dir.checkpoint(step) / f"__{dist.get_world_size() - 1}_0.distcp"
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 1
            damaged.write_bytes(content)
    dist.barrier()
    found: dict[str, Any] = {}
    try:
        checkpoint.find_undamaged(run_dir, 3, is_named=True)
    except CheckpointError as error:
        found["named"] = str(error)
    found["untouched"] = run_dir.checkpoint_steps()
    found["step"], found["notes"] = checkpoint.find_undamaged(run_dir, 3, is_named=False)
    found["again"] = checkpoint.find_undamaged(run_dir, 1, is_named=True)[0]
    dist.barrier()
    found["left"] = sorted(path.name for path in run_dir.checkpoints.iterdir())
    found["steps"] = _gathered([float(found["step"])])
    dist.barrier()
    if dist.get_rank() == 0:
        (run_dir.checkpoint(1) / "__0_0.distcp").unlink()
    dist.barrier()
    try:
        checkpoint.find_undamaged(run_dir, 1, is_named=False)
    except CheckpointError as error:
        found["none"] = str(error)
    return found


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
    write = checkpoint._Storage.write_data

    def slowly(*arguments: Any) -> Any:
        time.sleep(2.0)
        return write(*arguments)

    def note(event: str) -> None:
        events.append(event)

    checkpoint._Storage.write_data = slowly  # type: ignore[method-assign]
    for step in (1, 2):
        one_step(policy, optimizer, random_samples(seed=9))
        writer.begin(step, policy, optimizer, _state(step), on_written=lambda step=step: note(f"written {step}"))
        note(f"begun {step}")
        writer.poll()
        note("goes on" if writer.is_writing else "waited")
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
