"""The weight push of TRL's side: TRL's `WeightTransferProtocol` over this package's own push.

TRL sends by NCCL, which needs a GPU. Here its trainer calls the same five methods at the same places, and what happens then is
what a run of ours does: the same calls to the same server, the same buckets over the same gloo broadcast, each request in
flight recomputed with the new weights (TRL, too, pauses with mode=keep and clears the caches).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grpo_async.inference.control import ServerControl
from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets
from grpo_async.weights.push import PushSettings, push_weights
from grpo_async.weights.transport import WeightTransport

BUCKET_BYTES = 8 << 20  # the default of weights.bucket_mb
TIMEOUT_S = 120.0


class ListedParameters:
    """Named tensors as a push wants them (`push.GatheredParameters`)."""

    def __init__(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors: list[torch.Tensor] = []
        self.specs: list[ParameterSpec] = []
        for name, tensor in named:
            self._tensors.append(tensor.contiguous())
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            self.specs.append(ParameterSpec(name=name, dtype_name=dtype_name, shape=tuple(tensor.shape)))

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        """The tensors in the order of `specs`, one bucket at a time."""
        tensors = iter(self._tensors)
        for bucket in cut_into_buckets(self.specs, bucket_bytes):
            yield [next(tensors) for _ in bucket]


class EqualPush:
    """`weight_transfer` of TRL's trainer. `pause` and `resume` do nothing: the push does both, around the sending."""

    def __init__(self, server_url: str) -> None:
        self._control = ServerControl(server_url, token=None, timeout_s=TIMEOUT_S)
        self._transport = WeightTransport(
            "gloo", host="127.0.0.1", bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, device=torch.device("cpu")
        )
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Form the weight group with the server."""
        self._control.info()
        self._transport.connect([self._control])

    def pause(self) -> None:
        """Part of `send_weights`."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push all parameters as the next version.

        Raises:
            GrpoAsyncError: the server failed.
        """
        self._version += 1
        push_weights(
            ListedParameters(iterator),
            version=self._version,
            targets=[self._control],
            transport=self._transport,
            settings=PushSettings(mode="recompute", timeout_s=TIMEOUT_S, drain_timeout_s=TIMEOUT_S),
        )

    def resume(self) -> None:
        """Part of `send_weights`."""

    def destroy(self) -> None:
        """Leave the weight group."""
        self._transport.close()
        self._control.close()
