"""`prepare-quickstart`: the model and the data that the configs of the tiny tasks use."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from grpo_async.utils.files import shipped

_CONFIGS = {  # task: those in configs/ that train it
    "think": ("quickstart.yaml",),
    "tool": ("tools.yaml", "agent.yaml"),
    "game": ("environment.yaml",),
    "code": ("code.yaml",),
    "reasoning_gym": ("reasoning-gym.yaml",),
}


def prepare_quickstart(
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="; ".join(f"{task}: {', '.join(names)}" for task, names in _CONFIGS.items()) + ".",
        ),
    ] = "think",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to write. Default: .cache/quickstart/seed_N; for tasks other than think, .cache/quickstart/TASK/seed_N.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the weights and the data.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Make it again even if it exists.")] = False,
) -> None:
    """Make a tiny model and data for one of the tiny tasks; does nothing if they already exist.

    \b
    Examples:
      grpo-async prepare-quickstart
      grpo-async prepare-quickstart --task tool
      grpo-async prepare-quickstart --seed 1 --out .cache/quickstart/other
    """
    from grpo_async.quickstart.prepare import prepare

    prepare(out, task=task, seed=seed, force=force)
    if out is None and seed == 0:  # what the configs name
        typer.echo(f"Next: grpo-async train {shlex.quote(str(shipped(f'configs/{_CONFIGS[task][0]}')))}")
