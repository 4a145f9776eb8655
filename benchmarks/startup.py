"""How long commands and runs take to start, and where the time goes.

    python -m benchmarks startup [--repeats 9] [--skip-train] [--json FILE]
    python -m benchmarks startup --skip-commands [--engines embedded vllm] [--train-repeats 3] [--against FOLDER]

commands  wall and CPU seconds of every command that should be light, in turns with `python -c pass`; then, of each, the packages
          whose modules cost most while they are imported (python -X importtime; the sum of their own time)
train     from the command to the end of the first step, with the quickstart's model (made before, if it is not there): the stages
          on the trainer's side one after the other, and the moments of the server, which starts beside it. Evaluation is off

With --against, --help, validate and train of another checkout take turns with those of this one, and their ratios are shown.
Exit 1 where a target is missed: --help within 0.3 s, validate within 1 s, nothing heavy imported by either.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks._startup_run import SERVER_MARKS, FirstStep, first_step
from benchmarks.report import Report, add_options
from benchmarks.turns import in_turns, ratios

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CONFIGS = {"embedded": QUICKSTART, "vllm": ROOT / "configs" / "quickstart-vllm.yaml"}
HELP_S, VALIDATE_S = 0.3, 1.0
HEAVY = ("torch", "transformers", "vllm", "duckdb", "textual", "starlette", "uvicorn", "datasets", "numpy")
"""What --help and validate may not import."""
BARE = "python -c pass"
_CONFIG, _RUN = "CONFIG", "RUN"
_COMMANDS = {
    "help": ["--help"],
    "validate": ["validate", _CONFIG],
    "schema": ["schema"],
    "status": ["status", _RUN],
    "inspect-rollouts": ["inspect-rollouts", _RUN, "--plain"],
    "export": ["export", "--help"],
    "report": ["report", "--help"],
}
_TIMEOUT_S = 120.0
_NUM_PACKAGES = 6
_NUM_ROLLOUTS, _NUM_TOKENS = 128, 16
_RUN_CONFIG = """\
run: {name: small}
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b"}]
inference: {engine: embedded}
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="of each command")
    parser.add_argument("--only", nargs="+", choices=sorted(_COMMANDS), help="of the commands; default: all")
    parser.add_argument("--skip-commands", action="store_true", help="only train")
    parser.add_argument("--skip-train", action="store_true", help="only the commands")
    parser.add_argument("--engines", nargs="+", choices=tuple(SERVER_MARKS), default=["embedded"], help="of train")
    parser.add_argument("--train-repeats", type=int, default=3, help="first steps of each engine")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one train")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, which takes turns")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for train")
    add_options(parser)
    options = parser.parse_args(arguments)
    report = Report("startup", options)
    with tempfile.TemporaryDirectory() as folder:
        if not options.skip_commands:
            _measure_commands(report, Path(folder), options)
        if not options.skip_train:
            _make_quickstart()
            for engine in options.engines:
                _measure_train(report, Path(folder), engine, options)
    return report.finish()


# -- commands ----------------------------------------------------------------------------------------------------------


def _measure_commands(report: Report, folder: Path, options: argparse.Namespace) -> None:
    run = str(_small_run(folder))
    commands = {BARE: ["-c", "pass"]}
    for key in options.only or _COMMANDS:
        words = _COMMANDS[key]
        commands[" ".join(word for word in words if word not in (_CONFIG, _RUN))] = [
            *("-m", "grpo_async"),
            *({_CONFIG: str(QUICKSTART), _RUN: run}.get(word, word) for word in words),
        ]
    compared = [name for name in ("--help", "validate") if options.against and name in commands]
    others = {f"{name}, other": commands[name] for name in compared}
    roots = {**dict.fromkeys(commands, ROOT), **dict.fromkeys(others, options.against)}
    wall: dict[str, list[float]] = {name: [] for name in roots}
    cpu: dict[str, list[float]] = {name: [] for name in roots}
    for name, root in roots.items():
        _run_python((commands | others)[name], root)  # the first writes what Python compiles
    for _, name in in_turns(list(roots), options.repeats):
        seconds, computed = _run_python((commands | others)[name], roots[name])
        wall[name].append(seconds)
        cpu[name].append(computed)
    for name in roots:
        report.row(name, wall[name], "s")
    for name in roots:
        report.row(f"{name}: computed", cpu[name], "CPU s")
    for other in others:
        this = other.removesuffix(", other")
        report.row(f"{this}, this / other", ratios(wall, this, other), "ratio")
        report.row(f"{this}: computed, this / other", ratios(cpu, this, other), "ratio")
    for name in list(commands)[1:]:
        found = import_seconds(["-X", "importtime", *commands[name]])
        for package, own in sorted(found.items(), key=lambda each: -each[1])[:_NUM_PACKAGES]:
            report.row(f"{name}: importing {package}", [1000 * own], "ms")
        heavy = [package for package in HEAVY if package in found]
        if heavy:
            report.note(f"{name} imports {', '.join(heavy)}")
        if name in ("--help", "validate"):
            report.target(f"heavy packages that {name} imports", len(heavy), at_most=0)
    for name, bound in (("--help", HELP_S), ("validate", VALIDATE_S)):
        if name in wall:
            report.target(f"{name}, median s", statistics.median(wall[name]), at_most=bound)


def _small_run(folder: Path) -> Path:
    """A run directory with a few rollouts, which looks like one that was killed."""
    from benchmarks.rollouts import make_store

    run = folder / "small"
    make_store(run / "rollouts", rollouts=_NUM_ROLLOUTS, tokens=_NUM_TOKENS)
    (run / "config.yaml").write_text(_RUN_CONFIG, encoding="utf-8")
    return run


def _run_python(arguments: Sequence[str], root: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a Python with these arguments in the checkout `root`. What it exits with is its own affair
    (`status` of a killed run: 4), but not a traceback."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=False,
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if b"Traceback" in done.stderr:
        raise RuntimeError(f"python {' '.join(arguments)}:\n{done.stderr.decode(errors='replace')}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def import_seconds(arguments: Sequence[str]) -> dict[str, float]:
    """Package -> seconds that its modules took to import, without what they import in turn: "rich.text" counts for rich."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    own: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        # "import time:       490 |      16266 |   rich.text"
        parts = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and len(parts) == 3 and parts[0].strip().isdecimal():
            own[parts[2].strip().partition(".")[0]] += int(parts[0]) / 1e6
    return dict(own)


# -- train -------------------------------------------------------------------------------------------------------------


def _make_quickstart() -> None:
    """The quickstart's model and data below the working directory, unless they are there."""
    subprocess.run(
        [sys.executable, "-m", "grpo_async", "prepare-quickstart"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        timeout=_TIMEOUT_S * 5,
        check=True,
    )


def _measure_train(report: Report, folder: Path, engine: str, options: argparse.Namespace) -> None:
    checkouts = {"this": ROOT} | ({"other": options.against.resolve()} if options.against else {})
    found: dict[str, list[FirstStep]] = {name: [] for name in checkouts}
    for number, name in in_turns(list(checkouts), options.train_repeats):
        found[name].append(
            first_step(
                checkouts[name],
                CONFIGS[engine],
                folder / f"{engine}-{name}-{number}",
                engine=engine,
                seed=options.seed,
                timeout_s=options.timeout_s,
                overrides=options.overrides,
            )
        )
    for name, measured in found.items():
        of = engine if name == "this" else f"{engine}, {name}"
        report.row(f"{of}: command to first step", [each.first_step_s for each in measured], "s")
        for stage in measured[0].stages:
            report.row(f"{of}:   {stage}", [each.stages[stage] for each in measured if stage in each.stages], "s")
        for moment in measured[0].server:
            values = [each.server[moment] for each in measured if moment in each.server]
            report.row(f"{of}: server at: {moment}", values, "s")
        report.row(f"{of}: computed until training begins", [each.cpu_s for each in measured], "CPU s")
        report.row(f"{of}: processes then", [each.num_processes for each in measured], "")
    if options.against:
        whole = {name: [each.first_step_s for each in measured] for name, measured in found.items()}
        report.row(f"{engine}: first step, this / other", ratios(whole, "this", "other"), "ratio")
        computed = {name: [each.cpu_s for each in measured] for name, measured in found.items()}
        report.row(f"{engine}: computed, this / other", ratios(computed, "this", "other"), "ratio")


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
