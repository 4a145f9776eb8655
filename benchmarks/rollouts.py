"""How long the rollout table takes on a large run: open it, filter, search, sort, show one rollout.

    python -m benchmarks rollouts [--rollouts 100000] [--tokens 256] [--repeats 5] [--threads N] [--json FILE]
    python -m benchmarks rollouts --folder /tmp/large-run

Makes a store of that many rollouts from a seed, in the blocks that a run leaves (Parquet, the same columns, order and compression;
the last block as JSON lines by the real writer), or takes up the one that is in FOLDER already. Then it measures:

    cold    a new process: Python starts, imports, opens the store, and the first page of groups and of rollouts is there;
            with the files in the page cache, and with them dropped from it
    warm    each question to a table that is open: of the repeats, and the first time it is asked

Exit 1 where a target is missed: the first table within 2 s, a filter within 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._rollout_store import cores, make_store
from benchmarks.report import Report, add_options

__all__ = ["FILTERS", "FILTER_S", "FIRST_TABLE_S", "first_table", "main", "make_store"]

ROOT = Path(__file__).resolve().parents[1]
FIRST_TABLE_S, FILTER_S = 2.0, 1.0
_TIMEOUT_S = 300.0

FILTERS = (
    ("reward<0.2 and truncated", "numbers"),
    ("tool=python and failed", "a tool"),
    ("reward.format<1", "a part of the reward"),
    ("step in 100..120 and not finished", "a range of steps"),
    ("group.std=0", "a figure of the group"),
    ("staleness>=2 or clipped_share>10%", "two of them"),
    ("columns.answer=9", "a column of the data set"),
    ('"zyzzyva"', "text search, rare word"),
    ('completion~"so therefore" and reward>0.5', "text search and a number"),
)


def first_table(folder: Path, threads: int | None) -> dict[str, Any]:
    """What a new process does until the first table can be drawn."""
    from grpo_async.store.table import RolloutTable

    with RolloutTable.open(folder, threads=threads) as table:
        counts = table.count()
        groups = table.group_page(limit=40)
        rollouts = table.page(limit=40)
        return {"rollouts": counts.rollouts, "groups": len(groups), "page": len(rollouts), "notes": table.notes}


def drop_from_cache(folder: Path) -> None:
    """The next to read these files reads the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cold(folder: Path, repeats: int, threads: int | None, *, dropped: bool) -> tuple[list[float], float]:
    """Seconds of each repeat, and CPU seconds of one, which another load of the machine does not change."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.rollouts",
        "--first-table",
        str(folder),
        "--threads",
        str(threads or 0),
    ]
    taken = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(repeats):
        if dropped:
            drop_from_cache(folder)
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S)
        taken.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / repeats
    return taken, cpu


def timed(ask: Callable[[], Any], repeats: int) -> tuple[float, list[float], Any]:
    """Seconds of the first time, of the repeats after it, and what was answered."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        answer = ask()
        taken.append(time.perf_counter() - start)
    return taken[0], taken[1:], answer


def measure(report: Report, folder: Path, repeats: int, threads: int | None) -> None:
    """Adds a row for each question, and a target for those that have one."""
    from grpo_async.store.query import parse_query
    from grpo_async.store.table import RolloutTable

    def note(name: str, first: float | None, taken: list[float], target: float | None = None) -> None:
        report.row(name, [1000 * seconds for seconds in taken], "ms")
        if first is not None:
            report.row(f"{name}: first time", [1000 * first], "ms")
        if target is not None:
            report.target(f"{name}, median s", statistics.median(taken), at_most=target)

    for dropped in (False, True):
        taken, cpu = cold(folder, repeats, threads, dropped=dropped)
        name = f"first table, new process, files {'not ' if dropped else ''}cached"
        note(name, None, taken, FIRST_TABLE_S)
        report.row(f"{name}: computed", [1000 * cpu], "CPU ms")
    with RolloutTable.open(folder, threads=threads) as table:
        everything = parse_query("")
        for text, meaning in FILTERS:
            query = parse_query(text)

            def filtered(query: Any = query) -> tuple[int, int]:
                return table.count(query).rollouts, len(table.page(query, limit=40))

            first, taken, (count, _) = timed(filtered, repeats)
            note(f"filter {text}  ({meaning}): {count} rollouts", first, taken, FILTER_S)
        newest = table.page(limit=1)[0]
        some = table.page(sort="seq", limit=1)[0]
        questions: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("page of groups, newest", lambda: table.group_page(limit=40)),
            ("page of groups by group.std", lambda: table.group_page(sort="-std", limit=40)),
            ("page of rollouts by length", lambda: table.page(sort="-length", limit=40)),
            (
                "page of rollouts by reward.format, far down",
                lambda: table.page(sort="reward.format", offset=50_000, limit=40),
            ),
            ("histogram of reward", lambda: table.histogram("reward", everything)),
            ("figures of every step", lambda: table.by_step(everything)),
            ("best, worst, most improved", lambda: table.extremes(everything, 10)),
            ("the same prompt over all steps", lambda: table.same_prompt(some.prompt_hash)),
            ("one rollout with its tokens, sealed", lambda: table.rollout(some.rollout_id)),
            ("one rollout with its tokens, open block", lambda: table.rollout(newest.rollout_id)),
            ("refresh without news", table.refresh),
        )
        for name, ask in questions:
            first, taken, _ = timed(ask, repeats)
            note(name, first, taken)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256, help="mean length of a rollout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of the queries; 0 = one per core")
    parser.add_argument("--folder", type=Path, help="keep the store here, and use it again")
    parser.add_argument("--first-table", type=Path, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args(arguments)
    threads = options.threads or None
    if options.first_table is not None:
        print(json.dumps(first_table(options.first_table, threads)))
        return 0
    report = Report("rollouts", options)
    with tempfile.TemporaryDirectory(prefix="bench-rollouts-") as scratch:
        folder = options.folder or Path(scratch) / "rollouts"
        if not any(folder.glob("block-*")):
            start = time.perf_counter()
            make_store(folder, rollouts=options.rollouts, tokens=options.tokens, seed=options.seed)
            report.row("the store is made", [time.perf_counter() - start], "s")
        sizes = [path.stat().st_size for path in folder.glob("block-*")]
        report.note(f"{len(sizes)} blocks, {sum(sizes) / 1e6:.0f} MB; {threads or cores()} threads")
        measure(report, folder, options.repeats, threads)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
