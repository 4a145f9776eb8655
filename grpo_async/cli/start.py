"""`init`, `prepare-quickstart` and `import`: something to start from, your own, ours or TRL's."""

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
