"""Staleness, queue and split of the GPUs at any scale, without GPUs: the real rules, simulated seconds.

    python -m benchmarks simulation [--gpus 8] [--sigma 1.0] [--staleness 0 1 2 4] [--queue 1 2] [--json FILE]

Real: rollout worker, admission, buffer, ledger, staleness rules, and the trainer's loop with its order of taking, training,
settling and pushing. Simulated: the servers (a decode step of n rows takes --decode-s + n x --row-s seconds; slots; keys and values
are computed again after a push), the trainer (--train-s a token and GPU), the push. Time is virtual (_virtual_time.py): a run of
hours takes a second, and the same seed gives the same figures.

First the target: with completions of constant length and max_staleness 1, at every split, at least 0.9 of the ideal speed-up
(g + t) / max(g, t) over max_staleness 0. Then a sweep with long-tailed lengths: steps/h for each max_staleness, room in the queue
(in steps) and split, and the best split of each. "thrown" is the share of generated tokens dropped as stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

from benchmarks._simulated_parts import (
    Lengths,
    ServerSpeed,
    SimulatedProducer,
    SimulatedScorer,
    SimulatedServer,
    SimulatedSource,
    SimulatedStore,
    SimulatedSync,
    TellingBuffer,
)
from benchmarks._virtual_time import VirtualLoop
from benchmarks.report import Report, add_options
from grpo_async.buffer.admission import Admission
from grpo_async.buffer.ledger import Ledger, is_closed
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.data.stream import PromptStream
from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.rollout.error_log import ErrorLog
from grpo_async.rollout.worker import RolloutWorker, WorkerSettings

_SKIP = 4  # first steps: the pipeline fills


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
    """Share of the groups with nothing to learn from; they keep their place in their step."""
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


def simulate(setup: Setup) -> Outcome:
    """Run `setup.steps` steps in virtual time.

    Raises:
        StandstillError: worker and trainer wait for each other for ever.
        AssertionError: the ledger does not add up, or something staler than allowed was trained.
    """
    from grpo_async.trainer.loop import LeaderLoop  # here: torch is not loaded for --help
    from grpo_async.training.metrics import PipelineMeter, Reading
    from grpo_async.training.step import StepResult

    loop = VirtualLoop()
    servers = [SimulatedServer(loop, setup.speed) for _ in range(setup.servers)]
    ledger, admission = Ledger(), _admission(setup)
    source, worker = _rollout_side(setup, loop, servers, ledger, admission)
    ticks: list[tuple[float, float, float]] = []  # after each step: time, waited, busy
    ages: list[dict[str, float]] = []
    num_trainers = setup.gpus - setup.servers

    def busy_s() -> float:
        return sum(server.busy_s() for server in servers) / len(servers)

    def train(*_: object) -> StepResult:
        loop.run_for(setup.step_s + source.taken_tokens * setup.train_s / num_trainers)
        return StepResult(loss=0.0, grad_norm=1.0, num_tokens=source.taken_tokens, updates=(True,), metrics={})

    def on_step(step: int, metrics: dict[str, float]) -> None:
        ticks.append((loop.time(), source.waited_s, busy_s()))
        ages.append(metrics)

    nothing = SimpleNamespace(poll=lambda: None, take_metrics=dict)
    place: Any = SimpleNamespace(
        config=_config(setup),
        num_ranks=1,
        channel=SimpleNamespace(send=lambda _: None),
        step=train,
        checkpoints=nothing,
        obstacle_to_shared_prompts="a simulated sample is a length, and its time goes by that",
    )
    meter = PipelineMeter(Reading(time_s=0.0, generation_busy_s=0.0, generated_tokens=0))
    trainer = LeaderLoop(
        place,
        source=source,  # type: ignore[arg-type]
        sync=SimulatedSync(loop, servers, setup.push_s),  # type: ignore[arg-type]
        read=lambda: Reading(time_s=loop.time(), generation_busy_s=busy_s(), generated_tokens=0),
        on_step=on_step,
        meter=meter,
        progress={},
    )
    trainer.push(0)
    running = loop.create_task(worker.run())
    try:
        trainer.run(first_step=1)
        assert is_closed(ledger.snapshot()), ledger.snapshot()
        assert all(age["async/staleness_max"] <= setup.max_staleness for age in ages if "async/staleness_max" in age)
    finally:
        running.cancel()
        loop.run_for(0.0)
        loop.close()
    tokens = ledger.snapshot()["tokens"]
    return _outcome(setup, ticks, ages, thrown=tokens[GroupStatus.STALE] / max(1, tokens["started"]))


def _admission(setup: Setup) -> Admission:
    return Admission(
        groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness, version=0, last_version=setup.steps
    )


def _rollout_side(
    setup: Setup, loop: VirtualLoop, servers: Sequence[SimulatedServer], ledger: Ledger, admission: Admission
) -> tuple[SimulatedSource, RolloutWorker]:
    def on_drop(scored: ScoredGroup, status: GroupStatus, step: int | None) -> None:
        worker.drop_scored(scored, status, step)

    buffer = TellingBuffer(
        loop,
        max_groups=setup.queue_steps * setup.groups_per_step,
        max_staleness=setup.max_staleness,
        on_drop=on_drop,
    )
    scorer: Any = SimulatedScorer(filtered=setup.filtered, seed=setup.seed)
    store: Any = SimulatedStore()
    worker = RolloutWorker(
        settings=WorkerSettings(
            group_size=setup.group_size,
            max_staleness=setup.max_staleness,
            zero_variance="skip",
            seed=setup.seed,
            max_failed_groups=1,
            max_groups_without_signal=1000,
        ),
        stream=PromptStream([{"prompt": "simulated"}], seed=setup.seed, shuffle=False),
        producer=SimulatedProducer(servers, setup.lengths),
        errors=ErrorLog(),
        scorer=scorer,
        buffer=buffer,
        ledger=ledger,
        admission=admission,
        store=store,
    )
    return SimulatedSource(loop, worker, buffer, ledger, admission), worker


def _config(setup: Setup) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "simulated"},
            "model": {"path": "none"},
            "data": {"train": {"type": "jsonl", "path": "none.jsonl"}},
            "rewards": [{"function": "none:none"}],
            "rollout": {
                "groups_per_step": setup.groups_per_step,
                "group_size": setup.group_size,
                "max_staleness": setup.max_staleness,
            },
            "training": {"max_steps": setup.steps},
            "checkpoint": {"every_steps": 10 * setup.steps},
            "record": {"rollouts": {"token_figures": False}},
        }
    )


def _outcome(
    setup: Setup, ticks: Sequence[tuple[float, float, float]], ages: Sequence[Mapping[str, float]], *, thrown: float
) -> Outcome:
    """Without the first steps, and the last ones, in which nothing is left to generate."""
    first, last = ticks[_SKIP - 1], ticks[-2 - setup.max_staleness]
    count = len(ticks) - 1 - setup.max_staleness - _SKIP
    wall, waited, busy = (b - a for a, b in zip(first, last, strict=True))
    ages = [age for age in ages[_SKIP:] if "async/staleness_mean" in age]
    return Outcome(
        step_s=wall / count,
        wait_s=waited / count,
        trainer_idle=waited / wall,
        generator_idle=1.0 - busy / wall,
        overlap=max(busy, wall - waited) / wall,
        staleness=sum(age["async/staleness_mean"] for age in ages) / len(ages),
        staleness_max=max(age["async/staleness_max"] for age in ages),
        thrown=thrown,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--filtered", type=float, default=0.2, help="share of groups with nothing to learn from")
    parser.add_argument("--steps", type=int, default=32)
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.steps < _SKIP + max(options.staleness) + 4:
        parser.error("--steps is too few for a steady state")
    report = Report("simulation", options)

    sweep = Sweep(options)
    _constant_lengths(report, sweep)
    lines = [_HEADER]
    options.outcomes = []
    for staleness in options.staleness:
        best: dict[int, tuple[float, int]] = {}  # by room in the queue: the fastest split
        for queue, servers in product(options.queue or [staleness + 1], sweep.splits):
            setup = sweep.setup(servers=servers, max_staleness=staleness, queue_steps=queue)
            outcome = simulate(setup)
            best[queue] = max(best.get(queue, (0.0, 0)), (outcome.steps_per_hour, servers))
            lines.append(_line(setup, outcome))
            options.outcomes.append({**asdict(setup), **asdict(outcome), "steps_per_hour": outcome.steps_per_hour})
        for queue, (speed, servers) in best.items():
            name = f"max_staleness {staleness}, queue {queue}: best split {servers}+{options.gpus - servers}"
            report.row(name, [speed], "steps/h")
    report.note("\n".join(lines))
    return report.finish()


class Sweep:
    """Makes setups from the options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.splits: Sequence[int] = options.servers or range(1, options.gpus)

    def setup(self, *, servers: int, max_staleness: int, queue_steps: int) -> Setup:
        """With the options' distribution of lengths."""
        options = self._options
        return Setup(
            gpus=options.gpus,
            servers=servers,
            max_staleness=max_staleness,
            queue_steps=queue_steps,
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


def _constant_lengths(report: Report, sweep: Sweep) -> None:
    """The target: completions of one length, no group filtered, max_staleness 1 against 0 at every split."""
    shares, overlaps = [], []
    for servers in sweep.splits:
        base = sweep.setup(servers=servers, max_staleness=0, queue_steps=1)
        base = replace(base, lengths=replace(base.lengths, sigma=0.0), filtered=0.0)
        synchronous = simulate(base)
        asynchronous = simulate(replace(base, max_staleness=1, queue_steps=2))
        shares.append(synchronous.step_s / asynchronous.step_s / synchronous.ideal_speedup)
        overlaps.append(asynchronous.overlap)
    report.row("constant lengths, max_staleness 1: speed-up / ideal, over the splits", shares, "ratio")
    report.row("constant lengths, max_staleness 1: overlap efficiency, over the splits", overlaps, "share")
    report.target("constant lengths: lowest speed-up / ideal", min(shares), at_least=0.9)
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
