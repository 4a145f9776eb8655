"""The weight push: one function, on all servers at once.

    pause -> (connect) -> start -> transfer -> finish(version) -> resume

In the transfer the trainer gathers and sends bucket after bucket, and every worker loads each as it arrives, in place: next to its
weights it holds two buckets, and what a layer waits for.

Where the bytes go, file by file:

    trainer   push -> transport (the group, packing) -> backend (gloo, nccl, ipc)
    server    its HTTP routes -> the engine, or each worker -> receiver -> backend
    both      rendezvous (how the group forms), buckets (how parameters are cut and packed), calls (which server failed)

Invariants: a pause is followed by a resume, on errors too, but for a server that holds a part of an update: it answers nothing
until it has received another one wholly, be it of the next attempt, of the next trainer, or after its restart. A push that fails
before the transfer has changed nothing. Every rank gathers every bucket; only rank 0 sends. When sending fails, rank 0 goes on
gathering without sending, because the other ranks wait for it in the collective. Every wait has a deadline; in the transfer each
bucket has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from grpo_async.config.base import PushMode
from grpo_async.config.server_sections import WeightsSection
from grpo_async.errors import RequestRejectedError, WeightPushError
from grpo_async.inference.api import PauseMode
from grpo_async.inference.connect import is_answer
from grpo_async.inference.control import ServerControl
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.calls import (
    GRACE_S,
    SETTING,
    PushFailedError,
    failed_calls,
    split_failed,
    start_calls,
)
from grpo_async.weights.transport import WeightTransport

_PAUSES: dict[PushMode, tuple[PauseMode, bool]] = {
    "recompute": ("keep", False),
    "keep_kv": ("keep", True),
    "drain": ("drain", False),
    "abort": ("abort", False),
}
"""What the servers do, by weights.mode: pause mode, and whether caches are kept."""

TRACK = "weights"
"""Of the timeline."""
_OUT_OF_ORDER = 409  # answered to resume: a part of an update is loaded
_RESUME_SILENT_S = 5.0  # for a server that has stopped answering: the others do not stand still for it


class GatheredParameters(Protocol):
    """Parameters of the policy, gathered bucket by bucket; every rank iterates in lockstep. See training.parameters."""

    @property
    def specs(self) -> list[ParameterSpec]: ...

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        """Contiguous tensors, one bucket at a time, in the order of `specs`."""


def push_weights(
    parameters: GatheredParameters,
    *,
    version: int,
    servers: Sequence[ServerControl],
    transport: WeightTransport,
    settings: WeightsSection,
    before_gather: Callable[[int], None] = lambda _: None,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    timeline: Timeline = NO_TIMELINE,
) -> dict[str, float]:
    """Rank 0: push all parameters to all servers and make `version` their policy version.

    Args:
        transport: one that is not connected is connected with `servers` first.
        before_gather: called with the size of the buckets when the servers are ready to receive; brings the other ranks into the
            gather.
        loading: a context for the phases in which engines are busy with the update and answer to nothing else.
        timeline: takes the phases; within "transfer" what gathering and, on a separate track, sending each bucket took.

    Returns:
        The metrics sync/* of this push (tracking.catalog has what each is).

    Raises:
        PushFailedError: servers failed, or the broadcast to them did. Those that still answer continue with their weights, if they
            have whole ones; the others wait for the next push. After a failed transfer the transport is closed.
        WeightPushError: the trainer itself failed.
    """
    started, timeout_s = time.monotonic(), settings.timeout_s
    seconds: dict[str, float] = {}  # of each phase

    @contextmanager
    def phase_of_all(name: str) -> Iterator[None]:
        phase_started = time.monotonic()
        with timeline.span(name, TRACK):
            yield
        seconds[name] = time.monotonic() - phase_started

    def call_all(
        phase: str, call: Callable[[ServerControl], None], *, deadline_s: float = timeout_s, setting: str = SETTING
    ) -> None:
        with phase_of_all(phase):
            calls = start_calls(servers, call, phase=phase)
            failures = failed_calls(calls, phase=phase, deadline_s=deadline_s + GRACE_S, setting=setting)
        if failures:
            what, hint = f"{phase} of the push of version {version}", f"deadline {deadline_s:.0f} s: {setting}"
            raise PushFailedError(what, phase=phase, failures=failures, hint=hint)

    def pause_all() -> float:
        """When generation stood still: from the call on; with mode drain from its answer on."""
        mode, keep_cache = _PAUSES[settings.mode]
        deadline_s, setting, asked = timeout_s, SETTING, time.monotonic()
        if mode == "drain":
            deadline_s, setting = settings.drain_timeout_s, "weights.drain_timeout_s"
        call_all(
            "pause",
            lambda server: server.pause(mode=mode, keep_cache=keep_cache, timeout_s=deadline_s),
            deadline_s=deadline_s,
            setting=setting,
        )
        return time.monotonic() if mode == "drain" else asked

    try:
        paused_at = pause_all()
        with loading():
            if not transport.members:
                with phase_of_all("connect"):
                    transport.connect(servers)
            update = transport.describe(parameters.specs)
            call_all("start", lambda server: server.start_weight_update(update, timeout_s=timeout_s))
            before_gather(transport.bucket_bytes)
            with phase_of_all("transfer"):
                seconds["gather"], seconds["send"] = _transfer(
                    parameters,
                    version=version,
                    servers=servers,
                    transport=transport,
                    timeout_s=timeout_s,
                    timeline=timeline,
                )
            call_all("finish", lambda server: server.finish_weight_update(version, timeout_s=timeout_s))
        call_all("resume", lambda server: server.resume(timeout_s=timeout_s))
    except PushFailedError as error:
        if error.phase != "resume":
            _resume_after(error.failures, servers, timeout_s=timeout_s)
        raise
    except BaseException as error:
        _resume_after({}, servers, timeout_s=timeout_s)
        if isinstance(error, WeightPushError) or not isinstance(error, Exception):
            raise
        raise WeightPushError(f"pushing version {version} failed: {type(error).__name__}: {error}") from error
    ended = time.monotonic()
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    return {
        "sync/push_s": ended - started,
        "sync/pause_s": ended - paused_at,
        **{f"sync/phase/{name}_s": taken_s for name, taken_s in seconds.items()},
        "sync/bytes": float(num_bytes),
        "sync/bytes_per_s": num_bytes / max(seconds["transfer"], 1e-9),
        "sync/servers": float(len(servers)),
    }


def _resume_after(failures: dict[str, Exception], servers: Sequence[ServerControl], *, timeout_s: float) -> None:
    """Resume every server after a failure, also one that did not answer pause: it may have paused before its answer was lost.
    One that cannot be resumed is added to those that failed, because it stands still; not one that refuses because it holds a part
    of an update, which the next push repairs."""
    silent = {name for name, error in failures.items() if not is_answer(error)}
    limits = {
        server.name: min(timeout_s, _RESUME_SILENT_S) if server.name in silent else timeout_s for server in servers
    }
    calls = start_calls(servers, lambda server: server.resume(timeout_s=limits[server.name]), phase="resume")
    lively = {name: call for name, call in calls.items() if name not in silent}
    for name, error in failed_calls(lively, phase="resume", deadline_s=timeout_s + GRACE_S).items():
        if not (isinstance(error, RequestRejectedError) and error.status == _OUT_OF_ORDER):
            failures.setdefault(name, error)
    wait([calls[name] for name in silent], timeout=_RESUME_SILENT_S)


def _transfer(
    parameters: GatheredParameters,
    *,
    version: int,
    servers: Sequence[ServerControl],
    transport: WeightTransport,
    timeout_s: float,
    timeline: Timeline,
) -> tuple[float, float]:
    """Gather every bucket and send each while the next is gathered; (seconds gathering and packing, seconds waiting for a bucket to
    be sent, overlapping gathering).

        gather+pack 0 | start sending 0 | gather+pack 1 | wait for 0 | start sending 1 | gather+pack 2 | ...

    Raises:
        PushFailedError: phase "transfer".
    """
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    # every bucket has its own deadline; this one only ends the wait for a server that has stopped answering
    answer_s = timeout_s * (2 + num_bytes // transport.bucket_bytes)
    answers = start_calls(servers, lambda server: server.update_weights(timeout_s=answer_s), phase="transfer")
    end_group = transport.closer()  # of this group, however late an answer comes
    for answer in answers.values():
        # a send cannot end well when a server is out, and ends now where the backend can
        answer.add_done_callback(lambda ended: end_group() if ended.exception() is not None else None)
    failure: RuntimeError | WeightPushError | None = None  # of the sending; nothing is sent after it
    early: dict[str, Exception] = {}
    gather_s = send_s = 0.0
    sent_at = time.monotonic()
    in_flight: Callable[[], None] | None = None
    try:
        buckets = parameters.buckets(transport.bucket_bytes)
        while True:
            began, at = time.monotonic(), time.time()
            tensors = next(buckets, None)
            packed = transport.pack(tensors) if tensors is not None and failure is None else None
            gather_s += time.monotonic() - began
            if tensors is not None:
                timeline.add("gather", TRACK, at, time.time(), tensors=len(tensors))
            if failure is None:
                began, at = time.monotonic(), time.time()
                try:
                    if in_flight is not None:
                        in_flight()  # within the transport's deadline
                    sent_at = time.monotonic()
                    if packed is not None:
                        _check_answers(answers, early)
                        in_flight = transport.send(packed)
                except (RuntimeError, WeightPushError) as error:
                    failure = error
                send_s += time.monotonic() - began
                timeline.add("send", f"{TRACK}/send", at, time.time())
            if tensors is None:
                break
    except BaseException:  # the trainer's own: the servers must not wait for more buckets
        transport.close()
        wait(answers.values(), timeout=GRACE_S)
        raise
    if failure is not None:
        transport.close()
    # a server waits for a bucket as long as we wait for sending it, so all have ended by then that can
    left_s = max(0.0, sent_at + timeout_s - time.monotonic())
    errors = early | failed_calls(answers, phase="transfer", deadline_s=left_s + GRACE_S)
    if failure is None and not errors:
        return gather_s, send_s
    transport.close()
    failed, affected = split_failed(errors)
    if failure is None and not failed:
        failed, affected = affected, {}  # everything left us, so these lost it themselves
    if failure is not None and not failed:
        affected = {**affected, "trainer": failure}
    raise PushFailedError(
        f"transfer of the push of version {version}",
        phase="transfer",
        failures=failed,
        affected=affected,
        hint=f"deadline {timeout_s:.0f} s for each bucket: {SETTING}",
    ) from failure


def _check_answers(answers: Mapping[str, Future[object]], early: dict[str, Exception]) -> None:
    """Raises WeightPushError when a server has answered before everything was sent. One that said that it has everything is noted
    in `early`."""
    for name, answer in answers.items():
        if answer.done():
            if (error := answer.exception()) is None:
                error = early[name] = WeightPushError("it ended the update before all parameters had been sent")
            raise WeightPushError(f"{name}: {error}") from error
