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

    from grpo_async.weights.gloo import WeightGroup
    from grpo_async.weights.rendezvous import Rendezvous

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=timeout_s)
    where = (rendezvous.store_file, rendezvous.key)
    receiver = context.Process(target=_receive, args=(theirs, where, list(sizes), timeout_s), daemon=True)
    receiver.start()
    rendezvous.wait("cpu")
    rendezvous.begin()
    group = WeightGroup(rendezvous.store, rank=0, world_size=2, address="127.0.0.1", timeout_s=timeout_s)
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
        rendezvous.close()


def _receive(pipe: Connection, where: tuple[str, str], sizes: list[int], timeout_s: float) -> None:
    import torch

    from grpo_async.inference.surface import WeightInitInfo
    from grpo_async.weights.gloo import WeightGroup
    from grpo_async.weights.rendezvous import join_rendezvous

    torch.set_num_threads(1)
    info = WeightInitInfo(
        master_address="127.0.0.1", store_file=where[0], key=where[1], rank_offset=1, world_size=2, timeout_s=timeout_s
    )
    store = join_rendezvous(info, rank=1, device="cpu")
    group = WeightGroup(store, rank=1, world_size=2, address="127.0.0.1", timeout_s=timeout_s)
    while pipe.recv() == "go":
        kept = []  # fresh memory for all, as a server that stages
        for size in sizes:
            buffer = torch.empty(size, dtype=torch.uint8)
            group.broadcast(buffer, timeout_s=timeout_s)
            kept.append(buffer)
        pipe.send("done")
