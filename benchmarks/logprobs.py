"""Peak memory and time of two parts of the forward and backward pass, each against the plain way, side by side.

    python -m benchmarks logprobs [--tokens 4096] [--vocab 150000] [--hidden 1024] [--chunk 512] [--json]
    python -m benchmarks logprobs --part attention [--rows 1] [--row-tokens 4096] [--sample-tokens 128] [--json]

logprobs: from hidden states to logprobs and entropies and back: in chunks, and with full logits (tokens, vocab).
attention: of packed rows: a sample at a time, and under one dense block mask (rows, 1, T, T).

Every variant runs in a process of its own. Memory is what the step adds, at its peak, to the inputs that were there: on a GPU
by torch's allocator, on the CPU by the process's resident memory (VmHWM, reset before the step). "beyond gradients" leaves out the
gradients of the inputs, which have to be held in any case. Exit code 1 when logprobs in chunks need more than 1/8 of full logits.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MAX_RATIO = 1 / 8
TIMEOUT_S = 1800.0
MB = 1024 * 1024
VARIANTS = {"logprobs": ("chunked", "full"), "attention": ("samples", "dense")}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(VARIANTS), default="logprobs")
    parser.add_argument("--tokens", type=int, default=4096, help="trained tokens of one micro-batch")
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512, help="training.logprob_chunk_tokens")
    parser.add_argument("--entropy-gradient", action="store_true", help="the loss depends on the entropy, too")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--sample-tokens", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--repeats", type=int, default=1, help="steps after the measured one; the fastest is reported")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.variant:
        print(json.dumps(_measure(options)))
        return 0
    results = {name: _run(name) for name in VARIANTS[options.part]}
    ours, plain = (results[name] for name in VARIANTS[options.part])
    report = {
        "part": options.part,
        "machine": platform.processor() or platform.machine(),
        "settings": {key: value for key, value in vars(options).items() if key not in ("variant", "json", "part")},
        "variants": results,
        "ratio": _share(ours["peak_beyond_gradients_mb"], plain["peak_beyond_gradients_mb"]),
        "ratio_with_gradients": _share(ours["peak_mb"], plain["peak_mb"]),
        "same": all(abs(ours[key] - plain[key]) <= 1e-3 * max(1.0, abs(plain[key])) for key in ("loss", "gradient")),
    }
    print(json.dumps(report) if options.json else _table(report))
    if not report["same"]:
        print("the two variants do not compute the same", file=sys.stderr)
        return 1
    return int(options.part == "logprobs" and report["ratio"] > MAX_RATIO)


def _share(ours: float, plain: float) -> float:
    return ours / max(plain, 1e-9)


def _run(variant: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    make = _logprob_step if options.part == "logprobs" else _attention_step
    warm_up, _ = make(options, torch.device(kind), small=True)
    warm_up()  # threads and libraries have their buffers before anything is counted
    step, inputs = make(options, torch.device(kind), small=False)
    meter = _CudaPeak() if kind == "cuda" else _CpuPeak()
    meter.start()
    started = time.perf_counter()
    loss, gradient = step()
    seconds = [time.perf_counter() - started]
    peak = meter.peak_bytes()
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    for _ in range(options.repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "peak_mb": peak / MB,
        "peak_beyond_gradients_mb": max(0.0, peak - gradients) / MB,
        "gradients_mb": gradients / MB,
        "seconds": min(seconds),
        "loss": loss,
        "gradient": gradient,
        "device": kind,
    }


class _CudaPeak:
    def start(self) -> None:
        import torch

        torch.cuda.synchronize()  # waits: for kernels of this process alone
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        import torch

        torch.cuda.synchronize()  # waits: for kernels of this process alone
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


def _logprob_step(options: argparse.Namespace, device: Any, *, small: bool) -> tuple[Any, list[Any]]:
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
        )

    def step() -> tuple[float, float]:
        logprobs, entropy = chunked() if options.variant == "chunked" else full()
        loss = (logprobs * weights).sum() + (0.01 * entropy.sum() / tokens if options.entropy_gradient else 0.0)
        loss.backward()
        return _numbers(loss, inputs)

    return step, inputs


def _attention_step(options: argparse.Namespace, device: Any, *, small: bool) -> tuple[Any, list[Any]]:
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
        return attention._mask_attention(module, *inputs, attention.CausalMask(None), sample_layout=layout)[0]

    def step() -> tuple[float, float]:
        output = samples() if options.variant == "samples" else dense()
        loss = (output * upstream).float().sum() / upstream.numel()
        loss.backward()
        return _numbers(loss, inputs)

    return step, inputs


def _numbers(loss: Any, inputs: list[Any]) -> tuple[float, float]:
    """Loss and norm of all gradients, which are dropped."""
    norm = sum(float(tensor.grad.float().norm()) ** 2 for tensor in inputs) ** 0.5
    for tensor in inputs:
        tensor.grad = None
    return float(loss.detach()), norm


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'':10}{'peak':>12}{'beyond gradients':>20}{'time':>10}"]
    for name, result in report["variants"].items():
        lines.append(
            f"{name:10}{result['peak_mb']:>9.0f} MB{result['peak_beyond_gradients_mb']:>17.0f} MB{result['seconds']:>8.2f} s"
        )
    lines.append(f"{'ratio':10}{report['ratio_with_gradients']:>12.3f}{report['ratio']:>20.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
