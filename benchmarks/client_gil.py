"""How much the training thread slows down while the rollout thread runs beside it in the same process.

    python -m benchmarks client_gil [--in-flight 256] [--rate 30] [--rewards light heavy] [--rounds 8] [--json FILE]

The main thread trains a small model (forward, backward, optimizer step: torch operations, which let go of the interpreter, with
Python between them), a fixed number of steps at a time; the rollout side is that of a run, with `--in-flight` rollouts, each of
which gets `--rate` tokens per second from a server that computes nothing. In turns:

    off          the server is paused: everything is there, nothing arrives
    on           tokens arrive, rewards are computed, groups go through to the trainer

and, where there are processors enough, each thread has one: the trainer the first, the rollout thread and the server the second.
So the difference is what the interpreter lock costs, and what two processors take from each other (cache, memory). `apart`
measures the latter: the same rollout side in a process of its own, on the second processor, while the trainer's own is paused.

"elapsed" is the clock's, "CPU" the training thread's own (time.thread_time): where only the first grows, the thread waited.
"waited" is their difference, as a share of the CPU time: what the lock costs, and less noisy than a ratio of two turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._rollout_side import ROOT, Load, Side, rollout_side
from benchmarks.report import Report, add_options
from benchmarks.turns import in_turns, median_interval, ratios

MOST_SLOWER = 1.03
SETTLE_S = 0.3
WAIT_S = 120.0
VARIANTS = ("off", "on", "apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a training step took in one turn: seconds by the clock, CPU seconds of this thread; and what arrived meanwhile."""

    wall_s: float
    cpu_s: float
    tokens_per_s: float


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of each rollout")
    parser.add_argument("--tokens", type=int, default=256, help="of a rollout, in the mean")
    parser.add_argument(
        "--rewards", nargs="+", choices=["light", "heavy", "heavy in processes"], default=["light", "heavy"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="of training, in each turn")
    parser.add_argument("--width", type=int, default=256, help="of the model that is trained")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.child:
        _generate_apart(Load(**json.loads(options.child)))
        return 0
    report = Report("client_gil", options)

    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    other = cpus[1] if len(cpus) > 1 else None
    for rewards in options.rewards:
        load = Load(
            in_flight=options.in_flight, tokens=options.tokens, rate=options.rate, rewards=rewards, seed=options.seed,
            server_cpu=other,
        )  # fmt: skip
        _compare(report, load, options, cpus)
    report.note(f"{options.in_flight} rollouts in flight, {options.rate:g} tokens/s each")
    report.note("one processor for each thread" if other is not None else "one processor: threads share it")
    return report.finish()


def _compare(report: Report, load: Load, options: argparse.Namespace, cpus: list[int]) -> None:
    train = make_training(options.width)
    with tempfile.TemporaryDirectory(prefix="bench-gil-") as folder, rollout_side(Path(folder), load) as side:
        if len(cpus) > 1:
            os.sched_setaffinity(0, {cpus[0]})  # this thread only
        with _apart(load) as say:
            others = cpus[1] if len(cpus) > 1 else None
            taken = _turns(train, side, say, rounds=options.rounds, seconds=options.seconds, others=others)
    if len(cpus) > 1:
        os.sched_setaffinity(0, set(cpus))
    elapsed = {name: [each.wall_s for each in turns] for name, turns in taken.items()}
    cpu = {name: [each.cpu_s for each in turns] for name, turns in taken.items()}
    for name in VARIANTS:
        report.row(f"{load.rewards} rewards, {name}: elapsed", [1000 * value for value in elapsed[name]], "ms/step")
        report.row(f"{load.rewards} rewards, {name}: CPU", [1000 * value for value in cpu[name]], "ms/step")
        waited = [100 * (each.wall_s / each.cpu_s - 1.0) for each in taken[name]]
        report.row(f"{load.rewards} rewards, {name}: waited", waited, "% of CPU")
    for name in ("off", "on"):
        report.row(
            f"{load.rewards} rewards, tokens/s while {name}", [each.tokens_per_s for each in taken[name]], "tokens/s"
        )
    slower = ratios(elapsed, "on", "off")
    for over, under in (("on", "off"), ("apart", "off"), ("on", "apart")):
        found = ratios(elapsed, over, under)
        report.row(f"{load.rewards} rewards, {over} / {under}: elapsed", found, "ratio")
        low, high = median_interval(found, seed=options.seed)
        report.note(f"{load.rewards} rewards, {over} / {under}: the median is in {low:.3f} to {high:.3f} (95%)")
    if load.rewards == "light":
        report.target("training thread, light rewards, on / off", statistics.median(slower), at_most=MOST_SLOWER)
        rate = statistics.median(each.tokens_per_s for each in taken["on"]) / (options.in_flight * options.rate)
        report.target("tokens generated meanwhile, share of what was asked for", rate, at_least=0.9)


def make_training(width: int) -> Callable[[], None]:
    """One training step of a small transformer on one thread, as the trainer does it: forward, loss, backward, AdamW."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    model.append(torch.nn.Linear(width, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(4, 64, width)
    wanted = torch.randint(0, 1024, (4 * 64,))

    def train() -> None:
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def _turns(
    train: Callable[[], None],
    side: Side,
    say: Callable[[str], None],
    *,
    rounds: int,
    seconds: float,
    others: int | None,
) -> dict[str, list[Taken]]:
    """Each variant once a round; the groups are taken by a thread of its own, so that nothing of it is timed. Every thread but
    this one is put onto the processor `others`."""
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            side.step()

    while side.rollouts < side.load.in_flight:
        side.step()
    taker = threading.Thread(target=take, name="taker", daemon=True)
    taker.start()
    if others is not None:
        _move_other_threads(others)
    side.pause()
    steps = max(3, round(seconds / _seconds_of(train)))
    taken: dict[str, list[Taken]] = {name: [] for name in VARIANTS}
    pause = threading.Event()
    for _, name in in_turns(VARIANTS, rounds):
        if name == "on":
            side.resume()
        elif name == "apart":
            say("resume")
        pause.wait(timeout=SETTLE_S)
        wall, cpu, tokens = time.perf_counter(), time.thread_time(), side.tokens()
        for _ in range(steps):
            train()
        wall_s = time.perf_counter() - wall
        cpu_s = time.thread_time() - cpu
        rate = (side.tokens() - tokens) / wall_s
        taken[name].append(Taken(wall_s=wall_s / steps, cpu_s=cpu_s / steps, tokens_per_s=rate))
        if name == "on":
            side.pause()
        elif name == "apart":
            say("pause")
        pause.wait(timeout=SETTLE_S)
    stop.set()
    side.resume()
    taker.join(timeout=WAIT_S)
    return taken


def _move_other_threads(cpu: int) -> None:
    for name in os.listdir("/proc/self/task"):
        if int(name) != threading.get_native_id():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(name), {cpu})


def _seconds_of(train: Callable[[], None]) -> float:
    for _ in range(3):
        train()
    began = time.perf_counter()
    for _ in range(5):
        train()
    return (time.perf_counter() - began) / 5


@contextmanager
def _apart(load: Load) -> Iterator[Callable[[str], None]]:
    """The same rollout side in a process of its own, paused; tell it to `resume` and to `pause`."""
    command = [sys.executable, "-m", "benchmarks.client_gil", "--child", json.dumps(asdict(load))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        pipes: Any = child

        def say(word: str) -> None:
            pipes.stdin.write(word + "\n")
            pipes.stdin.flush()
            if not pipes.stdout.readline():
                raise RuntimeError("the rollout side in a process of its own has ended; its error is above")

        try:
            say("pause")
            yield say
        finally:
            child.kill()


def _generate_apart(load: Load) -> None:
    """The child of `_apart`."""
    if load.server_cpu is not None:
        os.sched_setaffinity(0, {load.server_cpu})
    with tempfile.TemporaryDirectory(prefix="bench-gil-") as folder, rollout_side(Path(folder), load) as side:

        def take() -> None:
            while True:
                side.step()

        threading.Thread(target=take, daemon=True).start()
        for word in sys.stdin:
            (side.pause if word.strip() == "pause" else side.resume)()
            print("done", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
