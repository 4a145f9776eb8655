"""How fast a server generates on a GPU, compared with the limits of the card; and eight parts that try everything on one card.

    python -m benchmarks gpu --part N                  # N of 1 to 8: one card, no network
    python -m benchmarks gpu [--shape 0.6b] [--json FILE]
    python -m benchmarks gpu --top-logprobs 0 20 128   # what the likeliest tokens cost (score centering, top_k)
    python -m benchmarks gpu --device cpu                                           # the same code, as a test of itself
    python -m benchmarks gpu --device cpu --part N

Without --part: tokens/s of a server with --in-flight completions at once and, if utils/devices.py lists the GPU, as a fraction of
the bound (generation_bound_s).

part 1  doctor; the tests of training and weights marked gpu, two ranks on one card among them
part 2  both sides in float32 and in bfloat16; the quickstart with vLLM over ipc
part 3  both sides in bfloat16 with a float32 head, in float16 without and with one
part 4  pushes over ipc, over gloo, and over nccl between two processes (with two NCCL_HOSTIDs on a single card)
part 5  the trainer's step with its MFU; generation at 1, 64 and 256
part 6  a run with CUDA graphs whose weights are verified after every push
part 7  whole runs: weights over ipc in two dtypes, sleep mode
part 8  kill -9 of the engine in a push, and of everything; --resume

Each is estimated at three to five minutes, most of which vLLM takes to start, and is ended after ten.
A part reports the seconds of each of its commands; its targets are exit codes of 0. With --device cpu its sizes are tiny, the
engine is the embedded one, and what needs a GPU is skipped. Weights are random. Without a GPU and without --device cpu the exit
code is 2. `asynchrony --engine vllm` measures both sides of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _server
from benchmarks._models import SHAPES, ModelShape, generation_bound_s
from benchmarks.report import Report, parser_of
from grpo_async.utils.devices import listed_peaks

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_DEFAULTS: dict[str, tuple[Any, Any]] = {  # on a GPU, on a CPU
    "shape": ("0.6b", "tiny"),
    "engine": ("vllm", "embedded"),
    "dtype": ("bfloat16", "float32"),
    "in_flight": ([1, 16, 64, 256], [1, 4]),
    "prompt_tokens": (128, 8),
    "completion_tokens": (512, 16),
}
_GPU_MEMORY = 0.8  # fraction of the GPU that a lone server takes
_ROUND_TIMEOUT_S = 600.0


def _default(name: str) -> str:
    on_gpu, on_cpu = _DEFAULTS[name]
    return f"default: {on_gpu}, on a CPU {on_cpu}"


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", type=int, choices=sorted(parts("cpu")), help="run this part instead")
    parser.add_argument("--shape", choices=sorted(SHAPES), help=f"shape of the model; {_default('shape')}")
    parser.add_argument("--engine", choices=["vllm", "embedded"], help=_default("engine"))
    parser.add_argument("--dtype", choices=sorted(_ITEMSIZE), help=f"dtype of the server; {_default('dtype')}")
    parser.add_argument("--in-flight", nargs="+", type=int, help=_default("in_flight"))
    parser.add_argument("--prompt-tokens", type=int, help=_default("prompt_tokens"))
    parser.add_argument("--completion-tokens", type=int, help=_default("completion_tokens"))
    parser.add_argument(
        "--top-logprobs", nargs="+", type=int, default=[0], help="likeliest tokens that requests ask for, in turns"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py measures GPUs, and torch sees none here; `--device cpu` runs the same code on the CPU with a tiny "
            "model, whose figures say nothing of a GPU",
            file=sys.stderr,
        )
        return 2
    for name, (on_gpu, on_cpu) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, on_gpu if options.device == "cuda" else on_cpu)
    os.environ.setdefault("GRPO_ASYNC_TOKEN", secrets.token_urlsafe(16))
    report = Report("gpu", options)
    if options.part is not None:
        return _run_part(report, parts(options.device)[options.part], options)
    shape = SHAPES[options.shape]
    report.note(f"{shape.num_parameters / 1e6:.2f} M parameters")
    if options.device == "cpu":
        report.note("on a CPU: this proves that the code runs, and says nothing of a GPU")
    peaks = listed_peaks(torch.cuda.get_device_name()) if options.device == "cuda" else None
    found = _generate(shape, options)
    for (in_flight, top), seconds in found.items():
        name, tokens = f"{in_flight} in flight" + (f", top {top}" if top else ""), in_flight * options.completion_tokens
        report.row(name, [tokens / each for each in seconds], "tokens/s")
        if top != options.top_logprobs[0]:
            first = found[in_flight, options.top_logprobs[0]]
            ratios = [without / each for without, each in zip(first, seconds, strict=True)]
            report.row(f"{name} / top {options.top_logprobs[0]}", ratios, "ratio")
        if peaks is not None:
            bound_s = generation_bound_s(
                shape.size, peaks, in_flight=in_flight, prompt=options.prompt_tokens, completion=options.completion_tokens,
                itemsize=_ITEMSIZE[options.dtype],
            )  # fmt: skip
            report.row(f"{name}, of the bound", [bound_s / each for each in seconds], "fraction")
    return report.finish()


# ------------------------------------------------------------------------------------------------------------- the parts

_PART_S = 600.0


def parts(device: str) -> dict[int, tuple[str, ...]]:
    """Part -> the arguments of each call of Python, in the checkout; {runs} is a temporary folder. With device "cuda" they need a
    GPU and vLLM, with "cpu" neither."""
    on_gpu = device == "cuda"
    config = "configs/quickstart-vllm.yaml" if on_gpu else "configs/quickstart.yaml"
    short = "" if on_gpu else " --set training.max_steps=2 --set optimizer.warmup_steps=1 --set evaluation=null"
    run = f"-m grpo_async train {config} --quiet --set run.dir={{runs}} --set launch.device={device}"
    check = (
        f"-m grpo_async eval {config} --quiet --set run.dir={{runs}} --set launch.device={device} "
        "--set evaluation.num_prompts=2"
    )
    sizes = "--dtype bfloat16 --shape 0.6b --rounds 5" if on_gpu else "--engine embedded --shape tiny --rounds 2"
    tiny = "" if on_gpu else " --device cpu --rounds 1 --completion-tokens 4"
    train = (
        "--device cuda --dtype bfloat16 --shape 0.6b --samples 256 --completion-tokens 512 --micro-batch-tokens 16384"
    )
    graphs = " --set inference.vllm.enforce_eager=false --set training.max_steps=10" if on_gpu else short
    prepare = "-m grpo_async prepare-quickstart"

    def both_in(*dtypes: tuple[str, str]) -> tuple[str, ...]:  # of everything but the head, and of the head
        settings = "--set inference.dtype={0} --set model.compute_dtype={0} --set model.head_dtype={1}"
        return (prepare, *(f"{check} {settings.format(*each)}" for each in dtypes))

    return {
        1: (
            "-m grpo_async doctor",
            "-m pytest -q -m gpu tests/training tests/weights",
        ),
        2: (
            *both_in(("float32", "null"), ("bfloat16", "null")),
            f"{run} --set weights.transport={'ipc' if on_gpu else 'gloo'}{short}",
        ),
        3: both_in(("bfloat16", "float32"), ("float16", "null"), ("float16", "float32")),
        4: tuple(
            f"-m benchmarks push --device {device} --transport {transport} {sizes}"
            for transport in (("ipc", "gloo", "nccl") if on_gpu else ("gloo",))
        ),
        5: (
            f"-m benchmarks step {train if on_gpu else '--device cpu --shape tiny --samples 8 --rounds 1'}",
            f"-m benchmarks gpu --in-flight {'1 64 256' if on_gpu else '1 4'}{tiny}",
        ),
        6: (prepare, f"{run} --set weights.verify_every_pushes=1{graphs}"),
        7: ("-m pytest -q tests/e2e/test_gpu.py -k ipc", "-m pytest -q tests/e2e/test_gpu.py -k sleeps"),
        8: ("-m pytest -q tests/e2e/test_gpu.py -k kill_nine",),
    }


def _run_part(report: Report, commands: Sequence[str], options: argparse.Namespace) -> int:
    """Run all commands of a part, one after the other, within ten minutes; also after one that failed."""
    ends_at = time.monotonic() + _PART_S
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if options.device == "cuda":
        environment["GRPO_REQUIRE"] = "gpu,vllm"  # a test that is skipped proves nothing
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as runs:
        for arguments in commands:
            print(f"== python {arguments}", flush=True)
            command = [sys.executable, *arguments.format(runs=runs).split()]
            began = time.monotonic()
            code = _server.run_command(command, environment=environment, timeout_s=max(1.0, ends_at - began))
            report.row(f"python {arguments}", [time.monotonic() - began], "s")
            report.target(f"exit code of python {arguments}", 1 if code is None else abs(code), at_most=0)
    return report.finish()


# -------------------------------------------------------------------------------------------------------------- generation


def _generate(shape: ModelShape, options: argparse.Namespace) -> dict[tuple[int, int], list[float]]:
    """(In flight, likeliest tokens) -> seconds of each round of that many completions of --completion-tokens. A first round warms
    up."""
    from grpo_async.quickstart.model import train_tokenizer

    most, length = max(options.in_flight), options.prompt_tokens + options.completion_tokens
    memory = {"gpu_memory_utilization": _GPU_MEMORY} if options.device == "cuda" else {"kv_cache_mb": 256}
    engines = {
        "vllm": {"enforce_eager": options.device == "cpu", **memory},
        "embedded": {"device": options.device, "max_slots": most},
    }
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        shape.save(folder / "model", train_tokenizer([]), seed=options.seed, dtype=options.dtype, max_length=length)
        config = _server.write_config(
            folder,
            rollout={"max_in_flight": most, "max_completion_tokens": options.completion_tokens},
            inference={
                "engine": options.engine, "dtype": options.dtype, "max_model_len": length, options.engine: engines[options.engine],
            },
        )  # fmt: skip
        with _server.serving(config, options.engine) as server:
            return asyncio.run(_rounds(server.url, shape, options))


async def _rounds(url: str, shape: ModelShape, options: argparse.Namespace) -> dict[tuple[int, int], list[float]]:
    from grpo_async.inference.api import GenerateRequest
    from grpo_async.inference.client import InferenceClient
    from grpo_async.inference.router import FixedServers

    draw, numbers = random.Random(options.seed), itertools.count()

    def request(top: int) -> GenerateRequest:
        number = next(numbers)
        return GenerateRequest(
            request_id=f"gpu-{number}", token_ids=[draw.randrange(min(256, shape.vocab)) for _ in range(options.prompt_tokens)],
            max_tokens=options.completion_tokens, temperature=1.0, seed=number, ignore_eos=True,
            top_logprobs=top,
        )  # fmt: skip

    found: dict[tuple[int, int], list[float]] = {}
    async with InferenceClient(
        FixedServers([url]), token=os.environ["GRPO_ASYNC_TOKEN"], request_timeout_s=_ROUND_TIMEOUT_S,
        wait_timeout_s=_server.START_TIMEOUT_S,
    ) as client:  # fmt: skip
        for in_flight in options.in_flight:
            for number, top in itertools.product(range(options.rounds + 1), options.top_logprobs):
                requests = [request(top) for _ in range(in_flight)]
                began = time.perf_counter()
                async with asyncio.timeout(_ROUND_TIMEOUT_S):
                    made = await asyncio.gather(*(client.generate(each) for each in requests))
                if number:
                    found.setdefault((in_flight, top), []).append(time.perf_counter() - began)
                lengths = {len(each.token_ids) for each in made}
                if lengths != {options.completion_tokens}:
                    raise RuntimeError(f"completions of {sorted(lengths)} tokens, not {options.completion_tokens}")
    return found
