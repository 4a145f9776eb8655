"""`prepare-quickstart`: the model and the data that configs/quickstart.yaml names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def prepare_quickstart(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default .cache/quickstart/seed_N.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the weights and of the data.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Make it again even if it is there.")] = False,
) -> None:
    """Make the quickstart's tiny model and its data; returns at once when they are there.

    \b
    Examples:
      grpo-async prepare-quickstart
      grpo-async prepare-quickstart --seed 1 --out .cache/quickstart/other
    """
    from grpo_async.quickstart.prepare import prepare

    prepare(out, seed=seed, force=force)
