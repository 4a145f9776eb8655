"""What rollouts cost the trainer's process: rollouts/s and CPU time, against a server that computes nothing.

    python -m benchmarks client [--in-flight 1 64 256 1024] [--rounds 3] [--rewards light heavy] [--json FILE]
    python -m benchmarks client --in-flight 1024 --rounds 1 --profile      and where the rollout thread spends it

Everything from the prompt to the trained group is that of a run: worker, client, router, conversations, rewards, buffer, store,
timeline. The server is a process of its own (its CPU time is not counted) and comes in two kinds:

    at once      whole answers at once: what one rollout costs, and how many there are in a second
    streaming    `--rate` tokens per second for each rollout, in chunks as the real servers send them: CPU time per 100 tokens

"thread" is the rollout thread alone, "process" everything: rewards, the store's and the timeline's threads, and the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._rollout_side import Load, Side, rollout_side
from benchmarks._thread_profile import profiled
from benchmarks.report import Report, add_options
from benchmarks.turns import in_turns

MOST_MS_PER_100_TOKENS = 1.0
AT = 1024
"""In flight, where the target is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one measurement: seconds by the clock, CPU seconds of the rollout thread and of the process, and what came of it."""

    wall_s: float
    thread_s: float
    process_s: float
    rollouts: int
    tokens: int


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 256, 1024], help="rollouts at once")
    parser.add_argument(
        "--rollouts", type=int, default=1024, help="of each measurement at once (8 where one is in flight)"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement that streams")
    parser.add_argument("--tokens", type=int, default=256, help="of a rollout, in the mean")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of a rollout that is streamed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rewards", nargs="+", choices=["light", "heavy"], default=["light"])
    parser.add_argument("--profile", action="store_true", help="print the rollout thread's functions (slows it down)")
    add_options(parser)
    options = parser.parse_args(arguments)
    report = Report("client", options)

    loads = {}
    for rewards in options.rewards:
        for in_flight in options.in_flight:
            for rate in (0.0, options.rate):
                kind = "streaming" if rate else "at once"
                name = f"{kind}, {in_flight} in flight" + (", heavy rewards" if rewards == "heavy" else "")
                loads[name] = Load(
                    in_flight=in_flight, tokens=options.tokens, rate=rate, rewards=rewards, seed=options.seed
                )
    costs: dict[str, list[Cost]] = {name: [] for name in loads}
    for _, name in in_turns(list(loads), options.rounds):
        load = loads[name]
        rollouts = max(8, min(options.rollouts, 128 * load.in_flight))
        costs[name].append(measure(load, rollouts=rollouts, seconds=options.seconds, profile=options.profile and name))

    for name, load in loads.items():
        found = costs[name]
        if not load.rate:
            report.row(f"{name}: rate", [cost.rollouts / cost.wall_s for cost in found], "rollouts/s")
            report.row(f"{name}: thread", [1000 * cost.thread_s / cost.rollouts for cost in found], "ms/rollout")
            report.row(f"{name}: process", [1000 * cost.process_s / cost.rollouts for cost in found], "ms/rollout")
            continue
        report.row(f"{name}: rate", [cost.tokens / cost.wall_s for cost in found], "tokens/s")
        report.row(f"{name}: thread", [1e5 * cost.thread_s / cost.tokens for cost in found], "ms/100 tokens")
        report.row(f"{name}: process", [1e5 * cost.process_s / cost.tokens for cost in found], "ms/100 tokens")
        if load.in_flight == AT and load.rewards == "light":
            typical = statistics.median(cost.process_s / cost.tokens for cost in found)
            report.target(
                f"CPU ms of the process per 100 tokens, {name}", 1e5 * typical, at_most=MOST_MS_PER_100_TOKENS
            )
    report.note(f"rollouts of {options.tokens} tokens in the mean; streamed with {options.rate:g} tokens/s each")
    return report.finish()


def measure(load: Load, *, rollouts: int, seconds: float, profile: str | bool = False) -> Cost:
    """Cost of `rollouts` rollouts, or of `seconds` seconds where they are streamed, after as many as are in flight."""
    with tempfile.TemporaryDirectory(prefix="bench-client-") as folder, rollout_side(Path(folder), load) as side:
        warm = load.in_flight if load.rate else max(64, load.in_flight // 2)
        while side.rollouts < warm:
            side.step()
        if profile:
            with profiled(side.source, title=str(profile)):
                return _cost(side, rollouts=rollouts, seconds=seconds)
        return _cost(side, rollouts=rollouts, seconds=seconds)


def _cost(side: Side, *, rollouts: int, seconds: float) -> Cost:
    wall, thread, process = time.perf_counter(), side.thread_cpu_s(), time.process_time()
    tokens, taken = side.tokens(), side.rollouts
    while side.rollouts - taken < rollouts if not side.load.rate else time.perf_counter() - wall < seconds:
        side.step()
    return Cost(
        wall_s=time.perf_counter() - wall,
        thread_s=side.thread_cpu_s() - thread,
        process_s=time.process_time() - process,
        rollouts=side.rollouts - taken,
        tokens=side.tokens() - tokens,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
