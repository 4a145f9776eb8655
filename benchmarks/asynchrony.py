"""How much asynchrony gains: real runs of one config, synchronous and asynchronous in turns; their speed-up against the ideal one.

    python -m benchmarks asynchrony [--pairs 3] [--steps 12] [--engine embedded|vllm] [--json FILE]

A random model of a few million parameters learns to write digits. The rewards of a group are never all equal, so every group is
trained, and the model is large enough that computing outweighs the cost of requests. Config, seed and number of steps are the same;
only rollout.max_staleness differs: 0, and --staleness. The synchronous runs give

    g     seconds of a step in which the trainer waits: generation, with nothing beside it
    t     the other seconds of a step: training, the push, everything else that the trainer does
    ideal speed-up = (g + t) / max(g, t)

The steady state is all steps but the first --skip and the last, in which nothing is left to generate. The ideal ignores that two
processes that compute at once slow each other down (caches, memory, clock): on two cores by a factor of about 1.1.

The speed-up is that of steps. The one "in trained tokens" differs if the two kinds of runs have learned completions of different
lengths. Overlap efficiency is the fraction of the time in which the busier side is busy; the trainer is busy unless it waits for
samples.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import _server
from benchmarks._models import ModelShape
from benchmarks.report import Report, figures, in_turns, parser_of, ratios
from grpo_async.config.loader import set_options
from grpo_async.rewards.text import final_text

RUN_TIMEOUT_S = 600.0
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
MAX_COMPLETION_TOKENS = 48
GROUPS_PER_STEP, GROUP_SIZE, SLOTS = 5, 8, 20


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of a synchronous and an asynchronous run")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--staleness", type=int, default=1, help="max_staleness of the asynchronous runs")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the config, for both"
    )
    options = parser.parse_args(arguments)
    if options.steps <= options.skip + options.staleness + 1:
        parser.error("--steps leaves no step between those that are skipped and the last")
    report = Report("asynchrony", options)

    runs: dict[str, list[dict[str, float]]] = {SYNCHRONOUS: [], ASYNCHRONOUS: []}
    with tempfile.TemporaryDirectory(prefix="grpo-async-bench-") as scratch:
        folder = Path(scratch)
        config = write_task(folder, seed=options.seed)
        for number, variant in in_turns(list(runs), options.pairs):
            run_dir = folder / f"{variant}-{number}"
            log, made = folder / f"{run_dir.name}.log", command(config, run_dir, variant, options)
            _server.run_logged(made, log, environment=os.environ, timeout_s=RUN_TIMEOUT_S)
            lines = _server.read_lines(run_dir / "metrics.jsonl")
            last = options.staleness + 1  # both: in the last steps of an asynchronous run nothing is left to generate
            runs[variant].append(statistics_of(lines, skip=options.skip, last=last))
    _report(report, runs)
    return report.finish()


def command(config: Path, run_dir: Path, variant: str, options: argparse.Namespace) -> list[str]:
    """What a user would type to start such a run."""
    settings = {
        "run.name": run_dir.name,
        "run.dir": str(run_dir.parent),
        "run.seed": options.seed,
        "rollout.max_staleness": options.staleness if variant == ASYNCHRONOUS else 0,
        "training.max_steps": options.steps,
        "checkpoint.every_steps": 10 * options.steps,
        "inference.engine": options.engine,
        "evaluation": "null",
    }
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *options.set]
    return [sys.executable, "-m", "grpo_async", "train", str(config), "--quiet", *set_options(overrides)]


UNITS = {
    "trained tokens": "1/s", "steps": "1/h", "step": "s", "waiting for samples": "s", "server busy": "s", "training": "s",
    "push": "s", "trainer idle": "fraction", "servers idle": "fraction", "overlap efficiency": "fraction",
    "staleness, mean": "steps", "effective sample size": "fraction", "all steps": "s",
}  # fmt: skip


def statistics_of(lines: Sequence[Mapping[str, float]], *, skip: int, last: int) -> dict[str, float]:
    """The figures of a run (UNITS), from its metrics.jsonl without the first `skip` and the last `last` lines; seconds are those
    of a mean step.

    Steps of 2 s with 1.5 s busy and of 4 s with 2.5 s busy: the server idles (6 - 4) / 6 = 0.33 of the time, not the mean of
    0.25 and 0.375.
    """
    steady = lines[skip : len(lines) - last]
    wall = sum(line["step_time"] for line in steady)

    def seconds(fraction: str) -> float:
        return sum(line[fraction] * line["step_time"] for line in steady)

    def mean(name: str) -> float:
        values = [line[name] for line in steady if line.get(name) is not None]
        return statistics.fmean(values) if values else 0.0

    waited = seconds("pipeline/trainer_idle_ratio")
    busy = wall - seconds("pipeline/generator_idle_ratio")
    return {
        "trained tokens": seconds("perf/trained_tokens_per_s") / wall,
        "steps": 3600.0 * len(steady) / wall,
        "step": wall / len(steady),
        "waiting for samples": waited / len(steady),
        "server busy": busy / len(steady),
        "training": seconds("pipeline/training_fraction") / len(steady),
        "push": seconds("pipeline/pushing_fraction") / len(steady),
        "trainer idle": waited / wall,
        "servers idle": 1.0 - busy / wall,
        "overlap efficiency": max(busy, wall - waited) / wall,
        "staleness, mean": mean("async/staleness_mean"),
        "effective sample size": mean("sampling/ess"),
        "all steps": sum(line["step_time"] for line in lines),
    }


def _report(report: Report, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    report.runs(runs, UNITS)
    speedups = ratios(figures(runs, "step"), SYNCHRONOUS, ASYNCHRONOUS)
    waits = [(run["waiting for samples"], run["step"]) for run in runs[SYNCHRONOUS]]
    ideals = [step / max(wait, step - wait) for wait, step in waits]  # (g + t) / max(g, t)
    reached = [a / b for a, b in zip(speedups, ideals, strict=True)]
    report.row("speed-up", speedups, "ratio")
    report.row(
        "speed-up in trained tokens", ratios(figures(runs, "trained tokens"), ASYNCHRONOUS, SYNCHRONOUS), "ratio"
    )
    report.row("ideal speed-up, (g + t) / max(g, t)", ideals, "ratio")
    report.row("speed-up / ideal", reached, "ratio")
    overlap = statistics.median(run["overlap efficiency"] for run in runs[ASYNCHRONOUS])
    report.target("speed-up / ideal", statistics.median(reached), at_least=0.9)
    report.target("overlap efficiency", overlap, at_least=0.9)


def digits(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """0 to 1: half of it for the fraction of the budget spent on digits, half for digits that continue the one before.

    A budget of 4 tokens and "12a7": 3 of 4 are digits, 1 of 4 follows on (the 2): 0.5 * 3 / 4 + 0.5 * 1 / 4 = 0.5.
    """
    scores = []
    for completion in completions:
        text = final_text(completion)
        num_digits = sum(character in "0123456789" for character in text)
        follow_on = sum(pair[0] + pair[1] in "01234567890" for pair in pairwise(text))
        scores.append((0.5 * num_digits + 0.5 * follow_on) / MAX_COMPLETION_TOKENS)
    return scores


def write_task(folder: Path, *, seed: int) -> Path:
    """Write model, data and config to `folder`; returns the config."""
    from grpo_async.quickstart.model import train_tokenizer
    from grpo_async.quickstart.prepare import write_rows
    from grpo_async.quickstart.tasks import TASKS

    task = TASKS["think"]
    tokenizer = train_tokenizer(task.vocabulary())
    write_rows(folder / "train.jsonl", map(task.row, task.training_items()), seed=seed)
    shape = ModelShape(
        vocab=len(tokenizer), hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=768
    )  # 3.2 million parameters
    shape.save(folder / "model", tokenizer, seed=seed, max_length=256, initializer_range=0.05)
    return _server.write_config(
        folder,
        rollout={
            "groups_per_step": GROUPS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_completion_tokens": MAX_COMPLETION_TOKENS,
        },
        rewards=[{"function": "benchmarks.asynchrony:digits"}],
        inference={"engine": "embedded", "max_model_len": 128, "embedded": {"max_slots": SLOTS}},
        loss={"type": "dapo"},
        optimizer={"lr": 5e-4, "warmup_steps": 2, "betas": [0.9, 0.99]},
        training={"micro_batch_tokens": 2048},
    )
