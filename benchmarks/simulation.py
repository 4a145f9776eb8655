"""Staleness, queue and split of the GPUs at any scale, without GPUs: the real rules, simulated seconds.

    python -m benchmarks simulation [--gpus 8] [--sigma 1.0] [--staleness 0 1 2 4] [--queue 1 2] [--json FILE]

Real: rollout worker, admission, buffer, ledger, staleness rules. Simulated: the servers (a decode step of n rows takes --decode-s +
n x --row-s seconds; slots; keys and values are computed again after a push) and the trainer, which takes groups, trains (--train-s
a token and GPU) and pushes. Time is virtual (_simulated.py): a run of hours takes a second, the same for the same seed.

First the target: with completions of constant length and max_staleness 1, at every split, at least 0.9 of the ideal speed-up
(g + t) / max(g, t) over max_staleness 0. Then a sweep with long-tailed lengths: steps/h for each max_staleness, room in the queue
(in steps) and split, and the best split of each. "thrown" is the fraction of generated tokens dropped as stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks._simulated import (
    Lengths,
    ServerSpeed,
    SimulatedProducer,
    SimulatedScorer,
    SimulatedServer,
    SimulatedStore,
    TellingBuffer,
    VirtualLoop,
    num_tokens_of,
)
from benchmarks.report import Report, parser_of
from grpo_async.buffer.admission import Admission
from grpo_async.buffer.ledger import Ledger, is_closed
from grpo_async.buffer.sample_buffer import Watch
from grpo_async.config.sections import RolloutSection
from grpo_async.data.stream import PromptStream
from grpo_async.records import GroupStatus
from grpo_async.rollout.error_log import ErrorLog
from grpo_async.rollout.worker import RolloutWorker

_SKIP = 4  # first steps: the pipeline fills
_NEVER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One simulated run. Seconds are virtual."""

    gpus: int
    servers: int
    max_staleness: int
    queue_steps: int
    """Room in the queue, in steps' worth of groups."""
    groups_per_step: int
    group_size: int
    lengths: Lengths
    speed: ServerSpeed
    train_s: float
    """Of a token on one GPU."""
    step_s: float
    """Of a step, whatever its size."""
    push_s: float
    filtered: float
    """Fraction of the groups with nothing to learn from; they keep their place in their step."""
    steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run in its steady state. Seconds are virtual, of a mean step."""

    step_s: float
    wait_s: float
    trainer_idle: float
    generator_idle: float
    overlap: float
    staleness: float
    staleness_max: float
    thrown: float

    @property
    def steps_per_hour(self) -> float:
        return 3600.0 / self.step_s

    @property
    def ideal_speedup(self) -> float:
        """Of a synchronous run: (g + t) / max(g, t), where g is what it waits and t the rest of a step."""
        return self.step_s / max(self.wait_s, self.step_s - self.wait_s)


class _Tick(NamedTuple):
    """After a step: the time, what the trainer waited and the servers generated so far, staleness of the step's tokens."""

    time_s: float
    waited_s: float
    busy_s: float
    ages: Sequence[int]


def simulate(setup: Setup) -> Outcome:
    """Run `setup.steps` steps in virtual time.

    Raises:
        StandstillError: worker and trainer wait for each other for ever.
        AssertionError: the ledger does not add up, or something staler than allowed was trained.
    """
    loop = VirtualLoop()
    servers = [SimulatedServer(loop, setup.speed) for _ in range(setup.servers)]
    ledger = Ledger()
    admission = Admission(
        groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness, version=0, last_version=setup.steps
    )
    worker: RolloutWorker
    buffer = TellingBuffer(
        loop,
        max_groups=setup.queue_steps * setup.groups_per_step,
        max_staleness=setup.max_staleness,
        on_drop=lambda scored, status, step: worker.drop_scored(scored, status, step),
    )
    scorer: Any = SimulatedScorer(filtered=setup.filtered, seed=setup.seed)
    store: Any = SimulatedStore()
    worker = RolloutWorker(
        section=RolloutSection(
            group_size=setup.group_size,
            groups_per_step=setup.groups_per_step,
            max_staleness=setup.max_staleness,
            max_rounds_without_signal=1000,
        ),
        seed=setup.seed,
        stream=PromptStream([{"prompt": "simulated"}], seed=setup.seed, shuffle=False),
        producer=SimulatedProducer(servers, setup.lengths),
        errors=ErrorLog(),
        scorer=scorer,
        buffer=buffer,
        ledger=ledger,
        admission=admission,
        store=store,
    )
    watch = Watch(
        timeout_s=_NEVER_S,
        setting="training.stall_timeout_s",
        progress=lambda: ledger.num_events,
        heartbeat=loop.run_until_call,
        heartbeat_s=0.0,  # it never blocks: virtual seconds pass in the heartbeat
    )
    num_trainers = setup.gpus - setup.servers

    def push(version: int) -> None:
        for server in servers:
            server.pause()
        loop.run_for(setup.push_s)
        for server in servers:
            server.resume()
        loop.call_soon(worker.on_version, version)
        admission.advance(version)

    ticks: list[_Tick] = []
    waited_s = 0.0
    push(0)
    running = loop.create_task(worker.run())
    try:
        for step in range(1, setup.steps + 1):
            began = loop.time()
            groups = buffer.take(setup.groups_per_step, trainer_version=step - 1, watch=watch)
            waited_s += loop.time() - began
            trained = [group for group in groups if group.samples]
            loop.run_for(setup.step_s + sum(map(num_tokens_of, trained)) * setup.train_s / num_trainers)
            for group in groups:
                status = GroupStatus.TRAINED if group.samples else GroupStatus.FILTERED
                worker.close_group(group.group, status, scored=group, step=step)
            push(step)
            samples = [sample for group in trained for sample in group.samples]
            ages = [step - 1 - version for sample in samples for version in sample.policy_versions if version >= 0]
            ticks.append(_Tick(loop.time(), waited_s, fmean(server.busy_s() for server in servers), ages))
        assert is_closed(ledger.snapshot()), ledger.snapshot()
        assert all(age <= setup.max_staleness for tick in ticks for age in tick.ages)
    finally:
        running.cancel()
        loop.run_for(0.0)
        loop.close()
    tokens = ledger.snapshot()["tokens"]
    return _outcome(setup, ticks, thrown=tokens[GroupStatus.STALE] / max(1, tokens["started"]))


def _outcome(setup: Setup, ticks: Sequence[_Tick], *, thrown: float) -> Outcome:
    """Without the first steps, and the last ones, in which nothing is left to generate."""
    first, last = ticks[_SKIP - 1], ticks[-2 - setup.max_staleness]
    count = len(ticks) - 1 - setup.max_staleness - _SKIP
    wall, waited, busy = last.time_s - first.time_s, last.waited_s - first.waited_s, last.busy_s - first.busy_s
    ages = [tick.ages for tick in ticks[_SKIP:] if tick.ages]
    return Outcome(
        step_s=wall / count,
        wait_s=waited / count,
        trainer_idle=waited / wall,
        generator_idle=1.0 - busy / wall,
        overlap=max(busy, wall - waited) / wall,
        staleness=fmean(map(fmean, ages)),
        staleness_max=max(map(max, ages)),
        thrown=thrown,
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--servers", type=int, nargs="+", help="GPUs of them that generate (default: every split)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--queue", type=int, nargs="+", help="in steps (default: max_staleness + 1, as runs have it)")
    parser.add_argument("--groups", type=int, default=16, help="groups of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="mean length of a completion")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lognormal lengths in the sweep; 0: constant")
    parser.add_argument("--longest", type=int, default=16384, help="longest completion")
    parser.add_argument("--slots", type=int, default=256, help="of a server")
    parser.add_argument("--decode-s", type=float, default=0.012, help="seconds of a decode step, and")
    parser.add_argument("--row-s", type=float, default=0.00005, help="more for each row of it")
    parser.add_argument("--prefill-s", type=float, default=0.00002, help="of a token that is computed again")
    parser.add_argument("--train-s", type=float, default=0.0004, help="of a trained token, on one GPU")
    parser.add_argument("--step-s", type=float, default=1.0, help="of a step, whatever its size")
    parser.add_argument("--push-s", type=float, default=1.0)
    parser.add_argument("--filtered", type=float, default=0.2, help="fraction of groups with nothing to learn from")
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args(arguments)
    if options.steps < _SKIP + max(options.staleness) + 4:
        parser.error("--steps is too few for a steady state")
    report = Report("simulation", options)
    splits = options.servers or range(1, options.gpus)
    _constant_lengths(report, [_setup(options, servers=servers) for servers in splits])
    lines = [_HEADER]
    options.outcomes = []
    for staleness in options.staleness:
        best: dict[int, tuple[float, int]] = {}  # by room in the queue: the fastest split
        for queue, servers in product(options.queue or [staleness + 1], splits):
            setup = replace(_setup(options, servers=servers), max_staleness=staleness, queue_steps=queue)
            outcome = simulate(setup)
            best[queue] = max(best.get(queue, (0.0, 0)), (outcome.steps_per_hour, servers))
            lines.append(_line(setup, outcome))
            options.outcomes.append({**asdict(setup), **asdict(outcome), "steps_per_hour": outcome.steps_per_hour})
        for queue, (speed, servers) in best.items():
            name = f"max_staleness {staleness}, queue {queue}: best split {servers}+{options.gpus - servers}"
            report.row(name, [speed], "steps/h")
    report.note("\n".join(lines))
    return report.finish()


def _setup(options: argparse.Namespace, *, servers: int) -> Setup:
    """A synchronous run with the options' distribution of lengths."""
    return Setup(
        gpus=options.gpus,
        servers=servers,
        max_staleness=0,
        queue_steps=1,
        groups_per_step=options.groups,
        group_size=options.group_size,
        lengths=Lengths(mean=options.tokens, sigma=options.sigma, longest=options.longest),
        speed=ServerSpeed(
            slots=options.slots, decode_s=options.decode_s, row_s=options.row_s, prefill_s=options.prefill_s
        ),
        train_s=options.train_s,
        step_s=options.step_s,
        push_s=options.push_s,
        filtered=options.filtered,
        steps=options.steps,
        seed=options.seed,
    )


def _constant_lengths(report: Report, setups: Sequence[Setup]) -> None:
    """The target: completions of one length, no group filtered, max_staleness 1 against 0 at every split."""
    speedups, overlaps = [], []
    for setup in setups:
        base = replace(setup, lengths=replace(setup.lengths, sigma=0.0), filtered=0.0)
        synchronous = simulate(base)
        asynchronous = simulate(replace(base, max_staleness=1, queue_steps=2))
        speedups.append(synchronous.step_s / asynchronous.step_s / synchronous.ideal_speedup)
        overlaps.append(asynchronous.overlap)
    report.row("constant lengths, max_staleness 1: speed-up / ideal, over the splits", speedups, "ratio")
    report.row("constant lengths, max_staleness 1: overlap efficiency, over the splits", overlaps, "fraction")
    report.target("constant lengths: lowest speed-up / ideal", min(speedups), at_least=0.9)
    report.target("constant lengths: lowest overlap efficiency", min(overlaps), at_least=0.9)


_HEADER = (
    f"{'staleness':>9} {'queue':>5} {'split':>7} {'steps/h':>9} {'trainer idle':>12} {'generator idle':>14} {'overlap':>7} "
    f"{'staleness mean':>14} {'thrown':>6}"
)


def _line(setup: Setup, outcome: Outcome) -> str:
    split = f"{setup.servers}+{setup.gpus - setup.servers}"
    return (
        f"{setup.max_staleness:>9} {setup.queue_steps:>5} {split:>7} {outcome.steps_per_hour:>9.1f} {outcome.trainer_idle:>12.2f} "
        f"{outcome.generator_idle:>14.2f} {outcome.overlap:>7.2f} {outcome.staleness:>14.2f} {outcome.thrown:>6.3f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
