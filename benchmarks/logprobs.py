"""Peak memory and time of two parts of the forward and backward pass, each against the plain way, side by side.

    python -m benchmarks logprobs [--tokens 1024] [--vocab 150000] [--hidden 1024] [--chunk 256] [--any-loss] [--json FILE]
    python -m benchmarks logprobs --part attention [--rows 1] [--row-tokens 4096] [--sample-tokens 128] [--json FILE]

logprobs: from hidden states to logprobs and entropies and back: in chunks, and with full logits (tokens, vocab). A chunk is a
quarter of the tokens, as with the trainer's own training.logprob_chunk_tokens (1024) and training.micro_batch_tokens (4096). The
loss is a sum over tokens, for which chunks make their gradients at once (dapo, grpo, bnpo, dr_grpo, cispo, sapo); with --any-loss
it is not known to be one (gspo, weights of whole sequences, your own), and chunks compute their logits again for the backward pass.
attention: of packed rows: a sample at a time, and under one dense block mask (rows, 1, T, T).

Memory is measured of one step in a process of its own for each variant: what the step adds, at its peak, to the inputs that were
there; on a GPU by torch's allocator, on the CPU by the process's resident memory (VmHWM, reset before the step). "beyond gradients"
leaves out the gradients of the inputs, which have to be held in any case. Times are taken in turns in one process. Exit code 1 when
logprobs in chunks need more than 1/8 of the memory of full logits, or more than 1.1 of their time, or do not compute the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Report, add_options, in_turns, median_interval, ratios

MAX_MEMORY = 1 / 8
MAX_TIME = 1.1
SAME = 1e-3  # relative, of loss and norm of the gradients
TIMEOUT_S = 1800.0
MB = 1024 * 1024
VARIANTS = {"logprobs": ("chunked", "full"), "attention": ("samples", "dense")}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(VARIANTS), default="logprobs")
    parser.add_argument("--tokens", type=int, default=1024, help="trained tokens of one micro-batch")
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256, help="training.logprob_chunk_tokens")
    parser.add_argument("--any-loss", action="store_true", help="one that is not known to be a sum over tokens")
    parser.add_argument("--entropy-gradient", action="store_true", help="the loss depends on the entropy, too")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--sample-tokens", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant; 0: memory only")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.variant:
        print(json.dumps(_measure_memory(options)))
        return 0
    report = Report("logprobs", options)
    names = VARIANTS[options.part]
    results = {name: _run(name, arguments) for name in names}
    for name in names:
        report.row(f"{name}: memory beyond gradients", [results[name]["peak_beyond_gradients_mb"]], "MiB")
        report.row(f"{name}: memory with gradients", [results[name]["peak_mb"]], "MiB")
    ours, plain = (results[name] for name in names)
    memory = _share(ours["peak_beyond_gradients_mb"], plain["peak_beyond_gradients_mb"])
    report.row(f"{names[0]} / {names[1]}: memory beyond gradients", [memory], "ratio")
    difference = max(abs(ours[key] - plain[key]) / max(1.0, abs(plain[key])) for key in ("loss", "gradient"))
    report.row("difference of loss and gradient", [difference], "relative")
    report.target("both variants compute the same", difference, at_most=SAME)
    if options.part == "logprobs":
        report.target("memory beyond gradients, chunked / full", memory, at_most=MAX_MEMORY)
    if options.rounds:
        _report_times(report, options)
    return report.finish()


def _report_times(report: Report, options: argparse.Namespace) -> None:
    """Both variants in turns in this process; the first step of each is not counted."""
    names = VARIANTS[options.part]
    device = _device(options)
    steps = {name: _make_step(options, name, device, small=False)[0] for name in names}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _, name in in_turns(names, options.rounds):
        started = time.perf_counter()
        steps[name]()
        seconds[name].append(time.perf_counter() - started)
    for name in names:
        report.row(f"{name}: time", seconds[name], "s")
    found = ratios(seconds, *names)
    report.row(f"{names[0]} / {names[1]}: time", found, "ratio")
    low, high = median_interval(found, seed=options.seed)
    report.note(f"{names[0]} / {names[1]}, time: 95% interval of the median {low:.3f} to {high:.3f}")
    if options.part == "logprobs":
        report.target("time, chunked / full, median", statistics.median(found), at_most=MAX_TIME)


def _share(ours: float, plain: float) -> float:
    return ours / max(plain, 1e-9)


def _run(variant: str, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.logprobs", *arguments, "--variant", variant]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _device(options: argparse.Namespace) -> Any:
    import torch

    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind)


def _make_step(
    options: argparse.Namespace, variant: str, device: Any, *, small: bool
) -> tuple[Callable[[], tuple[float, float]], list[Any]]:
    """A step (loss and norm of the gradients, which are read and so waited for) and its inputs."""
    import torch

    torch.manual_seed(options.seed)
    make = _logprob_step if options.part == "logprobs" else _attention_step
    return make(options, variant, device, small=small)


def _measure_memory(options: argparse.Namespace) -> dict[str, float]:
    device = _device(options)
    warm_up, _ = _make_step(options, options.variant, device, small=True)
    warm_up()  # threads and libraries have their buffers before anything is counted
    step, inputs = _make_step(options, options.variant, device, small=False)
    meter = _CudaPeak() if device.type == "cuda" else _CpuPeak()
    meter.start()
    loss, gradient = step()
    peak = meter.peak_bytes()
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    return {
        "peak_mb": peak / MB,
        "peak_beyond_gradients_mb": max(0.0, peak - gradients) / MB,
        "loss": loss,
        "gradient": gradient,
    }


class _CudaPeak:
    def start(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        import torch

        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


class _CpuPeak:
    """Resident memory of this process; Linux resets its high-water mark when 5 is written to clear_refs."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _logprob_step(
    options: argparse.Namespace, variant: str, device: Any, *, small: bool
) -> tuple[Callable[[], tuple[float, float]], list[Any]]:
    import torch
    from torch import nn

    from grpo_async.training.logprobs import chunked_logprobs

    tokens, vocab = (16, 1000) if small else (options.tokens, options.vocab)
    dtype = getattr(torch, options.dtype)
    head = nn.Linear(options.hidden, vocab, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(tokens, options.hidden, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    weights = torch.randn(tokens, device=device) / tokens
    inputs = [hidden, head.weight]

    def full() -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(head(hidden).float() / 0.9, dim=-1)
        with torch.set_grad_enabled(options.entropy_gradient):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    def chunked() -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_logprobs(
            hidden,
            targets,
            head,
            temperature=0.9,
            chunk_tokens=options.chunk,
            entropy_gradient=options.entropy_gradient,
        )[:2]

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        loss = (logprobs * weights[rows]).sum()
        return loss + 0.01 * entropy.sum() / tokens if options.entropy_gradient else loss

    def gradients(
        logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        of_entropy = torch.full_like(entropy, 0.01 / tokens) if options.entropy_gradient else None
        return loss_of(logprobs, entropy, rows), weights[rows], of_entropy

    def step() -> tuple[float, float]:
        if variant == "chunked" and not options.any_loss:
            made = chunked_logprobs(
                hidden, targets, head, temperature=0.9, chunk_tokens=options.chunk, objective=gradients
            ).objective
            assert made is not None
            loss = made
        else:
            loss = loss_of(*(chunked() if variant == "chunked" else full()), slice(None))
        loss.backward()  # type: ignore[no-untyped-call]
        return _numbers(loss, inputs)

    return step, inputs


def _attention_step(
    options: argparse.Namespace, variant: str, device: Any, *, small: bool
) -> tuple[Callable[[], tuple[float, float]], list[Any]]:
    import torch
    from torch.nn import functional

    from grpo_async.training import attention

    rows, tokens = (1, 32) if small else (options.rows, options.row_tokens)
    dtype = getattr(torch, options.dtype)
    shapes = [(rows, heads, tokens, options.head_dim) for heads in (options.heads, options.kv_heads, options.kv_heads)]
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    segments = (torch.arange(tokens, device=device) // options.sample_tokens).expand(rows, tokens)
    upstream = torch.randn(rows, tokens, options.heads, options.head_dim, device=device).to(dtype)
    module = torch.nn.Module()

    def dense() -> torch.Tensor:
        visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(
            tokens, tokens, dtype=torch.bool, device=device
        ).tril()
        query, key, value = inputs
        group = options.heads // options.kv_heads
        key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None])
        return output.transpose(1, 2)

    def samples() -> torch.Tensor:
        layout = attention.SampleLayout(segments)
        output: torch.Tensor = attention._mask_attention(
            module, *inputs, attention.CausalMask(None), sample_layout=layout
        )[0]
        return output

    def step() -> tuple[float, float]:
        output = samples() if variant == "samples" else dense()
        loss = (output * upstream).float().sum() / upstream.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        return _numbers(loss, inputs)

    return step, inputs


def _numbers(loss: Any, inputs: list[Any]) -> tuple[float, float]:
    """Loss and norm of all gradients, which are dropped."""
    norm = sum(float(tensor.grad.float().norm()) ** 2 for tensor in inputs) ** 0.5
    for tensor in inputs:
        tensor.grad = None
    return float(loss.detach()), norm


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
