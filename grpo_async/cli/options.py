"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ConfigArgument: TypeAlias = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment.")]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override one value, e.g. optimizer.lr=1e-6 or rewards.0.weight=2; repeatable.",
    ),
]
PortOption: TypeAlias = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
