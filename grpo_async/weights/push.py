"""The weight push: one function, one order.

    pause(keep) -> start -> update (the server receives while the trainer sends) -> finish(version) -> resume

Invariant: a pause is always followed by a resume, on errors too. The server applies an update all or nothing, so a push that
fails leaves the old weights serving. Every rank gathers every bucket; only rank 0 sends. When sending fails, rank 0 goes on
gathering without sending, because the other ranks wait for it in the collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    parameters: GatheredParameters,
    *,
    version: int,
    control: PushControl,
    transport: WeightTransport,
    before_gather: Callable[[], None] = lambda: None,
) -> PushReport:
    """Rank 0: push all parameters and make `version` the server's policy version.

    Args:
        before_gather: called when the server is ready to receive; brings the other ranks into the gather.

    Raises:
        WeightPushError: some phase failed; the server is not paused, and unless it was the last phase that failed it serves
            the old weights.
    """
    began = time.monotonic()
    try:
        control.pause()
        control.start_weight_update()
        before_gather()
        gather_s, send_s = _transfer(parameters, transport=transport)
        control.finish_weight_update(version)
    except Exception as error:
        also = _try_to_resume(control)
        raise WeightPushError(f"pushing version {version} failed: {type(error).__name__}: {error}{also}") from error
    control.resume()
    total_s = time.monotonic() - began
    return PushReport(
        version=version,
        num_bytes=sum(spec.num_bytes for spec in parameters.specs),
        pause_s=total_s,
        gather_s=gather_s,
        send_s=send_s,
        total_s=total_s,
    )


def _try_to_resume(control: PushControl) -> str:
    """After a failure, also one of pause(): the server may have paused before its answer was lost."""
    try:
        control.resume()
    except Exception as error:  # noqa: BLE001 - the first failure is the cause; this one is only told
        return f" (nor could generation be resumed: {error})"
    return ""


def _transfer(parameters: GatheredParameters, *, transport: WeightTransport) -> tuple[float, float]:
    """Gather and send every bucket while the server receives; (seconds gathering, seconds sending)."""
    gather_s = send_s = 0.0
    failure: Exception | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-update") as executor:
        applied = executor.submit(transport.announce, parameters.specs)
        mark = time.monotonic()
        for tensors in parameters.buckets(transport.bucket_bytes):
            gather_s += time.monotonic() - mark
            mark = time.monotonic()
            if failure is None:
                try:
                    if applied.done():  # it can only be done this early if the server refused the update
                        applied.result()
                        raise WeightPushError("the server ended the update before all parameters were sent")
                    transport.send(tensors)
                except Exception as error:  # noqa: BLE001 - kept until every rank is through the gather, then raised
                    failure = error
            send_s += time.monotonic() - mark
            mark = time.monotonic()
        try:
            applied.result()
        except Exception as error:  # noqa: BLE001 - the server's own words explain more than our broken broadcast
            failure = error
    if failure is not None:
        raise failure
    return gather_s, send_s
