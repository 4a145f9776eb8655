"""Checkpoints: what they contain, writing them during training and generation, loading them, and which ones to keep.

    checkpoints/step_N/
    |- *.distcp, .metadata   model, optimizer and a synced reference, in torch's distributed checkpoint format (DCP)
    |- state.json            step, counters, ledger, data cursor, prompts to issue again
    |- rollouts.jsonl        finished groups that were not trained, and rollouts in progress (buffer.resume)
    `- manifest.json         sizes and checksums of the others, written last (checkpoint_manifest)

A directory named step_N is complete: DCP's thread writes all ranks' files under another name, in a gloo group of its own with a
deadline, then rank 0 adds the rest and renames it. Frozen parameters are left out. It loads on another number of ranks."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult

from grpo_async.buffer.resume import ResumeState, read_resume_state
from grpo_async.buffer.sample_buffer import HEARTBEAT_S
from grpo_async.config.sections import CheckpointSection
from grpo_async.errors import CheckpointError, DeadlineError
from grpo_async.records import Prompt
from grpo_async.run_directory import PARTIAL_PREFIX, RunDir, partial_of
from grpo_async.tracking.timeline import record, span
from grpo_async.training.checkpoint_manifest import (
    STATE,
    best_first,
    checksum,
    damaged,
    holds_tensors,
    problem_of,
    set_aside,
    write_manifest,
    write_synced,
)
from grpo_async.training.fingerprints import Fingerprints
from grpo_async.training.model import Policy
from grpo_async.utils.files import put_in_place, sync

_WRITE_MARGIN_S = 30.0

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts.jsonl"
_SMALL = ("step", "rollouts", "counters", "fingerprints")
"""The part of a CheckpointState that state.json holds."""
# DCP wraps an error of a rank, even a full disk, into an exception that does not derive from Exception
DCP_ERRORS = (OSError, RuntimeError, ValueError, KeyError, dcp.api.CheckpointException)
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Options of `model_state` and for loading it. (Not strict: DCP itself reports what a checkpoint lacks.)"""
_WHOLE = StateDictOptions(strict=False)
"""The same for a reference: all of its parameters are frozen, and none is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a resume needs, apart from tensors. `step` = finished training steps = policy version.

    Attributes:
        rollouts, lines: the rollout side's ResumeState.small(), and its groups as lines, made while they are written.
        counters: NonfiniteSteps.counters.
        fingerprints: of what the run depends on beside its data (training.fingerprints)."""

    step: int
    rollouts: dict[str, Any]
    lines: Iterator[str] | Sequence[str] = ()
    counters: dict[str, int] = field(default_factory=dict)
    fingerprints: Fingerprints = field(default_factory=dict)

    def resume_state(self, prompt_of: Callable[[int], Prompt]) -> ResumeState:
        """The rollout side's part. `prompt_of` gives a prompt by its id. Raises CheckpointError."""
        try:
            return read_resume_state(self.rollouts, list(self.lines), prompt_of)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the rollouts in the checkpoint of step {self.step} cannot be read: {error}"
            ) from error


def load_state(run_dir: RunDir, step: int) -> CheckpointState:
    """The part of a checkpoint that is not tensors. Raises CheckpointError."""
    folder = run_dir.checkpoint(step)
    path = folder / STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lines = (folder / ROLLOUTS).read_text(encoding="utf-8").splitlines()
        return CheckpointState(lines=lines, **content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; resume from another one with --resume N") from error


def find_undamaged(run_dir: RunDir, step: int, *, is_named: bool) -> tuple[int, list[str]]:
    """The step to resume from: `step`, or, unless the user named it, the newest one before it whose tensor files match their
    checksums; and a sentence about each one that was set aside. A collective: each rank reads its part of the files.

    Raises:
        CheckpointError: none is complete."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_mine = partial(holds_tensors, rank=rank, world_size=world_size)
    notes: list[str] = []
    while True:
        problems: list[str | None] = [None] * world_size
        dist.all_gather_object(problems, problem_of(run_dir.checkpoint(step), reads=is_mine))
        problem = next(filter(None, problems), None)
        if problem is None:
            return step, notes
        if is_named:
            raise CheckpointError(f"--resume {step}: {problem}; `--resume latest` takes the newest complete checkpoint")
        earlier = [max((each for each in run_dir.checkpoint_steps() if each < step), default=None)]
        if rank == 0:
            set_aside(run_dir.checkpoint(step), "broken")
        dist.broadcast_object_list(earlier, src=0)  # one answer, whatever a rank's machine sees of a shared disk
        message = damaged(step, problem)
        if earlier[0] is None:
            raise CheckpointError(f"{message}; there is no earlier one: start over with --clean")
        step = earlier[0]
        notes.append(f"{message}; resuming from step {step}")


def model_state(policy: Policy, options: StateDictOptions = TRAINED) -> dict[str, Any]:
    """The part of a policy that a checkpoint has: trained parameters (`options`), tied ones under one name, and buffers."""
    names = {name for name, _ in policy.named_parameters()}
    aliases = {name for name, _ in policy.named_parameters(remove_duplicate=False)} - names
    state = get_model_state_dict(policy, options=options)
    return {name: value for name, value in state.items() if name not in aliases}


def load_tensors(
    run_dir: RunDir, step: int, policy: Policy, optimizer: torch.optim.Optimizer, *, reference: Policy | None = None
) -> None:
    """Load model and optimizer of a checkpoint into this rank's shards, and the reference where it is synced. Every rank
    calls it. A checkpoint of step 0 holds the model as it was loaded and an optimizer that has not begun: nothing is loaded."""
    if step == 0:
        return
    folder = run_dir.checkpoint(step)
    state = {"model": model_state(policy), "optimizer": get_optimizer_state_dict(policy, optimizer, options=TRAINED)}
    if reference is not None:
        state["reference"] = model_state(reference, _WHOLE)
    try:
        dcp.load(state, checkpoint_id=str(folder))
    except DCP_ERRORS as error:
        raise CheckpointError(f"cannot load {folder}: {error}; resume from another one with --resume N") from error
    model, moments = state["model"], state["optimizer"]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    set_state_dict(policy, optimizer, model_state_dict=model, optim_state_dict=moments, options=TRAINED)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)  # the checkpoint has those of the attempt that wrote it; the config may have others now
    if reference is not None:
        set_model_state_dict(reference, state["reference"], options=_WHOLE)


def set_aside_later_checkpoints(run_dir: RunDir, step: int) -> None:
    """Rename later checkpoints to replaced_step_N, since a run that resumes from `step` writes its own: neither `--resume` nor
    pruning must take them for a part of this run. The newest goes first: if this is interrupted, `--resume latest` still continues
    from `step`, or from an older attempt's step that nothing has continued."""
    for later in reversed(run_dir.checkpoint_steps()):
        if later > step:
            set_aside(run_dir.checkpoint(later), "replaced")


class _Storage(FileSystemWriter):  # type: ignore[misc]  # mypy does not see torch's class
    """This rank's part of a checkpoint: copied on the CPU (`stage`), then written by DCP's thread. When that is done, rank 0 has
    the `checksums` of all ranks' files, by name."""

    state_dict_cache: dict[str, Any] | None  # DCP's

    def __init__(self, folder: Path) -> None:
        # memory for the copies is slow to allocate (pinned memory above all), so it is kept: as large as this rank's part
        super().__init__(folder, cache_staged_state_dict=True)
        self.checksums: dict[str, str] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.state_dict_cache is None and not torch.cuda.is_available():
            self.state_dict_cache = copy.deepcopy(state_dict)  # DCP would pin it, which needs a GPU
        staged: dict[str, Any] = super().stage(state_dict)
        return staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """DCP passes the results of each rank to `finish` on rank 0; the checksums are appended to them."""
        written = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in written}
        # read while the system still has them in memory
        found = {name: checksum(Path(self.path) / name) for name in names}
        checksums = WriteResult(index=MetadataIndex("checksums"), size_in_bytes=0, storage_data=found)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*written, checksums])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        sync(Path(self.path) / ".metadata")  # DCP syncs it while its end is still buffered
        self.checksums = {name: value for of_rank in results for name, value in of_rank[-1].storage_data.items()}


class CheckpointWriter:
    """Writes checkpoints; one on every rank. Its construction is a collective. `timeout_s` is the deadline of the collectives
    within a write; a whole write has twice as long. A write that failed or takes too long raises CheckpointError or
    DeadlineError later on.
    """

    def __init__(self, run_dir: RunDir, *, timeout_s: float) -> None:
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        # separate: the writer's collectives must not mix with those of the training thread
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._storage = _Storage(run_dir.checkpoints)
        self._writing: Future[None] | None = None
        self._step = 0
        self._metrics: dict[str, float] = {}

    @property
    def is_writing(self) -> bool:
        writing = self._writing
        return writing is not None and not writing.done()

    @property
    def longest_s(self) -> float:
        return 2 * self._timeout_s + _WRITE_MARGIN_S

    def prepare(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Called on rank 0 before the others begin: wait for the previous write and remove what a crash left half-written."""
        self.wait(heartbeat)
        for leftover in self._run_dir.checkpoints.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def begin(
        self,
        step: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        state: CheckpointState | None,
        *,
        reference: Policy | None = None,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the tensors and begin to write. Every rank calls it; rank 0 passes the state. `reference`: given if it is synced.
        `on_written` is called by the writer's thread on rank 0 when the checkpoint is complete."""
        self.wait()
        began = time.monotonic()
        saving = dcp.async_save(
            {
                "model": model_state(policy),
                "optimizer": get_optimizer_state_dict(policy, optimizer, options=TRAINED),
                **({} if reference is None else {"reference": model_state(reference, _WHOLE)}),
            },
            checkpoint_id=str(partial_of(self._run_dir.checkpoint(step))),
            storage_writer=self._storage,
            async_stager=self._storage,
            process_group=self._group,
        )
        assert isinstance(saving, Future)  # the other return type is for stagers that copy in the background
        self._metrics["checkpoint/staged_s"] = time.monotonic() - began
        written: Future[None] = Future()

        def complete(saved: Future[Any]) -> None:
            try:
                saved.result()
                if state is not None:
                    self._complete(step, state, began, on_written)
                written.set_result(None)
            except BaseException as error:  # noqa: BLE001 - passed to the training thread; DCP's does not derive from Exception
                written.set_exception(error)

        self._step, self._writing = step, written
        saving.add_done_callback(complete)  # called by the thread that saved

    def poll(self) -> None:
        """Raise the error of a write that has failed. Never waits."""
        if not self.is_writing:
            self.wait()

    def wait(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        writing = self._writing
        if writing is None:
            return
        began = time.monotonic()
        while not wait([writing], timeout=HEARTBEAT_S).done:
            waited_s = time.monotonic() - began
            if waited_s > self.longest_s:
                raise DeadlineError(
                    f"the checkpoint of step {self._step} to be written",
                    waited_s=waited_s,
                    setting="training.collective_timeout_s",
                    hint="A disk that hangs can cause this.",
                )
            heartbeat()
        self._writing = None
        error = writing.exception()
        if error is None:
            return
        if dist.get_rank() == 0:
            shutil.rmtree(partial_of(self._run_dir.checkpoint(self._step)), ignore_errors=True)
        # DCP's own text contains the tracebacks of all ranks
        cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.api.CheckpointException) else error
        raise CheckpointError(
            f"cannot write checkpoint {self._run_dir.checkpoint(self._step)}: {cause}; free space or set run.dir to another "
            "disk, then `train --resume`"
        ) from error

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the writes that ended since the last call: seconds that the training thread was blocked, seconds until
        everything was written, bytes on the disk."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _complete(self, step: int, state: CheckpointState, began: float, on_written: Callable[[], None]) -> None:
        """Called on rank 0, when every rank has written: write the other files and rename the folder."""
        final = self._run_dir.checkpoint(step)
        folder = partial_of(final)
        write_synced(folder / ROLLOUTS, (line + "\n" for line in state.lines))
        content = {name: getattr(state, name) for name in _SMALL}
        write_synced(folder / STATE, [json.dumps(content)])
        num_bytes = write_manifest(folder, step=step, checksums=self._storage.checksums)
        put_in_place(folder, final, aside=final.with_name(f"{PARTIAL_PREFIX}replaced_{final.name}"))
        took_s = time.monotonic() - began
        self._metrics |= {"checkpoint/written_s": took_s, "checkpoint/bytes": float(num_bytes)}
        record("write checkpoint", time.time() - took_s, time.time(), step=step)
        with span("remove old checkpoints", step=step):
            on_written()


def steps_to_keep(steps: Collection[int], section: CheckpointSection, scores: Mapping[int, float]) -> set[int]:
    """The ones of `steps` to keep; `scores`: `checkpoint.best_metric` by step.

    steps 5 10 15 20, keep_last 1, keep_every 10, keep_best 1, scores 5: .9, 10: .2 -> {20} and {10, 20} and {5} = {5, 10, 20}
    """
    kept = set(sorted(steps)[-section.keep_last :])
    if section.keep_every is not None:
        kept |= {step for step in steps if step > 0 and step % section.keep_every == 0}
    if section.keep_best:
        kept |= set(best_first(steps, scores)[: section.keep_best])
    return kept


def prune(
    run_dir: RunDir, section: CheckpointSection, *, scores: Mapping[int, float], evaluated_now: int | None = None
) -> None:
    """Remove checkpoints that need not be kept (`steps_to_keep`), after one has been written; the newest is always kept. With
    `keep_best` that of the step `evaluated_now` stays until its score is known."""
    steps = run_dir.checkpoint_steps()
    kept = steps_to_keep(steps, section, scores)
    if section.keep_best and evaluated_now is not None:
        kept.add(evaluated_now)
    for step in set(steps) - kept:
        # renamed first: a kill in the middle must not leave an incomplete checkpoint under a complete one's name
        shutil.rmtree(set_aside(run_dir.checkpoint(step), f"{PARTIAL_PREFIX}removed"), ignore_errors=True)
