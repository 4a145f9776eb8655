"""What a checkpoint holds, and loading it.

    checkpoints/step_N/
    |- *.distcp, .metadata   model and optimizer, by torch's distributed checkpoint (DCP)
    |- rank_K.json           random number generators of rank K
    |- state.json            step, counters, ledger, data cursor, prompts to issue again
    |- rollouts.jsonl        finished groups that were not trained, and rollouts in progress (buffer.resume)
    `- manifest.json         sizes and checksums of the others, written last

Invariant: a directory named step_N is whole: it is written under another name (checkpoint_write) and renamed. A crash or a full
disk leaves the last good checkpoint untouched. A checkpoint loads on another number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from grpo_async.buffer.resume import ResumeState, read_resume_state
from grpo_async.errors import CheckpointError
from grpo_async.records import Prompt
from grpo_async.rundir import RunDir
from grpo_async.training.checkpoint_manifest import FORMAT, STATE
from grpo_async.training.checkpoint_rng import restore_rng, seed_rng
from grpo_async.training.policy import Policy

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts.jsonl"
# DCP wraps what went wrong on a rank, a full disk too, into an exception that is no Exception
DCP_ERRORS = (OSError, RuntimeError, ValueError, KeyError, dcp.api.CheckpointException)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a resume needs beside tensors. `step` = finished training steps = policy version.

    Attributes:
        rollouts: ResumeState.small() of the rollout side.
        lines: its groups; made one by one while they are written.
        progress: of the run as a whole: totals of the meter, evaluations.
        counters: of the main loop, such as steps in a row that were not finite.
    """

    step: int
    rollouts: dict[str, Any]
    lines: Iterator[str] | Sequence[str] = ()
    progress: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, step: int, rollouts: ResumeState, *, progress: dict[str, Any], counters: dict[str, int]
    ) -> TrainerState:
        """Of one instant: `step` is trained, and the next has not begun."""
        return cls(step=step, rollouts=rollouts.small(), lines=rollouts.lines(), progress=progress, counters=counters)

    def resume_state(self, prompt_of: Callable[[int], Prompt]) -> ResumeState:
        """The rollout side's part. `prompt_of` gives a prompt by its id.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return read_resume_state(self.rollouts, list(self.lines), prompt_of)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the rollouts in the checkpoint of step {self.step} cannot be read: {error}"
            ) from error


def write_state(folder: Path, state: TrainerState) -> None:
    """Write state.json and rollouts.jsonl.

    Raises:
        OSError: the disk is full or not writable.
    """
    content = {
        "format": FORMAT,
        "step": state.step,
        "rollouts": state.rollouts,
        "progress": state.progress,
        "counters": state.counters,
    }
    with (folder / ROLLOUTS).open("w", encoding="utf-8") as file:
        for line in state.lines:
            file.write(line + "\n")
        _to_disk(file.fileno(), file.flush)
    with (folder / STATE).open("w", encoding="utf-8") as file:
        json.dump(content, file)
        _to_disk(file.fileno(), file.flush)


def _to_disk(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)


def load_state(rundir: RunDir, step: int) -> TrainerState:
    """The part of a checkpoint that is no tensor.

    Raises:
        CheckpointError: missing, broken or of another format.
    """
    folder = rundir.checkpoint(step)
    path = folder / STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{path} has another format than this version reads ({FORMAT})")
        lines = (folder / ROLLOUTS).read_text(encoding="utf-8").splitlines()
        return TrainerState(lines=lines, **content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; resume from another one with --resume N") from error


def load_tensors(rundir: RunDir, step: int, policy: Policy, optimizer: torch.optim.Optimizer, *, seed: int = 0) -> None:
    """Load model and optimizer of a checkpoint into this rank's shards, and its random number generators. Every rank calls it.

    A checkpoint of step 0 holds the model as it was loaded and an optimizer that has not begun: there is no tensor to load. A rank
    that the checkpoint does not have (it was written by fewer) begins its generators at a seed made of `seed`, step and rank.

    Raises:
        CheckpointError: files are missing or do not fit the model.
    """
    folder = rundir.checkpoint(step)
    if step > 0:
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        try:
            dcp.load(state, checkpoint_id=str(folder))
        except DCP_ERRORS as error:
            raise CheckpointError(f"cannot load {folder}: {error}; resume from another one with --resume N") from error
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _load_rng(folder, step, seed)


def _load_rng(folder: Path, step: int, seed: int) -> None:
    rank = dist.get_rank()
    path = folder / rank_file(rank)
    if not path.exists():
        logger.info("%s knows no rank %d: its random number generators begin anew, from run.seed", folder, rank)
        digest = hashlib.blake2b(f"seed {seed}, step {step}, rank {rank}".encode(), digest_size=4).digest()
        seed_rng(int.from_bytes(digest, "big"))
        return
    try:
        restore_rng(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; resume from another one with --resume N") from error


def rank_file(rank: int) -> str:
    """Name of the file with the generators of a rank."""
    return f"rank_{rank}.json"


def set_aside_later_checkpoints(rundir: RunDir, step: int) -> None:
    """A run that goes on from `step` writes its own later steps: what stands there is renamed to replaced_step_N, so that
    neither `--resume` nor pruning takes it for a part of this run. Newest first: whenever this ends, `--resume auto` goes on from
    `step` or a step that nothing has gone on behind."""
    for later in reversed(rundir.checkpoint_steps()):
        if later > step:
            set_aside(rundir.checkpoint(later), "replaced")


def set_aside(checkpoint: Path, reason: str) -> Path:
    """Rename step_N to {reason}_step_N, replacing what an earlier call left; returns the new path."""
    target = checkpoint.with_name(f"{reason}_{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(checkpoint, target)
    return target
