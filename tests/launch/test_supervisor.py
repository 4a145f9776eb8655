"""The launcher over stand-in children: exit codes, messages, and that nobody is left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.support import START_S, LauncherProcess
from tests.support.waiting import eventually


def test_a_server_that_ends_early_ends_the_trainer_and_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with LauncherProcess(tmp_path, trainer="ignore-stop", server="crash") as launcher:
        assert launcher.end() == 1
        assert launcher.left() == {}
        assert "the inference server ended with exit code 3" in launcher.output
        assert "  KV cache does not fit\n  giving up\n" in launcher.output  # without the color's escape codes
        assert "there is no checkpoint yet" in launcher.output


@pytest.mark.parametrize("stop_timeout_s", [60.0, 0.5])
def test_a_trainer_that_does_not_stop_is_killed_in_time_or_by_a_second_signal(
    tmp_path: Path, stop_timeout_s: float
) -> None:
    is_second = stop_timeout_s > 1.0
    options: dict[str, Any] = {"trainer": "ignore-stop", "server": "ignore-term", "stop_timeout_s": stop_timeout_s}
    with LauncherProcess(tmp_path, **options) as launcher:
        launcher.wait_for_line("training")
        launcher.wait_for_processes("server")
        launcher.process.send_signal(signal.SIGINT)
        launcher.wait_for_line("press Ctrl-C again")
        sent = time.monotonic()
        if is_second:
            launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130
        assert time.monotonic() - sent < 8.0  # at once: less than the grace of a server that ignores SIGTERM
        assert ("a second signal" if is_second else "launch.stop_timeout_s: 0.5 s") in launcher.output
        assert launcher.left() == {}


def test_a_signal_before_the_trainer_has_begun_ends_everything_at_once(tmp_path: Path) -> None:
    with LauncherProcess(tmp_path, trainer="never-connect") as launcher:
        launcher.wait_for_processes("rank0", "server")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130
        assert "before the trainer had started" in launcher.output
        assert launcher.left() == {}


def _log(folder: Path) -> str:
    return (folder / "runs" / "test" / "logs" / "latest" / "trainer.log").read_text()


@pytest.mark.clock  # heartbeats of seconds
def test_a_trainer_whose_gil_is_held_is_named_with_the_place_in_the_code(tmp_path: Path) -> None:
    """A regular expression that backtracks, in a thread: nothing within the process can say anything anymore. The warning
    comes after 4 s: several looks lie between it and the end, so a busy machine cannot skip it."""
    with LauncherProcess(tmp_path, trainer="hold", launch={"heartbeat_timeout_s": 8.0}) as launcher:
        assert launcher.end() == 1, launcher.output
        rank_0 = launcher.pids()["rank0"]
        assert f"trainer rank 0 (pid {rank_0})" in launcher.output.rpartition("error: ")[2]
        assert "in holds_the_gil" in launcher.output
        assert "launch.heartbeat_timeout_s" in launcher.output
        assert launcher.left() == {}
        status = launcher.status()
        assert status["state"] == "failed"
        assert f"pid {rank_0}" in status["last_warning"]["text"]
    assert _log(tmp_path).count("Thread 0x") > 1


def test_a_trainer_that_was_stopped_is_continued_to_save(tmp_path: Path) -> None:
    with LauncherProcess(tmp_path, trainer="obey-stop", launch={"heartbeat_timeout_s": 4.0}) as launcher:
        launcher.wait_for_line("training")
        os.kill(launcher.pids()["rank0"], signal.SIGSTOP)
        assert launcher.end() == 1, launcher.output
        assert f"trainer rank 0 (pid {launcher.pids()['rank0']})" in launcher.output
        assert "SIGSTOP" in launcher.output
        assert (tmp_path / "asked_to_stop").exists(), "it was asked to save"
        assert launcher.left() == {}
    assert "in obey_stop" in _log(tmp_path)


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_run_whose_directory_is_gone_fails_by_its_name(tmp_path: Path, is_renamed: bool) -> None:
    with LauncherProcess(tmp_path, trainer="obey-stop") as launcher:
        run = tmp_path / "runs" / "test"
        launcher.wait_for_line("training")
        if is_renamed:
            run.rename(tmp_path / "runs" / "other")
        while run.exists():  # status.json is written in it meanwhile
            shutil.rmtree(run, ignore_errors=True)
        assert launcher.end() == 1, launcher.output
        assert f"the run directory {run} was deleted or renamed" in launcher.output.rpartition("error: ")[2]
        assert launcher.left() == {}
        left = {path.name for path in run.rglob("*")} if run.exists() else set()
        assert left <= {"status.json"}, "it is not made again"


@pytest.mark.parametrize(
    ("kind", "number"), [("pipe", signal.SIGTERM), ("terminal", signal.SIGHUP), ("terminal", signal.SIGQUIT)]
)
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path, kind: str, number: signal.Signals) -> None:
    """`train | tee log` whose tee has died; a terminal that was closed. Standard error is the same stream."""
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    with LauncherProcess(tmp_path, trainer="obey-stop", stdout=writer) as launcher:
        os.close(writer)
        assert eventually(lambda: launcher.status().get("phase") == "training", START_S), launcher.status()
        os.close(reader)
        launcher.process.send_signal(number)
        assert launcher.end() == 143
        assert (tmp_path / "asked_to_stop").exists()
        status = launcher.status()
        assert status["state"] == "stopped"
        assert "standard output" in status["last_warning"]["text"]
