"""The trainer's end of a weight push: one function, for all servers at once.

    pause -> (connect) -> start -> transfer -> finish(version) -> resume      (swapped adapters: without pause and resume)

    trainer   push_weights -> WeightTransport (the group, packing; both here) -> backends (gloo, nccl, ipc)
              other ranks: hand_over
    server    its HTTP routes (servers.app) -> the engine, or each of its workers -> receiver -> backends

Every pause is followed by a resume, except for a server that has loaded part of an update: it refuses requests until it has
received a complete one. Every rank gathers every bucket, also after a failed send, because the others wait in the collective.
A server that dies breaks the broadcast for all: those that report that in an HTTP answer are affected, the others failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.config.base import PushMode, TransportKind
from grpo_async.config.sections import WeightsSection
from grpo_async.errors import DeadlineError, RequestRejectedError, ServerUnavailableError, WeightPushError, message_of
from grpo_async.inference.api import OUT_OF_ORDER, Paused, PauseMode, WeightUpdateInfo
from grpo_async.inference.connect import is_answer
from grpo_async.inference.control import ServerControl
from grpo_async.tracking.timeline import span
from grpo_async.utils.concurrency import in_thread
from grpo_async.weights import ipc
from grpo_async.weights.backends import (
    NOT_FORMED,
    Backend,
    GroupClosedError,
    IpcBackend,
    Rendezvous,
    check_device,
)
from grpo_async.weights.buckets import GatheredParameters, pack, update_buckets, with_digests
from grpo_async.weights.receiver import NOT_ARRIVED, NOT_AS_SENT

_PAUSES: dict[PushMode, tuple[PauseMode, bool]] = {
    "recompute": ("keep", False),
    "keep_kv": ("keep", True),
    "abort": ("abort", False),
}
"""What servers do, by weights.mode: the pause mode, and whether caches are kept."""

GRACE_S = 10.0
"""Waited beyond the deadline of a call itself, so that the call's own error message comes first."""
_SETTING = "weights.timeout_s"
_RESUME_SILENT_S = 5.0  # for a server that has stopped answering, so that the others need not wait for it


class PushFailedError(WeightPushError):
    """Servers failed in a phase of a push, or the broadcast failed.

    Args:
        phase: connect, pause, start, transfer, finish or resume.
        failures: the error of each server that failed itself; empty if none did and a new attempt may well succeed.
        affected: the errors of the servers that only saw the failure."""

    def __init__(
        self,
        what: str,
        *,
        phase: str,
        failures: Mapping[str, Exception],
        affected: Mapping[str, Exception] | None = None,
        hint: str = "",
    ) -> None:
        self.phase = phase
        self.failures = dict(failures)
        self.affected = dict(affected or {})
        named = self.failures or self.affected
        causes = "; ".join(f"{name}: {message_of(error)}" for name, error in named.items())
        super().__init__(f"{what} failed{f': {causes}' if causes else ''}{f' ({hint})' if hint else ''}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCommand:
    """Have trainer ranks 1..N-1 take part in a push: they gather every bucket with rank 0."""

    bucket_bytes: int
    over_ipc: bool = False
    """They also hand it to the workers on their GPUs."""
    buffer_bytes: int = 0
    worker_gpus: Sequence[str] = ()
    """Where the group is new: share two buffers of `buffer_bytes` with these workers."""


class WeightTransport:
    """The trainer's end of one group with all servers: rank 0 = trainer, then the workers of each server in the given order.
    After a failed send the group is unusable: close, then connect. `host` is the trainer's address, loopback if all are on this
    machine.

    Raises:
        WeightPushError: `transport` is impossible on `device`."""

    def __init__(
        self,
        transport: TransportKind,
        *,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        try:
            check_device(transport, device)
        except RuntimeError as error:
            raise WeightPushError(str(error)) from error
        self._transport = transport
        self.bucket_bytes = bucket_bytes
        self._host = host
        self._timeout_s = timeout_s
        self._device = device
        self._backend: Backend | None = None
        self.members: tuple[str, ...] = ()
        """Names of the connected servers; () if not connected."""
        self.last_push: tuple[int, torch.Tensor] | None = None
        """Version and digests of the last push that all servers took."""

    def connect(self, servers: Sequence[ServerControl]) -> None:
        """Form a new group, leaving the previous one. Raises PushFailedError: a server refused or did not join within the
        deadline."""
        self.close()
        ranks: dict[str, int] = {}  # rank of each server's first worker
        world_size = 1
        for server in servers:
            ranks[server.name] = world_size
            world_size += server.num_workers
        what = f"forming the weight group of trainer and {', '.join(ranks)} at {self._host}"
        try:
            rendezvous = Rendezvous(self._host, world_size=world_size, timeout_s=self._timeout_s)
        except (OSError, RuntimeError) as error:
            raise PushFailedError(what, phase="connect", failures={}, affected={"trainer": error}) from error

        def ask_to_join(server: ServerControl) -> None:
            info = rendezvous.init_info(self._transport, rank_offset=ranks[server.name])
            try:
                server.init_weight_transfer(info, timeout_s=self._timeout_s + GRACE_S)
            except Exception as error:
                rendezvous.abort(f"{server.name} did not join: {message_of(error)}")
                raise

        joins = _start_calls(servers, ask_to_join, phase="connect")
        failure: RuntimeError | None = None
        try:
            self._backend = rendezvous.join(self._transport, self._device)
        except RuntimeError as error:
            failure = error
            rendezvous.abort(f"not all workers joined within {self._timeout_s:.0f} s")
        # after an abort, every worker that is alive reports it
        errors = _failed_calls(joins, phase="connect", deadline_s=GRACE_S if failure else self._timeout_s + GRACE_S)
        if failure is not None or errors:
            self.close()
            raise _broken_group(what, "connect", errors, failure, f"deadline {self._timeout_s:.0f} s: {_SETTING}")
        self.members = tuple(ranks)

    def describe(self, parameters: GatheredParameters) -> WeightUpdateInfo:
        specs = parameters.specs
        return WeightUpdateInfo(
            names=[spec.name for spec in specs],
            dtype_names=[spec.dtype_name for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            bucket_bytes=self.bucket_bytes,
            timeout_s=self._timeout_s,
            base=parameters.base,
            swap=parameters.swap,
        )

    def start_gather(self, parameters: GatheredParameters, ask: Callable[[GatherCommand], None]) -> None:
        """Tell the other ranks, through `ask`, to gather too; over ipc in a new group they also share their buffers."""
        backend = self._open()
        if not isinstance(backend, IpcBackend) or backend.is_shared:
            ask(GatherCommand(bucket_bytes=self.bucket_bytes, over_ipc=self._transport == "ipc"))
            return
        buckets = update_buckets(parameters.specs, self.bucket_bytes)
        command = GatherCommand(
            bucket_bytes=self.bucket_bytes,
            over_ipc=True,
            buffer_bytes=max(sum(spec.num_bytes for spec in bucket) for bucket in buckets),
            worker_gpus=backend.worker_gpus(),
        )
        ask(command)
        backend.share(command.buffer_bytes, [pair for pairs in _of_all_ranks([]) for pair in pairs])

    def await_ranks(self) -> None:
        """Over ipc: wait until every other rank has packed its bucket, too."""
        if self._transport == "ipc":
            _await_ranks()

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack one bucket of contiguous tensors, [num_bytes] uint8, into one of two alternating buffers: the previous one may still
        be in transit. A bucket of one tensor is that tensor's own memory if the backend can send it: do not change it until it
        is sent."""
        backend = self._open()
        if len(tensors) == 1 and backend.sends_in_place and tensors[0].device == backend.device:
            return tensors[0].reshape(-1).view(torch.uint8)
        return pack(tensors, into=backend.buffer(sum(tensor.nbytes for tensor in tensors)))

    def send(self, bucket: torch.Tensor) -> Callable[[], None]:
        """Begin to send one bucket that `pack` returned to all servers. The returned function waits for the end. Both raise
        RuntimeError."""
        return self._open().send(bucket, timeout_s=self._timeout_s)

    def close_callback(self) -> Callable[[], None]:
        """A function that closes the current group, and no later one. Thread-safe."""
        return self._open().close

    def close(self) -> None:
        backend, self._backend = self._backend, None
        self.members = ()
        if backend is not None:
            backend.close()

    def _open(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the weight group is not connected")
        return self._backend


def push_weights(
    parameters: GatheredParameters,
    *,
    version: int,
    servers: Sequence[ServerControl],
    transport: WeightTransport,
    settings: WeightsSection,
    send_to_ranks: Callable[[GatherCommand], None] = lambda _: None,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, float]:
    """Rank 0: push all parameters to all servers and make `version` their policy version. Returns the metrics sync/*.

    Args:
        send_to_ranks: sends the command to the other ranks, when the servers are ready.
        loading: a context for the phases in which engines are busy with the update and answer nothing else.

    Raises:
        PushFailedError: servers failed, or the broadcast did. Those with complete weights continue, the others wait for the next
            push. After a failed transfer the transport is closed.
        WeightPushError: the trainer itself failed."""
    started, timeout_s = time.monotonic(), settings.timeout_s
    clock, paused = _Clock(), list[Paused]()

    def call_all(phase: str, call: Callable[[ServerControl], None]) -> None:
        with clock.part(phase):
            calls = _start_calls(servers, call, phase=phase)
            failures = _failed_calls(calls, phase=phase, deadline_s=timeout_s + GRACE_S, setting=_SETTING)
        if failures:
            what, hint = f"{phase} of the push of version {version}", f"deadline {timeout_s:.0f} s: {_SETTING}"
            raise PushFailedError(what, phase=phase, failures=failures, hint=hint)

    mode, keep_cache = _PAUSES[settings.mode]
    try:
        if not parameters.swap:
            call_all(
                "pause",
                lambda server: paused.append(server.pause(mode=mode, keep_cache=keep_cache, timeout_s=timeout_s)),
            )
        with loading():
            if not transport.members:
                with clock.part("connect"):
                    transport.connect(servers)
            update = transport.describe(parameters)
            call_all("start", lambda server: server.start_weight_update(update, timeout_s=timeout_s))
            transport.start_gather(parameters, send_to_ranks)
            with clock.part("transfer"):
                digests = _transfer(parameters, version, servers, transport, timeout_s, clock)
            call_all("finish", lambda server: server.finish_weight_update(version, timeout_s=timeout_s))
        if not parameters.swap:
            call_all("resume", lambda server: server.resume(timeout_s=timeout_s))
    except PushFailedError as error:
        if error.phase != "resume":
            _resume_after(error.failures, servers, timeout_s=timeout_s)
        raise
    except BaseException as error:
        _resume_after({}, servers, timeout_s=timeout_s)
        if isinstance(error, WeightPushError) or not isinstance(error, Exception):
            raise
        raise WeightPushError(f"pushing version {version} failed: {message_of(error)}") from error
    ended = time.monotonic()
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    before, transport.last_push = transport.last_push, (version, digests)
    changed = {}
    if before is not None and before[0] != version:
        changed["sync/changed"] = (digests != before[1]).float().mean().item()
    if settings.mode == "recompute":
        recomputed = sum(each.recomputed_tokens for each in paused)
        changed["sync/recomputed_tokens"] = float(recomputed)
        changed["sync/recomputed_ratio"] = recomputed / max(
            1, recomputed + sum(each.computed_tokens for each in paused)
        )
    return {
        "sync/push_s": ended - started,
        # without a pause, workers that receive and load compute no step
        "sync/stopped_s": clock.seconds["transfer"] if parameters.swap else ended - started,
        **{f"sync/phase/{name}_s": taken_s for name, taken_s in clock.seconds.items()},
        "sync/bytes": float(num_bytes),
        "sync/bytes_per_s": num_bytes / max(clock.seconds["transfer"], 1e-9),
        "sync/servers": float(len(servers)),
        **changed,
    }


def hand_over(
    parameters: GatheredParameters, command: GatherCommand, buffers: ipc.SharedBuffers | None, *, device: torch.device
) -> ipc.SharedBuffers | None:
    """Ranks 1..N-1: gather every bucket with rank 0 and, over ipc, hand it to the workers on the GPU of this rank, in `buffers` of
    the last push. Returns those of this one. A collective."""
    if not command.over_ipc:
        for _ in parameters.buckets(command.bucket_bytes):
            pass  # only rank 0 sends
        return None
    if command.worker_gpus:
        num_workers = command.worker_gpus.count(ipc.gpu_of(device))
        buffers = ipc.SharedBuffers(device, command.buffer_bytes) if num_workers else None
        _of_all_ranks([] if buffers is None else buffers.pairs(num_workers))
    for tensors in with_digests(parameters.buckets(command.bucket_bytes)):
        if buffers is not None:
            pack(tensors, into=buffers.next(sum(tensor.nbytes for tensor in tensors)))
            ipc.finish_copies(device)
        _await_ranks()
    return buffers


def _of_all_ranks(pairs: Sequence[ipc.Pair]) -> list[Sequence[ipc.Pair]]:
    """What each trainer rank shares with workers, on rank 0. A collective."""
    if not dist.is_initialized():
        return [pairs]
    every: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(pairs, every if dist.get_rank() == 0 else None)
    return every


def _await_ranks() -> None:
    """Wait for every trainer rank, on the host. A collective."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


class _Clock:
    """Measures the phases: the total seconds of each, and a timeline span for every time that it ran."""

    def __init__(self) -> None:
        self.seconds = {"pause": 0.0, "resume": 0.0}  # which adapters that are swapped do without

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        with span(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def _transfer(
    parameters: GatheredParameters,
    version: int,
    servers: Sequence[ServerControl],
    transport: WeightTransport,
    timeout_s: float,
    clock: _Clock,
) -> torch.Tensor:
    """Gather every bucket and send each while the next is gathered. "send" is the time spent waiting until a bucket is sent.
    Returns the digests, which are the last bucket."""
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    # every bucket has its own deadline; this one only ends the wait for a server that has stopped answering
    answer_s = timeout_s * (2 + num_bytes // transport.bucket_bytes)
    answers = _start_calls(servers, lambda server: server.update_weights(timeout_s=answer_s), phase="transfer")
    end_group = transport.close_callback()  # bound to this group, however late an answer comes
    for answer in answers.values():
        # a send cannot succeed when a server has failed, so end it now if the backend can
        answer.add_done_callback(lambda ended: end_group() if ended.exception() is not None else None)
    failure: RuntimeError | None = None  # the error of sending; nothing is sent after it
    in_flight: Callable[[], None] = lambda: None  # noqa: E731 - nothing to wait for before the first bucket
    sent_at, has_more = time.monotonic(), True
    last: Sequence[torch.Tensor] = ()
    try:
        buckets = with_digests(parameters.buckets(transport.bucket_bytes))
        while has_more:
            with clock.part("gather"):
                tensors = next(buckets, None)
                has_more = tensors is not None
                last = tensors or last
                packed = None
                try:
                    if tensors is not None and failure is None:
                        packed = transport.pack(tensors)
                except GroupClosedError as error:  # by a server's answer
                    failure = error
            with clock.part("send"):
                try:
                    if failure is None:
                        in_flight()  # within the transport's deadline
                        sent_at = time.monotonic()
                except RuntimeError as error:
                    failure = error
                if has_more:
                    transport.await_ranks()  # which fill the buffers of the previous bucket next
                try:
                    if failure is None and packed is not None:
                        in_flight = transport.send(packed)
                except RuntimeError as error:
                    failure = error
    except BaseException:  # the trainer itself failed: the servers must not wait for more buckets
        transport.close()
        wait(answers.values(), timeout=GRACE_S)
        raise
    if failure is not None:
        transport.close()
    # a server waits as long for a bucket as we wait for its sending, so every server that can has answered by then
    left_s = max(0.0, sent_at + timeout_s - time.monotonic())
    errors = _failed_calls(answers, phase="transfer", deadline_s=left_s + GRACE_S)
    if failure is None and not errors:
        return last[0]
    transport.close()
    what, hint = f"transfer of the push of version {version}", f"deadline {timeout_s:.0f} s for each bucket: {_SETTING}"
    if len(errors) == len(servers) and all(NOT_AS_SENT in str(error) for error in errors.values()):
        raise PushFailedError(what, phase="transfer", failures={}, affected=errors)  # it was sent wrongly
    raise _broken_group(what, "transfer", errors, failure, hint)


def _broken_group(
    what: str, phase: str, errors: Mapping[str, Exception], failure: Exception | None, hint: str
) -> PushFailedError:
    """The error for a group that did not form or broke: `errors` of the servers, `failure` of the trainer's own end."""
    affected = {name: error for name, error in errors.items() if _is_affected(error)}
    failed = {name: error for name, error in errors.items() if name not in affected}
    if failure is None and not failed:
        failed, affected = affected, {}  # the trainer sent everything, so these servers failed themselves
    if failure is not None and not failed:
        affected |= {"trainer": failure}
    error = PushFailedError(what, phase=phase, failures=failed, affected=affected, hint=hint)
    error.__cause__ = failure
    return error


def _is_affected(error: Exception) -> bool:
    """Whether the error only reports a failure elsewhere, as the HTTP answer "the weights did not arrive" does; a broken connection
    is a failure itself."""
    says_so = NOT_ARRIVED in str(error) or NOT_FORMED in str(error)
    return isinstance(error, ServerUnavailableError) and error.answered and says_so


def _resume_after(failures: dict[str, Exception], servers: Sequence[ServerControl], *, timeout_s: float) -> None:
    """Resume every server after a failure, also one that did not answer pause: it may have paused before its answer was lost.
    A server that cannot be resumed is added to `failures`, because it stays paused; except if it refuses because it has part
    of an update, which the next push repairs."""
    silent = {name for name, error in failures.items() if not is_answer(error)}
    limits = {
        server.name: min(timeout_s, _RESUME_SILENT_S) if server.name in silent else timeout_s for server in servers
    }
    calls = _start_calls(servers, lambda server: server.resume(timeout_s=limits[server.name]), phase="resume")
    answering = {name: call for name, call in calls.items() if name not in silent}
    for name, error in _failed_calls(answering, phase="resume", deadline_s=timeout_s + GRACE_S).items():
        if not (isinstance(error, RequestRejectedError) and error.status == OUT_OF_ORDER):
            failures.setdefault(name, error)
    wait([calls[name] for name in silent], timeout=_RESUME_SILENT_S)


def _start_calls(
    servers: Sequence[ServerControl], call: Callable[[ServerControl], object], *, phase: str
) -> dict[str, Future[object]]:
    """Start `call` for every server at once, in daemon threads; returns the futures by server name. A call that
    outlives its deadline is abandoned."""
    return {server.name: in_thread(partial(call, server), name=f"push {phase} {server.name}") for server in servers}


def _failed_calls(
    calls: Mapping[str, Future[object]], *, phase: str, deadline_s: float, setting: str = _SETTING
) -> dict[str, Exception]:
    """Wait for all calls, `deadline_s` seconds altogether; returns the error of each one that failed."""
    failed: dict[str, Exception] = {}
    until = time.monotonic() + deadline_s
    for name, call in calls.items():
        try:
            error = call.exception(timeout=max(0.0, until - time.monotonic()))
        except TimeoutError:
            error = DeadlineError(f"an answer from {name} to {phase}", waited_s=deadline_s, setting=setting)
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None:
            failed[name] = error
    return failed
