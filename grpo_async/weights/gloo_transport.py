"""The gloo transport of the trainer: hosts the group, announces updates over HTTP, broadcasts buckets."""

from __future__ import annotations

import itertools
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from grpo_async.errors import WeightPushError
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.gloo import WeightGroup, listen, pack


class WeightEndpoint(Protocol):
    """The server's calls that this transport needs; the arguments are the fields of surface.GlooInitInfo / GlooUpdateInfo."""

    def init_weight_transfer(self, fields: dict[str, Any]) -> None: ...

    def update_weights(self, fields: dict[str, Any], *, timeout_s: float) -> None: ...


class GlooTransport:
    """One trainer, one server with `num_workers` workers.

    Args:
        endpoint: the server.
        host: own address on which the group meets.
        num_workers: processes of the server that join.
        bucket_bytes: parameters travel in buckets of this many bytes.
        timeout_s: deadline of joining and of each bucket.
    """

    def __init__(
        self, endpoint: WeightEndpoint, *, host: str, num_workers: int, bucket_bytes: int, timeout_s: float
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self._endpoint = endpoint
        self._host = host
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._numbers = itertools.count()

    def connect(self) -> None:
        """Form the group; call again after the server was restarted.

        Raises:
            WeightPushError: the server refused, or did not join within the deadline.
        """
        self.close()
        listener = listen(self._host)
        address, port = listener.getsockname()[:2]
        world_size = 1 + self._num_workers
        key = f"weights/{next(self._numbers)}-{secrets.token_hex(4)}"
        fields = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "timeout_s": self._timeout_s,
            "key": key,
        }
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-join") as executor:
            joined = executor.submit(self._endpoint.init_weight_transfer, fields)
            try:
                self._group = WeightGroup.host(listener, world_size=world_size, key=key, timeout_s=self._timeout_s)
                joined.result()
            except Exception as error:
                self._group = None
                cause = joined.exception() if joined.done() else None
                raise WeightPushError(
                    f"the weight group of trainer and server ({world_size} members at {address}:{port}) did not form "
                    f"within {self._timeout_s:.0f} s: {cause or error}; look into server.log, or raise weights.timeout_s"
                ) from error

    def announce(self, specs: list[ParameterSpec]) -> None:
        self._endpoint.update_weights(
            {
                "names": [spec.name for spec in specs],
                "dtype_names": [spec.dtype_name for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "bucket_bytes": self.bucket_bytes,
                "timeout_s": self._timeout_s,
            },
            # every bucket has a deadline of its own; this one only ends the wait for a server that has stopped answering
            timeout_s=self._timeout_s * (2 + sum(spec.num_bytes for spec in specs) // self.bucket_bytes),
        )

    def send(self, tensors: list[torch.Tensor]) -> None:
        if self._group is None:
            raise WeightPushError("the weight group is not connected; call connect() first")
        self._group.broadcast(pack(tensors), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._group = None
