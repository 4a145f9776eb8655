"""The command line: options, messages, exit codes; and as a process of its own: what it imports, what an interrupt does."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from grpo_async.checks import doctor
from grpo_async.checks.report import Check
from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.display.display import StatusFile
from grpo_async.display.progress import Progress
from grpo_async.errors import RunError
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutStore
from tests.store.builders import append_simple
from tests.support.configs import MINIMAL

CONFIG = f"{MINIMAL}inference: {{engine: embedded}}\n"
COMMANDS = [
    "train", "validate", "doctor", "check-reward", "schema", "serve-vllm", "serve-embedded", "prepare-quickstart",
    "inspect", "inspect-rollouts", "status", "eval", "export", "report", "trace",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG, encoding="utf-8")
    return "x.yaml"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `train` asks of the launcher. The launcher itself has its own tests; this is about what reaches it."""
    calls: list[dict[str, Any]] = []

    def run(config: ExperimentConfig, **options: Any) -> int:
        calls.append({"config": config, **options})
        return 7

    monkeypatch.setattr("grpo_async.launch.start.launch", run)
    return calls


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_every_command_explains_itself_with_examples_and_the_help_lists_it() -> None:
    listed = _invoke("--help").stdout
    for command in COMMANDS:
        result = _invoke(command, "--help")
        assert result.exit_code == 0
        assert f"Examples:\n    grpo-async {command}" in result.stdout
        assert f"\n  {command} " in listed
    assert _invoke("--version").stdout.split()[0] == "grpo-async"


@pytest.mark.parametrize("command", ["train", "eval", "validate", "serve-vllm"])
def test_a_bad_configuration_is_exit_code_2_with_every_problem_and_an_event_where_events_are_asked_for(
    command: str, config: str
) -> None:
    result = _invoke(command, config, "--set", "optim.lrr=3", "--set", "rollout.group_size=1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "--set optim.lrr=3: unknown key 'optim.lrr'; did you mean 'optimizer.lr'?",
        "--set rollout.group_size=1: rollout.group_size: input should be greater than or equal to 2 (got 1)",
    ]
    if command in ("validate", "serve-vllm"):
        return
    result = _invoke(command, config, "--json-logs", "--set", "optimizer.lr=-1")
    assert result.exit_code == 2
    (event,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert "optimizer.lr" in event["error"]
    assert "optimizer.lr" in result.stderr


def test_status_knows_the_newest_run_and_says_how_it_is_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _invoke("status").exit_code == 2  # there is no run
    run_dir = RunDir(tmp_path / "runs" / "x")
    run_dir.create()
    with StatusFile(Progress(run_dir, run_name="x", max_steps=3)) as status:
        running = _invoke("status", "x", "--json")
        assert (running.exit_code, json.loads(running.stdout)["state"]) == (0, "running")
    status.end("failed", exit_code=1, error="the trainer\x1b[2J died")
    failed = _invoke("status")
    assert failed.exit_code == 1
    assert "the trainer died" in failed.stdout


def test_train_hands_everything_to_the_launcher(config: str, runs: list[dict[str, Any]]) -> None:
    _invoke("train", config, "--set", "run.name=other", "--resume=12", "--clean", "--dry-run", "--set", "run.seed=3")
    (call,) = runs
    assert (call["config"].run.name, call["config"].run.seed) == ("other", 3)
    assert (call["resume"], call["clean"], call["dry_run"]) == ("12", True, True)
    for given in (["--resume=best"], ["--resume", "best"], ["--resume", "runs/x/checkpoints/step_2"], ["--resume"]):
        _invoke("train", *given, config)
    assert [call["resume"] for call in runs[1:]] == ["best", "best", "runs/x/checkpoints/step_2", "latest"]


def test_an_own_error_is_a_message_and_an_exit_code(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> int:
        raise RunError("broke")

    monkeypatch.setattr("grpo_async.launch.start.launch", run)
    result = _invoke("train", config)
    assert (result.exit_code, result.stderr) == (1, "broke\n")


def test_validate_prints_a_configuration(config: str) -> None:
    result = _invoke("validate", config, "--set", "run.seed=3")
    assert result.exit_code == 0, result.output
    Path("resolved.yaml").write_text(result.stdout, encoding="utf-8")
    assert load_config(Path("resolved.yaml")) == load_config(Path(config), ["run.seed=3"])
    assert sorted(path.name for path in Path().iterdir()) == ["resolved.yaml", "x.yaml"]  # nothing was made


@pytest.mark.parametrize("given", ["", "mine"])
def test_a_server_started_by_hand_is_never_without_a_token(
    config: str, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    tokens: list[str | None] = []
    monkeypatch.setenv("GRPO_ASYNC_TOKEN", given)
    monkeypatch.setattr(
        "grpo_async.servers.embedded.main.serve_embedded",
        lambda config, port: tokens.append(os.environ.get("GRPO_ASYNC_TOKEN")),
    )
    result = _invoke("serve-embedded", config)
    assert result.exit_code == 0
    (token,) = tokens
    if given:
        assert token == "mine"
    else:
        assert token is not None
        assert len(token) >= 32
        assert f"export GRPO_ASYNC_TOKEN={token}" in result.stderr


def test_the_doctor_prints_every_check_and_only_a_failed_one_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("python", "pass", "CPython"), Check("disk", "warn", "[red]nearly[/red] full")]  # text, no markup
    monkeypatch.setattr(doctor, "run_doctor", lambda: list(checks))
    assert "[red]nearly[/red] full" in _invoke("doctor").stdout
    result = _invoke("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)["status"]) == (0, "warn")
    checks.append(Check("torch", "fail", "not installed"))
    assert _invoke("doctor").exit_code == 1


# ---- as a process of its own ----

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "datasets")
NOT_FOR_HELP = (*HEAVY, "duckdb", "starlette", "uvicorn", "numpy", "httpx", "aiohttp")
# runs command lines (joined by +) in this process and prints which of the heavy libraries it loaded
LOADED = f"""
import sys
from grpo_async.cli import main
for arguments in " ".join(sys.argv[1:]).split(" + "):
    try:
        main(arguments.split())
    except SystemExit as end:
        assert not end.code, end.code
print("LOADED", [name for name in {NOT_FOR_HELP!r} if name in sys.modules])
"""


def _python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    with RolloutStore(tmp_path / "runs" / "demo" / "rollouts") as store:
        append_simple(store, 0)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "--help + train --help + eval --help + export --help + report --help + doctor --help",
        "schema + validate x.yaml",
        "inspect-rollouts --help + inspect-rollouts demo --rollout 0-1",
    ],
)
def test_a_light_command_loads_no_heavy_library(folder: Path, arguments: str) -> None:
    done = _python("-c", LOADED, arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    reads_rollouts = {"duckdb", "numpy"} if "--rollout" in arguments else set()
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1].removeprefix("LOADED ")))
    assert loaded - reads_rollouts == set()


@pytest.mark.parametrize("during", ["import", "run"])
def test_an_interrupt_ends_a_command_with_130(folder: Path, during: str) -> None:
    script = f"""
import os, signal, sys
def interrupt(name="typer", *arguments, **options):
    if name != "typer":
        return None
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
if {during!r} == "import":
    sys.meta_path.insert(0, type("Importing", (), {{"find_spec": staticmethod(interrupt)}}))
else:
    import grpo_async.launch.start
    grpo_async.launch.start.launch = lambda *arguments, **options: interrupt()
from grpo_async.cli import main
main(["train", "x.yaml"])
"""
    done = _python("-c", script, folder=folder)
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
