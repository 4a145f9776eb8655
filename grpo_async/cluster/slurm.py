"""A batch script for Slurm from a configuration: one job, in which `srun` runs `grpo-async train CONFIG` on every machine.

job      launch.nodes: as many whole machines as train and serve; each finds its place by Slurm's variables (cluster.nodes)
GPUs     Slurm gives a task all of its machine; the launcher divides them there among its processes, by what the task may see
time     a while before the limit the run saves and ends, and the job is queued again to continue from there
again    a job that is queued again continues only what it began itself: every attempt notes its job, see `restart_of_job`
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import set_options
from grpo_async.run_directory import RunDir, write_atomically

_MARGIN_S = 60  # to end the servers, and for Slurm, which looks at its clock every so often


def batch_script(
    config: ExperimentConfig,
    config_path: Path,
    *,
    num_gpus: int,
    overrides: Sequence[str] = (),
    python: str,
    working_dir: Path,
) -> str:
    """The script as text.

    Args:
        config_path: the file of `config`; the job reads it when it starts.
        num_gpus: of each machine, where `launch.slurm.gpus_per_node` does not say it.
        overrides: values that were set on the command line, `section.key=value`.
        python: interpreter, the same path on every machine.
        working_dir: where the job runs, on a file system that all machines share, like `config.run.dir`.
    """
    train = [python, "-m", "grpo_async", "train", str(config_path), *set_options(overrides)]
    lines = [
        *_head(config, config_path, num_gpus),
        f"cd {shlex.quote(str(working_dir))}",
        f"train=({shlex.join(train)})",
        *(["", "# launch.slurm.setup", *config.launch.slurm.setup] if config.launch.slurm.setup else []),
        "",
        _BODY,
    ]
    return "\n".join(lines)


def note_job(attempt: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Write the Slurm job that this process belongs to, if any, into the folder of an attempt, for `restart_of_job`."""
    if job := environment.get("SLURM_JOB_ID"):
        write_atomically(_note(attempt), f"{job}\n")


def restart_of_job(
    run_dir: RunDir, *, resume: str | None, clean: bool, environment: Mapping[str, str] = os.environ
) -> tuple[str | None, bool]:
    """Where a Slurm job that is queued again starts, after its time was over or a machine broke: `resume` and `clean` of its
    command line, or what takes their place once an attempt of this job has started in the run directory.

    It continues from the newest checkpoint; while it has saved none, it starts over, or from the checkpoint that it was given. A
    job whose start was refused, because the directory holds another run, is refused again.
    """
    job = environment.get("SLURM_JOB_ID")
    own = [path for path in run_dir.logs.glob("attempt_*/slurm_job") if path.read_text(encoding="utf-8").strip() == job]
    latest = _note(run_dir.latest_logs.resolve())
    if environment.get("SLURM_RESTART_COUNT", "0") == "0" or latest not in [path.resolve() for path in own]:
        return resume, clean
    began_at = min(path.stat().st_mtime for path in own)
    # all checkpoints are of this job, unless it began with one
    steps = [
        s for s in run_dir.checkpoint_steps() if resume is None or run_dir.checkpoint(s).stat().st_mtime > began_at
    ]
    return ("latest", False) if steps else (resume, resume is None)


def _note(attempt: Path) -> Path:
    return attempt / "slurm_job"


def _head(config: ExperimentConfig, config_path: Path, num_gpus: int) -> Iterator[str]:
    launch, slurm = config.launch, config.launch.slurm
    notice_s = round(launch.stop_timeout_s) + _MARGIN_S
    yield "#!/bin/bash"
    yield f"# Made by: grpo-async launch slurm {shlex.quote(str(config_path))}".replace("\n", " ")
    yield "#"
    yield "#   sbatch FILE                                begin a run"
    yield "#   sbatch FILE --resume                       continue from its newest checkpoint (any option of `grpo-async train`)"
    yield "#   scancel --signal=TERM JOB                  save a checkpoint and end (a plain scancel saves nothing)"
    yield "#"
    yield f"#SBATCH --job-name={config.run.name}"
    yield f"#SBATCH --nodes={launch.nodes.count}"
    yield "#SBATCH --ntasks-per-node=1"
    yield "#SBATCH --exclusive"
    if gpus := num_gpus if slurm.gpus_per_node is None else slurm.gpus_per_node:
        yield f"#SBATCH --gpus-per-node={gpus}"
    for name in ("partition", "account", "time"):
        if value := getattr(slurm, name):
            yield f"#SBATCH --{name}={value}"
    yield "#SBATCH --output=%x-%j.log"
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --requeue"
    yield f"#SBATCH --signal=B:USR1@{notice_s}"
    for option in slurm.options:
        yield f"#SBATCH {option}"
    yield ""
    yield "set -euo pipefail"
    yield ""


_BODY = r"""# ---- what Slurm sends to this script, it passes on to the tasks: `srun` itself would kill them
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
  "${train[@]}" "$@" &
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
