"""What the rollout store costs the training thread: the same work with and without it, in turns, in one process.

    python -m benchmarks store_writer [--rollouts 64] [--tokens 150] [--step-ms 1000] [--pairs 30] [--json FILE]

A step is work as the trainer's main thread does it: matrix products, with the interpreter's lock released, and plain Python between
them. With the store on, each step appends one group with all statistics of the trainer; blocks are written and sealed as in a run.
Off and on take turns (off, on, on, off, ...), so that a drift of the machine hits both. The slow-down is the median over the
pairs of on / off - 1, and its spread the interval that holds 95% of the medians of resampled pairs. "processor" is the same of the
seconds that all threads of the process computed: what a machine without an idle core would lose, and what a busy machine measures
more exactly. The defaults are 9600 tokens a second, more than one GPU trains of a 7B model. Exit code 1 above --max-percent.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Report, in_turns, median_interval, parser_of, ratios, seconds_of

MATRIX = 256
PRODUCTS_PER_LOOP = 40


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rollouts", type=int, default=64, help="of the group that each step appends")
    parser.add_argument("--tokens", type=int, default=150, help="of each rollout")
    parser.add_argument("--step-ms", type=float, default=1000.0, help="about how long a step works")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--block-mb", type=int, default=16, help="record.rollouts.block_mb")
    parser.add_argument("--max-percent", type=float, default=2.0)
    options = parser.parse_args(arguments)
    report = Report("store_writer", options)
    _measure(report, options)
    return report.finish()


def _measure(report: Report, options: argparse.Namespace) -> None:
    import torch

    from grpo_async.config.record_sections import RolloutRecordSection
    from grpo_async.records import GroupStatus
    from grpo_async.store.rollout_store import RolloutStore

    torch.set_num_threads(1)
    matrix = torch.randn(MATRIX, MATRIX) / MATRIX**0.5
    loops = max(1, round(options.step_ms / 1000 / seconds_of(lambda: _work(matrix, 5)) * 5))
    groups = [_group(options, index) for index in range(options.pairs + 9)]
    lines = [_build_line(*groups.pop()) for _ in range(8)]
    appends: list[float] = []
    wall: dict[str, list[float]] = {"off": [], "on": []}
    computed: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        with RolloutStore(Path(folder), settings=RolloutRecordSection(block_mb=options.block_mb)) as store:

            def on() -> None:
                scored, stats = groups.pop()
                append = functools.partial(
                    store.append, scored.group, GroupStatus.TRAINED, 1, scored=scored, stats=stats
                )
                appends.append(seconds_of(append))
                _work(matrix, loops)

            steps: dict[str, Callable[[], None]] = {"off": lambda: _work(matrix, loops), "on": on}
            for number, name in in_turns(("off", "on"), options.pairs + 1):
                before = time.process_time()
                seconds = seconds_of(steps[name])
                store.flush()
                if number > 0:  # the first pair warms up
                    wall[name].append(seconds)
                    computed[name].append(time.process_time() - before)
        sealed = sum(path.stat().st_size for path in Path(folder).glob("block-*.parquet"))
    tokens = options.rollouts * options.tokens
    report.row("step without the store", [1000 * seconds for seconds in wall["off"]], "ms")
    slow_downs = {
        name: [100 * (ratio - 1) for ratio in ratios(values, "on", "off")]
        for name, values in (("slow-down by the store", wall), ("slow-down, of the processor", computed))
    }
    for name, values in slow_downs.items():
        report.row(name, values, "%")
    report.row("append", [1000 * seconds for seconds in appends], "ms")
    report.row("a line, on its thread", [1000 * seconds for seconds, _ in lines], "ms")
    report.row("as lines", [lines[-1][1] / tokens], "bytes per token")
    report.row("sealed", [sealed / ((options.pairs + 1) * tokens)], "bytes per token")
    for name, values in slow_downs.items():
        low, high = median_interval(values, seed=options.seed)
        report.note(f"the median of the {name} is within {low:.2f}% and {high:.2f}% (95%, bootstrap)")
    median = statistics.median(slow_downs["slow-down by the store"])
    report.target("slow-down by the store, median %", median, at_most=options.max_percent)


def _build_line(scored: Any, stats: dict[str, Any]) -> tuple[float, int]:
    """Seconds that the line of a group takes to build, and its bytes."""
    from grpo_async.records import GroupStatus
    from grpo_async.store.lines import Entry, line_of

    entry = Entry(
        seq=0,
        group=scored.group,
        status=GroupStatus.TRAINED,
        step=1,
        written_at=0.0,
        scored=scored,
        stats=stats,
    )
    began = time.perf_counter()
    line = line_of(entry)
    return time.perf_counter() - began, len(line)


def _work(matrix: Any, loops: int) -> None:
    """Matrix products, and Python between them as the main loop has it: small objects, dicts, sums."""
    product = matrix
    for loop in range(loops):
        for _ in range(PRODUCTS_PER_LOOP):
            product = product @ matrix
        metrics = {f"metric/{name}": float(name) for name in range(200)}
        sum(value * loop for value in metrics.values())


def _group(options: argparse.Namespace, group_id: int) -> tuple[Any, dict[str, Any]]:
    import numpy as np

    from grpo_async.records import (
        FinishReason,
        Origin,
        Prompt,
        RolloutCompletion,
        RolloutGroup,
        RolloutSample,
        RolloutStatus,
        ScoredGroup,
        TaggedMessage,
        TokenStats,
        TurnRecord,
    )

    rng = np.random.default_rng(options.seed + group_id)
    count = options.tokens
    completions, samples, stats = [], [], {}
    prompt_ids = rng.integers(0, 150_000, 100, dtype=np.int32)

    def numbers() -> Any:
        return rng.normal(size=count).astype(np.float32)

    for index in range(options.rollouts):
        rollout_id = f"g{group_id}-r{index}"
        turn = TurnRecord(
            output_ids=rng.integers(0, 150_000, count, dtype=np.int32),
            output_logprobs=(-rng.exponential(0.5, count)).astype(np.float32),
            policy_versions=np.full(count, 12, np.int32),
            finish_reason=FinishReason.STOP,
            messages=[TaggedMessage(role="assistant", content="words " * count, origin=Origin.POLICY)],
        )
        completion = RolloutCompletion(
            rollout_id=rollout_id, prompt_ids=prompt_ids, turns=[turn], status=RolloutStatus.FINISHED
        )
        completions.append(completion)
        samples.append(
            RolloutSample(
                group_id=group_id,
                rollout_id=rollout_id,
                token_ids=turn.output_ids,
                loss_mask=np.ones(count, np.bool_),
                sampler_logprobs=turn.output_logprobs,
                policy_versions=turn.policy_versions,
                advantage=0.5,
                rewards={"exact": 1.0},
                reward=1.0,
                truncated=False,
            )
        )
        stats[rollout_id] = TokenStats(
            logprobs=numbers(),
            proximal_logprobs=numbers(),
            weights=numbers(),
            entropies=numbers(),
            flags=np.zeros(count, dtype=np.uint8),  # type: ignore[arg-type]
        )
    message = TaggedMessage(role="user", content="What is 3 + 4? " * 20, origin=Origin.PROMPT)
    prompt = Prompt(prompt_id=group_id, messages=[message], columns={"answer": "7"})
    group = RolloutGroup(group_id=group_id, prompt=prompt, completions=completions)
    rewards, parts = [1.0] * len(samples), [{"exact": 1.0}] * len(samples)
    return ScoredGroup(group=group, samples=samples, rewards=rewards, reward_parts=parts), stats
