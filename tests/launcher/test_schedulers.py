"""The batch script of docs/howto/slurm.md with stand-ins for Slurm's commands, and the manifest of docs/howto/kubernetes.md."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_async.config.loader import load_config
from grpo_async.quickstart.prepare import prepare
from tests.e2e.support import REPOSITORY, make_run
from tests.support.waiting import eventually

LIMIT_S = 600.0  # a machine that may be busy imports torch
HOSTS = "127.0.0.1,127.0.0.1,127.0.0.1"  # nodes 0, 1 and 2: all are this machine

SCONTROL = """#!/bin/bash
echo "$@" >> "$FAKE_SLURM/scontrol.log"
"""
# As Slurm's: a task on each machine, with its number. A task sees all GPUs of its machine, whatever the script has exported. What
# `srun` is sent kills the tasks; `scancel` with a signal reaches them and nothing else.
SRUN = """#!/bin/bash
echo "$@" >> "$FAKE_SLURM/srun.log"
while [[ "$1" == --* ]]; do shift; done
IFS=, read -ra hosts <<< "$SLURM_JOB_NODELIST"
tasks=()
for index in "${!hosts[@]}"; do
  SLURM_NODEID=$index SLURM_NNODES=${#hosts[@]} SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST \\
    CUDA_VISIBLE_DEVICES=$FAKE_GPUS "$@" &
  tasks+=("$!")
done
printf '%s\\n' "${tasks[@]}" > "$FAKE_SLURM/tasks"
trap 'kill -KILL "${tasks[@]}"' TERM INT
code=0
for task in "${tasks[@]}"; do
  wait "$task"
  ended=$?
  if ((ended > code)); then code=$ended; fi
done
exit "$code"
"""
SCANCEL = """#!/bin/bash
echo "$@" >> "$FAKE_SLURM/scancel.log"
kill -TERM $(< "$FAKE_SLURM/tasks")
"""


def _block(page: str) -> str:
    """The file that a page of the docs holds."""
    (block,) = re.findall(r"```(?:bash|yaml)\n(.*?)```", (REPOSITORY / "docs/howto" / page).read_text(), re.S)
    return str(block)


def _script(folder: Path, program: str, config: str = "x.yaml", *, working_dir: Path | None = None) -> Path:
    path = folder / "run.sbatch"
    changes = {
        "/shared/my-project": str(working_dir or folder),
        ".venv/bin/grpo-async": program,
        "configs/cluster.yaml": config,
    }
    text = _block("slurm.md")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_a_shell_and_shellcheck_have_nothing_to_say(tmp_path: Path) -> None:
    path = _script(tmp_path, "grpo-async")
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert checker is not None, "install the dependency group `test`"
    done = subprocess.run([checker, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Environment of a job, with stand-ins for Slurm's commands that log to $FAKE_SLURM and run everything here."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("scancel", SCANCEL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GRPO_ASYNC_"))},
        "PATH": f"{commands}:{os.environ['PATH']}",
        "FAKE_SLURM": str(tmp_path),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": HOSTS,
        "SLURM_CPUS_ON_NODE": "2",
        "FAKE_GPUS": "",
    }


def test_a_job_that_is_queued_again_resumes(tmp_path: Path, cluster: dict[str, str]) -> None:
    for count, resumed in (("0", ""), ("1", " --resume")):
        environment = {**cluster, "SLURM_RESTART_COUNT": count, "SLURM_JOB_NODELIST": "a"}
        command = ["bash", str(_script(tmp_path, "/bin/echo")), "--set", "run.seed=3"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"train x.yaml --set run.seed=3{resumed}\n"


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, "requeue 42\n"), (signal.SIGTERM, "")])
def test_a_signal_stops_the_tasks_which_save_and_only_at_the_time_limit_the_job_is_queued_again(
    tmp_path: Path, cluster: dict[str, str], number: signal.Signals, requeued: str
) -> None:
    train = tmp_path / "train"  # saves and ends as a launcher does after SIGTERM
    train.write_text(
        f"#!/bin/bash\ntrap 'echo saved; kill $!; exit 143' TERM\ntouch {tmp_path}/begun_$SLURM_NODEID\nsleep 60 & wait\n"
    )
    train.chmod(0o755)
    command = ["bash", str(_script(tmp_path, str(train)))]
    job = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, text=True)
    assert eventually(lambda: len(list(tmp_path.glob("begun_*"))) == 3, 60.0)
    job.send_signal(number)
    printed, _ = job.communicate(timeout=60.0)
    assert (job.returncode, printed.count("saved")) == (143, 3)
    assert (tmp_path / "scancel.log").read_text() == "--signal=TERM 42\n"
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == requeued


@pytest.mark.slow
def test_every_process_of_a_task_gets_gpus_of_its_own_of_those_that_slurm_has_bound(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """What the script exports outside `srun` does not count: the step overwrites it."""
    settings = (
        "launch.nodes.infer=1",
        "launch.num_trainer_ranks=4",
        "inference.engine=vllm",
        "inference.replicas=2",
        "inference.vllm.tensor_parallel_size=2",
    )
    prepare(REPOSITORY)
    config = make_run(tmp_path, "quickstart.yaml", settings).config
    script = _script(tmp_path, f"{sys.executable} -m grpo_async", str(config), working_dir=REPOSITORY)
    cuda_build = tmp_path / "packages" / "torch-2.13.0.dist-info" / "METADATA"  # a torch for CPUs has no GPUs
    cuda_build.parent.mkdir(parents=True)
    cuda_build.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    environment = {
        **cluster,
        "PYTHONPATH": str(tmp_path / "packages"),
        "SLURM_JOB_NODELIST": "gpu[7,9]",
        "FAKE_GPUS": "4,5,6,7",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN.replace('IFS=, read -ra hosts <<< "$SLURM_JOB_NODELIST"', "hosts=(gpu7 gpu9)"))
    done = subprocess.run(
        ["bash", str(script), "--dry-run"], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nodes      2, which meet at gpu7:29400" in done.stdout
    assert "trainer: 4 processes, 1 CPU thread each, GPU 4,5,6,7" in done.stdout
    assert "inference server 0: 1 process, 1 CPU thread each, GPU 4,5" in done.stdout
    assert "inference server 1: 1 process, 1 CPU thread each, GPU 6,7" in done.stdout
    (srun_line,) = (tmp_path / "srun.log").read_text().splitlines()
    assert "--ntasks-per-node=1 --cpus-per-task=2 --mem=0" in srun_line


def test_the_manifest_is_an_indexed_job_whose_pods_find_each_other_through_a_headless_service() -> None:
    service, job = yaml.safe_load_all(_block("kubernetes.md"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    config = load_config(REPOSITORY / pod["containers"][0]["command"][-1])
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", pod["subdomain"])
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == config.launch.nodes.count
    assert pod["terminationGracePeriodSeconds"] == config.launch.stop_timeout_s + 60
    assert f"--nodes={config.launch.nodes.count}\n" in _block("slurm.md")
    assert f"--signal=B:USR1@{config.launch.stop_timeout_s + 60:.0f}\n" in _block("slurm.md")
