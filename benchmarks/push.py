"""What a weight push costs, compared with a bare broadcast of the same bytes.

    python -m benchmarks push [--engine vllm] [--shape 95m] [--rounds 15] [--json FILE]
    python -m benchmarks push --transport nccl --device cuda --dtype bfloat16 --shape 1.7b      # two GPUs
    python -m benchmarks push --lora adapter_swap                               # or merged, adapter: model.lora.push
    python -m benchmarks push --transport ipc --device cuda --dtype bfloat16 --shape 0.6b       # one GPU

A server, started as in a run, serves a model with random weights. Every round has, in turns, a bare broadcast (another process
receives the same buckets into fresh memory) and a push as a run makes it. The load time is from the server's log, without its
wait for what it loads. "stopped" is how long the server generates nothing. The trainer's weights are float32, so with --dtype
bfloat16 gathering casts them, as in a run. The bare broadcast goes over NCCL if the push does, else over gloo from host memory.
On one GPU the two ends of NCCL have two NCCL_HOSTIDs.

Target on the CPU with the shape 95m (calls bound smaller ones): the median of  push / (1.2 x bare broadcast + load)  is at most 1.
"""

from __future__ import annotations

import argparse
import itertools
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
from benchmarks._models import SHAPES
from benchmarks.report import Report, in_turns, parser_of

MAX_RATIO = 1.0
BARE_FACTOR = 1.2
STEP_TIMEOUT_S = 300.0
PHASES = ("pause", "start", "transfer", "gather", "send", "finish", "resume")


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--transport", choices=["gloo", "nccl", "ipc"], default="gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of trainer and server")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the server")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="95m", help="shape of the model")
    parser.add_argument(
        "--lora", choices=["merged", "adapter", "adapter_swap"], help="model.lora.push of a model with adapters"
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket-mb", type=int, help="size of a bucket in MiB; default: as in a run, by the model")
    options = parser.parse_args(arguments)
    from grpo_async.quickstart.model import train_tokenizer

    os.environ.setdefault("GRPO_ASYNC_TOKEN", secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory(prefix="bench-push-") as name:
        folder = Path(name)
        model = SHAPES[options.shape].save(folder / "model", train_tokenizer([]), seed=options.seed)
        config = _server.write_config(folder, **_sections(options, str(folder / "model")))
        environment = {**os.environ, **(_nccl_environment() if options.transport == "nccl" else {})}
        with (
            _server.serving(config, options.engine, environment=environment) as server,
            _connected(server.url, _parameters(folder / "model", model, options), options) as (push, bucket_sizes),
        ):
            measured = _measure(push, bucket_sizes, server, options)
    return _report(measured, options)


def _sections(options: argparse.Namespace, path: str) -> dict[str, Any]:
    engines: dict[str, dict[str, Any]] = {
        "vllm": {"enforce_eager": True, "kv_cache_mb": 512, "gpu_memory_utilization": 0.4},
        "embedded": {"device": options.device},
    }
    engine = options.engine
    lora = {} if options.lora is None else {"lora": {"rank": options.rank, "push": options.lora}}
    return {
        **({"model": {"path": path, **lora}} if lora else {}),
        "inference": {"engine": engine, "dtype": options.dtype, "max_model_len": 2048, engine: engines[engine]},
        "weights": {"transport": options.transport},
    }


def _nccl_environment() -> dict[str, str]:
    """The second GPU for the server. If there is only one, the server says that it is another host: NCCL refuses a communicator
    with two ends on one GPU of one host, and connects hosts by sockets."""
    import torch

    return {"CUDA_VISIBLE_DEVICES": "1"} if torch.cuda.device_count() > 1 else {"NCCL_HOSTID": "server"}


def _parameters(folder: Path, model: Any, options: argparse.Namespace) -> Any:
    """What a run would send."""
    import torch

    from grpo_async.config.sections import LoraSection, ModelSection
    from grpo_async.training.load import load_policy
    from grpo_async.training.parameters import choose_parameters

    section = ModelSection(path=str(folder))
    if options.lora is not None:
        section = section.model_copy(update={"lora": LoraSection(rank=options.rank, push=options.lora)})
        model = load_policy(section, temperature=1.0, chunk_tokens=256, max_model_len=2048).model
    device = torch.device("cpu" if options.transport == "gloo" else options.device)
    served = getattr(torch, options.dtype)
    return choose_parameters(model.to(options.device), section, served_dtype=served, device=device)


@contextmanager
def _connected(
    url: str, parameters: Any, options: argparse.Namespace
) -> Iterator[tuple[Callable[[], dict[str, float]], list[int]]]:
    """The trainer's end, as in `train`: a function that pushes version 1, 2, 3, ... and returns the metrics of the push;
    and the sizes of its buckets in bytes."""
    import torch

    from grpo_async.config.sections import InferenceSection, WeightsSection
    from grpo_async.inference.fleet import Fleet
    from grpo_async.weights.buckets import choose_bucket_bytes
    from grpo_async.weights.push import WeightTransport, push_weights

    torch.set_num_threads(1)  # as the ranks of a run
    inference = InferenceSection(
        heartbeat_interval_s=5.0, heartbeat_timeout_s=120.0, startup_timeout_s=_server.START_TIMEOUT_S
    )
    fleet = Fleet([url], inference, token=os.environ["GRPO_ASYNC_TOKEN"], control_timeout_s=STEP_TIMEOUT_S)
    device = torch.device(options.device)
    num_bytes = sum(spec.num_bytes for spec in parameters.specs)
    settings = WeightsSection(bucket_mb=options.bucket_mb, timeout_s=STEP_TIMEOUT_S)
    transport = WeightTransport(
        options.transport, host="127.0.0.1", timeout_s=STEP_TIMEOUT_S, device=device,
        bucket_bytes=choose_bucket_bytes(settings, num_bytes, device=device),
    )  # fmt: skip
    versions = itertools.count(1)

    def push() -> dict[str, float]:
        (server,) = fleet.servers_up()
        return push_weights(
            parameters, version=next(versions), servers=[server.control], transport=transport, settings=settings,
            loading=fleet.loading_weights,
        )  # fmt: skip

    fleet.start()
    try:
        fleet.wait_until_up(stop=threading.Event(), deadline_s=_server.START_TIMEOUT_S)
        buckets = parameters.buckets(transport.bucket_bytes)
        yield push, [sum(tensor.nbytes for tensor in tensors) for tensors in buckets]
    finally:
        transport.close()
        fleet.close()


# ------------------------------------------------------------------------------------------------------ the bare broadcast


@contextmanager
def bare_broadcast(sizes: Sequence[int], *, transport: Literal["gloo", "nccl"]) -> Iterator[Callable[[], float]]:
    """A function that broadcasts buckets of these sizes (bytes) to another process, and returns the seconds until all have
    arrived. They are in host memory for gloo, on GPUs for nccl."""
    import torch

    from grpo_async.weights.backends import Rendezvous

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=STEP_TIMEOUT_S)
    info = rendezvous.init_info(transport, rank_offset=1).model_dump()
    device = torch.device("cuda", 0) if transport == "nccl" else torch.device("cpu")
    environment = _nccl_environment() if transport == "nccl" else {}
    receiver = context.Process(target=_receive, args=(theirs, info, list(sizes), str(device), environment), daemon=True)
    receiver.start()
    group = rendezvous.join(transport, device)
    buffers = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]

    def broadcast() -> float:
        ours.send("go")
        began = time.perf_counter()
        for buffer in buffers:
            group.send(buffer, timeout_s=STEP_TIMEOUT_S)()
        if not ours.poll(STEP_TIMEOUT_S):
            raise SystemExit("the bare broadcast did not end")
        ours.recv()
        return time.perf_counter() - began

    try:
        yield broadcast
    finally:
        ours.send("end")
        receiver.join(timeout=30.0)


def _receive(
    pipe: Connection, init_info: dict[str, Any], sizes: list[int], device: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    import torch

    from grpo_async.inference.api import WeightInitInfo
    from grpo_async.weights.backends import join_group

    torch.set_num_threads(1)
    group = join_group(WeightInitInfo.model_validate(init_info), rank=1, device=torch.device(device))
    while pipe.recv() == "go":
        kept = [group.receive(size, timeout_s=STEP_TIMEOUT_S)() for size in sizes]  # fresh memory for all
        pipe.send("done")
        del kept


# --------------------------------------------------------------------------------------------------- measure and report


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of each round."""

    pushes: list[dict[str, float]]
    load_s: list[float]
    bare_s: list[float]


def _measure(
    push: Callable[[], dict[str, float]],
    bucket_sizes: Sequence[int],
    server: _server.Server,
    options: argparse.Namespace,
) -> Measured:
    measured = Measured([], [], [])
    transport: Literal["gloo", "nccl"] = "nccl" if options.transport == "nccl" else "gloo"
    with bare_broadcast(bucket_sizes, transport=transport) as bare:
        for _, variant in in_turns(("bare", "push"), options.rounds + 1):
            if variant == "bare":
                measured.bare_s.append(bare())
                continue
            seen = len(server.load_times())
            measured.pushes.append(push())
            measured.load_s.append(server.wait_for_load_time(seen))
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
    report.row("  stopped", [1e3 * push["sync/stopped_s"] for push in pushes], "ms")
    report.row("transfer", [push["sync/bytes_per_s"] / 1e6 for push in pushes], "MB/s")
    report.row("bare broadcast", [num_bytes / seconds / 1e6 for seconds in measured.bare_s], "MB/s")
    found = [
        push["sync/push_s"] / (BARE_FACTOR * bare_s + load_s)
        for push, bare_s, load_s in zip(pushes, measured.bare_s, measured.load_s, strict=True)
    ]
    report.row(f"push / ({BARE_FACTOR:g} x bare + load)", found, "ratio")
    if (options.device, options.shape, options.lora) == ("cpu", "95m", None):
        what = f"push / ({BARE_FACTOR:g} x bare broadcast + load), median"
        report.target(what, statistics.median(found), at_most=MAX_RATIO)
    sizes = f"{options.bucket_mb} MiB" if options.bucket_mb else "the size that a run takes"
    report.note(
        f"{num_bytes / 1e6:.1f} MB, served in {options.dtype}, model.lora.push {options.lora}, {options.engine}, "
        f"{options.transport} on {options.device}, buckets of {sizes}"
    )
    return report.finish()
