"""What a weight push costs, compared with a bare broadcast of the same bytes.

    python -m benchmarks push [--engine vllm] [--megabytes 400] [--rounds 15] [--json FILE]
    python -m benchmarks push --transport nccl --device cuda --dtype bfloat16 --shape 1.7b      # two GPUs
    python -m benchmarks push --transport ipc --device cuda --dtype bfloat16 --shape 0.6b       # one GPU

A server started as a run does serves a model with random weights. In every round and in turns: a bare broadcast (another process
receives the same buckets into fresh memory) and a push as a run makes it; the server's log has its load time, without that of
waiting for what it loads. "paused" is how long the server stands still. --trainer-dtype float32 --dtype bfloat16 makes gathering a
cast. The bare broadcast is NCCL's where the push is, else gloo's from host memory. On one GPU NCCL's two ends have two
NCCL_HOSTIDs.

Target on the CPU: the median of  push / (1.2 x bare broadcast + load)  is at most 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks import _server
from benchmarks._models import SIZES
from benchmarks.report import Report, in_turns, parser_of

MAX_RATIO = 1.0
BARE_FACTOR = 1.2
STEP_TIMEOUT_S = 300.0
PHASES = ("pause", "start", "transfer", "gather", "send", "finish", "resume")


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--transport", choices=["gloo", "nccl", "ipc"], default="gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of trainer and server")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the server")
    parser.add_argument("--trainer-dtype", choices=["float32", "bfloat16"], help="without it the server's")
    parser.add_argument("--shape", choices=sorted(SIZES), help="of the model; without it one of --megabytes")
    parser.add_argument("--megabytes", type=int, default=400, help="of float32 parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--bucket-mb", type=int, help="without it what a run takes: it depends on the size of the model"
    )
    parser.add_argument("--mode", choices=["recompute", "keep_kv", "drain", "abort"], default="recompute")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GRPO_ASYNC_TOKEN", secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory(prefix="bench-push-") as name:
        folder = Path(name)
        sizes = SIZES[options.shape].qwen3() if options.shape else small_shape(options.megabytes)
        dtype = options.trainer_dtype or options.dtype
        model = _server.write_model(
            folder / "model", seed=options.seed, dtype=dtype, max_position_embeddings=2048, **sizes
        )
        config = _server.write_config(folder, _sections(options))
        environment = {**os.environ, **(_nccl_environment() if options.transport == "nccl" else {})}
        with (
            _server.serving(config, options.engine, environment=environment) as server,
            _connected(server.url, model.to(options.device), options) as pusher,
        ):
            measured = _measure(pusher, server, options)
    return _report(measured, options)


def small_shape(megabytes: int) -> dict[str, int]:
    """About that many float32 megabytes: layers of 4.2 M parameters each, in matrices of up to 512 x 2048, a vocabulary of 8192;
    below 20 MB a quarter of each width and a vocabulary of 1024."""
    if megabytes < 20:
        return {"hidden_size": 128, "num_hidden_layers": max(1, round((megabytes * 1e6 / 4 - 1024 * 128) / 0.26e6)),
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 512,
                "vocab_size": 1024}  # fmt: skip
    layers = max(1, round((megabytes * 1e6 / 4 - 8192 * 512) / 4.2e6))
    return {"hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 2048, "vocab_size": 8192}  # fmt: skip


def _sections(options: argparse.Namespace) -> dict[str, Any]:
    engines: dict[str, dict[str, Any]] = {
        "vllm": {"enforce_eager": True, "kv_cache_mb": 512, "gpu_memory_utilization": 0.4},
        "embedded": {"device": options.device},
    }
    engine = options.engine
    return {
        "inference": {"engine": engine, "dtype": options.dtype, "max_model_len": 2048, engine: engines[engine]},
        "weights": {"transport": options.transport, "mode": options.mode},
    }


def _nccl_environment() -> dict[str, str]:
    """The second GPU for the server. With one GPU only the server says that it is another host: NCCL refuses two ends of one
    communicator on a GPU of one host, and sends between hosts through sockets."""
    import torch

    return {"CUDA_VISIBLE_DEVICES": "1"} if torch.cuda.device_count() > 1 else {"NCCL_HOSTID": "server"}


class Pusher:
    """A trainer's end, as `train` has it: pushes version 1, 2, 3, ... of one model to one server."""

    def __init__(self, fleet: Any, transport: Any, parameters: Any, options: argparse.Namespace) -> None:
        from grpo_async.config.sections import WeightsSection

        self._fleet, self._transport, self._parameters = fleet, transport, parameters
        self._settings = WeightsSection(mode=options.mode, timeout_s=STEP_TIMEOUT_S, drain_timeout_s=STEP_TIMEOUT_S)
        self._version = 0
        self.bucket_sizes = [
            sum(tensor.nbytes for tensor in tensors) for tensors in parameters.buckets(transport.bucket_bytes)
        ]

    def push(self) -> dict[str, float]:
        """One push; its metrics."""
        from grpo_async.weights.push import push_weights

        self._version += 1
        (member,) = self._fleet.members()
        metrics: dict[str, float] = push_weights(
            self._parameters, version=self._version, servers=[member.control], transport=self._transport,
            settings=self._settings, loading=self._fleet.loading_weights,
        )  # fmt: skip
        return metrics


@contextmanager
def _connected(url: str, model: Any, options: argparse.Namespace) -> Iterator[Pusher]:
    import torch

    from grpo_async.config.sections import InferenceSection, WeightsSection
    from grpo_async.inference.fleet import Fleet
    from grpo_async.training.parameters import ShardedParameters
    from grpo_async.weights.buckets import choose_bucket_bytes
    from grpo_async.weights.push import WeightTransport

    torch.set_num_threads(1)  # as the ranks of a run
    inference = InferenceSection(
        heartbeat_interval_s=5.0, heartbeat_timeout_s=120.0, startup_timeout_s=_server.START_TIMEOUT_S
    )
    fleet = Fleet([url], inference, token=os.environ["GRPO_ASYNC_TOKEN"], control_timeout_s=STEP_TIMEOUT_S)
    device = torch.device(options.device)
    parameters = ShardedParameters(
        model,
        wire_dtype=getattr(torch, options.dtype),
        device=torch.device("cpu") if options.transport == "gloo" else device,
    )
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    transport = WeightTransport(
        options.transport, host="127.0.0.1", timeout_s=STEP_TIMEOUT_S, device=device,
        bucket_bytes=choose_bucket_bytes(WeightsSection(bucket_mb=options.bucket_mb), num_bytes, device=device),
    )  # fmt: skip
    fleet.start()
    try:
        fleet.wait_for_members(
            stop=threading.Event(), deadline_s=_server.START_TIMEOUT_S, setting="inference.startup_timeout_s"
        )
        yield Pusher(fleet, transport, parameters, options)
    finally:
        transport.close()
        fleet.close()


# ------------------------------------------------------------------------------------------------------ the bare broadcast


@contextmanager
def bare_broadcast(
    sizes: Sequence[int], *, transport: Literal["gloo", "nccl"], timeout_s: float
) -> Iterator[Callable[[], float]]:
    """A function that broadcasts buckets of these sizes (bytes) to another process and returns the seconds until it has all. Over
    gloo they are in host memory, over nccl on GPUs."""
    import torch

    from grpo_async.weights.backends import Rendezvous

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=timeout_s)
    info = rendezvous.init_info(transport, rank_offset=1).model_dump()
    device = torch.device("cuda", 0) if transport == "nccl" else torch.device("cpu")
    environment = _nccl_environment() if transport == "nccl" else {}
    receiver = context.Process(
        target=_receive, args=(theirs, info, list(sizes), timeout_s, str(device), environment), daemon=True
    )
    receiver.start()
    group = rendezvous.join(transport, device)
    buffers = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]

    def broadcast() -> float:
        ours.send("go")
        began = time.perf_counter()
        for buffer in buffers:
            group.send(buffer, timeout_s=timeout_s)()
        if not ours.poll(timeout_s):
            raise SystemExit("the bare broadcast did not end")
        ours.recv()
        return time.perf_counter() - began

    try:
        yield broadcast
    finally:
        ours.send("end")
        receiver.join(timeout=30.0)


def _receive(
    pipe: Connection,
    init_info: dict[str, Any],
    sizes: list[int],
    timeout_s: float,
    device: str,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    import torch

    from grpo_async.inference.api import WeightInitInfo
    from grpo_async.weights.backends import join_group

    torch.set_num_threads(1)
    group = join_group(WeightInitInfo.model_validate(init_info), rank=1, device=torch.device(device))
    while pipe.recv() == "go":
        kept = []  # fresh memory for all
        for size in sizes:
            kept.append(group.receive(size, timeout_s=timeout_s)())
        pipe.send("done")


# --------------------------------------------------------------------------------------------------- measure and report


@dataclass(frozen=True, slots=True)
class Measured:
    """Of each round; seconds."""

    pushes: list[dict[str, float]]
    load_s: list[float]
    bare_s: list[float]


def _measure(pusher: Pusher, server: _server.Server, options: argparse.Namespace) -> Measured:
    measured = Measured([], [], [])

    def push() -> None:
        seen = len(server.load_times())
        measured.pushes.append(pusher.push())
        measured.load_s.append(server.wait_for_load_time(seen))

    transport: Literal["gloo", "nccl"] = "nccl" if options.transport == "nccl" else "gloo"
    with bare_broadcast(pusher.bucket_sizes, transport=transport, timeout_s=STEP_TIMEOUT_S) as bare:
        for _, variant in in_turns(("bare", "push"), options.rounds + 1):
            push() if variant == "push" else measured.bare_s.append(bare())
    return Measured(measured.pushes[1:], measured.load_s[1:], measured.bare_s[1:])  # the first round warms up


def _report(measured: Measured, options: argparse.Namespace) -> int:
    report = Report("push", options)
    pushes = measured.pushes
    num_bytes = pushes[0]["sync/bytes"]
    report.row("bare broadcast", [1e3 * seconds for seconds in measured.bare_s], "ms")
    report.row("load, by the server", [1e3 * seconds for seconds in measured.load_s], "ms")
    report.row("push", [1e3 * push["sync/push_s"] for push in pushes], "ms")
    for phase in PHASES:
        report.row(f"  {phase}", [1e3 * push[f"sync/phase/{phase}_s"] for push in pushes], "ms")
    report.row("  paused", [1e3 * push["sync/pause_s"] for push in pushes], "ms")
    report.row("transfer", [push["sync/bytes_per_s"] / 1e6 for push in pushes], "MB/s")
    report.row("bare broadcast", [num_bytes / seconds / 1e6 for seconds in measured.bare_s], "MB/s")
    found = [
        push["sync/push_s"] / (BARE_FACTOR * bare_s + load_s)
        for push, bare_s, load_s in zip(pushes, measured.bare_s, measured.load_s, strict=True)
    ]
    report.row(f"push / ({BARE_FACTOR:g} x bare + load)", found, "ratio")
    if options.device == "cpu":
        what = f"push / ({BARE_FACTOR:g} x bare broadcast + load), median"
        report.target(what, statistics.median(found), at_most=MAX_RATIO)
    report.note(
        f"{num_bytes / 1e6:.0f} MB of {options.dtype}, {options.engine}, {options.transport} on {options.device}, mode "
        f"{options.mode}, buckets of {options.bucket_mb or 'the size that a run takes'}"
    )
    return report.finish()
