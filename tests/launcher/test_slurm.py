"""The batch script for Slurm: what it says, that a shell takes it, and that it runs, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.cluster.slurm import batch_script, gpus_per_node, note_job, restart_of_job
from grpo_async.config import ExperimentConfig
from grpo_async.run_directory import RunDir
from tests.e2e.support import SMALL, finish, free_port, make_run, run_command, wait_for
from tests.launcher.support import make_config

LIMIT_S = 600.0  # five processes import torch, on a machine that may be busy
HOSTS = ("127.0.0.1", "127.0.0.1", "127.0.0.1")  # node 0, node 1, server: all are this machine

SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf '%s\\n' $SLURM_JOB_NODELIST; else echo "$@" >> "$FAKE_SLURM/scontrol.log"; fi
"""
SRUN = """#!/bin/bash
echo "$@" >> "$FAKE_SLURM/srun.log"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
SBATCH = """#!/bin/bash
echo "$@" >> "$FAKE_SLURM/sbatch.log"
echo "Submitted batch job 42"
"""


def _script(config: ExperimentConfig, **options: Any) -> str:
    folder = Path("/shared/my project")
    arguments: dict[str, Any] = {"python": "/venv/bin/python", "working_dir": folder} | options
    return batch_script(config, arguments.pop("config_path", folder / "x.yaml"), **arguments)


def _cluster(folder: Path, **launch: Any) -> ExperimentConfig:
    return make_config(folder, launch={"nodes": 2, "rdzv": "node-0:29555", **launch})


def _directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def _sourced(script: str, *names: str) -> list[str]:
    """Values that bash gives the variables of the script's head (arrays: one line for each entry)."""
    head = script.partition("# ---- who is who")[0].replace("cd ", ": ", 1)
    show = "\n".join(f'printf "%s\\n" "${{{name}[@]}}"' for name in names)
    done = subprocess.run(["bash", "-c", f"{head}\n{show}"], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


def test_the_job_has_the_machines_of_trainer_and_servers_and_the_options_of_the_section(tmp_path: Path) -> None:
    slurm = {
        "server_nodes": 3,
        "partition": "gpu",
        "account": "lab",
        "time": "12:00:00",
        "gpus_per_node": 4,
        "options": ["--constraint=a100"],
        "setup": ["module load cuda"],
    }
    script = _script(_cluster(tmp_path, slurm=slurm, stop_timeout_s=120.0))
    directives = _directives(script)
    wanted = [
        "--nodes=5",
        "--gpus-per-node=4",
        "--partition=gpu",
        "--account=lab",
        "--time=12:00:00",
        "--constraint=a100",
    ]
    assert set(wanted) <= set(directives)
    assert "--signal=B:USR1@180" in directives  # launch.stop_timeout_s + 60
    assert "--requeue" in directives
    assert "\nmodule load cuda\n" in script
    # Slurm reads no options after the first command
    assert script.index("#SBATCH --constraint") < script.index("set -euo")


@pytest.mark.parametrize(
    ("sections", "number"),
    [
        ({"launch": {"num_trainer_ranks": 4}, "inference": {"engine": "vllm"}}, 4),
        (
            {
                "launch": {"num_trainer_ranks": 2},
                "inference": {"engine": "vllm", "replicas": 4, "vllm": {"tensor_parallel_size": 2}},
            },
            8,
        ),
        ({"launch": {"device": "cpu"}, "inference": {"engine": "embedded"}}, 0),
        ({"launch": {"slurm": {"gpus_per_node": 0}}, "inference": {"engine": "vllm"}}, 0),
    ],
)
def test_gpus_are_those_of_the_larger_of_trainer_and_servers(tmp_path: Path, sections: Any, number: int) -> None:
    config = make_config(tmp_path, **sections)
    assert gpus_per_node(config) == number
    assert any("gpus-per-node" in line for line in _directives(_script(config))) == (number > 0)


def test_every_word_of_the_user_is_quoted(tmp_path: Path) -> None:
    """Nothing that stands in a path or a value is carried out by the shell."""
    evil = "$(touch /tmp/evil) `id` ' \" ; rm -rf x"
    script = _script(
        _cluster(tmp_path),
        config_path=Path("/shared") / evil,
        overrides=[f"data.train.path={evil}", "optimizer.lr=1e-5"],
        working_dir=Path("/work") / evil,
    )
    config = _sourced(script, "config")
    assert config == [f"/shared/{evil}", "--set", f"data.train.path={evil}", "--set", "optimizer.lr=1e-5"]
    assert _sourced(script, "grpo") == ["/venv/bin/python", "-m", "grpo_async"]
    cd = next(line for line in script.splitlines() if line.startswith("cd "))
    assert shlex.split(cd) == ["cd", f"/work/{evil}"]
    comment = next(line for line in script.splitlines() if "Made by" in line)
    assert comment.startswith("#")


@pytest.mark.parametrize(
    "section",
    [
        {"partition": "gpu\n#SBATCH --uid=0"},
        {"time": "1 2"},
        {"options": ["rm -rf /"]},
        {"options": ["--x\nrm"]},
        {"setup": ["a\nb"]},
    ],
)
def test_values_that_would_leave_their_line_are_refused(tmp_path: Path, section: Any) -> None:
    with pytest.raises(ValueError, match=r"launch\.slurm"):
        _cluster(tmp_path, slurm=section)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_shell_and_shellcheck_have_nothing_to_say(tmp_path: Path, nodes: int) -> None:
    path = tmp_path / "x.sbatch"
    path.write_text(_script(_cluster(tmp_path, nodes=nodes)))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert checker is not None, "install the dependency group `test`"
    done = subprocess.run([checker, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Environment of a job, with stand-ins for scontrol, srun and sbatch that log to $FAKE_SLURM and run everything here."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("sbatch", SBATCH)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GRPO_ASYNC_"))},
        "PATH": f"{commands}:{os.environ['PATH']}",
        "FAKE_SLURM": str(tmp_path),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": " ".join(HOSTS),
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_NODEID": "0",
    }


def test_submit_writes_the_script_and_hands_it_to_sbatch(
    tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", cluster["PATH"])
    monkeypatch.setenv("FAKE_SLURM", cluster["FAKE_SLURM"])
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(json.loads(_cluster(tmp_path).model_dump_json())))
    out = tmp_path / "a b.sbatch"
    done = CliRunner().invoke(
        app, ["launch", "slurm", str(config), "--out", str(out), "--submit", "--set", "training.max_steps=7"]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "sbatch.log").read_text() == f"{out}\n"
    assert "training.max_steps=7" in out.read_text()
    printed = CliRunner().invoke(app, ["launch", "slurm", str(config)])
    assert printed.output.startswith("#!/bin/bash\n")


def test_the_script_is_for_its_user_alone_and_has_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    content = json.loads(_cluster(tmp_path).model_dump_json())
    content["launch"]["slurm"]["setup"] = ["export HF_TOKEN=${HF_TOKEN}", "mkdir /tmp/$${USER}/${SLURM_JOB_ID}"]
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(content))
    out = tmp_path / "x.sbatch"
    out.with_name("x.sbatch.tmp").write_text("of a process that was killed")
    out.with_name("x.sbatch.tmp").chmod(0o644)
    done = CliRunner().invoke(app, ["launch", "slurm", str(config), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "\nexport HF_TOKEN=${HF_TOKEN}\nmkdir /tmp/${USER}/${SLURM_JOB_ID}\n" in out.read_text()
    assert "hf_secret" not in out.read_text()
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


NOW = time.time()
HOUR = 3600.0


def _attempt(run_dir: RunDir, number: int, *, job: int | None = 42, at: float = NOW) -> None:
    """What a launcher does to the run directory as soon as that is its own."""
    attempt = run_dir.logs / f"attempt_{number}"
    attempt.mkdir(parents=True)
    if job is not None:
        note_job(attempt, {"SLURM_JOB_ID": str(job)})
        os.utime(attempt / "slurm_job", (at, at))
    run_dir.latest_logs.unlink(missing_ok=True)
    run_dir.latest_logs.symlink_to(attempt.name)


def _save(run_dir: RunDir, step: int, at: float = NOW + 60.0) -> None:
    """A checkpoint, written a while after all that was there (file times are no finer than some milliseconds)."""
    run_dir.checkpoint(step).mkdir(parents=True)
    os.utime(run_dir.checkpoint(step), (at, at))


def _restart(
    run_dir: RunDir, resume: str | None = None, clean: bool = False, *, count: int = 1
) -> tuple[str | None, bool]:
    environment = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": str(count)}
    return restart_of_job(run_dir, resume=resume, clean=clean, environment=environment)


@pytest.mark.parametrize("clean", [False, True])
def test_a_job_that_is_queued_again_goes_on_with_what_it_began(tmp_path: Path, clean: bool) -> None:
    run_dir = RunDir(tmp_path)
    assert _restart(run_dir, clean=clean) == (None, clean)  # the machine broke before it had the run directory
    _attempt(run_dir, 1)
    assert _restart(run_dir, clean=clean, count=0) == (None, clean)  # handed in anew
    assert _restart(run_dir, clean=clean) == (None, True)
    _save(run_dir, 5, at=NOW - HOUR)  # clocks do not agree
    assert _restart(run_dir, clean=clean) == ("auto", False)
    _attempt(run_dir, 2)
    _attempt(run_dir, 10)  # what an attempt saved is not lost by one that saved nothing
    assert _restart(run_dir, clean=clean) == ("auto", False)
    _attempt(run_dir, 11, job=43)  # another run has the directory in the meantime
    assert _restart(run_dir, clean=clean) == (None, clean)


@pytest.mark.parametrize("owner", [7, None])
def test_a_job_that_is_queued_again_leaves_another_run_alone(tmp_path: Path, owner: int | None) -> None:
    run_dir = RunDir(tmp_path)
    _attempt(run_dir, 1, job=owner)
    _save(run_dir, 40, at=NOW - 24 * HOUR)
    _save(run_dir, 60, at=NOW - 24 * HOUR)
    assert _restart(run_dir) == (None, False)  # refused, and refused again
    assert _restart(run_dir, clean=True) == (None, True)
    assert _restart(run_dir, "40") == ("40", False)
    _attempt(run_dir, 2, at=NOW - 2 * HOUR)
    # begun, but nothing saved: the checkpoint of step 60 is not the one to go on from
    assert _restart(run_dir, "40") == ("40", False)
    assert _restart(run_dir, "auto") == ("auto", False)
    _save(run_dir, 45, at=NOW - HOUR)
    _attempt(run_dir, 10)
    assert _restart(run_dir, "40") == ("auto", False)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_script_trains_on_three_machines_saves_ahead_of_the_time_limit_and_goes_on_after_a_requeue(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    settings = (
        *SMALL,
        "evaluation.num_prompts=4",
        "training.max_steps=5000",
        "launch.nodes=2",
        f"launch.rdzv=localhost:{free_port()}",
        f"launch.slurm.server_port={free_port()}",
        "launch.slurm.gpus_per_node=0",
    )
    run = make_run(tmp_path, "quickstart.yaml", settings)
    script = tmp_path / "run.sbatch"
    made = run_command("launch", "slurm", str(run.config), "--out", str(script))
    assert made.returncode == 0, made.stdout + made.stderr

    def start(**more: str) -> subprocess.Popen[str]:
        environment = {**cluster, "GRPO_ASYNC_TEST_MARK": run.mark, **more}
        return subprocess.Popen(
            ["bash", str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ends(job: subprocess.Popen[str], number: signal.Signals) -> str:
        job.send_signal(number)
        done = finish(job, timeout_s=LIMIT_S)
        assert done.returncode == 143, done.stdout[-4000:]
        assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"
        assert run.checkpoints()[-1] == len(run.metrics())
        run.assert_nothing_is_left()
        return done.stdout

    job = start()
    token = tmp_path / "run.token"
    wait_for(lambda: token.exists() and token.stat().st_size == 64, what="the token", timeout_s=LIMIT_S)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    secret = token.read_text()
    run.wait_for_step(2, job, timeout_s=LIMIT_S)
    printed = ends(job, signal.SIGUSR1)
    started = (tmp_path / "srun.log").read_text().splitlines()
    assert len(started) == 2
    assert any("serve-embedded" in line for line in started)
    assert any("--node-rank 1" in line for line in started)
    assert run.summary()["num_devices"] == 2
    assert not token.exists()
    assert secret not in printed + "".join(started)
    steps = len(run.metrics())
    again = start(SLURM_RESTART_COUNT="1")
    run.wait_for_step(steps + 2, again, timeout_s=LIMIT_S)
    assert f"from the checkpoint of step {steps}" in ends(again, signal.SIGTERM)  # by hand: saved, not queued again
