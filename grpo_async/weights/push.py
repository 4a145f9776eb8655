"""The weight push: one function, one order.

    pause(keep) -> start -> update (the server receives while the trainer sends) -> finish(version) -> resume

Invariant: a pause is always followed by a resume, on errors too. The server applies an update all or nothing, so a push that
fails leaves the old weights serving. Every rank gathers every bucket; only rank 0 sends. When sending fails, rank 0 goes on
gathering without sending, because the other ranks wait for it in the collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from grpo_async.errors import WeightPushError
from grpo_async.weights.buckets import ParameterSpec


class WeightTransport(Protocol):
    """What carries parameters from the trainer to the server."""

    bucket_bytes: int

    def connect(self) -> None:
        """Meet the server's workers. Raises WeightPushError."""

    def announce(self, specs: list[ParameterSpec]) -> None:
        """Tell the server what follows; returns when it has received and applied everything (runs in a thread)."""

    def send(self, tensors: list[torch.Tensor]) -> None:
        """Send one bucket of contiguous CPU tensors."""

    def close(self) -> None: ...


class PushControl(Protocol):
    """The server's side of the order above."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self, version: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one push cost, in seconds and bytes. `pause_s` is how long generation stood still."""

    version: int
    num_bytes: int
    pause_s: float
    gather_s: float
    send_s: float
    total_s: float

    def metrics(self) -> dict[str, float]:
        return {
            "sync/push_s": self.total_s,
            "sync/pause_s": self.pause_s,
            "sync/gather_s": self.gather_s,
            "sync/send_s": self.send_s,
            "sync/bytes": float(self.num_bytes),
        }


class GatheredParameters(Protocol):
    """Parameters of the policy, gathered bucket by bucket; every rank iterates in lockstep."""

    @property
    def specs(self) -> list[ParameterSpec]: ...

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]: ...


def push_weights(
    parameters: GatheredParameters, *, version: int, control: PushControl, transport: WeightTransport
) -> PushReport:
    """Rank 0: push all parameters and make `version` the server's policy version.

    Raises:
        WeightPushError: some phase failed; the server still serves the old weights and is not paused.
    """
    began = time.monotonic()
    try:
        try:
            control.pause()
            gather_s, send_s = _transfer(parameters, version=version, control=control, transport=transport)
        finally:
            control.resume()  # also when pause() failed: the server may have paused before its answer was lost
    except WeightPushError:
        raise
    except Exception as error:
        raise WeightPushError(f"pushing version {version} failed: {type(error).__name__}: {error}") from error
    total_s = time.monotonic() - began
    return PushReport(
        version=version,
        num_bytes=sum(spec.num_bytes for spec in parameters.specs),
        pause_s=total_s,
        gather_s=gather_s,
        send_s=send_s,
        total_s=total_s,
    )


def _transfer(
    parameters: GatheredParameters, *, version: int, control: PushControl, transport: WeightTransport
) -> tuple[float, float]:
    gather_s = send_s = 0.0
    failure: Exception | None = None
    applied: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-update") as executor:
        try:
            control.start_weight_update()
            applied = executor.submit(transport.announce, parameters.specs)
        except Exception as error:  # noqa: BLE001 - kept until every rank is through the gather, then raised
            failure = error
        mark = time.monotonic()
        for tensors in parameters.buckets(transport.bucket_bytes):
            gather_s += time.monotonic() - mark
            if failure is None and applied is not None:
                mark = time.monotonic()
                try:
                    if applied.done():  # it can only be done this early if the server refused the update
                        applied.result()
                        raise WeightPushError("the server ended the update before all parameters were sent")
                    transport.send(tensors)
                except Exception as error:  # noqa: BLE001 - as above
                    failure = error
                send_s += time.monotonic() - mark
            mark = time.monotonic()
        if applied is not None:
            try:
                applied.result()
            except Exception as error:  # noqa: BLE001 - the server's own words explain more than our broken broadcast
                failure = error
    if failure is not None:
        raise WeightPushError(
            f"pushing version {version} failed, the server keeps its old weights: {type(failure).__name__}: {failure}"
        ) from failure
    control.finish_weight_update(version)
    return gather_s, send_s
