"""Peak memory and time from hidden states to logprobs and entropies and back: chunks of logits against full logits, side by side.

    python -m benchmarks logprobs [--tokens 1024] [--vocab 150000] [--hidden 1024] [--chunk 256] [--any-loss] [--json FILE]

Full logits are (tokens, vocab). A chunk is a quarter of the tokens, as with training.logprob_chunk_tokens: 1024
and training.micro_batch_tokens (4096). The loss is a sum over tokens (dapo, grpo, bnpo, dr_grpo, cispo, sapo), so the gradients
of a chunk are computed at once. With --any-loss it is not known to be one (gspo, sequence-level weights, your own), and the
logits of a chunk are computed again.

Memory is measured for one step, in a process for each variant: what the step adds at its peak to the inputs; on a GPU by torch's
allocator, on the CPU by the resident memory of the process (VmHWM, reset before the step). "beyond gradients" leaves out the
gradients of the inputs, which have to be held in any case. Times are taken in turns in one process. The exit code is 1 when
chunks need more than 1/8 of the memory of full logits, or more than 1.1 of their time, or compute something else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Report, device_of, parser_of, ratios, time_in_turns

MAX_MEMORY = 1 / 8
MAX_TIME = 1.1
SAME = 1e-3  # relative difference of loss and norm of the gradients
TIMEOUT_S = 1800.0
MIB = 1024 * 1024
VARIANTS = ("chunked", "full")


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="trained tokens of one micro-batch")
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256, help="training.logprob_chunk_tokens")
    parser.add_argument("--any-loss", action="store_true", help="a loss that is not known to be a sum over tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant; 0: only memory is measured")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.variant:
        print(json.dumps(_measure_memory(options)))
        return 0
    report = Report("logprobs", options)
    chunked, full = (_run(name, arguments) for name in VARIANTS)
    for name, result in zip(VARIANTS, (chunked, full), strict=True):
        report.row(f"{name}: memory beyond gradients", [result["peak_beyond_gradients_mib"]], "MiB")
        report.row(f"{name}: memory with gradients", [result["peak_mib"]], "MiB")
    memory = chunked["peak_beyond_gradients_mib"] / max(full["peak_beyond_gradients_mib"], 1e-9)
    report.row("chunked / full: memory beyond gradients", [memory], "ratio")
    difference = max(abs(chunked[key] - full[key]) / max(1.0, abs(full[key])) for key in ("loss", "gradient"))
    report.row("difference of loss and gradient", [difference], "relative")
    report.target("both variants compute the same", difference, at_most=SAME)
    report.target("memory beyond gradients, chunked / full", memory, at_most=MAX_MEMORY)
    if options.rounds:
        _report_times(report, options)
    return report.finish()


def _report_times(report: Report, options: argparse.Namespace) -> None:
    """Both variants in turns in this process; the first step of each is not counted."""
    steps = {name: _make_step(options, name, small=False)[0] for name in VARIANTS}
    for step in steps.values():
        step()
    seconds = time_in_turns(steps, options.rounds)
    for name in VARIANTS:
        report.row(f"{name}: time", seconds[name], "s")
    found = ratios(seconds, *VARIANTS)
    report.row("chunked / full: time", found, "ratio")
    report.target("time, chunked / full, median", statistics.median(found), at_most=MAX_TIME)


def _run(variant: str, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks", "logprobs", *arguments, "--variant", variant]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure_memory(options: argparse.Namespace) -> dict[str, float]:
    import torch

    warm_up, _ = _make_step(options, options.variant, small=True)
    warm_up()  # threads and libraries have their buffers before anything counts
    step, inputs = _make_step(options, options.variant, small=False)
    on_gpu = inputs[0].device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux resets the high-water mark of the resident memory
        before = _status_bytes("VmRSS")
    loss, gradient = step()
    peak = (torch.cuda.max_memory_allocated() if on_gpu else _status_bytes("VmHWM")) - before
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    return {
        "peak_mib": peak / MIB,
        "peak_beyond_gradients_mib": max(0.0, peak - gradients) / MIB,
        "loss": loss,
        "gradient": gradient,
    }


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _make_step(
    options: argparse.Namespace, variant: str, *, small: bool
) -> tuple[Callable[[], tuple[float, float]], list[Any]]:
    """A step, which returns the loss and the norm of the gradients (and so waits for them), and its inputs."""
    import torch
    from torch import nn

    from grpo_async.training.logprobs import chunked_logprobs

    torch.manual_seed(options.seed)
    device, dtype = device_of(options), getattr(torch, options.dtype)
    tokens, vocab = (16, 1000) if small else (options.tokens, options.vocab)
    head = nn.Linear(options.hidden, vocab, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(tokens, options.hidden, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    weights = torch.randn(tokens, device=device) / tokens
    inputs = [hidden, head.weight]

    def full() -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(head(hidden).float() / 0.9, dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    def chunked() -> torch.Tensor | None:
        by_token = not options.any_loss
        return chunked_logprobs(
            hidden, targets, head, temperature=0.9, chunk_tokens=options.chunk, objective=loss_of, is_per_token=by_token
        ).objective

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, rows: Any, *_: torch.Tensor) -> torch.Tensor:
        return (logprobs * weights[rows]).sum()

    def step() -> tuple[float, float]:
        loss: torch.Tensor | None = loss_of(*full(), slice(None)) if variant == "full" else chunked()
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.get_total_norm([tensor.grad.float() for tensor in inputs if tensor.grad is not None]))
        for tensor in inputs:
            tensor.grad = None
        return float(loss.detach()), norm

    return step, inputs
