"""The files with which a scheduler starts a run on the machines of launch.nodes: a batch script for Slurm, a manifest for
Kubernetes. Both run `grpo-async train CONFIG` on every machine, which finds its place by what the scheduler sets (cluster.nodes).

Slurm        one job of whole machines; `srun` starts a task on each. A while before the time limit the run saves and ends, and
             the job is queued again to continue from there.
Kubernetes   an Indexed Job with a pod for each machine, and a headless Service with names by which the pods find pod 0. They
             share a volume, for run.dir, model and data. A pod that fails makes the Job fail: delete it, and apply it again with
             --resume.

The templates are slurm.sbatch.jinja and kubernetes.yaml.jinja, beside this module.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo_async.cluster.nodes import DEFAULT_PORT
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import set_options
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir

_MARGIN_S = 60  # to end everything after the trainer has saved; Slurm looks at its clock every so often
_MAX_NAME = 50  # a label of Kubernetes has 63 characters, of which the index takes some


def batch_script(
    config: ExperimentConfig,
    config_path: Path,
    *,
    num_gpus: int,
    overrides: Sequence[str] = (),
    python: str,
    working_dir: Path,
) -> str:
    """The script for `sbatch`.

    Args:
        config_path: the file of `config`; the job reads it when it starts.
        num_gpus: of each machine, where `launch.slurm.gpus_per_node` does not say it.
        overrides: values that were set on the command line, `section.key=value`.
        python: interpreter, the same path on every machine.
        working_dir: where the job runs, on a file system that all machines share, like `config.run.dir`.
    """
    slurm = config.launch.slurm
    return _render(
        "slurm.sbatch.jinja",
        config,
        slurm=slurm,
        config_path=shlex.quote(str(config_path)),
        num_gpus=num_gpus if slurm.gpus_per_node is None else slurm.gpus_per_node,
        run_name=config.run.name,
        working_dir=shlex.quote(str(working_dir)),
        train=shlex.join([python, "-m", "grpo_async", "train", str(config_path), *set_options(overrides)]),
        job_note=shlex.quote(str(job_note(RunDir(config.run_path).latest_logs))),
    )


def job_note(attempt: Path) -> Path:
    """A file of an attempt's logs that names the Slurm job which it belongs to."""
    return attempt / "slurm_job"


def manifest(
    config: ExperimentConfig, config_path: Path, *, num_gpus: int, overrides: Sequence[str] = (), resume: bool = False
) -> str:
    """The Service and the Job, as YAML for `kubectl apply -f`.

    Args:
        config_path: as the pods see it, relative to launch.kubernetes.mount_path, or absolute.
        num_gpus: of each pod.
        overrides: values that were set on the command line, `section.key=value`.
        resume: continue from the newest checkpoint.

    Raises:
        ConfigError: launch.kubernetes lacks the image or the volume.
    """
    section = config.launch.kubernetes
    missing = [key for key in ("image", "volume_claim") if getattr(section, key) is None]
    if missing:
        raise ConfigError("\n".join(f"launch.kubernetes.{key}: is needed for the manifest; set it" for key in missing))
    name = job_name(config.run.name)
    train = ["grpo-async", "train", str(config_path), *set_options(overrides), *(["--resume"] if resume else [])]
    return _render(
        "kubernetes.yaml.jinja",
        config,
        kubernetes=section,
        name=name,
        num_gpus=num_gpus,
        labels=json.dumps({"app.kubernetes.io/name": "grpo-async", "app.kubernetes.io/instance": name}),
        command=train,
        mount_path=str(section.mount_path),
        port=config.launch.rendezvous_address[1] if config.launch.rdzv is not None else DEFAULT_PORT,
    )


def job_name(run_name: str) -> str:
    """The run's name in the form that Kubernetes takes: "Math_7B.v2" -> "math-7b-v2"."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower())[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _render(template: str, config: ExperimentConfig, **values: object) -> str:
    """What is quoted is quoted for a shell or as JSON, not for HTML."""
    environment = Environment(  # noqa: S701
        loader=PackageLoader("grpo_async.cluster", ""),
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    launch = config.launch
    notice_s = round(launch.stop_timeout_s) + _MARGIN_S
    return environment.get_template(template).render(num_nodes=launch.nodes.count, notice_s=notice_s, **values)
