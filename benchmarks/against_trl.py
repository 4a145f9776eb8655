"""Against TRL's AsyncGRPOTrainer on one vLLM CPU server: trained samples/s.

    python -m benchmarks against_trl [--rounds 5] [--steps 20] [--warmup 5] [--json FILE]

Both sides train the same Qwen3 (6.4 M random weights) on the same prompts with the same batch, completion length, temperature,
learning rate, optimizer (AdamW, clipped at norm 1), loss (clipped, mean over tokens) and number of steps, one thread each,
against the same vLLM server, which is started once (one thread, float32, as `grpo-async serve-vllm` starts it on a CPU) and
serves them in turns. The reward is the same function.

TRL's side is the TRL that is installed here, its trainer and its rollout worker unmodified. Three things are replaced, because
TRL's own need a GPU: the weight transfer (NCCL) by the very push that our side makes, its attention kernel by the same computation
on the CPU, and its question for the GPU's peak FLOP/s. It is set not to use bfloat16 and gradient checkpointing, which only cost
time here. Both sides have the same limits of staleness (4) and of requests in flight (4 steps' worth): TRL's own defaults.
Staleness is counted from the policy that a rollout began with.

Measured is the steady state, after the warmup's last step and without the last ones, in which our side has nothing left to generate
and trains faster. A group without a signal counts as trained on TRL's side, which computes it, and as thrown away on ours, which
does not. Target: in every round our side trains at least 1.5 times as many samples a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import _server
from benchmarks._models import ModelSize
from benchmarks.report import ROOT, Report, in_turns, parser_of, ratios

OURS, TRL = "grpo-async", "TRL"
AT_LEAST = 1.5
RUN_TIMEOUT_S = 300.0
TRL_VERSION = "1.16.0"
GROUPS_PER_STEP, GROUP_SIZE, COMPLETION_TOKENS, MAX_STALENESS = 2, 8, 64, 4
LR = 1e-6
_NUM_PROMPTS = 512

Step = Mapping[str, float]
"""One optimizer step of either side: seconds `wall_s`, of which `waiting_s` for samples and `push_s`; trained `samples` and
`tokens`; mean `staleness` in steps; samples `thrown_away` since the run began."""


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="each side once a round")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those, one at least")
    parser.add_argument("--in-flight", type=int, help="requests of both sides; default: TRL's own choice")
    options = parser.parse_args(arguments)
    if find_spec("trl") is None:
        raise SystemExit(f"TRL is not installed here: uv pip install trl=={TRL_VERSION} --python {sys.executable}")
    report = Report("against_trl", options)
    options.max_steps = options.warmup + options.steps + MAX_STALENESS + 1
    options.in_flight = options.in_flight or MAX_STALENESS * GROUPS_PER_STEP * GROUP_SIZE
    report.note(
        f"max_staleness {MAX_STALENESS}, {options.in_flight} in flight at most, {GROUPS_PER_STEP} x {GROUP_SIZE} samples a step. "
        "The row staleness is the mean over trained tokens on our side, on TRL's over samples since their group began, which is "
        "more for the same sample"
    )
    found: dict[str, list[dict[str, float]]] = {OURS: [], TRL: []}
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as name:
        folder = Path(name)
        # in a process of its own: torch would stay in this one, which meters
        code = f"from benchmarks.against_trl import write_inputs; write_inputs({name!r}, {options.seed})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=_server.START_TIMEOUT_S)
        environment = {name: value for name, value in os.environ.items() if name != "GRPO_ASYNC_TOKEN"}
        config = write_config(folder, folder, "", options)
        with _server.serving(config, "vllm", environment=environment, has_token=False) as server:
            for number, side in in_turns(list(found), options.rounds):
                steps = _run(folder, folder / f"{number}-{side}", server.url, side, options)
                found[side].append(steady_state(steps, options))
                print(f"round {number + 1}, {side}: {found[side][-1]['trained samples']:.2f} samples/s", flush=True)
    report_rounds(report, found)
    return report.finish()


def write_config(inputs: Path, folder: Path, url: str, options: argparse.Namespace) -> Path:
    """What `grpo-async train` and the server are given (JSON is YAML). Everything else is at its default."""
    config = {
        "run": {"name": "run", "dir": str(folder), "seed": options.seed},
        "model": {"path": str(inputs / "model")},
        "data": {"train": {"type": "jsonl", "path": str(inputs / "prompts.jsonl")}, "shuffle": False},
        "rollout": {
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS_PER_STEP,
            "max_staleness": MAX_STALENESS,
            "max_completion_tokens": COMPLETION_TOKENS,
            "max_in_flight": options.in_flight,
            "temperature": 1.0,
        },
        "rewards": [{"function": "benchmarks.against_trl:low_ids"}],
        "inference": {
            "engine": "vllm",
            **({"urls": [url]} if url else {}),
            "max_model_len": COMPLETION_TOKENS + 64,
            "threads": 1,
            "vllm": {"enforce_eager": True, "kv_cache_mb": 256},
        },
        "loss": {"type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2},
        "optimizer": {"lr": LR},
        "training": {"max_steps": options.max_steps},
        "launch": {"device": "cpu", "trainer_threads": 1},
        "checkpoint": {"every_steps": 10_000},
        "record": {"report": False},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def low_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward of both sides: cheap, and different for every completion, so that no group is without a signal. The fraction of a
    completion's tokens whose id is below 192: [[1, 500], [2, 3]] -> [0.5, 1.0]."""
    return [sum(token < 192 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def write_inputs(folder: str, seed: int) -> None:
    """A Qwen3 with random weights, because what is measured is speed: nearly every completion runs to its limit on both sides,
    however long they train; the quickstart's tokenizer; and different sums as prompts: "27 + 3 - 81 + 4 = ?", for one."""
    from grpo_async.quickstart.model import train_tokenizer

    chance = random.Random(seed)
    messages: dict[str, None] = {}
    while len(messages) < _NUM_PROMPTS:
        terms = " ".join(f"{chance.choice('+-')} {chance.randrange(100)}" for _ in range(3))
        messages[f"{chance.randrange(100)} {terms} = ?"] = None
    tokenizer = train_tokenizer(
        [f"user\n{message}\nassistant\n" for message in messages]
    )  # the roles become tokens, too
    # Qwen3's own chat template, of which TRL has a copy: TRL refuses templates that it does not know
    tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    size = ModelSize(vocab=len(tokenizer), hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, intermediate=768)
    size.save(Path(folder) / "model", tokenizer, seed=seed)
    lines = [json.dumps({"prompt": [{"role": "user", "content": message}]}) + "\n" for message in messages]
    Path(folder, "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def _run(inputs: Path, folder: Path, url: str, side: str, options: argparse.Namespace) -> list[Step]:
    """`grpo-async train`, as anybody starts it, or TRL's trainer.

    Raises:
        RuntimeError: it failed, or took longer than RUN_TIMEOUT_S.
    """
    folder.mkdir()
    if side == OURS:
        command = [sys.executable, "-m", "grpo_async", "train", str(write_config(inputs, folder, url, options))]
    else:
        own = {"inputs": str(inputs), "folder": str(folder), "server_url": url, "in_flight": options.in_flight,
               "max_steps": options.max_steps, "seed": options.seed}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks._trl_train", json.dumps(own)]
    environment = {name: value for name, value in os.environ.items() if name not in ("GRPO_ASYNC_TOKEN", "PYTHONPATH")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    _server.run_logged(command, folder / "log", environment=environment, timeout_s=RUN_TIMEOUT_S)
    lines = _server.read_lines(folder / "run" / "metrics.jsonl" if side == OURS else folder / "steps.jsonl")
    return steps_of(lines) if side == OURS else lines


def steps_of(metrics: Sequence[Mapping[str, float]]) -> list[Step]:
    """Of our side."""
    steps: list[Step] = []
    trained = 0.0
    for line in metrics:
        lost = sum(line[f"ledger/groups/{status}"] for status in ("stale", "filtered", "failed"))
        steps.append(
            {
                "wall_s": line["step_time"],
                "waiting_s": line["step_time"] * line["pipeline/trainer_idle_ratio"],
                "push_s": line["step_time"] * line["pipeline/pushing_fraction"],
                "samples": GROUP_SIZE * (line["ledger/groups/trained"] - trained),
                "tokens": line["num_tokens"],
                "staleness": line.get("async/staleness_mean", 0.0),
                "thrown_away": GROUP_SIZE * lost,
            }
        )
        trained = line["ledger/groups/trained"]
    return steps


UNITS = {
    "trained samples": "1/s", "trained tokens": "1/s", "step": "ms", "  waiting": "ms", "  push": "ms",
    "thrown away": "fraction", "staleness": "steps",
}  # fmt: skip


def steady_state(steps: Sequence[Step], options: argparse.Namespace) -> dict[str, float]:
    """What is reported of a run (UNITS): of its steps after the warmup, without those at the end."""
    first, last = options.warmup, options.warmup + options.steps
    measured = steps[first:last]
    total = {
        name: sum(step[name] for step in measured) for name in ("wall_s", "waiting_s", "push_s", "samples", "tokens")
    }
    thrown = steps[last - 1]["thrown_away"] - steps[first - 1]["thrown_away"]
    return {
        "trained samples": total["samples"] / total["wall_s"],
        "trained tokens": total["tokens"] / total["wall_s"],
        "step": 1000 * total["wall_s"] / options.steps,
        "  waiting": 1000 * total["waiting_s"] / options.steps,
        "  push": 1000 * total["push_s"] / options.steps,
        "thrown away": thrown / (total["samples"] + thrown),
        "staleness": statistics.fmean(step["staleness"] for step in measured),
    }


def report_rounds(report: Report, found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Rows of both sides, their ratios round by round, and the target."""
    for side, runs in found.items():
        for name, unit in UNITS.items():
            report.row(f"{side}: {name}", [run[name] for run in runs], unit)
    for name in ("trained tokens", "trained samples"):
        values = ratios({side: [run[name] for run in runs] for side, runs in found.items()}, OURS, TRL)
        report.row(f"{name}: {OURS} / {TRL}", values, "ratio")
    report.target("trained samples/s over TRL's, lowest of all rounds", min(values), at_least=AT_LEAST)
