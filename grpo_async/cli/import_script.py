"""`import`: a training script of TRL as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_script(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A script that calls GRPOTrainer or AsyncGRPOTrainer.")
    ],
    arguments: Annotated[
        str,
        typer.Option(
            "--args", help="The command line of a script that reads its settings from it: '--learning_rate 1e-5 ...'."
        ),
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Run the script as well: compare two small steps here and in TRL.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--check-model", metavar="FOLDER", help="Its model for --check, if not the script's.")
    ] = None,
) -> None:
    """Turn a training script of TRL into a configuration, without running it.

    Writes SCRIPT.yaml beside the script, and SCRIPT_parts.py with its own functions and data, copied as they are. What has no
    counterpart, or is known only when the script runs, is a comment in the YAML with the reason. Never overwrites a file. Run the
    configuration from the script's folder.

    --check does run the script, your code, up to the end of train(), with TRL, which must be installed. Both trainers make two
    steps of the same tokens on the CPU, with a small random model of the same family; rewards, advantages, losses, gradient norms
    and the update of the weights are compared. Files that are there already are checked as they are.

    Exit code: 0 written (and equal), 1 not equal, 2 it cannot be read or run, or a file is there already.

    \b
    Examples:
      grpo-async import train_grpo.py --check
      grpo-async import gspo.py --args '--model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5'
    """
    from grpo_async.config.loader import load_config
    from grpo_async.config.trl_script import import_script as read_script
    from grpo_async.errors import ConfigError

    config, parts = script.with_suffix(".yaml"), script.with_name(f"{script.stem}_parts.py")
    found = read_script(script, arguments)
    if check and config.exists():
        _check(script, config, arguments, model)
    for path in (config, parts):
        if path.exists():
            raise ConfigError(f"{path} exists already; move it away first")
    if found.parts:
        parts.write_text(found.parts, encoding="utf-8")
    config.write_text(found.as_yaml(script.name), encoding="utf-8")
    written = f"{config} and {parts}" if found.parts else str(config)
    typer.echo(f"{written}: {len(found.comments)} comments say what to look at")
    if check:
        _check(script, config, arguments, model)
    try:
        load_config(config)
    except ConfigError as error:
        typer.echo(f"\nstill to be done by hand:\n{error}")
    typer.echo(f"\nnext:\n  grpo-async validate {config.name}    # in {script.parent.resolve()}")


def _check(script: Path, config: Path, arguments: str, model: str | None) -> None:
    """Raises typer.Exit: with 1 where the two are not equal."""
    from grpo_async.launch.check_import import check_import
    from grpo_async.utils.console import stdout_console

    typer.echo(f"two steps of {config.name} and of {script.name} on a tiny model; this takes about a minute")
    is_equal = check_import(script, config, arguments, model, stdout_console())
    raise typer.Exit(0 if is_equal else 1)
