"""What a GPU reaches against what it allows: generation and training. For whoever has one.

    python -m benchmarks gpu [--size 0.6b] [--parts generate train] [--json FILE]
    python -m benchmarks gpu --size 1.7b --parts train --peak-tflops 989 --memory-gbs 4800
    python -m benchmarks gpu --device cpu --size tiny --parts generate train      # the same code, as a test of itself

generate  tokens/s of a server with --in-flight completions at once, and share of the bound: prompts at the peak of FLOPs, then a
          step for each token, which reads all weights and all KV, or computes: (weights + KV bytes) / bandwidth or FLOPs / peak
train     tokens/s of a training step and MFU = tokens/s x (6 N + 6 L A (length + 1)) / peak; N, L, A: see _gpu_bounds.py

Pushes on GPUs are measured by `push --device cuda`, both sides on one GPU by `asynchrony --engine vllm`.
Weights are random, made here. Peaks: --peak-tflops, --memory-gbs; else a data sheet's, where the GPU is listed; else what one large
product and one large copy reach here. Without a GPU and without --device cpu: exit code 2. There are no targets.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _gpu_bounds as bounds
from benchmarks.report import Report, add_options

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("generate", "train")
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_CHILD_TIMEOUT_S = 3600.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size", choices=sorted(bounds.SIZES), help="of the model; default: 0.6b, on a CPU tiny")
    parser.add_argument("--engine", choices=["vllm", "embedded"], help="default: vllm, on a CPU embedded")
    parser.add_argument("--dtype", choices=sorted(_ITEMSIZE), help="that computes; default: bfloat16, on a CPU float32")
    parser.add_argument("--in-flight", nargs="+", type=int, help="default: 1 16 64 256, on a CPU 1 4")
    parser.add_argument("--prompt-tokens", type=int, help="default: 128, on a CPU 8")
    parser.add_argument("--completion-tokens", type=int, help="default: 512, on a CPU 16")
    parser.add_argument("--samples", type=int, help="of a training step; default: 256, on a CPU 8")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="of one forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--gpu-memory", type=float, default=0.8, help="share of the GPU that a lone server takes")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one round of completions")
    parser.add_argument("--peak-tflops", type=float, help="dense, in the dtype that computes")
    parser.add_argument("--memory-gbs", type=float, help="bandwidth of the memory, GB/s")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not _has_gpu():
        print(
            "benchmarks/gpu.py measures GPUs, and torch sees none here; `--device cpu` runs the same code on the CPU with a tiny "
            "model, whose figures say nothing of a GPU",
            file=sys.stderr,
        )
        return 2
    _fill_defaults(options)
    os.environ.setdefault("GRPO_ASYNC_TOKEN", secrets.token_urlsafe(16))
    report = Report("gpu", options)
    size, peaks = bounds.SIZES[options.size], _peaks(options)
    report.note(
        f"{size.num_parameters / 1e6:.2f} M parameters; peaks ({peaks.source}): {peaks.flops / 1e12:.4g} TFLOP/s, memory "
        f"{peaks.memory / 1e9:.4g} GB/s"
    )
    if options.device == "cpu":
        report.note("on a CPU: this proves that the code runs, and says nothing of a GPU")
    for part in dict.fromkeys(options.parts):
        {"generate": _generate, "train": _train}[part](report, size, peaks, options)
    return report.finish()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _fill_defaults(options: argparse.Namespace) -> None:
    on_gpu = options.device == "cuda"
    defaults: dict[str, tuple[Any, Any]] = {
        "size": ("0.6b", "tiny"),
        "engine": ("vllm", "embedded"),
        "dtype": ("bfloat16", "float32"),
        "in_flight": ([1, 16, 64, 256], [1, 4]),
        "prompt_tokens": (128, 8),
        "completion_tokens": (512, 16),
        "samples": (256, 8),
    }
    for name, (gpu, cpu) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, gpu if on_gpu else cpu)


def _peaks(options: argparse.Namespace) -> bounds.Peaks:
    import torch

    listed = bounds.listed_peaks(torch.cuda.get_device_name()) if options.device == "cuda" else None
    given = {
        "flops": options.peak_tflops and options.peak_tflops * 1e12,
        "memory": options.memory_gbs and options.memory_gbs * 1e9,
    }
    given = {name: value for name, value in given.items() if value}
    if len(given) == 2:
        return bounds.Peaks(**given, source="given")
    peaks = listed or bounds.measured_peaks(options.device, options.dtype)
    return dataclasses.replace(peaks, **given, source=f"given, else {peaks.source}" if given else peaks.source)


def _generate(report: Report, size: bounds.ModelSize, peaks: bounds.Peaks, options: argparse.Namespace) -> None:
    from benchmarks import _gpu_generate

    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        found = _gpu_generate.measure(Path(folder), size, options)
    for in_flight, seconds in found.items():
        tokens = in_flight * options.completion_tokens
        bound_s = bounds.generation_bound_s(
            size,
            peaks,
            in_flight=in_flight,
            prompt=options.prompt_tokens,
            completion=options.completion_tokens,
            itemsize=_ITEMSIZE[options.dtype],
        )
        report.row(f"generate: {in_flight} in flight", [tokens / each for each in seconds], "tokens/s")
        report.row(f"generate: {in_flight} in flight, bound", [tokens / bound_s], "tokens/s")
        report.row(f"generate: {in_flight} in flight, of the bound", [bound_s / each for each in seconds], "share")


def _train(report: Report, size: bounds.ModelSize, peaks: bounds.Peaks, options: argparse.Namespace) -> None:
    settings = {
        "seed": options.seed, "device": options.device, "dtype": options.dtype, "rounds": options.rounds,
        "threads": options.threads, "samples": options.samples, "prompt_tokens": options.prompt_tokens,
        "completion_tokens": options.completion_tokens, "micro_batch_tokens": options.micro_batch_tokens,
        "minibatches": 1, "group_size": 1, "chunk": 1024, "vocab": size.vocab, "hidden": size.hidden, "layers": size.layers,
        "heads": size.heads, "kv_heads": size.kv_heads, "head_dim": size.head_dim,
    }  # fmt: skip
    found = _in_a_process(settings)
    lengths = found["lengths"]
    flops = sum(length * size.training_flops(length) for length in lengths)
    seconds = found["seconds"]
    report.row("train: step", seconds, "s")
    report.row("train: tokens of the samples", [sum(lengths) / each for each in seconds], "tokens/s")
    report.row("train: bound", [sum(lengths) / (flops / peaks.flops)], "tokens/s")
    report.row("train: MFU", [flops / peaks.flops / each for each in seconds], "share")
    computed = found["tokens"]
    report.row("train: packing efficiency", [sum(lengths) / each for each in computed], "share")
    if found["peak_bytes"] is not None:
        report.row("train: memory, peak", [found["peak_bytes"] / 2**30], "GiB")


def _in_a_process(settings: dict[str, Any]) -> dict[str, Any]:
    """What _gpu_train.py measures; its memory is free again afterwards."""
    command = [sys.executable, "-m", "benchmarks._gpu_train", json.dumps(settings)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_CHILD_TIMEOUT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
