"""Our side: the configuration of a Setting, and its steps as a run records them (events.jsonl, metrics.jsonl)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trl_side.setting import Setting, Step

RUN_NAME = "run"
KV_CACHE_MB = 256
_LOST = ("stale", "filtered", "failed")
_PARTS = ("wait for samples", "forward", "backward", "optimizer", "push")


def configuration(setting: Setting) -> dict[str, Any]:
    """What `grpo-async train` and `grpo-async serve-vllm` are given. Everything else is at its default."""
    return {
        "run": {"name": RUN_NAME, "dir": str(setting.folder), "seed": setting.seed},
        "model": {"path": str(setting.model)},
        "data": {"train": {"type": "jsonl", "path": str(setting.prompts)}, "shuffle": False},
        "rollout": {
            "group_size": setting.group_size,
            "groups_per_step": setting.groups_per_step,
            "max_staleness": setting.max_staleness,
            "max_completion_tokens": setting.completion_tokens,
            "max_in_flight": setting.max_in_flight,
            "temperature": 1.0,
        },
        "rewards": [{"function": "benchmarks.trl_side.reward:share_of_low_ids"}],
        "inference": {
            "engine": "vllm",
            **({"urls": [setting.server_url]} if setting.server_url else {}),
            "max_model_len": setting.max_model_len,
            "threads": setting.threads,
            "vllm": {"enforce_eager": True, "kv_cache_mb": KV_CACHE_MB},
        },
        "weights": {"mode": setting.push_mode},
        "loss": {"type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2},
        "optimizer": {"lr": setting.learning_rate},
        "training": {"max_steps": setting.max_steps},
        "launch": {"device": "cpu", "trainer_threads": setting.threads},
        "checkpoint": {"every_steps": 10_000},
        "record": {"report": False},
    }


def write_configuration(setting: Setting) -> Path:
    """The configuration as a file in the run's folder (JSON is YAML)."""
    path = setting.folder / "config.yaml"
    path.write_text(json.dumps(configuration(setting), indent=2) + "\n", encoding="utf-8")
    return path


def metrics_file(setting: Setting) -> Path:
    """Where a run writes a line after every step."""
    return setting.folder / RUN_NAME / "metrics.jsonl"


def read_steps(setting: Setting) -> list[Step]:
    """The steps of a finished run.

    Raises:
        OSError: the run has left no metrics or no timeline.
    """
    from grpo_async.tracking.timeline_file import read_events

    lines = metrics_file(setting).read_text(encoding="utf-8").splitlines()
    events = list(read_events(setting.folder / RUN_NAME / "events.jsonl"))
    spans = [(event.name, event.lane, event.start, event.end) for event in events]
    return steps_of([json.loads(line) for line in lines], spans, group_size=setting.group_size)


def steps_of(
    metrics: Sequence[dict[str, float]], spans: Sequence[tuple[str, str, float, float]], *, group_size: int
) -> list[Step]:
    """Steps from the metrics of each and the timeline's spans (name, lane, start, end).

    A span belongs to the step that ended next; a step lasts from the end of the one before. The first has none before, and counts
    as 0 s.
    """
    ends = sorted(end for name, lane, _, end in spans if (name, lane) == ("step", "trainer"))
    parts: list[dict[str, float]] = [defaultdict(float) for _ in ends]
    for name, lane, start, end in spans:
        if lane == "trainer" and name in _PARTS:
            number = next((index for index, step_end in enumerate(ends) if end <= step_end + 1e-6), None)
            if number is not None:
                parts[number][name] += end - start
    steps = []
    trained = 0.0
    for number, (line, end) in enumerate(zip(metrics, ends, strict=True)):
        spent = parts[number]
        steps.append(
            Step(
                ended_at=end,
                wall_s=end - ends[number - 1] if number else 0.0,
                samples=group_size * (line["ledger/groups/trained"] - trained),
                tokens=line["num_tokens"],
                waiting_s=spent["wait for samples"],
                forward_s=spent["forward"],
                backward_s=spent["backward"],
                optimizer_s=spent["optimizer"],
                sync_s=spent["push"],
                staleness=line.get("async/staleness_mean", 0.0),
                thrown_away=group_size * sum(line[f"ledger/groups/{status}"] for status in _LOST),
            )
        )
        trained = line["ledger/groups/trained"]
    return steps
