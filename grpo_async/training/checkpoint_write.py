"""Writes checkpoints while training and generation go on.

    training thread:   begin = wait for the last one -> copy this rank's tensors to the CPU -> start the writer, go on
    writer thread:     generators of this rank -> DCP, all ranks together, in a gloo group of its own
                       rank 0 then: state -> manifest with checksums -> rename to step_N -> remove old ones

Invariant: a directory named step_N is whole. DCP's save returns on rank 0 only after every rank has written its tensors, and rank 0
looks for every other file before it renames; so nobody waits for anybody but within DCP, whose group has a deadline. The copy (the
size of this rank's model and optimizer shards) is kept for the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from grpo_async.errors import CheckpointError, DeadlineError
from grpo_async.rundir import RunDir
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.training.checkpoint import TrainerState, rank_file, write_state
from grpo_async.training.checkpoint_manifest import sync_folder, write_manifest
from grpo_async.training.checkpoint_rng import rng_state
from grpo_async.training.optimizers import give_state_to_all
from grpo_async.training.policy import Policy

_PREFIX = "writing_"
_SLICE_S = 20.0
_MARGIN_S = 30.0


class CheckpointWriter:
    """One of these on every rank. Making it is a collective.

    Args:
        timeout_s: deadline of the collectives within a write, and of one write on the whole is twice that.
        timeline: takes what the writer's thread does.
    """

    def __init__(self, rundir: RunDir, *, timeout_s: float, timeline: Timeline = NO_TIMELINE) -> None:
        self._timeline = timeline
        self._rundir = rundir
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
    def writing(self) -> int | None:
        """The step whose checkpoint is being written, or was and nobody has waited for it yet."""
        return self._writing

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
        for leftover in self._rundir.checkpoints.glob(f"{_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def begin(
        self,
        step: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        state: TrainerState | None,
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
        staged = self._stager.stage({"model": model_state, "optimizer": optimizer_state})
        generators = rng_state()
        self._metrics["checkpoint/staged_s"] = time.monotonic() - began
        self._writing = step

        def write() -> None:
            try:
                with self._timeline.span("write checkpoint", "checkpoint", step=step):
                    self._write(step, staged, generators, state)
                with self._timeline.span("remove old checkpoints", "checkpoint", step=step):
                    on_written()
            except BaseException as error:  # noqa: BLE001 - handed to the training thread; DCP's is no Exception
                self._error = error
                if state is not None:
                    shutil.rmtree(self._partial(step), ignore_errors=True)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Look without waiting whether a write has ended.

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
                f"cannot write checkpoint {self._rundir.checkpoint(step or 0)}: {error}; free space or set run.dir to another "
                "disk, then `train --resume`"
            ) from error

    def take_metrics(self) -> dict[str, float]:
        """Seconds that the training thread stood still and that the writer wrote, and bytes on the disk, of what ended since the
        last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _partial(self, step: int) -> Path:
        return self._rundir.checkpoints / f"{_PREFIX}step_{step}"

    def _write(self, step: int, staged: dict[str, Any], generators: dict[str, Any], state: TrainerState | None) -> None:
        began = time.monotonic()
        partial = self._partial(step)
        failed: OSError | None = None
        try:
            partial.mkdir(parents=True, exist_ok=True)
            _write_whole(partial / rank_file(dist.get_rank()), json.dumps(generators))
        except OSError as error:
            failed = error  # the others are on their way into DCP and would wait there: said when that is over
        dcp.save(staged, checkpoint_id=str(partial), process_group=self._group)
        if failed is not None:
            raise failed
        if state is not None:
            num_bytes = self._complete(step, partial, state)
            self._metrics |= {
                "checkpoint/written_s": time.monotonic() - began,
                "checkpoint/bytes": float(num_bytes),
            }

    def _complete(self, step: int, partial: Path, state: TrainerState) -> int:
        """Rank 0, when every rank has written: the rest, and the name."""
        world_size = dist.get_world_size()
        missing = [rank for rank in range(world_size) if not (partial / rank_file(rank)).is_file()]
        if missing:
            raise OSError(f"no file of rank {', '.join(map(str, missing))} in {partial}")
        write_state(partial, state)
        num_bytes = write_manifest(partial, step=step, world_size=world_size)
        final = self._rundir.checkpoint(step)
        replaced = final.with_name(f"{_PREFIX}replaced_{final.name}")
        if final.exists():
            os.replace(final, replaced)
        os.replace(partial, final)
        sync_folder(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        return num_bytes


def _write_whole(path: Path, text: str) -> None:
    """Rank 0 takes a file of this name for whole: it gets the name when it is on the disk."""
    temporary = path.with_name(f"{_PREFIX}{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
