"""The training part of gpu.py, in a process of its own, so that its memory is free again: `python -m benchmarks._gpu_train JSON`.

Prints one JSON line: {"seconds": [of each step], "tokens": [that a step computes, padding included], "lengths": [tokens of each
sample], "peak_bytes": on a GPU}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    options = argparse.Namespace(**json.loads(arguments[0]))
    import torch
    import torch.distributed as dist

    from benchmarks._step_sides import OurSide, make_samples

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=600),
        )
        try:
            print(json.dumps(_measure(options, device, OurSide, make_samples)))
        finally:
            dist.destroy_process_group()
    return 0


def _measure(options: argparse.Namespace, device: Any, side_class: Any, make_samples: Any) -> dict[str, Any]:
    import torch

    side = side_class(options, device, rank=0, num_ranks=1)
    samples = make_samples(options)
    seconds, tokens = [], []
    for _ in range(options.rounds + 1):
        began = time.perf_counter()
        outcome = side.step(samples)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        tokens.append(outcome.computed_tokens)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    lengths = [len(sample.token_ids) for sample in samples]
    return {"seconds": seconds[1:], "tokens": tokens[1:], "lengths": lengths, "peak_bytes": peak}  # the first warms up


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
