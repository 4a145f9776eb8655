"""Buckets between the trainer and a worker in a separate process, over every real transport.

NCCL refuses two processes of one host on one GPU, so its worker says that it is another host (NCCL_HOSTID).
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.buckets import cut_into_buckets, with_digests
from grpo_async.weights.push import WeightTransport
from grpo_async.weights.receiver import WeightReceiver, parameter_specs
from tests.support.weight_push import announcement

TIMEOUT_S = 120.0
SIZES = [(300, 70), (5,), (64, 64, 3), (1,), (1 << 18,)]


class _Server:
    """What the transport asks of a server, passed on to the worker."""

    name, num_workers = "worker", 1

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
        self._pipe.send(info.model_dump())
        assert self._pipe.poll(timeout_s)
        assert self._pipe.recv() == "joined"


def _work(pipe: Connection, kind: str, device: str) -> None:
    """A worker: joins, then sends back every parameter of every update."""
    if kind == "nccl":
        os.environ["NCCL_HOSTID"] = "worker"
    receiver = WeightReceiver(device=torch.device(device))
    receiver.join(WeightInitInfo.model_validate(pipe.recv()))
    pipe.send("joined")
    while (update := pipe.recv()) is not None:
        received = receiver.receive(WeightUpdateInfo.model_validate(update))
        pipe.send({name: tensor.cpu().float().numpy() for name, tensor in received})
    receiver.leave()


@pytest.mark.parametrize(
    ("kind", "device"),
    [("gloo", "cpu"), *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in ("ipc", "nccl", "gloo"))],
)
def test_what_the_trainer_sends_is_what_a_worker_gets(kind: Any, device: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, kind, device), daemon=True)
    worker.start()
    sender = WeightTransport(
        kind, host="127.0.0.1", bucket_bytes=1 << 16, timeout_s=TIMEOUT_S, device=torch.device(device)
    )
    server: Any = _Server(ours)
    try:
        sender.connect([server])
        for dtype in (torch.float32, torch.bfloat16):
            tensors = {f"p{number}": torch.randn(shape).to(device, dtype) for number, shape in enumerate(SIZES)}
            update = announcement(tensors, bucket_bytes=sender.bucket_bytes, timeout_s=TIMEOUT_S)
            ours.send(update.model_dump())
            specs = parameter_specs(update)
            parameters: Any = SimpleNamespace(specs=specs)
            sender.start_gather(parameters, lambda command: None)
            buckets = cut_into_buckets(specs, sender.bucket_bytes)
            for parts in with_digests([tensors[spec.name] for spec in bucket] for bucket in buckets):
                sender.send(sender.pack(parts))()
            assert ours.poll(TIMEOUT_S)
            received = ours.recv()
            assert received.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(torch.from_numpy(received[name]), tensor.cpu().float()), name
        ours.send(None)
        worker.join(TIMEOUT_S)
        assert worker.exitcode == 0
    finally:
        sender.close()
        worker.kill()
