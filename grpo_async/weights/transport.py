"""The trainer's end of the weight group: forms it with the workers of several servers, and sends them packed buckets.

    rank 0 = trainer, then the workers of each server in the order given

Knows no HTTP: the servers are called through `PushTarget`. After a failed send the group is of no use: close, then connect.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from grpo_async.errors import WeightPushError
from grpo_async.weights.blame import PushFailedError, split_blame
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.calls import GRACE_S, failures_of, start_each
from grpo_async.weights.carrier import Carrier, build_carrier, check_device
from grpo_async.weights.choice import CarrierKind
from grpo_async.weights.meeting import Meeting, device_identity, listen, problem_with_devices
from grpo_async.weights.packing import pack

_SETTING = "weights.timeout_s"


class JoiningTarget(Protocol):
    """A server, as far as the group needs it; see push.PushTarget. `fields` are those of surface.WeightInitInfo /
    WeightUpdateInfo."""

    @property
    def name(self) -> str: ...

    @property
    def num_workers(self) -> int: ...

    def init_weight_transfer(self, fields: dict[str, Any], *, timeout_s: float) -> None: ...

    def update_weights(self, fields: dict[str, Any], *, timeout_s: float) -> None: ...


class WeightTransport:
    """One group over all given servers.

    Args:
        kind: see `choose_transport`.
        host: own address on which the group meets.
        bucket_bytes: parameters travel in buckets of this many bytes.
        timeout_s: deadline of joining and of each bucket.
        device: where the trainer's weights are.
        base: fields of surface.AdapterBase when only adapters are pushed.

    Raises:
        WeightPushError: `kind` is impossible on `device`.
    """

    def __init__(
        self,
        kind: CarrierKind,
        *,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,
        base: dict[str, str] | None = None,
    ) -> None:
        try:
            check_device(kind, device)
        except RuntimeError as error:
            raise WeightPushError(str(error)) from error
        self.kind = kind
        self.bucket_bytes = bucket_bytes
        self._host = host
        self._timeout_s = timeout_s
        self._own_device = device
        self._base = base
        self._carrier: Carrier | None = None
        self._members: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the tensors of a bucket are best gathered: on the host for gloo, else on the trainer's GPU."""
        return torch.device("cpu") if self.kind == "gloo" else self._own_device

    @property
    def receives_beside_steps(self) -> bool:
        """Whether servers may generate while they receive: over gloo they stage in host memory. The other kinds stage on the GPU,
        in memory that torch has cached for the activations of the engine's steps, and their kernels share the GPU with those."""
        return self.kind == "gloo"

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the connected servers; () when not connected."""
        return self._members

    def connect(self, targets: Sequence[JoiningTarget]) -> None:
        """Form a new group, leaving the one before. A server that fails ends it for all at once.

        Raises:
            PushFailedError: phase "connect"; a server refused, or did not join within the deadline.
            WeightPushError: the servers' GPUs do not allow this transport.
        """
        self.close()
        if not targets:
            raise WeightPushError("there is no server to connect with")
        ranks: dict[str, range] = {}
        world_size = 1
        for target in targets:
            ranks[target.name] = range(world_size, world_size + target.num_workers)
            world_size += target.num_workers
        key = f"weights/{secrets.token_hex(8)}"
        meeting = Meeting(listen(self._host), world_size=world_size, key=key, timeout_s=self._timeout_s)
        joins = self._call_in(targets, ranks, meeting, key=key, world_size=world_size)
        carrier, broken = self._meet(meeting, world_size)
        errors = failures_of(
            joins,
            what="init_weight_transfer_engine",
            # once it is called off, every worker that is alive says so
            deadline_s=GRACE_S if carrier is None else self._timeout_s + GRACE_S,
            setting=_SETTING,
        )
        if carrier is not None and not errors:
            self._carrier, self._members = carrier, tuple(ranks)
            return
        if carrier is not None:
            carrier.close()
        to_blame, witnesses = split_blame(errors)
        raise PushFailedError(
            f"forming the weight group of trainer and {', '.join(ranks)} at {meeting.address}",
            phase="connect",
            failures=to_blame,
            witnesses=witnesses or ({} if to_blame or broken is None else {"trainer": broken}),
            hint=f"deadline {self._timeout_s:.0f} s: {_SETTING}",
        ) from broken

    def announce(self, target: JoiningTarget, specs: Sequence[ParameterSpec]) -> None:
        """Tell a server what follows; returns when it has received and staged everything, so call it in a thread.

        Raises:
            GrpoAsyncError: what the target raises.
        """
        target.update_weights(
            {
                "names": [spec.name for spec in specs],
                "dtype_names": [spec.dtype_name for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "bucket_bytes": self.bucket_bytes,
                "timeout_s": self._timeout_s,
                **({"base": self._base} if self._base else {}),
            },
            # every bucket has a deadline of its own; this one only ends the wait for a server that has stopped answering
            timeout_s=self._timeout_s * (2 + sum(spec.num_bytes for spec in specs) // self.bucket_bytes),
        )

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack one bucket of contiguous tensors, [num_bytes] uint8, into one of two buffers that take turns: the one before may
        still be on its way. A bucket of one tensor is that tensor's own memory where the carrier can send it: leave it alone until
        it is sent."""
        carrier = self._open()
        in_place = len(tensors) == 1 and carrier.sends_in_place and tensors[0].device == carrier.device
        into = None if in_place else carrier.buffer(sum(tensor.nbytes for tensor in tensors))
        buffer = tensors[0].reshape(-1).view(torch.uint8) if into is None else pack(tensors, into=into)
        if self._own_device.type == "cuda":
            torch.cuda.current_stream(self._own_device).synchronize()
        return buffer

    def send(self, buffer: torch.Tensor) -> None:
        """Send one bucket that `pack` returned to all servers.

        Raises:
            RuntimeError: a server vanished, or took longer than the deadline.
        """
        self._open().send(buffer, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Leave the group, which ends the waiting of the servers' workers. May be called from any thread."""
        carrier, self._carrier = self._carrier, None
        self._members = ()
        if carrier is not None:
            carrier.close()

    def _open(self) -> Carrier:
        carrier = self._carrier
        if carrier is None:
            raise RuntimeError("the weight group is not connected")
        return carrier

    def _call_in(
        self, targets: Sequence[JoiningTarget], ranks: dict[str, range], meeting: Meeting, *, key: str, world_size: int
    ) -> dict[str, Future[object]]:
        """Ask every server to join; one that fails calls the meeting off."""

        def join(target: JoiningTarget) -> Callable[[], None]:
            fields = {
                "transport": self.kind,
                "master_address": meeting.address,
                "master_port": meeting.port,
                "rank_offset": ranks[target.name].start,
                "world_size": world_size,
                "timeout_s": self._timeout_s,
                "key": key,
            }

            def run() -> None:
                try:
                    target.init_weight_transfer(fields, timeout_s=self._timeout_s + GRACE_S)
                except Exception as error:
                    meeting.call_off(f"{target.name} did not join: {error}")
                    raise

            return run

        return start_each({target.name: join(target) for target in targets}, what="weight group")

    def _meet(self, meeting: Meeting, world_size: int) -> tuple[Carrier | None, Exception | None]:
        """The trainer's own end, or what broke it."""
        try:
            devices = meeting.wait(device_identity(self._own_device))
            problem = problem_with_devices(self.kind, devices)
            if problem is not None:
                meeting.call_off(problem)
                raise WeightPushError(problem)
            meeting.begin()
            return build_carrier(
                self.kind,
                meeting.store,
                rank=0,
                world_size=world_size,
                address=meeting.address,
                timeout_s=self._timeout_s,
                device=self._own_device,
            ), None
        except RuntimeError as error:
            meeting.call_off(f"not all workers came within {self._timeout_s:.0f} s")
            return None, error
