"""`launch`: the files with which a scheduler starts a run on several machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_async.cli.options import ConfigArgument, SetOption

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig

launch_app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@launch_app.callback()
def _launch() -> None:
    """Print the file with which a scheduler starts a run on the machines of launch.nodes.

    It runs the same command, `grpo-async train CONFIG`, on every machine; that finds its role from the scheduler's variables.

    \b
    Examples:
      grpo-async launch slurm configs/cluster.yaml | sbatch
      grpo-async launch kubernetes configs/cluster.yaml | kubectl apply -f -
    """


@launch_app.command("slurm", short_help="Print a batch script for Slurm.")
def slurm(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Print a Slurm batch script for the machines of launch.nodes.

    The script runs where this command is called, so call it in a folder on a shared file system. Ahead of the time limit the
    run saves a checkpoint, and the job is requeued to continue from it. See launch.slurm in the configuration.

    \b
    Examples:
      grpo-async launch slurm configs/cluster.yaml > cluster.sbatch
      grpo-async launch slurm configs/cluster.yaml --set launch.slurm.partition=gpu | sbatch
    """
    from grpo_async.cluster.schedulers import batch_script

    loaded, num_gpus = _load(config, overrides)
    text = batch_script(
        loaded,
        config.absolute(),
        num_gpus=num_gpus,
        overrides=overrides or (),
        python=sys.executable,
        working_dir=Path.cwd(),
    )
    typer.echo(text, nl=False)


@launch_app.command("kubernetes", short_help="Print a manifest for Kubernetes.")
def kubernetes(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="YAML file of the experiment; the pods read it at the same relative path."
        ),
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overrides: SetOption = None,
) -> None:
    """Print a Kubernetes manifest: an Indexed Job with a pod for each machine of launch.nodes, and a headless Service through
    which they find each other.

    The pods mount the volume of launch.kubernetes.volume_claim at launch.kubernetes.mount_path and work there: it holds
    CONFIG, model, data and run.dir. A Job cannot be changed: delete it before applying it again with --resume.

    \b
    Examples:
      grpo-async launch kubernetes configs/cluster.yaml > cluster.k8s.yaml
      grpo-async launch kubernetes configs/cluster.yaml --set launch.kubernetes.image=my/image:2 | kubectl apply -f -
    """
    from grpo_async.cluster.schedulers import manifest

    loaded, num_gpus = _load(config, overrides)
    typer.echo(manifest(loaded, config, num_gpus=num_gpus, overrides=overrides or (), resume=resume), nl=False)


def _load(config: Path, overrides: list[str] | None) -> tuple[ExperimentConfig, int]:
    """The configuration, and the GPUs that it needs of each machine."""
    from grpo_async.config.loader import load_config
    from grpo_async.launcher.gpus import gpus_needed
    from grpo_async.servers.engine_choice import choose_engine

    loaded = load_config(config, overrides or ())
    return loaded, gpus_needed(loaded, choose_engine(loaded, is_here=False))
