"""The trainer's end of the weight group: forms it with the workers of several servers, and sends them packed buckets.

    rank 0 = trainer, then the workers of each server in the order given

After a failed send the group is of no use: close, then connect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from grpo_async.config.base import TransportKind
from grpo_async.errors import ConfigError, WeightPushError
from grpo_async.inference.api import AdapterBase, WeightUpdateInfo
from grpo_async.inference.control import ServerControl
from grpo_async.weights.backend import Backend, build_backend, check_device
from grpo_async.weights.buckets import ParameterSpec, pack
from grpo_async.weights.calls import (
    GRACE_S,
    SETTING,
    PushFailedError,
    failed_calls,
    split_failed,
    start_calls,
)
from grpo_async.weights.choice import choose_transport
from grpo_async.weights.rendezvous import GroupRendezvous, device_identity


class WeightTransport:
    """One group over all given servers.

    Args:
        transport: see `choose_transport`, which is asked again when the devices of all members are known.
        host: own address in the group; one of loopback when every server is on this machine.
        bucket_bytes: parameters travel in buckets of this many bytes.
        timeout_s: deadline of joining and of each bucket.
        device: where the trainer's weights are.
        base: fields of api.AdapterBase when only adapters are pushed.
        private: a folder of this user on this machine, which somebody removes even if this process is killed; None: the
            temporary folder.

    Raises:
        WeightPushError: `transport` is impossible on `device`.
    """

    def __init__(
        self,
        transport: TransportKind,
        *,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,
        base: dict[str, str] | None = None,
        private: Path | None = None,
    ) -> None:
        try:
            check_device(transport, device)
        except RuntimeError as error:
            raise WeightPushError(str(error)) from error
        self._transport = transport
        self.bucket_bytes = bucket_bytes
        self._host = host
        self._timeout_s = timeout_s
        self._own_device = device
        self._private = private
        self._base = AdapterBase.model_validate(base) if base else None
        self._backend: Backend | None = None
        self.members: tuple[str, ...] = ()
        """Names of the connected servers; () when not connected."""

    def connect(self, servers: Sequence[ServerControl]) -> None:
        """Form a new group, leaving the one before. A server that fails ends it for all at once.

        Raises:
            PushFailedError: phase "connect"; a server refused, or did not join within the deadline, or the trainer has no place to
                meet them.
            WeightPushError: the servers' GPUs do not allow this transport.
        """
        self.close()
        if not servers:
            raise WeightPushError("there is no server to connect to")
        ranks: dict[str, int] = {}  # of each server's first worker
        world_size = 1
        for server in servers:
            ranks[server.name] = world_size
            world_size += server.num_workers
        group = f"forming the weight group of trainer and {', '.join(ranks)} at {self._host}"
        broken: Exception | None = None
        try:
            rendezvous = GroupRendezvous(
                self._host, world_size=world_size, timeout_s=self._timeout_s, private=self._private
            )

            def ask_to_join(server: ServerControl) -> None:
                info = rendezvous.init_info(self._transport, rank_offset=ranks[server.name])
                try:
                    server.init_weight_transfer(info, timeout_s=self._timeout_s + GRACE_S)
                except Exception as error:
                    rendezvous.abort(f"{server.name} did not join: {error}")
                    raise

            try:
                joins = start_calls(servers, ask_to_join, phase="connect")
                try:
                    self._backend = self._join(rendezvous)
                except RuntimeError as error:
                    broken = error
                    rendezvous.abort(f"not all workers joined within {self._timeout_s:.0f} s")
                # once it is aborted, every worker that is alive says so
                deadline_s = GRACE_S if broken else self._timeout_s + GRACE_S
                errors = failed_calls(joins, phase="connect", deadline_s=deadline_s)
            finally:
                rendezvous.close()
        except (OSError, RuntimeError) as error:  # of the store: no room for its file, no such address here
            raise PushFailedError(group, phase="connect", failures={}, affected={"trainer": error}) from error
        if broken is None and not errors:
            self.members = tuple(ranks)
            return
        self.close()
        failed, affected = split_failed(errors)
        if broken is not None and not failed and not affected:
            affected = {"trainer": broken}
        hint = f"deadline {self._timeout_s:.0f} s: {SETTING}"
        raise PushFailedError(group, phase="connect", failures=failed, affected=affected, hint=hint) from broken

    def _join(self, rendezvous: GroupRendezvous) -> Backend:
        """The trainer's own end.

        Raises:
            RuntimeError: not all workers came, or the group did not form.
            WeightPushError: see `connect`.
        """
        own, *others = rendezvous.wait(device_identity(self._own_device))
        try:
            choose_transport(self._transport, own, others)
        except ConfigError as error:
            rendezvous.abort(str(error))
            raise WeightPushError(str(error)) from error
        rendezvous.begin()
        info = rendezvous.init_info(self._transport, rank_offset=1)
        return build_backend(info, rendezvous.store, rank=0, address=self._host, device=self._own_device)

    def describe(self, specs: Sequence[ParameterSpec]) -> WeightUpdateInfo:
        """What servers receive before an update of these."""
        return WeightUpdateInfo(
            names=[spec.name for spec in specs],
            dtype_names=[spec.dtype_name for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            bucket_bytes=self.bucket_bytes,
            timeout_s=self._timeout_s,
            base=self._base,
        )

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack one bucket of contiguous tensors, [num_bytes] uint8, into one of two buffers that take turns: the one before may
        still be on its way. A bucket of one tensor is that tensor's own memory where the backend can send it: leave it alone until
        it is sent."""
        backend = self._open()
        if len(tensors) == 1 and backend.sends_in_place and tensors[0].device == backend.device:
            return tensors[0].reshape(-1).view(torch.uint8)
        return pack(tensors, into=backend.buffer(sum(tensor.nbytes for tensor in tensors)))

    def send(self, bucket: torch.Tensor) -> Callable[[], None]:
        """Begin to send one bucket that `pack` returned to all servers. What this returns waits for the end.

        Raises, and so does that:
            RuntimeError: a server vanished, or took longer than the deadline, or the group was closed.
        """
        return self._open().send(bucket, timeout_s=self._timeout_s)

    def closer(self) -> Callable[[], None]:
        """What ends the group that there is now, and no later one. Callable from any thread."""
        return self._open().close

    def close(self) -> None:
        """Leave the group, which ends the waiting of the servers' workers."""
        backend, self._backend = self._backend, None
        self.members = ()
        if backend is not None:
            backend.close()

    def _open(self) -> Backend:
        backend = self._backend
        if backend is None:
            raise RuntimeError("the weight group is not connected")
        return backend
