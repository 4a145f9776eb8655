"""`init` and `prepare-quickstart`: something to start from, your own or ours."""

from __future__ import annotations

import json
import re
import shlex
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from grpo_async.errors import ConfigError
from grpo_async.quickstart import CONFIGS, DEFAULT_TASK
from grpo_async.utils.files import shipped

_DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to write; created if it does not exist.")
    ] = Path("."),
    model: Annotated[
        str, typer.Option("--model", metavar="PATH", help="The policy: a name on the Hugging Face hub, or a folder.")
    ] = _DEFAULT_MODEL,
) -> None:
    """Write a config with comments, your own reward function, ten rows of data and a test of the reward.

    Never overwrites a file.

    \b
    Examples:
      grpo-async init my-run
      grpo-async init my-run --model Qwen/Qwen3-4B
    """
    files = _files(name=_run_name(folder), model=model)
    if present := sorted(name for name in files if (folder / name).exists()):
        raise ConfigError(f"{folder} already contains {', '.join(present)}; choose another folder; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    typer.echo(f"{folder}: {', '.join(files)}")
    typer.echo("Next:")
    if folder != Path("."):
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    for command in ("python -m pytest", "grpo-async check-reward train.yaml", "grpo-async train train.yaml"):
        typer.echo(f"  {command}")
    typer.echo(f"Documentation: {shipped('docs')}; examples: {shipped('configs')}")


def _files(*, name: str, model: str) -> dict[str, str]:
    """Text by file name."""
    folder = resources.files("grpo_async") / "starters"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.is_file()}
    config = Template(texts.pop("train.yaml")).substitute(
        schema=shipped("configs/schema.json").resolve(),
        name=name,  # the file has the quotes; no character of a run's name needs an escape
        model=json.dumps(model),  # in quotes: a loader need not agree on what is a number
    )
    return {"train.yaml": config, **dict(sorted(texts.items()))}


def _run_name(folder: Path) -> str:
    """The folder's name, reduced to what a run's name may contain, and to its length."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:200] or "my-run"


def prepare_quickstart(
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="; ".join(f"{task}: {name}" for task, name in CONFIGS.items()) + ".",
        ),
    ] = DEFAULT_TASK,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the weights and the data.")] = 0,
) -> None:
    """Make a tiny model and data for one of the tiny tasks; does nothing if they already exist.

    They are in .cache/quickstart/seed_N, those of tasks other than think in .cache/quickstart/TASK/seed_N.

    \b
    Examples:
      grpo-async prepare-quickstart
      grpo-async prepare-quickstart --task tool
      grpo-async prepare-quickstart --seed 1
    """
    from grpo_async.quickstart.prepare import prepare

    prepare(task=task, seed=seed)
    if seed == 0:  # what the configs name
        typer.echo(f"Next: grpo-async train {shlex.quote(str(shipped(f'configs/{CONFIGS[task]}')))}")
