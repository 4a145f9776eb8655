"""`validate`, `schema` and `explain`: what a configuration says, and what it may say; `doctor`: what this machine can do."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_async.cli.options import ConfigArgument, SetOption
from grpo_async.errors import FAILURE, ConfigError

if TYPE_CHECKING:
    from grpo_async.config.keys import Key

_WIDTH = 100


def validate(
    config: ConfigArgument,
    overrides: SetOption = None,
) -> None:
    """Check a configuration and print it with every default.

    Starts nothing and opens none of the files that the configuration names. `train --dry-run` does, and shows the processes
    of the run. The output is itself a valid configuration; notes and the verdict go to stderr.

    \b
    Examples:
      grpo-async validate configs/quickstart.yaml
      grpo-async validate configs/quickstart.yaml --set launch.num_trainer_ranks=2 > resolved.yaml
    """
    from grpo_async.config.loader import dump_config, load_config
    from grpo_async.launch.plan import plan_dry

    resolved = load_config(config, overrides or ())
    notes = plan_dry(resolved).notes
    typer.echo(dump_config(resolved), nl=False)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{config} is valid", err=True)


def schema(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write to a file instead of the terminal.")
    ] = None,
) -> None:
    """Print the JSON schema of configuration files, for completion and validation in editors.

    Name it in the first line of a configuration: `# yaml-language-server: $schema=schema.json`.

    \b
    Examples:
      grpo-async schema
      grpo-async schema --out configs/schema.json
    """
    from grpo_async.config.keys import schema_text
    from grpo_async.utils.files import write_atomically

    if out is None:
        typer.echo(schema_text(), nl=False)
        return
    try:
        write_atomically(out, schema_text())
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from error


def explain(
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]", help="A key, its old or another trainer's name, or words to search for."),
    ] = None,
) -> None:
    """Explain a key: its meaning, type, range, default, and what other trainers call it. Without KEY: list all keys.

    \b
    Examples:
      grpo-async explain rollout.group_size
      grpo-async explain num_generations
      grpo-async explain weight push
      grpo-async explain | less
    """
    from grpo_async.config.keys import all_keys, find_keys
    from grpo_async.config.names import OTHER_NAMES

    word = " ".join(key or ())
    reasons = [other for other in OTHER_NAMES if other.name == word.lstrip("-") and other.here is None]
    for other in reasons:
        typer.echo(f"{other.name} ({other.trainer}) {other.why}.")
    found = all_keys() if not word else [] if reasons else find_keys(word)
    if not found and not reasons:
        raise ConfigError(f"no key or description contains {word!r}; `grpo-async explain` lists all keys")
    for each in found:
        if len(found) > 5 and each.path != word:
            typer.echo(f"{each.path:44} {each.summary}")
        else:
            _print_key(each)


def _print_key(key: Key) -> None:
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    typer.echo(textwrap.fill(f"{key.path}: {key.summary}", width, subsequent_indent="  "))
    for line in [*key.meaning.splitlines(), *([f"Elsewhere: {key.elsewhere}"] if key.elsewhere else [])]:
        typer.echo(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="  "))
    typer.echo("")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with every check.")] = False,
) -> None:
    """Check this machine: torch, vLLM, GPUs, drivers, limits, shared memory, sandbox.

    Every check passes, warns or fails, and says what to do. Starts and changes nothing. Exit code 1 only if something fails.

    \b
    Examples:
      grpo-async doctor
      grpo-async doctor --json | jq '.checks[] | select(.status != "pass")'
    """
    from grpo_async.checks.doctor import run_doctor
    from grpo_async.checks.report import print_checks, to_json, worst_status
    from grpo_async.utils.console import stdout_console

    checks = run_doctor()
    if as_json:
        typer.echo(to_json(checks))
    else:
        print_checks(stdout_console(), checks, title="This machine")
    if worst_status(checks) == "fail":
        raise typer.Exit(FAILURE)
