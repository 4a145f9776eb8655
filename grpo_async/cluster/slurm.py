"""A batch script for Slurm from a configuration: one job with machines that train and machines that serve.

job      launch.nodes + launch.slurm.server_nodes machines, whole ones
node 0   the machine of the batch script itself: what Slurm sends to the script, the script passes on to it and to nothing else
others   `srun` on one machine each: trainers by their --node-rank, servers by their port
time     a while before the limit the run saves and ends, and the job is queued again to go on from there
again    a job that is queued again goes on only with what it began itself: every attempt notes its job, see `restart_of_job`
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.run_directory import RunDir, write_atomically

_MARGIN_S = 60  # to end the servers, and for Slurm, which looks at its clock every so often
_DEFAULT_PORT = 29400


def batch_script(
    config: ExperimentConfig, config_path: Path, *, overrides: Sequence[str] = (), python: str, working_dir: Path
) -> str:
    """The script as text.

    Args:
        config_path: the file of `config`; the job reads it when it starts.
        overrides: values that were set on the command line, `section.key=value`.
        python: interpreter, the same path on every machine.
        working_dir: where the job runs, on a file system that all machines share, like `config.run.dir`.
    """
    blocks = (_head(config, config_path), _variables(config, config_path, overrides, python, working_dir), _BODY)
    return "\n".join("\n".join(block) if not isinstance(block, str) else block for block in blocks)


def gpus_per_node(config: ExperimentConfig) -> int:
    """`launch.slurm.gpus_per_node`, else the larger of what the trainer and the servers of a machine take.

    Trainer: one per rank. Servers: replicas x tensor_parallel_size. None for what is on the CPU by its setting.
    """
    if config.launch.slurm.gpus_per_node is not None:
        return config.launch.slurm.gpus_per_node
    trainer = config.launch.num_trainer_ranks if config.launch.device != "cpu" else 0
    return max(trainer, config.inference.replicas * _gpus_of_a_server(config))


def note_job(attempt: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Write the Slurm job that this process belongs to, if any, into the folder of an attempt, for `restart_of_job`."""
    if job := environment.get("SLURM_JOB_ID"):
        write_atomically(_note(attempt), f"{job}\n")


def restart_of_job(
    run_dir: RunDir, *, resume: str | None, clean: bool, environment: Mapping[str, str] = os.environ
) -> tuple[str | None, bool]:
    """Where a Slurm job that is queued again starts, after its time was over or a machine broke: `resume` and `clean` of its
    command line, or what takes their place once an attempt of this job has started in the run directory.

    It goes on from the newest checkpoint; while it has saved none, it begins anew, or from the checkpoint that it was given. A job
    whose start was refused, because the directory holds another run, is refused again.
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
    return ("auto", False) if steps else (resume, resume is None)


def _note(attempt: Path) -> Path:
    return attempt / "slurm_job"


def _gpus_of_a_server(config: ExperimentConfig) -> int:
    if config.launch.slurm.gpus_per_node == 0:
        return 0
    if config.inference.engine == "embedded":
        return 1 if config.inference.embedded.device == "cuda" else 0
    return config.inference.vllm.tensor_parallel_size


def _head(config: ExperimentConfig, config_path: Path) -> Iterator[str]:
    launch, slurm = config.launch, config.launch.slurm
    notice_s = round(launch.stop_timeout_s) + _MARGIN_S
    yield "#!/bin/bash"
    yield f"# Made by: grpo-async launch slurm {shlex.quote(str(config_path))}".replace("\n", " ")
    yield "#"
    yield "#   sbatch FILE                                begin a run"
    yield "#   sbatch FILE --resume                       go on from its newest checkpoint (any option of `grpo-async train`)"
    yield "#   scancel --batch --signal=TERM JOB          save a checkpoint and end (a plain scancel saves nothing)"
    yield "#"
    yield f"#SBATCH --job-name={config.run.name}"
    yield f"#SBATCH --nodes={launch.nodes + slurm.server_nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    yield "#SBATCH --exclusive"
    if gpus := gpus_per_node(config):
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


def _variables(
    config: ExperimentConfig, config_path: Path, overrides: Sequence[str], python: str, working_dir: Path
) -> Iterator[str]:
    launch, slurm = config.launch, config.launch.slurm
    port = launch.meeting_point[1] if launch.rdzv is not None else _DEFAULT_PORT
    settings = [part for override in overrides for part in ("--set", override)]
    serve = "serve-embedded" if config.inference.engine == "embedded" else "serve-vllm"
    run_dir = working_dir / config.run_path
    yield f"cd {shlex.quote(str(working_dir))}"
    yield f"token_file={shlex.quote(str(run_dir) + '.token')}"
    yield f"grpo=({shlex.join([python, '-m', 'grpo_async'])})"
    yield f"config=({shlex.join([str(config_path), *settings])})"
    yield f'serve="{serve}"'
    yield f"num_trainers={launch.nodes}      # machines that train"
    yield f"rdzv_port={port}"
    yield f"servers_per_node={config.inference.replicas}"
    yield f"server_port={slurm.server_port}      # of the first one of a machine"
    yield f"gpus_per_server={_gpus_of_a_server(config)}"
    if slurm.setup:
        yield ""
        yield "# launch.slurm.setup"
        yield from slurm.setup
    yield ""


_BODY = r"""# ---- who is who: the first machines train, the others serve; the first of all is the one that this script runs on
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${hosts[@]:0:num_trainers}")
server_hosts=("${hosts[@]:num_trainers}")

# ---- the secret by which the machines know each other; the file is for your own requests to the servers
mkdir -p "$(dirname "$token_file")"
rm -f "$token_file"
(umask 077 && set -o noclobber && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$token_file")
GRPO_ASYNC_TOKEN=$(< "$token_file")
export GRPO_ASYNC_TOKEN

# ---- what is started, and how it ends
steps=()       # pids of srun
leader=""      # pid of node 0's launcher
signalled=""   # a signal cut the last `wait` short
out_of_time="" # Slurm has said that the time is nearly over

# shellcheck disable=SC2329  # by traps
stop() {
  signalled=yes
  if [ -n "$leader" ]; then kill -TERM "$leader" 2> /dev/null || true; fi
}
# shellcheck disable=SC2329
cleanup() {
  trap '' TERM INT USR1
  for pid in "${steps[@]}"; do kill -TERM "$pid" 2> /dev/null || true; done
  for pid in "${steps[@]}"; do wait "$pid" || true; done
  rm -f "$token_file"
}
trap cleanup EXIT
trap 'out_of_time=yes; stop' USR1
trap stop TERM INT

on_host() { # on_host HOST COMMAND...: one process with all CPUs and all memory of a machine
  local host=$1
  shift
  exec srun --nodes=1 --ntasks=1 --nodelist="$host" --overlap --mem=0 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" "$@"
}
address_of() { getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }'; }

# ---- servers
urls=()
for host in "${server_hosts[@]}"; do
  address=$(address_of "$host")
  for ((index = 0; index < servers_per_node; index++)); do
    port=$((server_port + index))
    urls+=("http://$address:$port")
    (
      if ((gpus_per_server > 0)); then
        first=$((index * gpus_per_server))
        CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + gpus_per_server - 1)))
        export CUDA_VISIBLE_DEVICES
      fi
      on_host "$host" "${grpo[@]}" "$serve" "${config[@]}" --port "$port" --set "inference.host=$address"
    ) &
    steps+=("$!")
  done
done
joined=$(
  IFS=,
  echo "${urls[*]}"
)
train=("${grpo[@]}" train "${config[@]}" --set "inference.urls=[$joined]" --set inference.replicas=1)
if ((num_trainers > 1)); then train+=(--set "launch.rdzv=${trainers[0]}:$rdzv_port"); fi

# ---- trainers
for ((rank = 1; rank < num_trainers; rank++)); do
  (on_host "${trainers[rank]}" "${train[@]}" --node-rank "$rank") &
  steps+=("$!")
done

# ---- node 0: as `sbatch FILE ...` says; of a job that is queued again it knows by itself where to go on
"${train[@]}" --node-rank 0 "$@" &
leader=$!
if [ -n "$signalled" ]; then kill -TERM "$leader"; fi

# ---- until node 0 has ended: it decides how the run went
code=0
while true; do
  signalled=""
  code=0
  wait "$leader" || code=$?
  if [ -z "$signalled" ]; then break; fi
done
if [ -n "$out_of_time" ] && ((code == 143)); then
  echo "the time is over: queued again, to go on from the checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
