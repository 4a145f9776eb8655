"""Against TRL's AsyncGRPOTrainer on one vLLM CPU server: trained samples/s, split of the step, CPU seconds per sample.

    python -m benchmarks against_trl [--rounds 5] [--steps 20] [--warm-up 5] [--json FILE]

Both sides train the same Qwen3 (6.4 M random weights) on the same prompts with the same batch, completion length, temperature,
learning rate, optimizer (AdamW, clipped at norm 1), loss (clipped, mean over tokens) and number of steps, one thread each,
against the same vLLM server, which is started once (one thread, float32, as `grpo-async serve-vllm` starts it on a CPU) and
serves them in turns. The reward is the same function.

TRL's side is TRL from the package index in an environment of its own (made at the first run, .cache/benchmarks/trl), its
trainer and its rollout worker unmodified. Three things are replaced, because TRL's own need a GPU: the weight transfer (NCCL) by
the very push that our side makes, its attention kernel by the same computation on the CPU, and its question for the GPU's peak
FLOP/s. It is told not to use bfloat16 and gradient checkpointing, which only cost time here. Its limits of staleness (4) and of
requests in flight (4 steps' worth) are its own defaults; --trl-staleness and --trl-in-flight try others. Our side has the same two
limits (--our-staleness, --in-flight). Staleness is counted from the policy that a rollout began with. The server takes as many at
once as either side may have in flight.

Measured is the steady state, between the end of the warm-up's last step and that of the last step. A group without a signal
counts as trained on TRL's side, which computes it, and as thrown away on ours, which does not. Target: in every round our side
trains at least 1.5 times as many samples a second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Report, add_options, in_turns, ratios
from benchmarks.trl_side.meter import CpuUse, run_metered, stop
from benchmarks.trl_side.setting import Setting, Step

ROOT = Path(__file__).resolve().parents[1]
OURS, TRL = "grpo-async", "TRL"
AT_LEAST = 1.5
START_TIMEOUT_S, RUN_TIMEOUT_S = 300.0, 300.0
PARTS = ("waiting", "forward", "backward", "optimizer", "sync", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Steady state of one run."""

    steps: list[Step]
    """Those that were measured, without the warm-up."""
    cpu: CpuUse
    thrown_away: float
    """Samples, in the steps measured."""

    @property
    def wall_s(self) -> float:
        """Of the steps measured, end to end."""
        return sum(step.wall_s for step in self.steps)

    @property
    def samples(self) -> float:
        """Trained ones."""
        return sum(step.samples for step in self.steps)

    def figures(self) -> dict[str, tuple[float, str]]:
        """What is reported of a run: name -> value and unit."""
        tokens = sum(step.tokens for step in self.steps)
        known = {
            "trained samples": (self.samples / self.wall_s, "1/s"),
            "trained tokens": (tokens / self.wall_s, "1/s"),
            "step": (1000 * self.wall_s / len(self.steps), "ms"),
        }
        for part in PARTS:
            seconds = sum(getattr(step, f"{part}_s") for step in self.steps)
            known[f"  {part}"] = (1000 * seconds / len(self.steps), "ms")
        return known | {
            "CPU per trained sample": ((self.cpu.trainer_s + self.cpu.server_s) / self.samples, "s"),
            "  trainer": (self.cpu.trainer_s / self.samples, "s"),
            "  server": (self.cpu.server_s / self.samples, "s"),
            "thrown away": (self.thrown_away / (self.samples + self.thrown_away), "share"),
            "staleness": (statistics.fmean(step.staleness for step in self.steps), "steps"),
        }


def outcome(steps: Sequence[Step], cpu: CpuUse, setting: Setting) -> Outcome:
    """The steady state of a run: its steps after the warm-up, without those at the end.

    Raises:
        ValueError: there are fewer steps than that.
    """
    first, last = setting.warm_up, setting.last_measured
    if len(steps) < last:
        raise ValueError(f"{len(steps)} steps were made, {last} are needed")
    return Outcome(
        steps=list(steps[first:last]), cpu=cpu, thrown_away=steps[last - 1].thrown_away - steps[first - 1].thrown_away
    )


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.warm_up < 1 or options.steps < 1 or options.rounds < 1:
        raise SystemExit("--rounds, --steps and --warm-up are at least 1")
    from benchmarks.trl_side.environment import ensure_environment

    python = ensure_environment(options.environment)
    report = Report("against_trl", options)
    outcomes: dict[str, list[Outcome]] = {OURS: [], TRL: []}
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as name:
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        settings = both_settings(folder, options)
        make_inputs(settings[OURS], options.environment, shape=options.model)
        report.note(told_apart(settings))
        with serving(server_setting(settings)) as (url, server_pid):
            for number, side in in_turns(list(outcomes), options.rounds):
                setting = replace(settings[side], server_url=url, folder=folder / f"{number}-{side}")
                setting.folder.mkdir()
                run = run_ours if side == OURS else run_trl
                found = run(setting, python, server_pid=server_pid)
                outcomes[side].append(found)
                print(f"round {number + 1}, {side}: {found.samples / found.wall_s:.2f} samples/s", flush=True)
    tell(report, outcomes)
    return report.finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="each side once a round")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps measured")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before those")
    parser.add_argument("--model", choices=["0.3m", "6m"], default="6m", help="parameters of the Qwen3, in millions")
    parser.add_argument("--groups", type=int, default=2, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--our-staleness", "--staleness", type=int, default=4, help="limit of our side")
    parser.add_argument("--in-flight", type=int, default=-1, help="limit of our side; -1: as many as TRL's")
    parser.add_argument("--mode", default="recompute", help="weights.mode of our side; TRL has no other than recompute")
    parser.add_argument("--trl-staleness", type=int, default=4, help="limit of TRL's side")
    parser.add_argument("--trl-in-flight", type=int, default=-1, help="limit of TRL's side; -1: its own choice")
    parser.add_argument("--environment", type=Path, default=ROOT / ".cache/benchmarks/trl", help="TRL's own, made here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and runs there (an empty folder)")
    add_options(parser)
    return parser


def both_settings(folder: Path, options: argparse.Namespace) -> dict[str, Setting]:
    """What each side is given; they differ in staleness and requests in flight only, and there only where it was asked for."""
    trl = Setting(
        folder=folder,
        model=folder / "model",
        prompts=folder / "prompts.jsonl",
        server_url="",
        group_size=options.group_size,
        groups_per_step=options.groups,
        completion_tokens=options.completion_tokens,
        max_model_len=options.completion_tokens + 64,
        max_staleness=options.trl_staleness,
        max_in_flight=options.trl_in_flight,
        push_mode=options.mode,
        warm_up=options.warm_up,
        steps=options.steps,
        learning_rate=1e-6,
        seed=options.seed,
        threads=1,
    )
    in_flight = _in_flight(trl) if options.in_flight < 0 else options.in_flight
    return {OURS: replace(trl, max_staleness=options.our_staleness, max_in_flight=in_flight), TRL: trl}


def server_setting(settings: Mapping[str, Setting]) -> Setting:
    """What the server of both is started with: it takes as many requests at once as the side that may have more."""
    return replace(settings[OURS], max_in_flight=max(_in_flight(setting) for setting in settings.values()))


def _in_flight(setting: Setting) -> int:
    """Requests at the server at most; what TRL chooses by itself is max_staleness steps' worth, one at least."""
    own = max(1, setting.max_staleness) * setting.samples_per_step
    return own if setting.max_in_flight < 0 else setting.max_in_flight


def told_apart(settings: Mapping[str, Setting]) -> str:
    """What the sides are given that is not the same, in a sentence of the report."""
    sides = []
    for side, setting in settings.items():
        chosen = ", its own choice" if setting.max_in_flight < 0 else ""
        sides.append(f"{side}: max_staleness {setting.max_staleness}, {_in_flight(setting)} in flight at most{chosen}")
    ours = settings[OURS]
    same = f"{ours.groups_per_step} x {ours.group_size} samples a step, {ours.threads} thread each"
    return (
        f"{'; '.join(sides)}; weights.mode {ours.push_mode} and recompute; both: {same}. The row staleness is the mean over "
        "trained tokens on our side, on TRL's over samples since their group began, which is more for the same sample"
    )


def make_inputs(setting: Setting, environment: Path, *, shape: str) -> None:
    """Model and prompts, in a process of its own: torch would stay in this one, which meters."""
    from benchmarks.trl_side.environment import qwen3_chat_template

    command = [sys.executable, "-m", "benchmarks.trl_side.model", shape, str(setting.model)]
    command += [str(setting.prompts), str(setting.seed), str(qwen3_chat_template(environment))]
    subprocess.run(command, check=True, cwd=ROOT, timeout=START_TIMEOUT_S)


@contextmanager
def serving(setting: Setting) -> Iterator[tuple[str, int]]:
    """The vLLM server of both sides; yields its URL and pid. Without a token: TRL sends none, and it listens on loopback only."""
    from benchmarks.trl_side.ours import write_configuration
    from grpo_async.config.loader import load_config
    from grpo_async.inference.surface import TOKEN_VARIABLE
    from grpo_async.servers.vllm.command import vllm_command

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    command = vllm_command(load_config(write_configuration(setting)), port, environment=environment)
    log = setting.folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env=command.env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield url, process.pid
    finally:
        stop(process)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > ends_at:
                tail = log.read_bytes()[-4000:].decode(errors="replace")
                raise SystemExit(f"the server did not start; the end of its log:\n{tail}") from None
        time.sleep(0.2)


def _child_environment(setting: Setting) -> dict[str, str]:
    """Of a trainer of either side: as many threads as it was given, no hub, no token."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GRPO_ASYNC_TOKEN", "PYTHONPATH")}
    return environment | {
        "OMP_NUM_THREADS": str(setting.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_ours(setting: Setting, python: Path, *, server_pid: int) -> Outcome:
    """`grpo-async train`, as anybody starts it."""
    from benchmarks.trl_side.ours import metrics_file, read_steps, write_configuration

    del python
    cpu = run_metered(
        [sys.executable, "-m", "grpo_async", "train", str(write_configuration(setting))],
        steps_file=metrics_file(setting), first=setting.warm_up, last=setting.last_measured, server_pid=server_pid,
        log=setting.folder / "log", cwd=ROOT, environment=_child_environment(setting), timeout_s=RUN_TIMEOUT_S,
    )  # fmt: skip
    return outcome(read_steps(setting), cpu, setting)


def run_trl(setting: Setting, python: Path, *, server_pid: int) -> Outcome:
    """TRL's trainer in its environment."""
    cpu = run_metered(
        [str(python), "-m", "benchmarks.trl_side.train", str(setting.write())],
        steps_file=setting.steps_file, first=setting.warm_up, last=setting.last_measured, server_pid=server_pid,
        log=setting.folder / "log", cwd=ROOT, environment=_child_environment(setting), timeout_s=RUN_TIMEOUT_S,
    )  # fmt: skip
    lines = setting.steps_file.read_text(encoding="utf-8").splitlines()
    return outcome([Step(**json.loads(line)) for line in lines], cpu, setting)


def tell(report: Report, outcomes: dict[str, list[Outcome]]) -> None:
    """Rows of both sides, their ratios round by round, and the target."""
    for side, runs in outcomes.items():
        figures = [run.figures() for run in runs]
        for name, (_, unit) in figures[0].items():
            report.row(f"{side}: {name}", [each[name][0] for each in figures], unit)
    for name in ("trained samples", "trained tokens", "CPU per trained sample"):
        values = {side: [run.figures()[name][0] for run in runs] for side, runs in outcomes.items()}
        found = ratios(values, OURS, TRL)
        report.row(f"{name}: {OURS} / {TRL}", found, "ratio")
        if name == "trained samples":
            report.target("trained samples/s over TRL's, lowest of all rounds", min(found), at_least=AT_LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
