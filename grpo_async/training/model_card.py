"""README.md of an exported model: which run made it, of what, and how good it was. Pure text."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.loader import dump_values
from grpo_async.config.public import public_config
from grpo_async.rundir import write_atomically

_PACKAGES = ("grpo-async", "torch", "transformers", "vllm", "peft", "safetensors")


def write_model_card(
    folder: Path, config: ExperimentConfig, *, step: int, evaluation: Mapping[str, float] | None = None
) -> None:
    """Write README.md, or replace it (the last evaluation comes after the export).

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(folder / "README.md", model_card(config, step=step, evaluation=evaluation))


def model_card(config: ExperimentConfig, *, step: int, evaluation: Mapping[str, float] | None = None) -> str:
    """The card of the policy after `step` steps. `evaluation`: metrics on held-out data, if there are any."""
    base, rollout = config.model.path, config.rollout
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {_quoted(base)}",
        "pipeline_tag: text-generation",
        "tags:",
        "- grpo",
        "- reinforcement-learning",
        "---",
        "",
        f"# {config.run.name}",
        "",
        f"`{base}`, trained for {step} of {config.training.max_steps} steps by reinforcement learning (loss `{config.loss.type}`, "
        f"{rollout.groups_per_step} prompts with {rollout.group_size} completions per step, policies up to "
        f"{rollout.max_staleness} steps old).",
        *_adapter_lines(config),
        "",
        "## Data and rewards",
        "",
        f"- data: `{_data(config.data.train)}`",
        *(f"- reward: `{_reward(section)}`, weight {section.weight:g}" for section in config.rewards),
        *(["- no reward function: environments give the rewards"] if not config.rewards else []),
        "",
        "## Evaluation",
        "",
        *_evaluation_lines(evaluation),
        "",
        "## Versions",
        "",
        *(f"- {name} {version}" for name in _PACKAGES if (version := _version(name)) is not None),
        "",
        "## Configuration",
        "",
        "Without servers, launch and trackers; values of arguments are left out.",
        "",
        "```yaml",
        dump_values(public_config(config)).rstrip("\n").replace("```", "'''"),
        "```",
        "",
    ]
    return "\n".join(lines)


def _adapter_lines(config: ExperimentConfig) -> list[str]:
    lora = config.model.lora
    if lora is None:
        return []
    return ["", f"LoRA of rank {lora.rank}, merged into these weights; the adapter alone stands beside this folder."]


def _evaluation_lines(evaluation: Mapping[str, float] | None) -> list[str]:
    if not evaluation:
        return ["This policy was not evaluated on held-out data."]
    rows = [f"| {name} | {value:.6g} |" for name, value in evaluation.items() if isinstance(value, int | float)]
    return ["| metric | value |", "| --- | --- |", *rows]


def _data(source: object) -> str:
    """The kind of source and where it is: "jsonl: data/train.jsonl"."""
    for name in ("path", "name", "function", "task"):
        value = getattr(source, name, None)
        if value is not None:
            return f"{getattr(source, 'type', 'data')}: {value}"
    return str(getattr(source, "type", type(source).__name__))


def _reward(section: object) -> str:
    for name in ("function", "url", "type"):
        value = getattr(section, name, None)
        if value is not None:
            return str(value)
    return type(section).__name__


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
