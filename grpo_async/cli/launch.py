"""`launch`: the files with which a scheduler starts a run on several machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from grpo_async.cli.options import ConfigArgument, SetOption

_SUBMIT_TIMEOUT_S = 120.0
OutOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write to this file. Default: print it, unless --submit is given."),
]

launch_app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@launch_app.callback()
def _launch() -> None:
    """Write the files with which a scheduler starts a run on the machines of launch.nodes.

    They run the same command, `grpo-async train CONFIG`, on every machine; it finds its role from the scheduler's variables.

    \b
    Examples:
      grpo-async launch slurm configs/cluster.yaml
      grpo-async launch kubernetes configs/cluster.yaml
    """


@launch_app.command("slurm", short_help="Write a batch script for Slurm; --submit submits it.")
def slurm(
    config: ConfigArgument,
    out: OutOption = None,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Submit the script with sbatch. --out then defaults to run.dir/run.name.sbatch."),
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Write a Slurm batch script from a configuration, for the machines of launch.nodes.

    The script runs where this command is called, so call it in a folder on a shared file system. Ahead of the time limit the
    run saves a checkpoint, and the job is requeued to continue from it. See launch.slurm in the configuration.

    \b
    Examples:
      grpo-async launch slurm configs/cluster.yaml
      grpo-async launch slurm configs/cluster.yaml --out cluster.sbatch
      grpo-async launch slurm configs/cluster.yaml --submit --set launch.slurm.partition=gpu
    """
    from grpo_async.cluster.slurm import batch_script
    from grpo_async.config.loader import load_config
    from grpo_async.launcher.gpus import gpus_needed
    from grpo_async.servers.engine_choice import choose_engine

    loaded = load_config(config, overrides or ())
    text = batch_script(
        loaded,
        config.absolute(),
        num_gpus=gpus_needed(loaded, choose_engine(loaded, is_here=False)),
        overrides=overrides or (),
        python=sys.executable,
        working_dir=Path.cwd(),
    )
    path = out or (loaded.run.dir / f"{loaded.run.name}.sbatch" if submit else None)
    _write(text, path, mode=0o700)
    if submit:
        raise typer.Exit(_submit("sbatch", str(path), hint="look with `squeue --me`"))


@launch_app.command("kubernetes", short_help="Write a manifest for Kubernetes; --submit applies it.")
def kubernetes(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="YAML file of the experiment; the pods read it at the same relative path."
        ),
    ],
    out: OutOption = None,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Apply it with kubectl. --out then defaults to run.dir/run.name.k8s.yaml."),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overrides: SetOption = None,
) -> None:
    """Write a Kubernetes manifest from a configuration: an Indexed Job with a pod for each machine of launch.nodes, and a
    headless Service through which they find each other.

    The pods mount the volume of launch.kubernetes.volume_claim at launch.kubernetes.mount_path and work there: it holds
    CONFIG, model, data and run.dir. A Job cannot be changed: delete it before applying it again with --resume.

    \b
    Examples:
      grpo-async launch kubernetes configs/cluster.yaml --out cluster.k8s.yaml
      grpo-async launch kubernetes configs/cluster.yaml --submit --set launch.kubernetes.image=my/image:2
    """
    from grpo_async.cluster.kubernetes import manifest
    from grpo_async.config.loader import load_config
    from grpo_async.launcher.gpus import gpus_needed
    from grpo_async.servers.engine_choice import choose_engine

    loaded = load_config(config, overrides or ())
    num_gpus = gpus_needed(loaded, choose_engine(loaded, is_here=False))
    text = manifest(loaded, config, num_gpus=num_gpus, overrides=overrides or (), resume=resume)
    path = out or (loaded.run.dir / f"{loaded.run.name}.k8s.yaml" if submit else None)
    _write(text, path, mode=0o600)
    if submit:
        raise typer.Exit(_submit("kubectl", "apply", "-f", str(path), hint="look with `kubectl get jobs`"))


def _write(text: str, path: Path | None, *, mode: int) -> None:
    """Print it, or write it for this user alone: values set on the command line may be confidential."""
    from grpo_async.run_directory import write_atomically

    if path is None:
        typer.echo(text, nl=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text, mode=mode)
    typer.echo(f"wrote {path}")


def _submit(*command: str, hint: str) -> int:
    from grpo_async.errors import RunError

    try:
        return subprocess.run(command, timeout=_SUBMIT_TIMEOUT_S, check=False).returncode
    except FileNotFoundError as error:
        raise RunError(f"{command[0]} is not installed here; where it is, run: {' '.join(command)}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} has not returned within {_SUBMIT_TIMEOUT_S:.0f} s; {hint}") from error
