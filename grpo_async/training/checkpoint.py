"""Checkpoints: model and optimizer by torch's distributed checkpoint (DCP), everything else as one JSON file.

Invariant: a directory named step_N is whole. It is written under another name and renamed by rank 0 when every rank is done, so
a crash or a full disk leaves the last good checkpoint untouched. A checkpoint loads on another number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from grpo_async.errors import CheckpointError
from grpo_async.rundir import RunDir, write_atomically
from grpo_async.training.policy import Policy

_FORMAT = 1
# DCP wraps what went wrong on a rank, a full disk too, into an exception that is no Exception
_WRITE_ERRORS = (OSError, RuntimeError, dcp.api.CheckpointException)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a resume needs beside tensors. `step` = finished optimizer steps = policy version."""

    step: int
    data: dict[str, Any]
    outstanding_prompts: list[int]
    ledger: dict[str, dict[str, int]]
    progress: dict[str, Any]


def save_checkpoint(
    rundir: RunDir, step: int, policy: Policy, optimizer: torch.optim.Optimizer, state: TrainerState | None
) -> None:
    """Write step_N. Every rank calls it; rank 0 passes the state.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = rundir.checkpoint(step)
    partial = final.with_name(f"writing_{final.name}")
    leader = dist.get_rank() == 0
    if leader and partial.exists():
        shutil.rmtree(partial)
    dist.barrier()
    try:
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(partial))
        if leader:
            if state is None:
                raise ValueError("rank 0 saves the trainer's state")
            write_atomically(partial / "state.json", json.dumps({"format": _FORMAT, **asdict(state)}))
            replaced = final.with_name(f"writing_replaced_{final.name}")
            if final.exists():
                os.replace(final, replaced)
            os.replace(partial, final)
            shutil.rmtree(replaced, ignore_errors=True)
    except _WRITE_ERRORS as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}; free space or set run.dir to another disk, then `train --resume`"
        ) from error
    dist.barrier()


def prune_checkpoints(rundir: RunDir, *, keep_last: int) -> None:
    """Remove all but the newest `keep_last`, and what a crash left half-written."""
    for step in rundir.checkpoint_steps()[:-keep_last]:
        shutil.rmtree(rundir.checkpoint(step))
    for leftover in rundir.checkpoints.glob("writing_*"):
        shutil.rmtree(leftover)


def set_aside_later_checkpoints(rundir: RunDir, step: int) -> None:
    """A run that goes on from `step` writes its own later steps: what stands there is renamed to replaced_step_N, so that
    neither `--resume` nor pruning takes it for a part of this run."""
    for later in rundir.checkpoint_steps():
        if later > step:
            target = rundir.checkpoints / f"replaced_step_{later}"
            shutil.rmtree(target, ignore_errors=True)
            os.replace(rundir.checkpoint(later), target)


def load_state(rundir: RunDir, step: int) -> TrainerState:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: missing, broken or of another format.
    """
    path = rundir.checkpoint(step) / "state.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise CheckpointError(f"{path} has another format than this version writes ({_FORMAT})")
        return TrainerState(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; resume from another one with --resume-step N") from error


def load_tensors(rundir: RunDir, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load model and optimizer of a checkpoint into this rank's shards. Every rank calls it.

    A checkpoint of step 0 holds the model as it was loaded and an optimizer that has not begun: there is nothing to load.

    Raises:
        CheckpointError: files are missing or do not fit the model.
    """
    if step == 0:
        return
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    try:
        dcp.load(state, checkpoint_id=str(rundir.checkpoint(step)))
    except _WRITE_ERRORS as error:
        raise CheckpointError(
            f"cannot load {rundir.checkpoint(step)}: {error}; resume from another one with --resume-step N"
        ) from error
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def export_model(folder: Path, policy: Policy, tokenizer: Any) -> None:
    """Write a Hugging Face folder that `from_pretrained` loads. Every rank calls it; rank 0 writes.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        partial = folder.with_name(f"writing_{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        try:
            policy.model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the model to {folder}: {error}; free space, then `train --resume` exports it again"
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    dist.barrier()
