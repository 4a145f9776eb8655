"""Staleness, pushes, packing and the split of the GPUs for models of 4B to 70B, without GPUs: the real rules, simulated seconds.

    python -m benchmarks simulation [--scenario 7b 32b 70b math] [--staleness 0 1 2 4] [--json FILE]
    python -m benchmarks simulation --scenario 7b --gpus 8 --tokens 2000 --sigma 1.0 --longest 8192

Real: rollout worker, buffer, ledger, staleness rules, the plan of micro-batches. Simulated: the servers (a decode step of n rows
takes decode_s + n x row_s seconds; they have slots, and compute keys and values again after a push) and the trainer, which takes
groups, trains and pushes. Time is virtual (_simulated.py): a run of hours takes seconds, and is the same for the same seed.
Speeds follow from a model's size and an H100's data sheet, by the constants below and in checks/speed.py, which name their sources.

The table has a line for each scenario, split and max_staleness: seconds of a step, idle fractions of trainer and servers, "rows":
the used fraction of the servers' slots, "stall": the fraction of the time in which servers stand still, for pushes and for
computing their caches again, "packing": how even the work of the ranks is, staleness of the tokens, and "thrown": the fraction of
tokens dropped as stale. A split whose trainer does not fit into 80 GB is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks._models import SHAPES, trainer_bytes
from benchmarks._simulated import (
    Lengths,
    SimulatedProducer,
    SimulatedScorer,
    SimulatedServer,
    SimulatedStore,
    VirtualLoop,
    give_back_at,
    lengths_of,
)
from benchmarks.report import Report, parser_of
from grpo_async.batching.plan import plan_batch
from grpo_async.buffer.ledger import is_balanced
from grpo_async.buffer.sample_buffer import Watch
from grpo_async.checks.speed import GPU_BYTES, H100, TRAINING_MFU, ServerSpeed, server_speed
from grpo_async.config.sections import RolloutSection
from grpo_async.data.rows import Rows
from grpo_async.data.stream import PromptStream, SourceRows
from grpo_async.records import GroupStatus
from grpo_async.rollout.group import ErrorLog
from grpo_async.rollout.worker import RolloutWorker

_SKIP = 4  # first steps: the pipeline fills
_NEVER_S = 1e9

# ------------------------------------------------------------------------------------------------------------- the constants

_WIRE_BYTES_S = 40e9
"""Bytes/s of a push: rank 0 sends through one network card of 400 Gb/s (that of torchtitan's machines), at 0.8 of it. With all
cards of a machine checkpoint-engine reaches 61 to 76 GB/s (github.com/MoonshotAI/checkpoint-engine, README: 470 GB in 6.2 s)."""
_PUSH_S = 0.04
"""Seconds of the calls of a push, without the bytes: measured, pause 4 ms, start, resume and calls 18 ms, around the sends 10 ms
(NOTES.md)."""
_HOST_S = 0.3
"""Seconds to pack a step of 8 million tokens and send it to 8 ranks, where that does not hide behind the step before
(NOTES.md)."""
_OPTIMIZER_BYTES = 28
"""Bytes of a parameter that a step of the optimizer moves: it reads four values and writes three."""
_RESERVED_BYTES = 4e9
"""Bytes of a trainer's GPU for CUDA, NCCL and fragments; a server reserves 10% of the GPU and 4 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model, GPUs and a task. The figures of the task are assumptions: give yours (--tokens, --sigma, --longest, --groups)."""

    shape: str
    gpus: int
    tensor_parallel: int = 1
    """GPUs of a server."""
    unit: int = 1
    """Splits differ by this many GPUs."""
    groups: int = 64
    group_size: int = 16
    prompt: int = 500
    tokens: int = 8000
    sigma: float = 0.8
    longest: int = 32768

    def push_s(self) -> float:
        return _PUSH_S + 2 * SHAPES[self.shape].size.parameters / _WIRE_BYTES_S

    def trainer_bytes(self, trainers: int) -> float:
        """Memory on a trainer's GPU, with room for the longest sample."""
        longest = self.prompt + self.longest
        return trainer_bytes(SHAPES[self.shape], ranks=trainers, tokens=longest) + _RESERVED_BYTES


SCENARIOS = {
    "7b": Scenario(shape="7b", gpus=16, unit=2),
    "32b": Scenario(shape="32b", gpus=32, tensor_parallel=4, unit=4),
    # longer samples have no room on 40 trainers of 80 GB
    "70b": Scenario(shape="70b", gpus=64, tensor_parallel=8, unit=8, longest=16384),
    # configs/math.yaml on one machine
    "math": Scenario(shape="4b", gpus=8, groups=16, group_size=8, prompt=300, tokens=4000, sigma=0.6, longest=7168),
}


# ------------------------------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One simulated run. Seconds are virtual."""

    trainers: int
    servers: int
    max_staleness: int
    groups_per_step: int
    group_size: int
    lengths: Lengths
    speed: ServerSpeed
    train_s: float
    """Seconds of a token on one GPU."""
    pair_s: float = 0.0
    """Additional seconds of a token, for each token of its sample: attention."""
    prompt: int = 0
    step_s: float
    """Seconds of a step that do not depend on its tokens."""
    push_s: float
    filtered: float
    """Fraction of the groups with nothing to learn from; they keep their place in the step."""
    steps: int
    seed: int

    def training(self, completions: Sequence[int]) -> tuple[float, float]:
        """Seconds that the micro-batches of a step take as the real plan arranges them, and as if all ranks had the same work."""
        if not completions:
            return 0.0, 0.0
        lengths = [self.prompt + each for each in completions]
        limit = self.prompt + self.lengths.longest
        plan = plan_batch(lengths, world_size=self.trainers, micro_batch_tokens=limit, pack=True)
        cost = [length * (self.train_s + length * self.pair_s) for length in lengths]
        forwards = zip(*plan.ranks, strict=True)  # all ranks wait for the slowest of each
        taken = sum(max(sum(cost[i] for i in each.indices) for each in ranks) for ranks in forwards)
        return taken, sum(cost) / self.trainers


def simulate(setup: Setup) -> dict[str, float]:
    """Run `setup.steps` steps in virtual time; returns the figures of the steady state (COLUMNS).

    Raises:
        StandstillError: worker and trainer wait for each other forever.
        AssertionError: the ledger does not add up, or something staler than allowed was trained.
    """
    loop = VirtualLoop()
    servers = [SimulatedServer(loop, setup.speed) for _ in range(setup.servers)]
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
        stream=PromptStream(
            [SourceRows(rows=Rows([{"prompt": "simulated"}], locations=[""]))], seed=setup.seed, shuffle=False
        ),
        producer=SimulatedProducer(servers, setup.lengths),
        errors=ErrorLog(),
        scorer=scorer,
        store=store,
        num_steps=setup.steps,
    )
    table, buffer = worker.table, worker.buffer
    give_back_at(table, buffer, loop)
    watch = Watch(timeout_s=_NEVER_S, progress=lambda: table.num_events)

    def push(version: int) -> None:
        for server in servers:
            server.pause()
        loop.run_for(setup.push_s)
        for server in servers:
            server.resume()
        loop.call_soon(worker.on_version, version)

    # after each step: the time, and sums so far (of servers the mean)
    ticks: list[dict[str, float]] = []
    ages: list[list[int]] = []  # staleness of the tokens of each step
    waited_s = trained_s = even_s = 0.0
    push(0)
    running = loop.create_task(worker.run())
    try:
        for step in range(1, setup.steps + 1):
            began = loop.time()
            # it never blocks: virtual seconds pass in between
            while (
                groups := buffer.take(setup.groups_per_step, trainer_version=step - 1, watch=watch, wait_s=0.0)
            ) is None:
                loop.run_until_call()
            waited_s += loop.time() - began
            trained = [group for group in groups if group.samples]
            forwards_s, evenly_s = setup.training([length for group in trained for length in lengths_of(group)])
            trained_s, even_s = trained_s + forwards_s, even_s + evenly_s
            loop.run_for(setup.step_s + forwards_s)
            for group in groups:
                status = GroupStatus.TRAINED if group.samples else GroupStatus.FILTERED
                worker.close_group(group.group, status, scored=group, step=step)
            push(step)
            versions = [sample.policy_versions for group in trained for sample in group.samples]
            ages.append([step - 1 - int(version) for each in versions for version in each])
            for server in servers:
                server.catch_up()
            of_servers = {
                name: fmean(getattr(server, name) for server in servers) for name in ("busy_s", "stalled_s", "slot_s")
            }
            ticks.append(
                {"wall_s": loop.time(), "waited_s": waited_s, "trained_s": trained_s, "even_s": even_s, **of_servers}
            )
        assert is_balanced(table.ledger()), table.ledger()
        assert all(age <= setup.max_staleness for each in ages for age in each)
    finally:
        running.cancel()
        loop.run_for(0.0)
        loop.close()
    tokens = table.ledger()["tokens"]
    # without the first steps, and the last ones, in which nothing is left to generate
    last = len(ticks) - 2 - setup.max_staleness
    spent = {name: value - ticks[_SKIP - 1][name] for name, value in ticks[last].items()}
    wall = spent["wall_s"]
    return {
        "step s": wall / (last - _SKIP + 1),
        "trainer idle": spent["waited_s"] / wall,
        "servers idle": 1.0 - spent["busy_s"] / wall,
        "rows": spent["slot_s"] / wall / setup.speed.slots,
        "stall": spent["stalled_s"] / wall,
        "packing": spent["even_s"] / max(1e-9, spent["trained_s"]),
        "mean staleness": fmean(fmean(each) for each in ages[_SKIP:] if each),
        "thrown": tokens[GroupStatus.STALE] / max(1, tokens["started"]),
    }


# ----------------------------------------------------------------------------------------------------------- what is asked


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--scenario", nargs="+", choices=sorted(SCENARIOS), default=["7b", "32b", "70b"])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--filtered", type=float, default=0.2, help="fraction of groups with nothing to learn from")
    parser.add_argument("--steps", type=int, default=16)
    for name in ("gpus", "groups", "group-size", "tokens", "longest"):
        parser.add_argument(f"--{name}", type=int, help="in place of the scenario's")
    parser.add_argument(
        "--sigma", type=float, help="sigma of the lognormal lengths, in place of the scenario's; 0: constant"
    )
    options = parser.parse_args(arguments)
    if options.steps < _SKIP + max(options.staleness) + 4:
        parser.error("--steps is too few for a steady state")
    report = Report("simulation", options)
    for name in options.scenario:
        chosen = SCENARIOS[name]
        own = {key: value for key, value in vars(options).items() if hasattr(chosen, key) and value is not None}
        _answer(report, name, replace(chosen, **own), options)
    return report.finish()


COLUMNS = {
    "step s": "8.1f", "trainer idle": "12.2f", "servers idle": "12.2f", "rows": "5.2f", "stall": "6.3f", "packing": "7.3f",
    "mean staleness": "14.2f", "thrown": "6.3f",
}  # fmt: skip


def _answer(report: Report, name: str, scenario: Scenario, options: argparse.Namespace) -> None:
    names = " ".join(f"{column:>{spec.partition('.')[0]}}" for column, spec in COLUMNS.items())
    lines = [
        f"{name}, {scenario}; a push takes {scenario.push_s():.2f} s",
        f"{'train + generate':>16} {'max_staleness':>13} {names}",
    ]
    for setup in _setups(scenario, options):
        found = simulate(setup)
        split = f"{setup.trainers} + {setup.servers * scenario.tensor_parallel}"
        shown = " ".join(f"{found[column]:>{spec}}" for column, spec in COLUMNS.items())
        lines.append(f"{split:>16} {setup.max_staleness:>13} {shown}")
        report.row(f"{name}, {split}, max_staleness {setup.max_staleness}: step", [found["step s"]], "s")
    report.note("\n".join([*lines, ""]))


def _setups(scenario: Scenario, options: argparse.Namespace) -> Iterator[Setup]:
    """Every split into GPUs that train and GPUs that generate, if the trainer fits."""
    model = SHAPES[scenario.shape].size
    lengths = Lengths(mean=scenario.tokens, sigma=scenario.sigma, longest=scenario.longest)
    drawn = [lengths.draw(seed) for seed in range(2000)]
    # at any moment most rows are long ones, halfway through
    context = scenario.prompt + sum(each**2 for each in drawn) / (2 * sum(drawn))
    flops = H100.flops * TRAINING_MFU
    for generating in range(scenario.unit, scenario.gpus, scenario.unit):
        trainers = scenario.gpus - generating
        if generating < scenario.tensor_parallel or scenario.trainer_bytes(trainers) > GPU_BYTES:
            continue
        setup = Setup(
            trainers=trainers,
            servers=generating // scenario.tensor_parallel,
            max_staleness=0,
            groups_per_step=scenario.groups,
            group_size=scenario.group_size,
            lengths=lengths,
            speed=server_speed(model, gpus=scenario.tensor_parallel, context=context),
            train_s=model.training_flops(0) / flops,
            pair_s=(model.training_flops(1) - model.training_flops(0)) / flops,
            prompt=scenario.prompt,
            step_s=_HOST_S + _OPTIMIZER_BYTES * model.parameters / trainers / H100.memory,
            push_s=scenario.push_s(),
            filtered=options.filtered,
            steps=options.steps,
            seed=options.seed,
        )
        yield from (replace(setup, max_staleness=staleness) for staleness in options.staleness)
