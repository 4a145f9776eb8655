"""The files with which a scheduler starts a run on the machines of launch.nodes: a batch script for Slurm, a manifest for
Kubernetes. Both run `grpo-async train CONFIG` on every machine, which finds its place by what the scheduler sets (cluster.nodes).

Slurm        one job of whole machines; `srun` starts a task on each. A while before the time limit the run saves and ends, and
             the job is queued again to continue from there.
Kubernetes   an Indexed Job with a pod for each machine, and a headless Service with names by which the pods find pod 0. They
             share a volume, for run.dir, model and data. A pod that fails, fails the Job: apply it again with --resume.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from grpo_async.cluster.nodes import DEFAULT_PORT
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import set_options
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir

_MARGIN_S = 60  # to end everything after the trainer has saved; Slurm looks at its clock every so often
_MAX_NAME = 50  # a label of Kubernetes has 63 characters, of which the index takes some

_SLURM = r"""#!/bin/bash
# Made by: grpo-async launch slurm {{ config_path | replace("\n", " ") }}
#
#   sbatch FILE                                begin a run
#   sbatch FILE --resume                       continue from its newest checkpoint (any option of `grpo-async train`)
#   scancel --signal=TERM JOB                  save a checkpoint and end (a plain scancel saves nothing)
#
#SBATCH --job-name={{ run_name }}
#SBATCH --nodes={{ num_nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{% if num_gpus %}
#SBATCH --gpus-per-node={{ num_gpus }}
{% endif %}
{% for name in ("partition", "account", "time") if slurm[name] %}
#SBATCH --{{ name }}={{ slurm[name] }}
{% endfor %}
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{{ notice_s }}
{% for option in slurm.options %}
#SBATCH {{ option }}
{% endfor %}

set -euo pipefail

cd {{ working_dir }}
train=({{ train }})
{% if slurm.setup %}

# launch.slurm.setup
{{ slurm.setup | join("\n") }}
{% endif %}

# ---- a job that is queued again continues what it has saved; before that it begins anew
options=("$@")
if (( ${SLURM_RESTART_COUNT:-0} > 0 )) && [ -f {{ job_note }} ] && [ "$(< {{ job_note }})" = "$SLURM_JOB_ID" ]; then
  options=(--resume)
fi

# ---- what Slurm sends to this script, it passes on to the tasks: `srun` itself would kill them
signaled=""   # a signal cut the `wait` short
out_of_time="" # Slurm has said that the time is nearly over
# shellcheck disable=SC2329  # by traps
stop() {
  signaled=yes
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'out_of_time=yes; stop' USR1
trap stop TERM INT

# ---- every machine runs the same command, with all of its CPUs and memory; `sbatch FILE ...` adds options to it
srun --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --mem=0 --label \
  "${train[@]}" ${options[@]+"${options[@]}"} &
step=$!

# ---- until all have ended: node 0 decides how the run went
code=0
while true; do
  signaled=""
  code=0
  wait "$step" || code=$?
  if [ -z "$signaled" ]; then break; fi
done
if [ -n "$out_of_time" ] && ((code == 143)); then
  echo "the time is over: queued again, to continue from the checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_KUBERNETES = """\
# Made by: grpo-async launch kubernetes
apiVersion: v1
kind: Service
metadata: {name: {{ name }}, labels: {{ labels }}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # pods have to find each other before any of them could be called ready
  selector: {{ labels }}
---
apiVersion: batch/v1
kind: Job
metadata: {name: {{ name }}, labels: {{ labels }}}
spec:
  completionMode: Indexed
  completions: {{ num_nodes }}
  parallelism: {{ num_nodes }}
  backoffLimit: 0
  template:
    metadata: {labels: {{ labels }}}
    spec:
      subdomain: {{ name }}
      restartPolicy: Never
      terminationGracePeriodSeconds: {{ notice_s }}
      containers:
        - name: grpo-async
          image: {{ kubernetes.image | tojson }}
          command: {{ command | tojson }}
          workingDir: {{ mount_path | tojson }}
          env:
            - {name: MASTER_ADDR, value: {{ name }}-0.{{ name }}}
            - {name: MASTER_PORT, value: "{{ port }}"}
{% if num_gpus %}
          resources: {limits: {nvidia.com/gpu: "{{ num_gpus }}"}}
{% endif %}
          volumeMounts:
            - {name: shared, mountPath: {{ mount_path | tojson }}}
            - {name: memory, mountPath: /dev/shm}  # NCCL and vLLM pass more through it than the 64 MB of a pod
      volumes:
        - {name: shared, persistentVolumeClaim: {claimName: {{ kubernetes.volume_claim | tojson }}}}
        - {name: memory, emptyDir: {medium: Memory}}
"""


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
        _SLURM,
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
        _KUBERNETES,
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
    """As Kubernetes takes names: "Math_7B.v2" -> "math-7b-v2"."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower())[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _render(template: str, config: ExperimentConfig, **values: object) -> str:
    """What is quoted is quoted for a shell or as JSON, not for HTML."""
    environment = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    launch = config.launch
    notice_s = round(launch.stop_timeout_s) + _MARGIN_S
    return environment.from_string(template).render(num_nodes=launch.nodes.count, notice_s=notice_s, **values)
