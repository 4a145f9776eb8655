"""The batch script for Slurm and the manifest for Kubernetes: what they say, that a shell and a schema take them, and that the
script runs, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.cluster.nodes import find_node
from grpo_async.cluster.schedulers import batch_script, job_note, manifest
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError
from grpo_async.launcher.gpus import gpus_needed
from grpo_async.quickstart.prepare import prepare
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import choose_engine
from tests.e2e.support import REPOSITORY, make_run, run_command
from tests.launcher.support import make_config
from tests.support.waiting import eventually

LIMIT_S = 600.0  # five processes import torch, on a machine that may be busy
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


def _script(config: ExperimentConfig, **options: Any) -> str:
    folder = Path("/shared/my project")
    arguments: dict[str, Any] = {"python": "/venv/bin/python", "working_dir": folder, "num_gpus": 8} | options
    return batch_script(config, arguments.pop("config_path", folder / "x.yaml"), **arguments)


def _cluster(folder: Path, **launch: Any) -> ExperimentConfig:
    return make_config(folder, launch={"nodes": {"train": 2, "infer": 3}, **launch})


def _directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def _sourced(script: str, name: str) -> list[str]:
    """Values that bash gives an array of the script's head."""
    head = script.partition("# ---- what Slurm")[0].replace("cd ", ": ", 1)
    show = f'printf "%s\\n" "${{{name}[@]}}"'
    done = subprocess.run(["bash", "-c", f"{head}\n{show}"], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


def test_the_job_has_the_machines_of_trainer_and_servers_and_the_options_of_the_section(tmp_path: Path) -> None:
    slurm = {"partition": "gpu", "time": "12:00:00", "gpus_per_node": 4, "options": ["--constraint=a100"]}
    script = _script(_cluster(tmp_path, slurm=slurm | {"setup": ["module load cuda"]}, stop_timeout_s=120.0))
    wanted = ["--nodes=5", "--gpus-per-node=4", "--partition=gpu", "--time=12:00:00", "--constraint=a100", "--requeue"]
    assert {*wanted, "--signal=B:USR1@180"} <= set(_directives(script))  # launch.stop_timeout_s + 60
    assert "\nmodule load cuda\n" in script
    # Slurm reads no options after the first command
    assert script.index("#SBATCH --constraint") < script.index("set -euo")


@pytest.mark.parametrize(
    ("launch", "inference", "number"),
    [
        (
            {"nodes": {"infer": 1}, "num_trainer_ranks": 2},
            {"engine": "vllm", "replicas": 2, "vllm": {"tensor_parallel_size": 2, "data_parallel_size": 2}},
            8,
        ),
        ({"num_trainer_ranks": 4}, {"engine": "vllm", "replicas": 4}, 8),  # every machine does both
        ({"device": "cpu"}, {"engine": "vllm"}, 0),
    ],
)
def test_a_machine_is_asked_for_as_many_gpus_as_its_roles_need(
    tmp_path: Path, launch: Any, inference: Any, number: int
) -> None:
    config = make_config(tmp_path, launch=launch, inference=inference)
    assert gpus_needed(config, choose_engine(config, is_here=False)) == number
    assert any("gpus-per-node" in line for line in _directives(_script(config, num_gpus=number))) == (number > 0)
    own = make_config(tmp_path, launch={**launch, "slurm": {"gpus_per_node": 0, "options": ["--gres=gpu:a100:8"]}})
    assert not any("gpus-per-node" in line for line in _directives(_script(own, num_gpus=number)))


def test_every_word_of_the_user_is_quoted(tmp_path: Path) -> None:
    """Nothing that stands in a path or a value is carried out by the shell."""
    evil = "$(touch /tmp/evil) `id` ' \" ; rm -rf x"
    script = _script(
        _cluster(tmp_path),
        config_path=Path("/shared") / evil,
        overrides=[f"data.train.path={evil}", "optimizer.lr=1e-5"],
        working_dir=Path("/work") / evil,
    )
    assert _sourced(script, "train") == [
        *("/venv/bin/python", "-m", "grpo_async", "train", f"/shared/{evil}"),
        *("--set", f"data.train.path={evil}", "--set", "optimizer.lr=1e-5"),
    ]
    cd = next(line for line in script.splitlines() if line.startswith("cd "))
    assert shlex.split(cd) == ["cd", f"/work/{evil}"]
    comment = next(line for line in script.splitlines() if "Made by" in line)
    assert comment.startswith("#")


def test_values_that_would_leave_their_line_are_refused(tmp_path: Path) -> None:
    sections: list[Any] = [
        {"partition": "gpu\n#SBATCH"},
        {"time": "1 2"},
        {"options": ["--x\nrm"]},
        {"setup": ["a\nb"]},
    ]
    for section in sections:
        with pytest.raises(ValueError, match=r"launch\.slurm"):
            _cluster(tmp_path, slurm=section)


def test_a_shell_and_shellcheck_have_nothing_to_say(tmp_path: Path) -> None:
    path = tmp_path / "x.sbatch"
    path.write_text(_script(_cluster(tmp_path)))
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


def test_the_command_prints_the_script_without_the_secrets_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    content = json.loads(_cluster(tmp_path).model_dump_json())
    content["launch"]["slurm"]["setup"] = ["export HF_TOKEN=${HF_TOKEN}", "mkdir /tmp/$${USER}/${SLURM_JOB_ID}"]
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(app, ["launch", "slurm", str(config), "--set", "training.max_steps=7"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("#!/bin/bash\n")
    assert "training.max_steps=7" in done.output
    assert "\nexport HF_TOKEN=${HF_TOKEN}\nmkdir /tmp/${USER}/${SLURM_JOB_ID}\n" in done.output
    assert "hf_secret" not in done.output


def test_a_job_that_is_queued_again_resumes_what_it_began_itself(tmp_path: Path, cluster: dict[str, str]) -> None:
    config = _cluster(tmp_path)
    script = tmp_path / "x.sbatch"
    script.write_text(_script(config, python="/bin/echo", working_dir=tmp_path))

    def options(count: int) -> list[str]:
        """What each machine is given after `train CONFIG`."""
        environment = {**cluster, "SLURM_RESTART_COUNT": str(count), "SLURM_JOB_NODELIST": "a"}
        command = ["bash", str(script), "--clean", "--set", "run.seed=3"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.partition("x.yaml ")[2].split()

    assert options(1) == ["--clean", "--set", "run.seed=3"]  # the machine broke before it had the run directory
    attempt = RunDir(config.run_path).logs / "attempt_1"
    attempt.mkdir(parents=True)
    attempt.with_name("latest").symlink_to("attempt_1")
    job_note(attempt).write_text("42\n")
    assert options(0) == ["--clean", "--set", "run.seed=3"]  # handed in anew
    assert options(1) == ["--set", "run.seed=3", "--resume"]
    job_note(attempt).write_text("43\n")  # another run has the directory in the meantime
    assert options(1) == ["--clean", "--set", "run.seed=3"]


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, "requeue 42\n"), (signal.SIGTERM, "")])
def test_a_signal_stops_the_tasks_which_save_and_only_at_the_time_limit_the_job_is_queued_again(
    tmp_path: Path, cluster: dict[str, str], number: signal.Signals, requeued: str
) -> None:
    train = tmp_path / "python"  # saves and ends as a launcher does after SIGTERM
    train.write_text(
        f"#!/bin/bash\ntrap 'echo saved; kill $!; exit 143' TERM\ntouch {tmp_path}/begun_$SLURM_NODEID\nsleep 60 & wait\n"
    )
    train.chmod(0o755)
    script = tmp_path / "x.sbatch"
    script.write_text(_script(_cluster(tmp_path), python=str(train), working_dir=tmp_path))
    job = subprocess.Popen(["bash", str(script)], env=cluster, stdout=subprocess.PIPE, text=True)
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
    made = run_command("launch", "slurm", str(make_run(tmp_path, "quickstart.yaml", settings).config))
    assert made.returncode == 0, made.stdout + made.stderr
    script = tmp_path / "run.sbatch"
    script.write_text(made.stdout)
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


# ---- Kubernetes ----


_NAME = "[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # as a Service has it
_METADATA = {"name": _NAME, "labels": {"*": "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"}}
_CONTAINER = {
    "name": _NAME,
    "image": ".+",
    "command": [".+"],
    "workingDir": ".+",
    "env": [{"name": ".+", "value": ".*"}],
    "resources": {"limits": {"*": r"\d+"}},
    "volumeMounts": [{"name": _NAME, "mountPath": ".+"}],
}
_VOLUME = {"name": _NAME, "persistentVolumeClaim": {"claimName": _NAME}, "emptyDir": {"medium": "|Memory"}}
_POD = {
    "subdomain": _NAME,
    "restartPolicy": "Never|OnFailure",  # what a Job takes
    "terminationGracePeriodSeconds": int,
    "containers": [_CONTAINER],
    "volumes": [_VOLUME],
}
_JOB_SPEC = {
    "completionMode": "Indexed|NonIndexed",
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "template": {"metadata": {"labels": _METADATA["labels"]}, "spec": _POD},
}
_SERVICE_SPEC = {"clusterIP": "None", "publishNotReadyAddresses": bool, "selector": _METADATA["labels"]}
_FIELDS = {
    "Service": {"apiVersion": "v1", "kind": "Service", "metadata": _METADATA, "spec": _SERVICE_SPEC},
    "Job": {"apiVersion": "batch/v1", "kind": "Job", "metadata": _METADATA, "spec": _JOB_SPEC},
}
"""The fields of the Kubernetes API (batch/v1 Job, v1 Service, as of 1.33) that the manifest may use, and no other: a type, or what
the whole of a text has to match."""


def _check_fields(value: Any, fields: Any) -> None:
    if isinstance(fields, dict):
        assert isinstance(value, dict)
        for name, content in value.items():
            assert name in fields or "*" in fields, f"{name} is no field of the API"
            _check_fields(content, fields.get(name, fields.get("*")))
    elif isinstance(fields, list):
        assert isinstance(value, list)
        for each in value:
            _check_fields(each, fields[0])
    elif isinstance(fields, type):
        assert type(value) is fields
    else:
        assert isinstance(value, str)
        assert re.fullmatch(fields, value), f"{value!r} is not {fields}"


def test_the_manifest_is_an_indexed_job_with_a_headless_service_whose_pods_find_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = CliRunner().invoke(
        app,
        [
            *("launch", "kubernetes", "configs/cluster.yaml", "--set", "run.name=Math_7B.v2"),
            *("--set", "launch.slurm.gpus_per_node=2", "--resume"),  # of another scheduler
        ],
    )
    assert done.exit_code == 0, done.output
    service, job = yaml.safe_load_all(done.output)
    _check_fields(service, _FIELDS["Service"])
    _check_fields(job, _FIELDS["Job"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True}
    assert service["spec"] == headless | {"selector": job["spec"]["template"]["metadata"]["labels"]}
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"] == "math-7b-v2"
    (container,) = pod["containers"]
    assert container["command"] == [
        *("grpo-async", "train", "configs/cluster.yaml", "--set", "run.name=Math_7B.v2"),
        *("--set", "launch.slurm.gpus_per_node=2", "--resume"),
    ]
    assert (container["name"], pod["restartPolicy"]) == ("grpo-async", "Never")
    assert container["image"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert pod["terminationGracePeriodSeconds"] == 360  # launch.stop_timeout_s + 60
    # each pod finds its place by what the Job and the manifest give it; the name of node 0 stands in its own /etc/hosts
    environment = {each["name"]: each["value"] for each in container["env"]}
    for rank in (0, 2):
        domain = "math-7b-v2.space.svc.cluster.local"
        monkeypatch.setattr(socket, "getfqdn", lambda rank=rank, domain=domain: f"math-7b-v2-{rank}.{domain}")
        node = find_node(
            load_config(Path("configs/cluster.yaml")), environment=environment | {"JOB_COMPLETION_INDEX": str(rank)}
        )
        assert (node.rank, node.address, node.port) == (rank, f"math-7b-v2-0.{domain}", 29400)


def test_a_manifest_needs_an_image_and_a_volume(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.kubernetes\.image: is needed(.|\n)*launch\.kubernetes\.volume_claim"
    ):
        manifest(_cluster(tmp_path), Path("x.yaml"), num_gpus=8)
