"""The weight push: one function, on all servers at once.

    start -> transfer (the servers receive and stage while the trainer gathers and sends) -> pause -> finish(version) -> resume

Receiving touches nothing that generates, so requests only see pause and finish. Where it takes memory of a GPU that the engine's
steps may need (transport.receives_beside_steps is False), the pause comes first.

Where the bytes go, file by file:

    trainer   push -> transport (the group, packing) -> backend (gloo, nccl, ipc)
    server    its HTTP routes -> receiver -> backend -> staged; loaded by finish
    both      rendezvous (how the group forms), buckets (how parameters are cut and packed), calls (which server failed)

Invariants: a pause is always followed by a resume, on errors too. A server applies an update all or nothing, in finish: a push
that fails before leaves the old weights serving everywhere, one that fails there leaves each server with either version, whole.
Every rank gathers every bucket; only rank 0 sends. When sending fails, rank 0 goes on gathering without sending, because the
other ranks wait for it in the collective. Every wait has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Literal, Protocol

import torch

from grpo_async.config.server_sections import WeightsSection
from grpo_async.errors import DeadlineError, WeightPushError
from grpo_async.inference.api import PauseMode
from grpo_async.inference.connect import is_answer
from grpo_async.inference.control import ServerControl
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.utils.threads import in_thread
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

PushMode = Literal["recompute", "keep_kv", "drain", "abort"]

_PAUSES: dict[PushMode, tuple[PauseMode, bool]] = {
    "recompute": ("keep", False),
    "keep_kv": ("keep", True),
    "drain": ("drain", False),
    "abort": ("abort", False),
}
"""What the servers are told by weights.mode: pause mode, and whether caches are kept."""

TRACK = "weights"
"""Of the timeline."""
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
    before_gather: Callable[[], None] = lambda: None,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    timeline: Timeline = NO_TIMELINE,
) -> dict[str, float]:
    """Rank 0: push all parameters to all servers and make `version` their policy version.

    Args:
        transport: connected with `servers`.
        before_gather: called when the servers are ready to receive; brings the other ranks into the gather.
        loading: a context for the phase finish, in which the servers load what they have staged and answer to nothing else.
        timeline: takes the phases; within "transfer" what gathering and, on a track of its own, sending each bucket took.

    Returns:
        The metrics sync/* of this push (tracking.metrics has what each is).

    Raises:
        PushFailedError: servers failed, or the broadcast to them did. No server is paused that still answers. Unless the phase
            is finish or resume, all of them serve the old weights. After a failed transfer the transport is closed.
        WeightPushError: the trainer itself failed.
    """
    started, limit_s = time.monotonic(), settings.timeout_s
    seconds: dict[str, float] = {}  # of each phase

    @contextmanager
    def phase_of_all(name: str) -> Iterator[None]:
        phase_started = time.monotonic()
        with timeline.span(name, TRACK):
            yield
        seconds[name] = time.monotonic() - phase_started

    def call_all(
        phase: str, call: Callable[[ServerControl], None], *, deadline_s: float = limit_s, setting: str = SETTING
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
        deadline_s, setting, asked = limit_s, SETTING, time.monotonic()
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
        paused_at = None if transport.receives_beside_steps else pause_all()
        call_all("start", lambda server: server.start_weight_update(timeout_s=limit_s))
        before_gather()
        with phase_of_all("transfer"):
            seconds["gather"], seconds["send"] = _transfer(
                parameters, version=version, servers=servers, transport=transport, timeout_s=limit_s, timeline=timeline
            )
        paused_at = pause_all() if paused_at is None else paused_at
        with loading():
            call_all("finish", lambda server: server.finish_weight_update(version, timeout_s=limit_s))
        call_all("resume", lambda server: server.resume(timeout_s=limit_s))
    except PushFailedError as error:
        if error.phase != "resume":
            _resume_after(error.failures, servers, timeout_s=limit_s)
        raise
    except BaseException as error:
        _resume_after({}, servers, timeout_s=limit_s)
        if not isinstance(error, Exception):
            raise
        raise WeightPushError(f"pushing version {version} failed: {type(error).__name__}: {error}") from error
    ended = time.monotonic()
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    return {
        "sync/push_s": ended - started,
        "sync/pause_s": ended - paused_at,
        **{f"sync/{name}_ms": 1000.0 * taken_s for name, taken_s in seconds.items()},
        "sync/bytes": float(num_bytes),
        "sync/bytes_per_s": num_bytes / max(seconds["transfer"], 1e-9),
        "sync/servers": float(len(servers)),
    }


def _resume_after(failures: dict[str, Exception], servers: Sequence[ServerControl], *, timeout_s: float) -> None:
    """Resume every server after a failure, also one that did not answer pause: it may have paused before its answer was lost.
    One that cannot be resumed is added to those that failed, because it stands still."""
    silent = {name for name, error in failures.items() if not is_answer(error)}
    limits = {
        server.name: min(timeout_s, _RESUME_SILENT_S) if server.name in silent else timeout_s for server in servers
    }
    calls = start_calls(servers, lambda server: server.resume(timeout_s=limits[server.name]), phase="resume")
    lively = {name: call for name, call in calls.items() if name not in silent}
    for name, error in failed_calls(lively, phase="resume", deadline_s=timeout_s + GRACE_S).items():
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
    """Gather every bucket and send each while the next is gathered; (seconds gathering and packing, seconds sending).

    Raises:
        PushFailedError: phase "transfer".
    """
    answers = start_calls(servers, lambda server: transport.announce(server, parameters.specs), phase="transfer")
    sender = _BucketSender(transport, answers, timeout_s=timeout_s, timeline=timeline)
    gather_s = 0.0
    try:
        buckets = parameters.buckets(transport.bucket_bytes)
        while True:
            is_sending = sender.wait_for_room()
            gather_started, at = time.monotonic(), time.time()
            tensors = next(buckets, None)
            if tensors is None:
                break
            packed = transport.pack(tensors) if is_sending else None
            gather_s += time.monotonic() - gather_started
            timeline.add("gather", TRACK, at, time.time(), tensors=len(tensors))
            if packed is not None:
                sender.send(packed)
        sender.finish()
    except BaseException:  # the trainer's own: the servers must not wait for more buckets
        sender.finish(wait=False)
        transport.close()
        wait(answers.values(), timeout=GRACE_S)
        raise
    if sender.failure is not None:
        transport.close()
    # a server waits for a bucket as long as we wait for sending it, so all have ended by then that can
    left_s = max(0.0, sender.sent_at + timeout_s - time.monotonic())
    errors = sender.early | failed_calls(answers, phase="transfer", deadline_s=left_s + GRACE_S)
    if sender.failure is None and not errors:
        return gather_s, sender.send_s
    transport.close()
    failed, affected = split_failed(errors)
    if sender.failure is None and not failed:
        failed, affected = affected, {}  # everything left us, so these lost it themselves
    if isinstance(sender.failure, Exception) and not failed:
        affected = {**affected, "trainer": sender.failure}
    raise PushFailedError(
        f"transfer of the push of version {version}",
        phase="transfer",
        failures=failed,
        affected=affected,
        hint=f"deadline {timeout_s:.0f} s for each bucket: {SETTING}",
    ) from sender.failure


class _BucketSender:
    """Sends packed buckets in a thread, so that the next bucket is gathered and packed meanwhile: one bucket ahead at most, since
    there are two buffers to pack into.

        main thread     gather+pack 0 | gather+pack 1 | wait  | gather+pack 2 | ...
        thread                        | send 0 -------------- | send 1 ----------- | ...

    Raises nothing of the servers or the backend: the first failure is kept in `failure`, and nothing is sent after it.

    Args:
        answers: the servers' answers to the announced update. An error among them ends the sending; so does one that comes before
            the last bucket.
        timeout_s: deadline of each bucket.
    """

    def __init__(
        self,
        transport: WeightTransport,
        answers: Mapping[str, Future[object]],
        *,
        timeout_s: float,
        timeline: Timeline,
    ) -> None:
        self._transport = transport
        self._answers = answers
        self._timeout_s = timeout_s
        self._timeline = timeline
        self.failure: BaseException | None = None
        self.early: dict[str, Exception] = {}
        """Servers that answered with success before everything was sent."""
        self.send_s = 0.0
        self.sent_at = time.monotonic()
        """When the last bucket was out."""
        self._packed: SimpleQueue[torch.Tensor | None] = SimpleQueue()  # None: there are no more
        self._num_unsent = 0
        self._is_refused = False  # a server has answered with an error
        self._changed = threading.Condition()
        for answer in answers.values():
            answer.add_done_callback(self._note_answer)
        in_thread(self._run, name="weights send")

    def wait_for_room(self, *, at_most: int = 1) -> bool:
        """Until `at_most` buckets are on their way; False when nothing more is to be packed."""
        until = time.monotonic() + self._timeout_s + GRACE_S
        with self._changed:
            while True:
                if self._is_refused:
                    self._transport.close()  # a send cannot end well, and ends now where the backend can
                if self._num_unsent <= at_most or self.failure is not None:
                    return self.failure is None and not self._is_refused
                if not self._changed.wait(until - time.monotonic()):
                    waited_s = self._timeout_s + GRACE_S
                    self.failure = DeadlineError("a bucket of weights to be sent", waited_s=waited_s, setting=SETTING)

    def send(self, packed: torch.Tensor) -> None:
        """Send this bucket as soon as the one before is out."""
        with self._changed:
            self._num_unsent += 1
        self._packed.put(packed)

    def finish(self, *, wait: bool = True) -> None:
        """Return when everything is sent; nothing can be sent after it."""
        self._packed.put(None)
        if wait:
            self.wait_for_room(at_most=0)

    def _note_answer(self, answer: Future[object]) -> None:
        if answer.exception() is not None:
            with self._changed:
                self._is_refused = True
                self._changed.notify_all()

    def _run(self) -> None:
        while (packed := self._packed.get()) is not None:  # `finish` puts None
            failure: BaseException | None = self.failure
            if failure is None:
                try:
                    self._check_answers()
                    self._send(packed)
                except BaseException as error:  # noqa: BLE001 - told apart by whoever looks at `failure`
                    failure = error
            with self._changed:
                self._num_unsent -= 1
                self.failure = self.failure or failure  # the first one: at the deadline this thread is left behind
                self._changed.notify_all()

    def _check_answers(self) -> None:
        for name, answer in self._answers.items():
            if answer.done():
                if (error := answer.exception()) is None:
                    error = self.early[name] = WeightPushError("it ended the update before all parameters were sent")
                raise error

    def _send(self, packed: torch.Tensor) -> None:
        started = time.monotonic()
        with self._timeline.span("send", f"{TRACK}/send", bytes=packed.nbytes):
            self._transport.send(packed)
        self.sent_at = time.monotonic()
        self.send_s += self.sent_at - started
