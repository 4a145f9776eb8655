"""`launch`: start a run by a scheduler, over several machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import ConfigArgument, SetOption

_SBATCH_TIMEOUT_S = 120.0

launch_app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@launch_app.callback()
def _launch() -> None:
    """Start a run over several machines by a scheduler.

    \b
    Examples:
      grpo-async launch slurm configs/cluster.yaml
    """


@launch_app.command("slurm", short_help="Write a batch script for Slurm; --submit hands it in.")
def slurm(
    config: ConfigArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the script there; without it and --submit it is printed."),
    ] = None,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Hand the script to sbatch. Default of --out then: run.dir/run.name.sbatch."),
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Write a Slurm batch script from a configuration: launch.nodes machines train, launch.slurm.server_nodes serve.

    The script runs where this command is called, so call it in a folder that all machines see. Ahead of the time limit the
    run saves a checkpoint, and the job is queued again to go on from it. See launch.slurm in the configuration.

    \b
    Examples:
      grpo-async launch slurm configs/cluster.yaml
      grpo-async launch slurm configs/cluster.yaml --out cluster.sbatch
      grpo-async launch slurm configs/cluster.yaml --submit --set launch.slurm.partition=gpu
    """
    from grpo_async.cluster.slurm import batch_script
    from grpo_async.config.loader import load_config
    from grpo_async.run_directory import write_atomically

    loaded = load_config(config, overrides or ())
    text = batch_script(
        loaded, config.absolute(), overrides=overrides or (), python=sys.executable, working_dir=Path.cwd()
    )
    if out is None and not submit:
        typer.echo(text, nl=False)
        return
    path = out or loaded.run.dir / f"{loaded.run.name}.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text, mode=0o700)  # what was set on the command line may be confidential
    typer.echo(f"wrote {path}")
    if submit:
        raise typer.Exit(_submit(path))


def _submit(path: Path) -> int:
    from grpo_async.errors import RunError

    try:
        return subprocess.run(["sbatch", str(path)], timeout=_SBATCH_TIMEOUT_S, check=False).returncode
    except FileNotFoundError as error:
        raise RunError(f"sbatch is not installed here; on a machine of the cluster: sbatch {path}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"sbatch has not answered for {_SBATCH_TIMEOUT_S:.0f} s; look with `squeue --me`") from error
