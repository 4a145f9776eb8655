"""Servers that die or hang after they have served: real processes, real signals, stand-ins for server and trainer."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_async.inference.fleet import ServerEvent
from grpo_async.launch.node import NodeProcesses, RestartCount
from grpo_async.launch.plan import ProcessPlan, ProcessSpec
from grpo_async.processes.assignment import Assignment
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.utils.files import write_atomically
from grpo_async.utils.processes import START_VARIABLE
from tests.launch.support import EMBEDDED, START_S, LauncherProcess, make_config
from tests.support.waiting import eventually, is_alive

FAST: dict[str, Any] = {"restart_delay_s": 0.0}
PAUSE = (sys.executable, "-c", "import signal; signal.pause()")


def _served(folder: Path, *, trainer: str = "served", server: str = "serve", **inference: Any) -> LauncherProcess:
    return LauncherProcess(folder, trainer=trainer, server=server, inference={**FAST, **inference})


def _begin(launcher: LauncherProcess, *names: str) -> None:
    """Until the trainer has said that all serve, and the stand-ins `names` (the server) have really begun."""
    launcher.wait_for_line("servers serve")
    launcher.wait_for_processes(*(names or ("server",)))


def _news(folder: Path) -> list[dict[str, Any]]:
    path = folder / "news"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _events(folder: Path, index: int = 0) -> list[str]:
    return [message["event"] for message in _news(folder) if message["index"] == index]


def _await_events(folder: Path, *events: str, index: int = 0) -> None:
    assert eventually(lambda: _events(folder, index) == list(events), START_S), _news(folder)


def _await_new_pid(launcher: LauncherProcess, name: str, old: int) -> int:
    assert eventually(lambda: launcher.pids()[name] != old, START_S), f"{name} was not started again"
    return launcher.pids()[name]


def _signal(launcher: LauncherProcess, name: str, number: signal.Signals) -> int:
    """Send a signal to a stand-in; returns its pid."""
    pid = launcher.pids()[name]
    os.kill(pid, number)
    return pid


def _logs(folder: Path) -> Path:
    return folder / "runs" / "test" / "logs" / "latest"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_dies_or_hangs_is_killed_with_all_that_it_left_and_started_again_and_the_run_finishes(
    tmp_path: Path, hangs: bool
) -> None:
    reason = "was killed: it did not answer for 30 s" if hangs else "was killed by SIGKILL"
    with _served(tmp_path, server="children") as launcher:
        names = ("server", "server.child", "server.stray", "server.bare")
        _begin(launcher, *names)
        assert eventually(lambda: (_logs(tmp_path) / "server.log").read_text() == "serving\n", START_S)
        token = (tmp_path / "server.token").read_text()
        (tmp_path / "server.token").unlink()
        old = {name: launcher.pids()[name] for name in names}
        first = psutil.Process(old["server"]).environ()[START_VARIABLE]
        if hangs:
            _signal(launcher, "server", signal.SIGSTOP)
            _signal(launcher, "server.child", signal.SIGSTOP)
            _signal(launcher, "rank0", signal.SIGUSR1)  # the trainer asks for the restart
        else:
            _signal(launcher, "server", signal.SIGKILL)  # only the parent, as an out-of-memory killer does
        new = _await_new_pid(launcher, "server", old["server"])
        assert psutil.Process(new).environ()[START_VARIABLE] != first  # it must not sample the same noise again
        assert not any(psutil.pid_exists(pid) for pid in old.values())  # no zombies, either
        assert is_alive(launcher.pids()["rank0"])
        _await_events(tmp_path, "exited", "starting")
        launcher.wait_for_line("the inference server serves again, ")
        _signal(launcher, "rank0", signal.SIGUSR2)
        assert launcher.end() == 0, launcher.output
        assert launcher.left() == {}
        assert f"the inference server {reason}" in launcher.output
        assert "restart 1 of 3 in 0 s" in launcher.output
        assert " s after it was lost" in launcher.output
        assert "1 failure, recovered after 1.5 s" in " ".join(launcher.output.split())
    assert (tmp_path / "server.token").read_text() == token  # and its port: it is in the command
    assert reason in _news(tmp_path)[0]["detail"]
    assert (_logs(tmp_path) / "server.log").read_text() == "serving\n"  # the old log is kept
    assert (_logs(tmp_path) / "server.restart_1.log").read_text() == "serving\nasked to end\n"


def test_a_server_that_dies_after_every_restart_is_given_up_with_its_own_last_lines(tmp_path: Path) -> None:
    with _served(tmp_path, trainer="served", server="crash-again", max_restarts=2) as launcher:
        _begin(launcher)
        _signal(launcher, "server", signal.SIGUSR1)
        assert launcher.end() == 1
        assert launcher.left() == {}
        error = launcher.output[launcher.output.index("error: ") :]
        assert (
            "the inference server was given up after 2 consecutive restarts (inference.max_restarts): "
            "it ended with exit code 3\n" in error
        )
        assert "  KV cache does not fit\n  giving up\n" in error
        assert "the card is on fire" not in error  # that was before the first restart
        assert "server.restart_2.log" in error
        assert "there is no checkpoint yet" in error
    # the trainer is ended while the last news are on their way
    assert _events(tmp_path)[:4] == ["exited", "starting", "exited", "starting"]
    assert "the card is on fire" in (_logs(tmp_path) / "server.log").read_text()


def test_with_another_server_the_run_goes_on_and_ends_only_with_the_last(tmp_path: Path) -> None:
    with _served(tmp_path, max_restarts=0, replicas=2) as launcher:
        _begin(launcher, "server0", "server1")
        _signal(launcher, "server1", signal.SIGUSR1)
        launcher.wait_for_line("the run continues with 1 of 2")
        _await_events(tmp_path, "exited", "given_up", index=1)
        assert launcher.process.poll() is None
        assert is_alive(launcher.pids()["server0"])
        _signal(launcher, "server0", signal.SIGKILL)
        assert launcher.end() == 1
        assert launcher.left() == {}
        error = launcher.output[launcher.output.index("error: ") :]
        assert "inference server 1 was given up after 0 consecutive restarts" in error
        assert "inference server 0 was given up after 0 consecutive restarts" in error
        assert "was killed by SIGKILL" in error
        assert "server_0.log" in error
    names = {"config.yaml", "server_0.log", "server_1.log", "trainer.log"}
    assert {path.name for path in _logs(tmp_path).iterdir()} == names


def test_a_signal_ends_the_wait_before_a_restart(tmp_path: Path) -> None:
    with _served(tmp_path, restart_delay_s=50.0) as launcher:
        _begin(launcher)
        old = _signal(launcher, "server", signal.SIGKILL)
        launcher.wait_for_line("restart 1 of 3 in 50 s")
        sent = time.monotonic()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130, launcher.output
        assert time.monotonic() - sent < 20.0  # less than the wait for a restart that cannot be left
        assert launcher.left() == {}
        assert launcher.pids()["server"] == old  # it was not started again


def test_the_waits_double_up_to_a_minute_and_ten_minutes_of_service_begin_a_new_row() -> None:
    now = 1000.0
    count = RestartCount(8, 1.0, clock=lambda: now)
    assert [count.next_delay_s() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    count = RestartCount(2, 3.0, clock=lambda: now)
    for served_s, delay_s in ((0.0, 3), (599.9, 6), (600.0, 3), (1.0, 6), (1.0, None)):
        count.mark_serving()
        now += served_s
        assert count.next_delay_s() == delay_s
    now += 1000.0  # it was down, not serving
    assert count.next_delay_s() is None


class News:
    """What is told of a server; `arrived` is set by each event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.arrived = asyncio.Event()
        self.said = asyncio.Event()

    def server_event(self, index: int, event: ServerEvent, detail: str, num_restarts: int) -> None:
        self.events.append((event, detail, num_restarts))
        self.arrived.set()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.said.set()

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    async def wait_for(self, event: str, num_restarts: int) -> None:
        async with asyncio.timeout(START_S):
            while not any((event, num_restarts) == (name, number) for name, _, number in self.events):
                self.arrived.clear()
                await self.arrived.wait()


def _spawned(
    news: News,
    folder: Path,
    *,
    logs: Path | None = None,
    leads: bool = True,
    command: tuple[str, ...] = PAUSE,
    max_restarts: int = 3,
    has_trainer: bool = True,
) -> NodeProcesses:
    """One server that runs `command` and is restarted without delay, and no trainer."""
    spec = ProcessSpec(
        name="inference server", command=command, environment={}, log_name="server.log", num_processes=1, threads=1
    )
    config = make_config(folder, inference={**FAST, "max_restarts": max_restarts})
    assignment = Assignment(run_dir=RunDir(folder), attempt_dir=logs or folder, private_dir=folder)
    write_atomically(attempt_config(assignment.attempt_dir), "")
    plan = ProcessPlan(run_name="x", engine=EMBEDDED, assignment=assignment, servers=(spec,), trainer=None, num_gpus=0)
    display: Any = news
    tell_trainer = news.server_event if has_trainer else None
    return NodeProcesses(config, plan, display, tell_trainer=tell_trainer, leads=leads)


def _serves(local: NodeProcesses, num_restarts: int = 0) -> None:
    local.receive({"kind": "server_serving", "index": 0, "num_restarts": num_restarts})


def _ask_restart(local: NodeProcesses, reason: str, num_restarts: int) -> None:
    local.receive({"kind": "restart_server", "index": 0, "reason": reason, "num_restarts": num_restarts})


def test_what_a_run_starts_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    shows = (sys.executable, "-c", "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")

    async def main() -> None:
        async with _spawned(News(), tmp_path, command=shows) as local:
            await local.start()
            await local.wait(local.lost_servers, timeout_s=START_S)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        asyncio.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int((tmp_path / "server.log").read_text().split()[0]) == min(hard, 1 << 20)


def test_a_request_that_crossed_a_restart_does_not_end_the_restarted_server(tmp_path: Path) -> None:
    news = News()

    async def main() -> None:
        async with _spawned(news, tmp_path) as local:
            await local.start()
            _serves(local, 0)
            os.kill(local.running_servers[0].pid, signal.SIGKILL)
            await news.wait_for("starting", 1)
            _ask_restart(local, "an old request", 0)
            await asyncio.sleep(0.2)
            assert (len(local.running_servers), news.events[-1][0]) == (1, "starting")
            _serves(local, 0)
            assert "serves again" not in news.notes[-1]  # what served before the restart is no news of what runs now
            _serves(local, 1)
            assert "serves again" in news.notes[-1]
            _ask_restart(local, "a new request", 1)
            await news.wait_for("starting", 2)
            pid = local.running_servers[0].pid
            os.kill(pid, signal.SIGKILL)
            # the event loop, which stands still here, hears of the request before it hears of the end
            assert eventually(lambda: not is_alive(pid), START_S)
            _ask_restart(local, "it does not answer", 2)
            await news.wait_for("starting", 3)
            assert not local.lost_servers.is_set()

    asyncio.run(main())
    exits = [detail for event, detail, _ in news.events if event == "exited"]
    assert exits[1] == "was killed: a new request"
    assert exits[2].startswith("was killed by SIGKILL")  # it ended by itself


def test_without_a_trainer_a_server_is_restarted_and_nothing_says_that_it_serves(tmp_path: Path) -> None:
    news = News()

    async def main() -> None:
        async with _spawned(news, tmp_path, has_trainer=False) as local:
            await local.start()
            for number in (1, 2):
                os.kill(local.running_servers[0].pid, signal.SIGKILL)
                async with asyncio.timeout(START_S):
                    while len(news.notes) < number:
                        await news.said.wait()
                        news.said.clear()
            assert not local.lost_servers.is_set()

    asyncio.run(main())
    assert [note.partition(" (log")[0] for note in news.notes] == ["the inference server starts again"] * 2


def test_a_node_that_another_one_leads_leaves_it_to_that_whether_the_run_continues(tmp_path: Path) -> None:
    """It does not know which servers other machines have lost."""
    news = News()

    async def main() -> None:
        async with _spawned(news, tmp_path, leads=False, max_restarts=0) as local:
            await local.start()
            _serves(local)
            os.kill(local.running_servers[0].pid, signal.SIGKILL)
            await news.wait_for("given_up", 0)
            assert not local.lost_servers.is_set()

    asyncio.run(main())
    (warning,) = news.warnings
    assert warning.startswith("the inference server was given up after 0 consecutive restarts")
    assert "the run continues" not in warning


def test_a_hung_server_is_killed_but_not_restarted_when_the_run_stops(tmp_path: Path) -> None:
    """The trainer waits for it in a push, and has a checkpoint to write."""
    news = News()

    async def main() -> None:
        async with _spawned(news, tmp_path) as local:
            await local.start()
            (child,) = local.running_servers
            os.kill(child.pid, signal.SIGSTOP)
            local.stopping.set()
            _ask_restart(local, "it does not answer", 0)
            await asyncio.wait([child.exited], timeout=START_S)
            assert child.exited.result() == -signal.SIGKILL
            assert local.running_servers == []

    asyncio.run(main())
    assert [event for event, _, _ in news.events] == []


@pytest.mark.parametrize("gone", ["program", "folder of its logs"])
def test_a_program_that_cannot_be_started_again_counts_as_a_restart(tmp_path: Path, gone: str) -> None:
    logs, program = tmp_path / "logs", tmp_path / "server"
    logs.mkdir()
    program.write_text(f"#!{sys.executable}\nimport signal; signal.pause()\n")
    program.chmod(0o700)
    news = News()

    async def main() -> str | None:
        async with _spawned(news, tmp_path, logs=logs, command=(str(program),), max_restarts=2) as local:
            await local.start()
            _serves(local)
            program.unlink() if gone == "program" else logs.rename(tmp_path / "elsewhere")
            os.kill(local.running_servers[0].pid, signal.SIGKILL)
            async with asyncio.timeout(START_S):
                await local.lost_servers.wait()
        return local.server_failure

    failure = asyncio.run(main())
    assert failure is not None
    assert "given up after 2 consecutive restarts" in failure
    assert "could not be started: cannot start the inference server" in failure
    assert [event for event, _, _ in news.events] == ["exited", "exited", "exited", "given_up"]
