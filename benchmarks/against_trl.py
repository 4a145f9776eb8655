"""Against TRL's AsyncGRPOTrainer on one vLLM CPU server: trained samples/s.

    python -m benchmarks against_trl [--rounds 5] [--steps 20] [--warmup 5] [--prompt-tokens 330] [--hidden 256] [--layers 8]
                                     [--json FILE]

Both sides train the same Qwen3 (6.4 M random weights; 59 M with --hidden 640 --layers 12) on the same prompts with the same batch,
completion length, temperature, reward, learning rate, optimizer (AdamW, clipped at norm 1), loss (clipped, mean over tokens) and
number of steps, with one thread each. They take turns at one vLLM server (one thread, float32, as `grpo-async serve-vllm` starts it
on a CPU). Both have the same limits of staleness (4) and of requests in flight (4 steps' worth): TRL's own defaults. _trl_train.py
says what is replaced in TRL to run on a CPU.

The steady state is measured: the steps between the warmup and the last ones, in which our side has nothing left to generate and
trains faster. A group without a signal counts as trained on TRL's side, which computes it, and as thrown away on ours, which does
not. Target: in every round our side trains at least 1.5 times as many samples a second.
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
from benchmarks._models import ModelShape
from benchmarks.report import ROOT, Report, figures, in_turns, parser_of, ratios

OURS, TRL = "grpo-async", "TRL"
AT_LEAST = 1.5
RUN_TIMEOUT_S = 900.0
TRL_VERSION = "1.16.0"
GROUPS_PER_STEP, GROUP_SIZE, COMPLETION_TOKENS, MAX_STALENESS = 2, 8, 64, 4
LR = 1e-6
_NUM_PROMPTS = 512

Step = Mapping[str, float]
"""One optimizer step of either side: its seconds `wall_s`, with `waiting_s` for samples and `push_s` among them; trained
`samples` and `tokens`; mean `staleness` in steps; samples `thrown_away` since the run began."""


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with one run of each side")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps that are measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, at least 1")
    parser.add_argument(
        "--prompt-tokens", type=int, default=25, help="about so many; more than 25: worked examples come first"
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--in-flight", type=int, help="requests at once, for both sides; default: TRL's own choice")
    options = parser.parse_args(arguments)
    if find_spec("trl") is None:
        raise SystemExit(f"TRL is not installed here: uv pip install trl=={TRL_VERSION} --python {sys.executable}")
    report = Report("against_trl", options)
    options.max_steps = options.warmup + options.steps + MAX_STALENESS + 1
    options.in_flight = options.in_flight or MAX_STALENESS * GROUPS_PER_STEP * GROUP_SIZE
    report.note(
        f"max_staleness {MAX_STALENESS}, {options.in_flight} in flight at most, {GROUPS_PER_STEP} x {GROUP_SIZE} samples a step. "
        "Staleness is the mean over trained tokens on our side; on TRL's over samples, from the start of their group, which is "
        "more for the same sample"
    )
    found: dict[str, list[dict[str, float]]] = {OURS: [], TRL: []}
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as name:
        folder = Path(name)
        # in a process of its own: this one, which measures, stays without torch
        sizes = {name: getattr(options, name) for name in ("seed", "prompt_tokens", "hidden", "layers")}
        code = f"from benchmarks.against_trl import write_inputs; write_inputs({name!r}, **{sizes!r})"
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
    """The config of `grpo-async train` and of the server. Everything else is at its default."""
    return _server.write_config(
        folder,
        run={"name": "run", "dir": str(folder), "seed": options.seed},
        model={"path": str(inputs / "model")},
        data={"train": {"type": "jsonl", "path": str(inputs / "prompts.jsonl")}, "shuffle": False},
        rollout={
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS_PER_STEP,
            "max_staleness": MAX_STALENESS,
            "max_completion_tokens": COMPLETION_TOKENS,
            "max_in_flight": options.in_flight,
            "temperature": 1.0,
        },
        rewards=[{"function": "benchmarks.against_trl:low_ids"}],
        inference={
            "engine": "vllm",
            "urls": [url] if url else [],
            "max_model_len": COMPLETION_TOKENS + 2 * options.prompt_tokens + 14,
            "threads": 1,
            "vllm": {"enforce_eager": True, "kv_cache_mb": 256},
        },
        loss={"type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2},
        optimizer={"lr": LR},
        training={"max_steps": options.max_steps},
        launch={"device": "cpu", "trainer_threads": 1},
        checkpoint={"every_steps": 10_000},
        record={"report": False},
    )


def low_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward of both sides: the fraction of a completion's tokens with an id below 192, [[1, 500], [2, 3]] -> [0.5, 1.0]. It
    is cheap, and differs between completions, so that every group has a signal."""
    return [sum(token < 192 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def write_inputs(folder: str, *, seed: int, prompt_tokens: int, hidden: int, layers: int) -> None:
    """Write a Qwen3 with random weights (only speed is measured, and so nearly every completion runs to its limit on both sides), a
    tokenizer, and as prompts different sums such as "27 + 3 - 81 + 4 = ?", after so many worked examples that a prompt has about
    `prompt_tokens`."""
    from grpo_async.quickstart.model import train_tokenizer

    chance = random.Random(seed)
    examples: dict[str, str] = {}  # a sum, and one with an answer
    while len(examples) < _NUM_PROMPTS:
        terms = " ".join(f"{chance.choice('+-')} {chance.randrange(100)}" for _ in range(3))
        question = f"{chance.randrange(100)} {terms} ="
        examples[f"{question} ?"] = f"{question} {chance.randrange(400)}\n"
    tokenizer = train_tokenizer(
        [f"user\n{example}{question}\nassistant\n" for question, example in examples.items()]
    )  # the roles become tokens, too
    # Qwen3's own chat template, of which TRL has a copy: TRL refuses templates that it does not know
    tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    heads = hidden // 64
    shape = ModelShape(
        vocab=len(tokenizer),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads // 2,
        head_dim=64,
        intermediate=3 * hidden,
    )
    shape.save(Path(folder) / "model", tokenizer, seed=seed)
    lines = []
    for question in examples:
        prompt = question
        while len(tokenizer.encode(prompt)) < prompt_tokens - 14:  # the template adds its own
            prompt = chance.choice([*examples.values()]) + prompt
        lines.append(json.dumps({"prompt": [{"role": "user", "content": prompt}]}) + "\n")
    Path(folder, "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def _run(inputs: Path, folder: Path, url: str, side: str, options: argparse.Namespace) -> list[Step]:
    """Run `grpo-async train`, as anybody starts it, or TRL's trainer; returns its steps.

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
    """The steps of our side, from metrics.jsonl."""
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
    """The figures of a run (UNITS), from its steps after the warmup and before those at the end."""
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
    """Add the rows of both sides, their ratios round by round, and the target."""
    report.runs(found, UNITS)
    for name in ("trained tokens", "trained samples"):
        values = ratios(figures(found, name), OURS, TRL)
        report.row(f"{name}: {OURS} / {TRL}", values, "ratio")
    report.target("trained samples/s over TRL's, lowest of all rounds", min(values), at_least=AT_LEAST)
