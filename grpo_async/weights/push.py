"""The weight push: one function, on all servers at once.

    start -> update (the servers receive and stage while the trainer gathers and sends) -> pause -> finish(version) -> resume

Receiving touches nothing that generates, so requests only see pause and finish. Where it takes memory of a GPU that the engine's
steps may need (transport.receives_beside_steps is False), the pause comes first.

Where the bytes go, file by file:

    trainer   push -> sender (a thread) -> transport (buckets to all servers) -> backend (gloo, nccl, ipc)
    server    its HTTP routes -> receiver -> backend -> staged; loaded by finish
    both      rendezvous (how the group forms), buckets (how parameters are cut and packed), participants (who failed)

Invariants: a pause is always followed by a resume, on errors too. A server applies an update all or nothing, in finish: a push
that fails before leaves the old weights serving everywhere, one that fails there leaves each server with either version, whole.
Every rank gathers every bucket; only rank 0 sends. When sending fails, rank 0 goes on gathering without sending, because the
other ranks wait for it in the collective. Every wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch

from grpo_async.errors import WeightPushError
from grpo_async.inference.control import ServerControl
from grpo_async.inference.surface import PauseMode
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.participants import GRACE_S, PushFailedError, failures_of, is_answer, split_failed, start_each
from grpo_async.weights.sender import BucketSender
from grpo_async.weights.transport import WeightTransport

PushMode = Literal["recompute", "keep_kv", "drain", "abort"]

_PAUSES: dict[PushMode, tuple[PauseMode, bool]] = {
    "recompute": ("keep", False),
    "keep_kv": ("keep", True),
    "drain": ("drain", False),
    "abort": ("abort", False),
}
"""What the servers are told by weights.mode: pause mode, and whether caches are kept."""

_SETTING = "weights.timeout_s"
LANE = "weights"
"""Of the timeline."""
_RESUME_BROKEN_S = 5.0  # for a server that has stopped answering: the others do not stand still for it


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Of the section `weights`."""

    mode: PushMode
    timeout_s: float
    """Deadline of each phase."""
    drain_timeout_s: float
    """Deadline of the pause with mode drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one push cost, in seconds and bytes."""

    version: int
    num_servers: int
    num_bytes: int
    """Sent to each server."""
    pausing_s: float
    """Until every server had paused; with mode drain, until what was in flight had ended."""
    start_s: float
    transfer_s: float
    """From the first gather until every server had staged everything. Gather and send overlap in it."""
    gather_s: float
    """Gathering, casting and packing."""
    send_s: float
    finish_s: float
    resume_s: float
    paused_s: float
    """How long generation stood still: from pause (with mode drain: from its answer) until every server had resumed."""
    total_s: float

    def metrics(self) -> dict[str, float]:
        """The figures under their names in the log; phases in milliseconds."""
        phases = {
            "pause": self.pausing_s,
            "start": self.start_s,
            "transfer": self.transfer_s,
            "gather": self.gather_s,
            "send": self.send_s,
            "finish": self.finish_s,
            "resume": self.resume_s,
        }
        return {
            "sync/push_s": self.total_s,
            "sync/pause_s": self.paused_s,
            **{f"sync/{name}_ms": 1000.0 * seconds for name, seconds in phases.items()},
            "sync/bytes": float(self.num_bytes),
            "sync/bytes_per_s": self.num_bytes / max(self.transfer_s, 1e-9),
            "sync/servers": float(self.num_servers),
        }


class GatheredParameters(Protocol):
    """Parameters of the policy, gathered bucket by bucket; every rank iterates in lockstep."""

    @property
    def specs(self) -> list[ParameterSpec]: ...

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        """Contiguous tensors, one bucket at a time, in the order of `specs`."""


@dataclass(slots=True)
class _Clock:
    """Seconds of each phase."""

    timeline: Timeline
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        with self.timeline.span(phase, LANE):
            yield
        self.seconds[phase] = time.monotonic() - began


def push_weights(
    parameters: GatheredParameters,
    *,
    version: int,
    targets: Sequence[ServerControl],
    transport: WeightTransport,
    settings: PushSettings,
    before_gather: Callable[[], None] = lambda: None,
    applying: Callable[[], AbstractContextManager[None]] = nullcontext,
    timeline: Timeline = NO_TIMELINE,
) -> PushReport:
    """Rank 0: push all parameters to all servers and make `version` their policy version.

    Args:
        transport: connected with `targets`.
        before_gather: called when the servers are ready to receive; brings the other ranks into the gather.
        applying: a context for the phase finish, in which the servers load what they have staged and answer to nothing else.
        timeline: takes the phases; within "transfer" what gathering and, in a lane of its own, sending each bucket took.

    Raises:
        PushFailedError: servers failed, or the broadcast to them did. No server is paused that still answers. Unless the phase
            is finish or resume, all of them serve the old weights. After a failed update the transport is closed.
        WeightPushError: the trainer itself failed.
    """
    began = time.monotonic()
    clock = _Clock(timeline)
    names = [target.name for target in targets]
    mode, keep_cache = _PAUSES[settings.mode]
    limit_s, pause_limit_s, pause_setting = settings.timeout_s, settings.timeout_s, _SETTING
    if mode == "drain":
        pause_limit_s, pause_setting = settings.drain_timeout_s, "weights.drain_timeout_s"

    def on_all(
        phase: str, call: Callable[[ServerControl], None], *, deadline_s: float, setting: str = _SETTING
    ) -> None:
        with clock(phase):
            errors = _call_each(targets, call, phase, deadline_s=deadline_s, setting=setting)
        if errors:
            done = tuple(name for name in names if name not in errors)
            finished = {"finish": done, "resume": tuple(names)}.get(phase, ())
            raise PushFailedError(
                f"{phase} of the push of version {version}", phase=phase, failures=errors, finished=finished,
                hint=f"deadline {deadline_s:.0f} s: {setting}",
            )  # fmt: skip

    def pause_all() -> float:
        asked = time.monotonic()
        on_all(
            "pause",
            lambda target: target.pause(mode=mode, keep_cache=keep_cache, timeout_s=pause_limit_s),
            deadline_s=pause_limit_s,
            setting=pause_setting,
        )
        return asked if mode != "drain" else time.monotonic()

    try:
        stood_still = None if transport.receives_beside_steps else pause_all()
        on_all("start", lambda target: target.start_weight_update(timeout_s=limit_s), deadline_s=limit_s)
        before_gather()
        with clock("transfer"):
            gather_s, send_s = _transfer(
                parameters, version=version, targets=targets, transport=transport, settings=settings, timeline=timeline
            )
        stood_still = pause_all() if stood_still is None else stood_still
        with applying():
            on_all("finish", lambda target: target.finish_weight_update(version, timeout_s=limit_s), deadline_s=limit_s)
        on_all("resume", lambda target: target.resume(timeout_s=limit_s), deadline_s=limit_s)
    except PushFailedError as error:
        if error.phase != "resume":
            _resume_after(error, targets, timeout_s=limit_s)
        raise
    except BaseException as error:
        _call_each(targets, lambda target: target.resume(timeout_s=limit_s), "resume", deadline_s=limit_s)
        if not isinstance(error, Exception):
            raise
        raise WeightPushError(f"pushing version {version} failed: {type(error).__name__}: {error}") from error
    ended = time.monotonic()
    return PushReport(
        version=version,
        num_servers=len(targets),
        num_bytes=sum(spec.num_bytes for spec in parameters.specs),
        pausing_s=clock.seconds["pause"],
        start_s=clock.seconds["start"],
        transfer_s=clock.seconds["transfer"],
        gather_s=gather_s,
        send_s=send_s,
        finish_s=clock.seconds["finish"],
        resume_s=clock.seconds["resume"],
        paused_s=ended - stood_still,
        total_s=ended - began,
    )


def _call_each(
    targets: Sequence[ServerControl],
    call: Callable[[ServerControl], None],
    phase: str,
    *,
    deadline_s: float,
    setting: str = _SETTING,
) -> dict[str, Exception]:
    """Call on all servers at once; the errors of those that failed."""
    calls = start_each({target.name: partial(call, target) for target in targets}, what=f"push {phase}")
    return failures_of(calls, what=phase, deadline_s=deadline_s + GRACE_S, setting=setting)


def _resume_after(error: PushFailedError, targets: Sequence[ServerControl], *, timeout_s: float) -> None:
    """Resume every server after a failure, also one that did not answer pause: it may have paused before its answer was lost.
    One that cannot be resumed is added to those that failed, because it stands still."""
    silent = {name for name, cause in error.failures.items() if not is_answer(cause)}
    calls = start_each(
        {
            target.name: partial(
                target.resume, timeout_s=min(timeout_s, _RESUME_BROKEN_S) if target.name in silent else timeout_s
            )
            for target in targets
        },
        what="push resume",
    )
    lively = {name: call for name, call in calls.items() if name not in silent}
    failed = failures_of(lively, what="resume", deadline_s=timeout_s + GRACE_S, setting=_SETTING)
    error.failures.update({name: cause for name, cause in failed.items() if name not in error.failures})
    broken = {name: call for name, call in calls.items() if name in silent}
    failures_of(broken, what="resume", deadline_s=_RESUME_BROKEN_S, setting=_SETTING)


def _transfer(
    parameters: GatheredParameters,
    *,
    version: int,
    targets: Sequence[ServerControl],
    transport: WeightTransport,
    settings: PushSettings,
    timeline: Timeline,
) -> tuple[float, float]:
    """Gather every bucket and send each while the next is gathered; (seconds gathering, seconds sending).

    Raises:
        PushFailedError: phase "update".
    """
    specs = parameters.specs
    answers = start_each(
        {target.name: partial(transport.announce, target, specs) for target in targets}, what="push update"
    )
    sender = BucketSender(transport, answers, timeout_s=settings.timeout_s, timeline=timeline)
    gather_s = 0.0
    try:
        mark, began = time.monotonic(), time.time()
        for tensors in parameters.buckets(transport.bucket_bytes):
            buffer = transport.pack(tensors) if sender.takes_more else None
            gather_s += time.monotonic() - mark
            timeline.add("gather", LANE, began, time.time(), tensors=len(tensors))
            if buffer is not None:
                sender.hand_over(buffer)
            mark, began = time.monotonic(), time.time()
        sender.wait()
    except BaseException:  # the trainer's own: the servers must not wait for more buckets
        sender.abandon()
        transport.close()
        wait(answers.values(), timeout=GRACE_S)
        raise
    if sender.failure is not None:
        transport.close()
    # a server waits for a bucket as long as we wait for sending it, so all have ended by then that can
    errors = failures_of(
        answers,
        what="update_weights",
        deadline_s=max(0.0, sender.progress_at + settings.timeout_s - time.monotonic()) + GRACE_S,
        setting=_SETTING,
    )
    errors = {**sender.early, **errors}
    if sender.failure is None and not errors:
        return gather_s, sender.send_s
    transport.close()
    failed, affected = split_failed(errors)
    if sender.failure is None and not failed:
        failed, affected = affected, {}  # everything left us, so these lost it themselves
    if not failed and sender.failure is not None:
        affected = {**affected, "trainer": sender.failure}
    raise PushFailedError(
        f"update of the push of version {version}",
        phase="update",
        failures=failed,
        affected=affected,
        hint=f"deadline {settings.timeout_s:.0f} s for each bucket: {_SETTING}",
    ) from sender.failure
