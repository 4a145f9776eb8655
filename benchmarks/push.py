"""What a weight push costs: against a bare gloo broadcast of the same bytes plus the server's own load time, side by side.

    python -m benchmarks push [--megabytes 400] [--rounds 9] [--requests 0] [--bucket-mb 8]
    python -m benchmarks push --device cuda --transport ipc --shape 0.6b --dtype bfloat16         (one GPU for both)
    python -m benchmarks push --device cuda --transport nccl --shape 0.6b --dtype bfloat16        (a GPU for each)

A model with random weights is made, a real vLLM server of a run serves it, and in every round three things are measured one after the
other: a bare broadcast (another process receives into fresh memory, the same buckets), a push as a run makes it, and, from the
server's own log, how long it took to load what it had received. --requests N keeps N completions in flight meanwhile.
Exit code 1 when the median of  push / (bare broadcast + load)  is above 1.3 (on the CPU, where a bare broadcast is measured).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MAX_RATIO = 1.3
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936},
}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["gloo", "nccl", "ipc"], default="gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a Qwen3; without it a small one of --megabytes")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--bucket-mb", type=int, default=8)
    parser.add_argument("--mode", choices=["recompute", "keep_kv", "drain", "abort"], default="recompute")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GRPO_ASYNC_TOKEN", secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory(prefix="bench-push-") as name:
        folder = Path(name)
        model = make_model(folder / "model", options)
        config = write_config(folder, options)
        with serving(config, folder, options) as (url, log):
            rounds = measure(url, log, model, options)
    return report(rounds, options)


def make_model(folder: Path, options: argparse.Namespace):
    """A Qwen3 with random weights, saved where the server loads it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES.get(options.shape) or small_shape(options.megabytes)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=2048, tie_word_embeddings=True))
    model = model.to(getattr(torch, options.dtype)).eval().requires_grad_(False)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.to(options.device)


def small_shape(megabytes: int) -> dict[str, int]:
    """About so many float32 megabytes: layers of 512 x 2048 (4.2 M parameters each) and a vocabulary of 8192."""
    layers = max(1, round((megabytes * 1e6 / 4 - 8192 * 512) / 4.2e6))
    return {"hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 2048, "vocab_size": 8192}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Byte-level without merges: 256 tokens and an end, enough for a server that takes ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    import yaml

    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = {
        "run": {"name": "bench", "dir": str(folder)},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"type": "jsonl", "path": str(data)}},
        "rewards": [{"function": "grpo_async.quickstart.reward:exact_answer"}],
        "inference": {
            "engine": "vllm",
            "dtype": options.dtype,
            "max_model_len": 2048,
            "vllm": {"enforce_eager": True, "kv_cache_mb": 512, "gpu_memory_utilization": 0.4},
        },
        "weights": {"transport": options.transport, "mode": options.mode, "bucket_mb": options.bucket_mb},
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def serving(config: Path, folder: Path, options: argparse.Namespace):
    """A server as `train` starts it; yields its URL and log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    environment = dict(os.environ)
    if options.device == "cuda" and options.transport == "nccl":
        environment["CUDA_VISIBLE_DEVICES"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_async", "serve-vllm", str(config), "--port", str(port)],
            stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        try:
            process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30.0)


def measure(url: str, log: Path, model, options: argparse.Namespace) -> list[dict[str, float]]:
    import torch

    from grpo_async.inference.fleet import Fleet, FleetSettings
    from grpo_async.training.parameters import ShardedParameters
    from grpo_async.weights.push import PushSettings, push_weights
    from grpo_async.weights.transport import WeightTransport

    torch.set_num_threads(1)  # as the ranks of a run
    settings = FleetSettings(heartbeat_interval_s=5.0, heartbeat_timeout_s=120.0, startup_timeout_s=START_TIMEOUT_S)
    token = os.environ["GRPO_ASYNC_TOKEN"]
    fleet = Fleet([url], token=token, settings=settings, control_timeout_s=STEP_TIMEOUT_S)
    transport = WeightTransport(
        options.transport, host="127.0.0.1", bucket_bytes=options.bucket_mb << 20, timeout_s=STEP_TIMEOUT_S,
        device=torch.device(options.device),
    )  # fmt: skip
    parameters = ShardedParameters(model, wire_dtype=getattr(torch, options.dtype), device=transport.device)
    buckets = [sum(tensor.nbytes for tensor in tensors) for tensors in parameters.buckets(options.bucket_mb << 20)]
    push_settings = PushSettings(mode=options.mode, timeout_s=STEP_TIMEOUT_S, drain_timeout_s=STEP_TIMEOUT_S)
    fleet.start()
    rounds = []
    try:
        fleet.wait_for_members(
            stop=threading.Event(), deadline_s=START_TIMEOUT_S, setting="inference.startup_timeout_s"
        )
        (server,) = fleet.members()
        transport.connect([server.control])
        with load(url, options.requests), bare_broadcast(buckets, options) as broadcast:
            for number in range(options.rounds + 1):
                bare_s = broadcast()
                seen = len(load_times(log))
                report = push_weights(
                    parameters, version=number + 1, targets=[server.control], transport=transport, settings=push_settings,
                    applying=fleet.applying,
                )  # fmt: skip
                load_s = wait_for_load_time(log, seen)
                if number:  # the first one warms up
                    rounds.append({**report.metrics(), "bare_s": bare_s, "load_s": load_s})
    finally:
        transport.close()
        fleet.close()
    return rounds


_LOADED = re.compile(r"loaded \d+ parameters in ([0-9.]+) s")


def load_times(log: Path) -> list[float]:
    return [float(value) for value in _LOADED.findall(log.read_text(errors="replace"))]


def wait_for_load_time(log: Path, seen: int) -> float:
    ends_at = time.monotonic() + 10.0
    while len(times := load_times(log)) <= seen:
        if time.monotonic() > ends_at:
            raise SystemExit(f"the server's log has no load time: {log}")
        time.sleep(0.01)  # waits: back-off; another process writes the line
    return max(times[seen:])


@contextlib.contextmanager
def bare_broadcast(sizes: list[int], options: argparse.Namespace):
    """A function that broadcasts buckets of these sizes to another process and returns the seconds until it has them all."""
    if options.device != "cpu":
        yield lambda: float("nan")
        return
    import torch

    from grpo_async.weights.gloo import WeightGroup, listen

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    receiver = context.Process(target=receive_bare, args=(theirs, port, sizes), daemon=True)
    receiver.start()
    group = WeightGroup.host(listener, world_size=2, key="bare", timeout_s=STEP_TIMEOUT_S)
    buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]

    def broadcast() -> float:
        ours.send("go")
        began = time.perf_counter()
        for buffer in buffers:
            group.broadcast(buffer, timeout_s=STEP_TIMEOUT_S)
        if not ours.poll(STEP_TIMEOUT_S):
            raise SystemExit("the bare broadcast did not end")
        ours.recv()  # waits: poll said it is there
        return time.perf_counter() - began

    try:
        yield broadcast
    finally:
        ours.send("end")
        receiver.join(timeout=30.0)


def receive_bare(pipe, port: int, sizes: list[int]) -> None:
    import torch

    from grpo_async.weights.gloo import WeightGroup

    torch.set_num_threads(1)
    group = WeightGroup.join("127.0.0.1", port, rank=1, world_size=2, key="bare", timeout_s=STEP_TIMEOUT_S)
    while pipe.recv() == "go":  # waits: a daemon, ends with the benchmark
        kept = []  # fresh memory for all, as a server that stages
        for size in sizes:
            buffer = torch.empty(size, dtype=torch.uint8)
            group.broadcast(buffer, timeout_s=STEP_TIMEOUT_S)
            kept.append(buffer)
        pipe.send("done")


@contextlib.contextmanager
def load(url: str, num_requests: int):
    """`num_requests` completions in flight as long as the block runs."""
    if not num_requests:
        yield
        return
    from grpo_async.inference.client import InferenceClient
    from grpo_async.inference.router import FixedServers
    from grpo_async.inference.surface import GenerateRequest

    stop = threading.Event()

    async def one(client, number: int) -> None:
        turn = 0
        while not stop.is_set():
            request = GenerateRequest(
                request_id=f"load{number}-{turn}", token_ids=[5 + number % 90, *range(10, 42)], max_tokens=256, temperature=1.0,
                seed=number, ignore_eos=True,
            )  # fmt: skip
            await client.generate(request)
            turn += 1

    async def run() -> None:
        client = InferenceClient(
            FixedServers([url]), token=os.environ["GRPO_ASYNC_TOKEN"], max_connections=num_requests,
            request_timeout_s=STEP_TIMEOUT_S, wait_timeout_s=START_TIMEOUT_S,
        )  # fmt: skip
        async with client:
            await asyncio.gather(*(one(client, number) for number in range(num_requests)))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=STEP_TIMEOUT_S)


def report(rounds: list[dict[str, float]], options: argparse.Namespace) -> int:
    import torch

    size = rounds[0]["sync/bytes"]
    print(
        f"{size / 1e6:.0f} MB of {options.dtype}, vLLM, {options.transport} on {options.device}, mode {options.mode}, "
        f"buckets of {options.bucket_mb} MiB, {options.requests} requests in flight, {len(rounds)} rounds"
    )
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs" + (
        f", {torch.cuda.get_device_name()}" if options.device == "cuda" else ""))  # fmt: skip
    rows = {
        "bare broadcast": [r["bare_s"] * 1e3 for r in rounds],
        "load (server)": [r["load_s"] * 1e3 for r in rounds],
        "push, whole": [r["sync/push_s"] * 1e3 for r in rounds],
        **{
            f"  {name}": [r[f"sync/{name}_ms"] for r in rounds]
            for name in ("pause", "start", "transfer", "gather", "send", "finish", "resume")
        },
    }
    for name, values in rows.items():
        if values[0] == values[0]:  # no bare broadcast on a GPU
            print(f"{name:<16}{spread(values, 'ms', 0)}")
    print(f"{'transfer':<16}{spread([r['sync/bytes_per_s'] / 1e6 for r in rounds], 'MB/s', 0)}")
    if options.device != "cpu":
        print(json.dumps({name: statistics.median(values) for name, values in rows.items()}))
        return 0
    ratios = [r["sync/push_s"] / (r["bare_s"] + r["load_s"]) for r in rounds]
    print(f"{'push / (bare + load)':<22}{spread(ratios, '', 2)}; at most {MAX_RATIO}")
    return 0 if statistics.median(ratios) <= MAX_RATIO else 1


def spread(values: list[float], unit: str, digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f} {unit}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"median {middle:.{digits}f} {unit}, quartiles {low:.{digits}f} - {high:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
