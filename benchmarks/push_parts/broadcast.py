"""A gloo broadcast of buckets to one other process, with nothing around it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

_END_TIMEOUT_S = 30.0


@contextmanager
def bare_broadcast(sizes: Sequence[int], *, timeout_s: float) -> Iterator[Callable[[], float]]:
    """A function that broadcasts buckets of these sizes (bytes) to another process and returns the seconds until it has all."""
    import torch

    from grpo_async.weights.gloo import WeightGroup, listen

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    receiver = context.Process(target=_receive, args=(theirs, port, list(sizes), timeout_s), daemon=True)
    receiver.start()
    group = WeightGroup.host(listener, world_size=2, key="bare", timeout_s=timeout_s)
    buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]

    def broadcast() -> float:
        ours.send("go")
        began = time.perf_counter()
        for buffer in buffers:
            group.broadcast(buffer, timeout_s=timeout_s)
        if not ours.poll(timeout_s):
            raise SystemExit("the bare broadcast did not end")
        ours.recv()
        return time.perf_counter() - began

    try:
        yield broadcast
    finally:
        ours.send("end")
        receiver.join(timeout=_END_TIMEOUT_S)


def _receive(pipe: Connection, port: int, sizes: list[int], timeout_s: float) -> None:
    import torch

    from grpo_async.weights.gloo import WeightGroup

    torch.set_num_threads(1)
    group = WeightGroup.join("127.0.0.1", port, rank=1, world_size=2, key="bare", timeout_s=timeout_s)
    while pipe.recv() == "go":
        kept = []  # fresh memory for all, as a server that stages
        for size in sizes:
            buffer = torch.empty(size, dtype=torch.uint8)
            group.broadcast(buffer, timeout_s=timeout_s)
            kept.append(buffer)
        pipe.send("done")
