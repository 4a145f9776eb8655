"""What a training step reaches on a GPU against what the GPU allows. For whoever has one.

    python -m benchmarks gpu [--size 0.6b] [--json FILE]
    python -m benchmarks gpu --size 1.7b --peak-tflops 989
    python -m benchmarks gpu --device cpu --size tiny          # the same code, as a test of itself

MFU = tokens/s x (6 N + 6 L A (length + 1)) / peak; N, L, A: see ModelSize. Weights are random, made here. Without --peak-tflops the
peak is that of a data sheet, where the GPU is listed. Without a GPU and without --device cpu: exit code 2. `vllm bench` measures
generation, and `asynchrony --engine vllm` both sides of a run.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks._models import SIZES, ModelSize, Peaks, listed_peaks
from benchmarks.report import Report, parser_of

_DEFAULTS: dict[str, tuple[Any, Any]] = {  # on a GPU, on a CPU
    "size": ("0.6b", "tiny"),
    "dtype": ("bfloat16", "float32"),
    "prompt_tokens": (128, 8),
    "completion_tokens": (512, 16),
    "samples": (256, 8),
}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), help="of the model; default: 0.6b, on a CPU tiny")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16, on a CPU float32")
    parser.add_argument("--prompt-tokens", type=int, help="default: 128, on a CPU 8")
    parser.add_argument("--completion-tokens", type=int, help="default: 512, on a CPU 16")
    parser.add_argument("--samples", type=int, help="of a step; default: 256, on a CPU 8")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="of one forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--peak-tflops", type=float, help="dense, in the dtype that computes")
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
    report = Report("gpu", options)
    size, peaks = SIZES[options.size], _peaks(options)
    report.note(
        f"{size.num_parameters / 1e6:.2f} M parameters; peak ({peaks.source}): {peaks.flops / 1e12:.4g} TFLOP/s"
    )
    if options.device == "cpu":
        report.note("on a CPU: this proves that the code runs, and says nothing of a GPU")
    _report_training(report, _train(size, options), size, peaks)
    return report.finish()


def _peaks(options: argparse.Namespace) -> Peaks:
    """Raises: SystemExit, the GPU is not listed and no peak is given."""
    import torch

    if options.peak_tflops:
        return Peaks(flops=options.peak_tflops * 1e12, memory=0.0, source="given")
    if options.device == "cpu":
        return Peaks(flops=1e12, memory=0.0, source="assumed")
    device = torch.cuda.get_device_name()
    listed = listed_peaks(device)
    if listed is None:
        raise SystemExit(f"the peak of {device} is not listed here; give --peak-tflops")
    return listed


def _train(size: ModelSize, options: argparse.Namespace) -> dict[str, Any]:
    """{"seconds": [of each step], "tokens": [that a step computes, padding included], "lengths": [tokens of each sample],
    "peak_bytes": on a GPU}."""
    import torch

    from benchmarks._step_sides import OurSide, make_samples, process_group

    settings = argparse.Namespace(
        **vars(options), minibatches=1, group_size=1, chunk=1024, vocab=size.vocab, hidden=size.hidden, layers=size.layers,
        heads=size.heads, kv_heads=size.kv_heads, head_dim=size.head_dim,
    )  # fmt: skip
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(options.threads)
    seconds, tokens = [], []
    with process_group(1, device):
        side = OurSide(settings, device, rank=0, num_ranks=1)
        samples = make_samples(settings)
        for _ in range(options.rounds + 1):
            began = time.perf_counter()
            outcome = side.step(samples)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            tokens.append(outcome.computed_tokens)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    lengths = [len(sample.token_ids) for sample in samples]  # the first step warms up
    return {"seconds": seconds[1:], "tokens": tokens[1:], "lengths": lengths, "peak_bytes": peak}


def _report_training(report: Report, found: dict[str, Any], size: ModelSize, peaks: Peaks) -> None:
    lengths, seconds = found["lengths"], found["seconds"]
    bound_s = sum(length * size.training_flops(length) for length in lengths) / peaks.flops
    report.row("train: step", seconds, "s")
    report.row("train: tokens of the samples", [sum(lengths) / each for each in seconds], "tokens/s")
    report.row("train: bound", [sum(lengths) / bound_s], "tokens/s")
    report.row("train: MFU", [bound_s / each for each in seconds], "fraction")
    report.row("train: packing efficiency", [sum(lengths) / each for each in found["tokens"]], "fraction")
    if found["peak_bytes"] is not None:
        report.row("train: memory, peak", [found["peak_bytes"] / 2**30], "GiB")
