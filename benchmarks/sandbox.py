"""Start-up time of one sandboxed run, under each set of restrictions and without any.

    python -m benchmarks sandbox [--runs 30] [--json FILE]

All variants take turns: a bare interpreter, then the sandbox with resource limits alone, without namespaces, and under all that
this machine has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.report import Report, add_options
from benchmarks.turns import in_turns, ratios
from grpo_async.sandbox import Sandbox, restrictions
from grpo_async.sandbox.execution import find_interpreter
from grpo_async.sandbox.restrictions import Findings, try_restrictions

TIMEOUT_S = 60.0
BARE = "bare interpreter"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="of each variant")
    add_options(parser, seed=False)
    options = parser.parse_args(arguments)
    report = Report("sandbox", options)

    command = [find_interpreter().executable, "-I", "-S", "-c", "pass"]
    variants: dict[str, Callable[[], object]] = {BARE: lambda: subprocess.run(command, check=True, timeout=TIMEOUT_S)}
    for without in (("namespaces", "landlock", "seccomp", "user"), ("namespaces",), ()):
        found = try_restrictions(without=frozenset(without))
        variants["sandbox: " + (" + ".join(sorted(found.mechanisms)) or "limits only")] = _sandboxed(found)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _, name in in_turns(list(variants), options.runs):
        started = time.perf_counter()
        variants[name]()
        seconds[name].append(time.perf_counter() - started)

    for name, values in seconds.items():
        report.row(name, [1000 * value for value in values], "ms")
    for name in list(variants)[1:]:
        report.row(f"{name} / bare", ratios(seconds, name, BARE), "ratio")
    return report.finish()


def _sandboxed(found: Findings) -> Callable[[], object]:
    sandbox = Sandbox(require=[])

    def run() -> object:
        restrictions._findings = found  # what start-up finds on this machine, less the restrictions left out here
        return sandbox.run("pass")

    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
