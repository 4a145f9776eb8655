"""The plan is data; what it says is checked here, that it works is checked by the supervisor's tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.launch.engine_choice import EngineChoice, choose_engine
from grpo_async.launch.plan import Machine, Places, ProcessPlan, plan_processes
from grpo_async.rundir import RunDir
from grpo_async.servers.vllm import command
from tests.launch.support import make_config

MACHINE = Machine(num_cpus=2, python="/py", working_dir=Path("/work dir"), python_path="/lib")


def _plan(config: ExperimentConfig, machine: Machine = MACHINE, **options: Any) -> ProcessPlan:
    run_dir = RunDir(Path("/runs/x"))
    return plan_processes(
        config,
        engine=options.pop("engine", None) or choose_engine(config),
        places=Places(run_dir=run_dir, attempt=run_dir.logs / "attempt_3", private=Path("/private"), port=4711),
        machine=machine,
        token=options.pop("token", "secret"),
        **options,
    )


def test_the_plan_has_one_server_and_torchrun(tmp_path: Path) -> None:
    plan = _plan(make_config(tmp_path, launch={"num_trainer_ranks": 2, "trainer_threads": 3}), resume_step=40)
    assert plan.server is not None
    assert plan.server.command == ("/py", "-m", "grpo_async", "serve-embedded", "/runs/x/config.yaml", "--port", "4711")
    assert plan.server.environment["OMP_NUM_THREADS"] == "1"
    assert plan.server.environment["PYTHONPATH"] == "/work dir:/lib"
    assert plan.trainer.command[plan.trainer.command.index("--nproc-per-node") + 1] == "2"
    environment = plan.trainer.environment
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GRPO_ASYNC_SERVER_URL"] == "http://127.0.0.1:4711"
    assert environment["GRPO_ASYNC_RESUME"] == "40"
    assert environment["GRPO_ASYNC_CONTROL"] == "/private/control"
    assert environment["GRPO_ASYNC_ATTEMPT_DIR"] == "/runs/x/logs/attempt_3"
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_description_names_engine_logs_and_threads_but_not_the_token(tmp_path: Path) -> None:
    plan = _plan(make_config(tmp_path, launch={"num_trainer_ranks": 2}), token="very-secret", notes=("look here",))
    text = plan.describe()
    assert "engine     embedded: inference.engine says so" in text
    assert "/runs/x/logs/attempt_3/server.log" in text
    assert "trainer: 2 processes, 1 CPU thread each, CPU" in text
    assert "note: 3 compute threads on 2 CPUs" in text  # 2 ranks + 1 server
    assert "note: look here" in text
    assert "very-secret" not in text
    assert all("very-secret" not in part for spec in plan.processes for part in spec.command)


def test_a_configured_url_starts_no_server(tmp_path: Path) -> None:
    plan = _plan(make_config(tmp_path, inference={"url": "http://gpu-7:8000"}), token=None)
    assert plan.server is None
    assert plan.trainer.environment["GRPO_ASYNC_SERVER_URL"] == "http://gpu-7:8000"
    assert "GRPO_ASYNC_TOKEN" not in plan.trainer.environment
    assert "http://gpu-7:8000 (not started by this run)" in plan.describe()


@pytest.mark.parametrize(
    ("gpus", "server", "trainer"),
    [
        (("0", "1", "2", "3"), "2,3", "0,1"),  # 2 ranks first, then tensor_parallel_size 2
        (("5", "6"), "5,6", "5,6"),  # too few: shared, with a note
    ],
)
def test_gpus_are_split_where_there_are_enough(
    tmp_path: Path, gpus: tuple[str, ...], server: str, trainer: str
) -> None:
    config = make_config(
        tmp_path, launch={"num_trainer_ranks": 2, "device": "cuda"}, inference={"vllm": {"tensor_parallel_size": 2}}
    )
    plan = _plan(config, Machine(num_cpus=8, gpus=gpus), engine=EngineChoice(engine="vllm", reason="test"))
    assert plan.server is not None
    assert plan.server.environment["CUDA_VISIBLE_DEVICES"] == server
    assert plan.trainer.environment["CUDA_VISIBLE_DEVICES"] == trainer
    assert ("they share" in plan.describe()) == (server == trainer)


def test_a_wildcard_host_is_reached_by_loopback(tmp_path: Path) -> None:
    assert _plan(make_config(tmp_path, inference={"host": "0.0.0.0"})).server_url == "http://127.0.0.1:4711"
    assert _plan(make_config(tmp_path, inference={"host": "::1"})).server_url == "http://[::1]:4711"


@pytest.mark.parametrize(("installed", "engine"), [(True, "vllm"), (False, "embedded")])
def test_auto_takes_vllm_where_it_is_usable_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, engine: str
) -> None:
    monkeypatch.setattr(command, "vllm_installed", lambda: (installed, "the reason"))
    choice = choose_engine(make_config(tmp_path, inference={"engine": "auto"}))
    assert choice.engine == engine
    assert "the reason" in choice.reason


def test_vllm_that_was_asked_for_and_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "vllm_installed", lambda: (False, "no module vllm"))
    with pytest.raises(ConfigError, match=r"no module vllm(.|\n)*inference.engine: embedded"):
        choose_engine(make_config(tmp_path, inference={"engine": "vllm"}))


def test_importing_the_launcher_imports_no_torch() -> None:
    code = (
        "import sys, grpo_async.launch.launcher, grpo_async.launch.control, grpo_async.launch.failures; "
        "print({'torch', 'transformers', 'vllm', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
