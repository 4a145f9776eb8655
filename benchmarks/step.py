"""The trainer's step against a plain padded Hugging Face loop: tokens/s, packing, and what comes before the first forward.

    python -m benchmarks step [--rounds 9] [--json FILE]
    python -m benchmarks step --device cuda --dtype bfloat16 --shape 1.7b --micro-batch-tokens 32768 --completion-tokens 4096
                              --chunk 4096
    python -m benchmarks step --before-forward --ranks 8 --samples 1024 --prompt-tokens 512 --completion-tokens 22000
                              --micro-batch-tokens 32768

The same random Qwen3, ragged samples from a seed, GRPO's clipped loss, AdamW and tokens in a micro-batch, padding included, for all
of them; they take turns in one process:

    packed    plan, pack, train_step: the trainer's
    padded    samples as they come, padded to the longest of their micro-batch
    sorted    the same loop, samples sorted by length before

Tokens are trained tokens (of completions). "needed / computed" is the packing efficiency. On a GPU that is listed in _models.py the
MFU is tokens/s x (6 N + 6 L A (length + 1)) / peak; N, L, A: see ModelSize. Exit code 1 when the step is not as fast as the padded
loop. Host syncs and collectives of an update are counted in tests/training/test_step_syncs.py; where the time of a step goes is in
every run's timeline (`events.jsonl`).

With --before-forward no model is made: rank 0 plans, divides the columns by rank and sends each rank its own, and each rank packs
them, as the trainer's loop does it. The sum on rank 0 is what every GPU waits for. It has a target from 8 million tokens on, in CPU
time, since the ranks of this machine share its cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from benchmarks._models import SIZES, listed_peaks
from benchmarks.report import ROOT, Report, parser_of, ratios, time_in_turns
from grpo_async.utils.processes import usable_cpus

if TYPE_CHECKING:
    from benchmarks._step_sides import OurSide, PlainSide, StepOutcome

PHASES = ("plan", "divide", "send", "pack")
SAME = 1e-3  # relative, of losses and norms of the first step, which all compute from the same weights


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8, help="samples with one prompt")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--completion-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of one forward, padding included")
    parser.add_argument("--shape", choices=sorted(SIZES), default="small", help="of the model")
    parser.add_argument("--chunk", type=int, default=1024, help="training.logprob_chunk_tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--ranks", type=int, default=1, help="with --before-forward: of torchrun")
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="of torch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before-forward", action="store_true", help="time planning, sending and packing only")
    options = parser.parse_args(arguments)
    if options.ranks > 1 and not options.before_forward:
        parser.error("--ranks is for --before-forward")
    if options.ranks > 1 and "RANK" not in os.environ:
        return _under_torchrun(options.ranks, arguments)
    return _measure_before_forward(options) if options.before_forward else _measure(options)


def _under_torchrun(num_ranks: int, arguments: list[str]) -> int:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(num_ranks), "-m", "benchmarks.step", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=1800.0, check=False).returncode


def _measure(options: argparse.Namespace) -> int:
    import torch

    from benchmarks._step_sides import OurSide, PlainSide, make_samples, process_group

    torch.set_num_threads(options.threads)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = torch.device(kind)
    samples = make_samples(options)
    trained = sum(sample.num_trained_tokens for sample in samples)
    real = sum(len(sample.token_ids) for sample in samples)
    report = Report("step", options)
    with process_group(1, device):
        sides: dict[str, OurSide | PlainSide] = {"packed": OurSide(options, device)}
        sides |= {name: PlainSide(options, device, is_sorted=name == "sorted") for name in ("padded", "sorted")}
        # memory, threads and optimizer states are there when it counts
        outcomes = {name: side.step(samples) for name, side in sides.items()}
        wanted = outcomes["packed"]
        for name, first in outcomes.items():
            for value, right in ((first.loss, wanted.loss), (first.grad_norm, wanted.grad_norm)):
                if options.dtype == "float32" and abs(value - right) > SAME * max(abs(right), 0.01):
                    raise SystemExit(f"{name} and packed do not compute the same: {first} and {wanted}")

        def step_of(side: OurSide | PlainSide) -> None:
            side.step(samples)
            if kind == "cuda":
                torch.cuda.synchronize()

        seconds = time_in_turns({name: partial(step_of, side) for name, side in sides.items()}, options.rounds)
    _report_speed(report, seconds, outcomes, trained=trained, real=real)
    report.note(
        f"{len(samples)} samples, {real} tokens, {trained} of them trained; {options.threads} threads, {kind}; "
        f"{SIZES[options.shape].num_parameters / 1e6:.1f} M parameters"
    )
    if kind == "cuda":
        if (peaks := listed_peaks(torch.cuda.get_device_name())) is not None:
            flops = sum(
                len(each.token_ids) * SIZES[options.shape].training_flops(len(each.token_ids)) for each in samples
            )
            report.row("packed: MFU", [flops / peaks.flops / each for each in seconds["packed"]], "fraction")
        report.row("memory of all three, peak", [torch.cuda.max_memory_allocated() / 2**30], "GiB")
    return report.finish()


def _measure_before_forward(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from benchmarks._step_sides import make_samples, process_group
    from grpo_async.batching.minibatch import token_weights
    from grpo_async.batching.pack import split_by_rank
    from grpo_async.batching.plan import plan_batch
    from grpo_async.training.ranks import CommandChannel, StepCommand

    torch.set_num_threads(1)
    report = Report("step", options)
    rounds: list[list[tuple[float, float]]] = []  # (wall, CPU) at the beginning, and after each of PHASES

    def lap() -> None:
        rounds[-1].append((time.perf_counter(), time.process_time()))

    with process_group(options.ranks, torch.device("cpu")):
        is_leader = dist.get_rank() == 0
        samples = make_samples(options) if is_leader else []
        channel = CommandChannel(timeout_s=600.0)
        for _ in range(options.rounds + 1):
            dist.barrier()
            rounds.append([])
            lap()
            if is_leader:
                plan = plan_batch(
                    [len(sample.token_ids) for sample in samples],
                    num_ranks=options.ranks,
                    micro_batch_tokens=options.micro_batch_tokens,
                    pack=True,
                )
                weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=1)
                lap()
                parts = split_by_rank(samples, weights, plan, trainer_version=0)
                lap()
                commands = [StepCommand(minibatches=[part], lr=0.0) for part in parts]
                channel.send(commands)
                command = commands[0]
            else:
                received = channel.receive()
                assert isinstance(received, StepCommand)
                command = received
            lap()
            command.pack()
            lap()
    if not is_leader:
        return 0
    for clock, suffix in enumerate(("", ", CPU")):
        times = [[each[clock] for each in laps] for laps in rounds[1:]]  # the first round warms up
        for number, name in enumerate(PHASES):
            report.row(f"{name}{suffix}", [laps[number + 1] - laps[number] for laps in times], "s on rank 0")
        whole = [laps[-1] - laps[0] for laps in times]
        report.row(f"all{suffix}", whole, "s on rank 0")
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    report.note(f"{len(samples)} samples, {num_tokens} tokens, {options.ranks} ranks")
    if num_tokens >= 8_000_000:
        report.target("CPU time of all, median", statistics.median(whole), at_most=0.3)
    return report.finish()


def _report_speed(
    report: Report,
    seconds: Mapping[str, Sequence[float]],
    outcomes: Mapping[str, StepOutcome],
    *,
    trained: int,
    real: int,
) -> None:
    """Speed and padding of each side, of `trained` and of all `real` tokens of a step. The plain loop over ours in seconds is ours
    over the plain loop in speed."""
    for name, values in seconds.items():
        report.row(f"{name}: trained tokens/s", [trained / value for value in values], "tokens/s")
    for name in list(seconds)[1:]:
        report.row(f"packed over {name}", ratios(seconds, name, "packed"), "ratio")
    for name, outcome in outcomes.items():
        report.row(f"{name}: needed / computed tokens", [real / outcome.computed_tokens], "fraction")
        report.row(f"{name}: computed tokens", [outcome.computed_tokens], "of a step")
        report.row(f"{name}: micro-batches", [outcome.num_micro_batches], "of a rank")
    middle = statistics.median(ratios(seconds, "padded", "packed"))
    report.target("packed over padded, median of the rounds", middle, at_least=1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
