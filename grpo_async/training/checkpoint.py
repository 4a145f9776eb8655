"""Checkpoints: what they hold, writing them while training and generation go on, loading them, and which ones stay.

    checkpoints/step_N/
    |- *.distcp, .metadata   model, optimizer and every rank's random number generators, by torch's distributed checkpoint (DCP)
    |- state.json            step, counters, ledger, data cursor, prompts to issue again
    |- rollouts.jsonl        finished groups that were not trained, and rollouts in progress (buffer.resume)
    `- manifest.json         sizes and checksums of the others, written last (checkpoint_manifest)

    training thread   begin = wait for the last one -> copy this rank's tensors to the CPU -> start the writer, go on
    writer thread     DCP, all ranks together, in a gloo group of its own
                      rank 0 then: state -> manifest with checksums -> rename to step_N -> remove old ones

Invariant: a directory named step_N is whole. It is written under another name and renamed, so a crash or a full disk leaves the
last good checkpoint untouched. DCP's save returns on rank 0 only after every rank has written its part; so nobody waits for
anybody but within DCP, whose group has a deadline. (dcp.async_save would give the writer thread, but neither what stands after DCP
in it nor its deadline.) A checkpoint loads on another number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from grpo_async.buffer.resume import ResumeState, read_resume_state
from grpo_async.config.sections import CheckpointSection
from grpo_async.errors import CheckpointError, DeadlineError
from grpo_async.records import Prompt
from grpo_async.run_directory import RunDir
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.training.checkpoint_manifest import (
    FORMAT,
    STATE,
    read_manifest,
    set_aside,
    write_manifest,
    write_synced,
)
from grpo_async.training.model import Policy
from grpo_async.training.optimizer import give_state_to_all
from grpo_async.utils.folders import put_in_place

_PREFIX = "writing_"
_SLICE_S = 20.0
_MARGIN_S = 30.0

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts.jsonl"
# DCP wraps what went wrong on a rank, a full disk too, into an exception that is no Exception
DCP_ERRORS = (OSError, RuntimeError, ValueError, KeyError, dcp.api.CheckpointException)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a resume needs beside tensors. `step` = finished training steps = policy version.

    Attributes:
        rollouts: ResumeState.small() of the rollout side.
        lines: its groups; made one by one while they are written.
        progress: of the run as a whole: totals of the meter.
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
    ) -> CheckpointState:
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


def write_state(folder: Path, state: CheckpointState) -> None:
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
    write_synced(folder / ROLLOUTS, (line + "\n" for line in state.lines))
    write_synced(folder / STATE, [json.dumps(content)])


def load_state(run_dir: RunDir, step: int) -> CheckpointState:
    """The part of a checkpoint that is no tensor.

    Raises:
        CheckpointError: missing, broken or of another format.
    """
    folder = run_dir.checkpoint(step)
    path = folder / STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{path} has another format than this version reads ({FORMAT})")
        lines = (folder / ROLLOUTS).read_text(encoding="utf-8").splitlines()
        return CheckpointState(lines=lines, **content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; resume from another one with --resume N") from error


def load_tensors(
    run_dir: RunDir, step: int, policy: Policy, optimizer: torch.optim.Optimizer, *, seed: int = 0
) -> None:
    """Load model and optimizer of a checkpoint into this rank's shards, and its random number generators. Every rank calls it.

    A checkpoint of step 0 holds the model as it was loaded and an optimizer that has not begun: there is no tensor to load. A rank
    that the checkpoint does not have (it was written by fewer) begins its generators at a seed made of `seed`, step and rank.

    Raises:
        CheckpointError: files are missing or do not fit the model.
    """
    folder, rank = run_dir.checkpoint(step), dist.get_rank()
    is_known = rank < int(read_manifest(folder)["world_size"])
    state: dict[str, Any] = {"rng": {f"rank_{rank}": ()} if is_known else {}}
    if step > 0:
        state["model"], state["optimizer"] = get_state_dict(policy, optimizer)
    try:
        dcp.load(state, checkpoint_id=str(folder))
    except DCP_ERRORS as error:
        raise CheckpointError(f"cannot load {folder}: {error}; resume from another one with --resume N") from error
    if step > 0:
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if is_known:
        restore_rng(state["rng"][f"rank_{rank}"])
        return
    logger.info("%s knows no rank %d: its random number generators begin anew, from run.seed", folder, rank)
    digest = hashlib.blake2b(f"seed {seed}, step {step}, rank {rank}".encode(), digest_size=4).digest()
    seed_rng(int.from_bytes(digest, "big"))


def set_aside_later_checkpoints(run_dir: RunDir, step: int) -> None:
    """A run that goes on from `step` writes its own later steps: what stands there is renamed to replaced_step_N, so that
    neither `--resume` nor pruning takes it for a part of this run. Newest first: whenever this ends, `--resume auto` goes on from
    `step` or a step that nothing has gone on behind."""
    for later in reversed(run_dir.checkpoint_steps()):
        if later > step:
            set_aside(run_dir.checkpoint(later), "replaced")


def rng_state() -> tuple[Any, ...]:
    """The state of every generator of this process: Python's, numpy's, torch's, and that of the GPU or None."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def restore_rng(state: tuple[Any, ...]) -> None:
    """Set every generator to what `rng_state` returned, that of the GPU where there is one."""
    of_python, of_numpy, of_torch, of_gpu = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(of_gpu)


def seed_rng(seed: int) -> None:
    """Begin every generator at a seed, for a rank that a checkpoint knows nothing of."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)  # those of all GPUs too


class CheckpointWriter:
    """One of these on every rank. Making it is a collective.

    Args:
        timeout_s: deadline of the collectives within a write, and of one write on the whole is twice that.
        timeline: takes what the writer's thread does.
    """

    def __init__(self, run_dir: RunDir, *, timeout_s: float, timeline: Timeline = NO_TIMELINE) -> None:
        self._timeline = timeline
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        # of its own: the writer's collectives must not mix with those of the training thread
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        pins = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pins, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pins
            )
        )
        self._thread: threading.Thread | None = None
        self._writing: int | None = None
        self._error: BaseException | None = None
        self._metrics: dict[str, float] = {}

    @property
    def is_writing(self) -> bool:
        """Whether something is being written now. From any thread."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def longest_s(self) -> float:
        """How long one write may take."""
        return 2 * self._timeout_s + _MARGIN_S

    def prepare(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Rank 0, before it tells the others to begin: wait for the last one and remove what a crash left half-written.

        Raises:
            CheckpointError: the last one could not be written.
            DeadlineError: it takes too long.
        """
        self.wait(heartbeat)
        for leftover in self._run_dir.checkpoints.glob(f"{_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def begin(
        self,
        step: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        state: CheckpointState | None,
        *,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the tensors and begin to write. Every rank calls it; rank 0 passes the state.

        Args:
            on_written: called by the writer's thread on rank 0 when the checkpoint stands.

        Raises:
            CheckpointError: the last one could not be written.
            DeadlineError: the last one has not been written in time.
        """
        self.wait()
        began = time.monotonic()
        give_state_to_all(optimizer)  # loading expects it of every trained parameter
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        staged: dict[str, Any] = dict(self._stager.stage({"model": model_state, "optimizer": optimizer_state}))
        staged["rng"] = {f"rank_{dist.get_rank()}": rng_state()}
        self._metrics["checkpoint/staged_s"] = time.monotonic() - began
        self._writing = step

        def write() -> None:
            try:
                with self._timeline.span("write checkpoint", "checkpoint", step=step):
                    self._write(step, staged, state)
                with self._timeline.span("remove old checkpoints", "checkpoint", step=step):
                    on_written()
            except BaseException as error:  # noqa: BLE001 - handed to the training thread; DCP's is no Exception
                self._error = error
                if state is not None:
                    shutil.rmtree(self._partial(step), ignore_errors=True)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Check without waiting whether a write has ended.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Until nothing is being written. `heartbeat` is called now and then.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
            DeadlineError: it takes too long.
        """
        thread, step = self._thread, self._writing
        if thread is None:
            return
        began = time.monotonic()
        while thread.is_alive():
            thread.join(timeout=_SLICE_S)
            waited_s = time.monotonic() - began
            if thread.is_alive() and waited_s > self.longest_s:
                raise DeadlineError(
                    f"the checkpoint of step {step} to be written",
                    waited_s=waited_s,
                    setting="training.collective_timeout_s",
                    hint="A disk that hangs causes this.",
                )
            if thread.is_alive():
                heartbeat()
        self._thread = self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"cannot write checkpoint {self._run_dir.checkpoint(step or 0)}: {error}; free space or set run.dir to another "
                "disk, then `train --resume`"
            ) from error

    def take_metrics(self) -> dict[str, float]:
        """Seconds that the training thread stood still and that the writer wrote, and bytes on the disk, of what ended since the
        last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _partial(self, step: int) -> Path:
        return self._run_dir.checkpoints / f"{_PREFIX}step_{step}"

    def _write(self, step: int, staged: dict[str, Any], state: CheckpointState | None) -> None:
        began = time.monotonic()
        partial = self._partial(step)
        dcp.save(staged, checkpoint_id=str(partial), process_group=self._group)
        if state is not None:
            num_bytes = self._complete(step, partial, state)
            self._metrics |= {
                "checkpoint/written_s": time.monotonic() - began,
                "checkpoint/bytes": float(num_bytes),
            }

    def _complete(self, step: int, partial: Path, state: CheckpointState) -> int:
        """Rank 0, when every rank has written: the rest, and the name."""
        write_state(partial, state)
        num_bytes = write_manifest(partial, step=step, world_size=dist.get_world_size())
        final = self._run_dir.checkpoint(step)
        put_in_place(partial, final, aside=final.with_name(f"{_PREFIX}replaced_{final.name}"))
        return num_bytes


def steps_to_keep(steps: Collection[int], section: CheckpointSection, scores: Mapping[int, float]) -> set[int]:
    """Which of `steps` stay. Larger scores are better; of equal ones the newer step stays. A step without a score is not among the
    best, and one whose score is not finite neither.

    steps 5 10 15 20, keep_last 1, keep_every 10, keep_best 1, scores 5: .9, 10: .2 -> {20} and {10, 20} and {5} = {5, 10, 20}

    Args:
        scores: `checkpoint.best_metric` of every policy that was evaluated, by step.
    """
    kept = set(sorted(steps)[-section.keep_last :])
    if section.keep_every is not None:
        kept |= {step for step in steps if step > 0 and step % section.keep_every == 0}
    if section.keep_best:
        scored = [(score, step) for step, score in scores.items() if step in steps and math.isfinite(score)]
        kept |= {step for _, step in sorted(scored)[-section.keep_best :]}
    return kept


def prune(
    run_dir: RunDir, section: CheckpointSection, *, scores: Mapping[int, float], evaluated_now: int | None = None
) -> None:
    """Remove what need not stay (`steps_to_keep`); call it after a checkpoint has been written. The newest always stays, so the one
    that the run goes on from does until there is a newer one; what is being written has no such name yet.

    Args:
        evaluated_now: the step whose policy is being evaluated: with `keep_best` its checkpoint stays until the result is known.
    """
    steps = run_dir.checkpoint_steps()
    kept = steps_to_keep(steps, section, scores)
    if section.keep_best and evaluated_now is not None:
        kept.add(evaluated_now)
    for step in set(steps) - kept:
        # renamed first: a kill in the middle must not leave a part of it under the name of a whole one
        shutil.rmtree(set_aside(run_dir.checkpoint(step), "writing_removed"), ignore_errors=True)
