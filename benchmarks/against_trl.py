"""Against TRL's AsyncGRPOTrainer on one vLLM CPU server: trained samples/s and the split of the step.

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

Measured is the steady state, between the end of the warmup's last step and that of the last step. A group without a signal
counts as trained on TRL's side, which computes it, and as thrown away on ours, which does not. Target: in every round our side
trains at least 1.5 times as many samples a second.
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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import _server
from benchmarks._trl_setting import Setting, Step
from benchmarks.report import ROOT, Report, in_turns, parser_of, ratios

OURS, TRL = "grpo-async", "TRL"
AT_LEAST = 1.5
RUN_TIMEOUT_S = 300.0
TRL_VERSION = "1.16.0"
PARTS = ("waiting", "forward", "backward", "optimizer", "sync", "other")
_NUM_PROMPTS = 512


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.warmup < 1 or options.steps < 1 or options.rounds < 1:
        raise SystemExit("--rounds, --steps and --warmup are at least 1")
    if find_spec("trl") is None:
        raise SystemExit(f"TRL is not installed here: uv pip install trl=={TRL_VERSION} --python {sys.executable}")
    report = Report("against_trl", options)
    outcomes: dict[str, list[Outcome]] = {OURS: [], TRL: []}
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as name:
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        setting = make_setting(folder, options)
        _make_inputs(setting)
        report.note(
            f"max_staleness {setting.max_staleness}, {setting.in_flight} in flight at most, {setting.groups_per_step} x "
            f"{setting.group_size} samples a step, {setting.threads} thread each. The row staleness is the mean over trained "
            "tokens on our side, on TRL's over samples since their group began, which is more for the same sample"
        )
        environment = {name: value for name, value in os.environ.items() if name != "GRPO_ASYNC_TOKEN"}
        config = write_config(setting)
        with _server.serving(config, "vllm", environment=environment, has_token=False) as server:
            for number, side in in_turns(list(outcomes), options.rounds):
                own = replace(setting, server_url=server.url, folder=folder / f"{number}-{side}")
                own.folder.mkdir()
                found = _run(own, side)
                outcomes[side].append(found)
                print(f"round {number + 1}, {side}: {found.samples / found.wall_s:.2f} samples/s", flush=True)
    report_outcomes(report, outcomes)
    return report.finish()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="each side once a round")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those")
    parser.add_argument("--groups", type=int, default=2, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=4, help="limit of both sides")
    parser.add_argument("--in-flight", type=int, default=-1, help="requests of both sides; -1: TRL's own choice")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and runs there (an empty folder)")
    return parser


# ------------------------------------------------------------------------------------------------------------ what is given


def make_setting(folder: Path, options: argparse.Namespace) -> Setting:
    """What both sides are given."""
    return Setting(
        folder=folder,
        model=folder / "model",
        prompts=folder / "prompts.jsonl",
        server_url="",
        group_size=options.group_size,
        groups_per_step=options.groups,
        completion_tokens=options.completion_tokens,
        max_model_len=options.completion_tokens + 64,
        max_staleness=options.staleness,
        max_in_flight=options.in_flight,
        warm_up=options.warmup,
        steps=options.steps,
        learning_rate=1e-6,
        seed=options.seed,
        threads=1,
    )


def write_config(setting: Setting) -> Path:
    """What `grpo-async train` and the server are given (JSON is YAML). Everything else is at its default."""
    config = {
        "run": {"name": "run", "dir": str(setting.folder), "seed": setting.seed},
        "model": {"path": str(setting.model)},
        "data": {"train": {"type": "jsonl", "path": str(setting.prompts)}, "shuffle": False},
        "rollout": {
            "group_size": setting.group_size,
            "groups_per_step": setting.groups_per_step,
            "max_staleness": setting.max_staleness,
            "max_completion_tokens": setting.completion_tokens,
            "max_in_flight": setting.in_flight,
            "temperature": 1.0,
        },
        "rewards": [{"function": "benchmarks._trl_setting:low_ids"}],
        "inference": {
            "engine": "vllm",
            **({"urls": [setting.server_url]} if setting.server_url else {}),
            "max_model_len": setting.max_model_len,
            "threads": setting.threads,
            "vllm": {"enforce_eager": True, "kv_cache_mb": 256},
        },
        "loss": {"type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2},
        "optimizer": {"lr": setting.learning_rate},
        "training": {"max_steps": setting.max_steps},
        "launch": {"device": "cpu", "trainer_threads": setting.threads},
        "checkpoint": {"every_steps": 10_000},
        "record": {"report": False},
    }
    path = setting.folder / "config.yaml"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _make_inputs(setting: Setting) -> None:
    """Model and prompts, in a process of its own: torch would stay in this one, which meters."""
    code = "import sys; from benchmarks.against_trl import write_inputs; write_inputs(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(setting.write())]
    subprocess.run(command, check=True, cwd=ROOT, timeout=_server.START_TIMEOUT_S)


def write_inputs(setting_file: str) -> None:
    """A Qwen3 with random weights, because what is measured is speed: nearly every completion runs to its limit on both sides,
    however long they train; the quickstart's tokenizer; and different sums as prompts."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from grpo_async.quickstart.model import train_tokenizer

    setting = Setting.read(Path(setting_file))

    def messages() -> list[str]:
        chance = random.Random(setting.seed)
        made: dict[str, None] = {}
        while len(made) < _NUM_PROMPTS:  # "27 + 3 - 81 + 4 = ?", for one
            terms = " ".join(f"{chance.choice('+-')} {chance.randrange(100)}" for _ in range(3))
            made[f"{chance.randrange(100)} {terms} = ?"] = None
        return list(made)

    tokenizer = train_tokenizer(
        [f"user\n{message}\nassistant\n" for message in messages()]
    )  # the roles become tokens, too
    # Qwen3's own chat template, of which TRL has a copy: TRL refuses templates that it does not know
    tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    torch.manual_seed(setting.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=8, head_dim=64, intermediate_size=768,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(setting.model)
    tokenizer.save_pretrained(setting.model)
    lines = [json.dumps({"prompt": [{"role": "user", "content": message}]}) for message in messages()]
    setting.prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Steady state of one run."""

    steps: list[Step]
    """Those that were measured, without the warmup."""
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

    def statistics(self) -> dict[str, tuple[float, str]]:
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
            "thrown away": (self.thrown_away / (self.samples + self.thrown_away), "fraction"),
            "staleness": (statistics.fmean(step.staleness for step in self.steps), "steps"),
        }


def outcome(steps: Sequence[Step], setting: Setting) -> Outcome:
    """The steady state of a run: its steps after the warmup, without those at the end.

    Raises:
        ValueError: there are fewer steps than that.
    """
    first, last = setting.warm_up, setting.last_measured
    if len(steps) < last:
        raise ValueError(f"{len(steps)} steps were made, {last} are needed")
    return Outcome(
        steps=list(steps[first:last]), thrown_away=steps[last - 1].thrown_away - steps[first - 1].thrown_away
    )


def _run(setting: Setting, side: str) -> Outcome:
    """`grpo-async train`, as anybody starts it, or TRL's trainer.

    Raises:
        RuntimeError: it failed, or took longer than RUN_TIMEOUT_S.
    """
    run = setting.folder / "run"
    if side == OURS:
        command = [sys.executable, "-m", "grpo_async", "train", str(write_config(setting))]
    else:
        command = [sys.executable, "-m", "benchmarks._trl_train", str(setting.write())]
    environment = {name: value for name, value in os.environ.items() if name not in ("GRPO_ASYNC_TOKEN", "PYTHONPATH")}
    environment |= {
        "OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    log = setting.folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: object = process.wait(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            code = error
        finally:
            _server.stop(process)
    if code != 0:
        tail = log.read_bytes()[-4000:].decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)} ended with {code}; the end of its log:\n{tail}")
    steps_file = run / "metrics.jsonl" if side == OURS else setting.steps_file
    lines = [json.loads(line) for line in steps_file.read_text(encoding="utf-8").splitlines()]
    if side == TRL:
        return outcome([Step(**line) for line in lines], setting)
    from grpo_async.tracking.timeline_file import read_events

    spans = [(event.name, event.track, event.start, event.end) for event in read_events(run / "events.jsonl")]
    return outcome(steps_of(lines, spans, group_size=setting.group_size), setting)


def steps_of(
    metrics: Sequence[dict[str, Any]], spans: Sequence[tuple[str, str, float, float]], *, group_size: int
) -> list[Step]:
    """Steps from the metrics of each and the timeline's spans (name, track, start, end).

    A span belongs to the step that ended next; a step lasts from the end of the one before. The first has none before, and counts
    as 0 s.
    """
    ends = sorted(end for name, track, _, end in spans if (name, track) == ("step", "trainer"))
    parts: list[dict[str, float]] = [defaultdict(float) for _ in ends]
    for name, track, start, end in spans:
        number = next((index for index, step_end in enumerate(ends) if end <= step_end + 1e-6), None)
        if track == "trainer" and number is not None:
            parts[number][name] += end - start
    steps = []
    trained = 0.0
    for number, (line, end) in enumerate(zip(metrics, ends, strict=True)):
        spent = parts[number]
        lost = sum(line[f"ledger/groups/{status}"] for status in ("stale", "filtered", "failed"))
        steps.append(
            Step(
                wall_s=end - ends[number - 1] if number else 0.0,
                samples=group_size * (line["ledger/groups/trained"] - trained),
                tokens=line["num_tokens"],
                waiting_s=spent["wait for samples"],
                forward_s=spent["forward"],
                backward_s=spent["backward"],
                optimizer_s=spent["optimizer"],
                sync_s=spent["push"],
                staleness=line.get("async/staleness_mean", 0.0),
                thrown_away=group_size * lost,
            )
        )
        trained = line["ledger/groups/trained"]
    return steps


def report_outcomes(report: Report, outcomes: dict[str, list[Outcome]]) -> None:
    """Rows of both sides, their ratios round by round, and the target."""
    found = {side: [run.statistics() for run in runs] for side, runs in outcomes.items()}
    for side, runs in found.items():
        for name, (_, unit) in runs[0].items():
            report.row(f"{side}: {name}", [each[name][0] for each in runs], unit)
    for name in ("trained samples", "trained tokens"):
        values = ratios({side: [each[name][0] for each in runs] for side, runs in found.items()}, OURS, TRL)
        report.row(f"{name}: {OURS} / {TRL}", values, "ratio")
        if name == "trained samples":
            report.target("trained samples/s over TRL's, lowest of all rounds", min(values), at_least=AT_LEAST)
