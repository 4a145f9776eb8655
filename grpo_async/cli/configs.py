"""`validate` and `schema`: what a configuration says, and what it may say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import ConfigArgument, SetOption


def validate(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Check a configuration: print it with every default, and the processes that a run would start.

    Starts nothing and opens none of the files that the configuration names; `train --dry-run` does. The plan comes
    first, as comments, so the output is itself a valid configuration. Its notes are repeated on stderr at the end.

    \b
    Examples:
      grpo-async validate configs/quickstart.yaml
      grpo-async validate configs/quickstart.yaml --set launch.num_trainer_ranks=2 > resolved.yaml
    """
    from grpo_async.config.loader import dump_config, load_config
    from grpo_async.launcher.plan import plan_only

    resolved = load_config(config, overrides or ())
    plan = plan_only(resolved)
    typer.echo("".join(f"# {line}".rstrip() + "\n" for line in plan.describe().splitlines()))
    typer.echo(dump_config(resolved), nl=False)
    for note in plan.notes:
        typer.echo(f"note: {note}", err=True)


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
    from grpo_async.config.schema import schema_text
    from grpo_async.errors import ConfigError
    from grpo_async.run_directory import write_atomically

    if out is None:
        typer.echo(schema_text(), nl=False)
        return
    try:
        write_atomically(out, schema_text())
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from error
