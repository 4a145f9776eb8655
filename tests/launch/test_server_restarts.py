"""Servers that die or hang after they have served: real processes, real signals, stand-ins for server and trainer."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_async.errors import RunError
from grpo_async.inference.fleet import ServerEvent
from grpo_async.launch import servers as servers_module
from grpo_async.launch.children import Child, Children, first_of
from grpo_async.launch.plan import ProcessSpec
from grpo_async.launch.servers import Servers
from grpo_async.utils.processes import START_VARIABLE
from tests.launch.support import START_S, LauncherProcess, make_config
from tests.support.waiting import eventually, is_alive, until

FAST: dict[str, Any] = {"restart_delay_s": 0.0}
PAUSE = (sys.executable, "-c", "import signal; signal.pause()")


def _served(folder: Path, *, server: str = "serve", **inference: Any) -> LauncherProcess:
    return LauncherProcess(folder, trainer="served", server=server, inference={**FAST, **inference})


def _begin(launcher: LauncherProcess, *names: str) -> None:
    """Until the trainer has said that all serve, and the stand-ins `names` (the server) have really begun."""
    launcher.wait_for_line("servers serve")
    launcher.wait_for_processes(*(names or ("server",)))


def _news(folder: Path) -> list[dict[str, Any]]:
    path = folder / "news"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _signal(launcher: LauncherProcess, name: str, number: signal.Signals) -> None:
    os.kill(launcher.pids()[name], number)


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
        assert eventually(lambda: launcher.pids()["server"] != old["server"], START_S), "it was not started again"
        second = psutil.Process(launcher.pids()["server"]).environ()[START_VARIABLE]
        assert second != first  # it must not sample the same noise again
        assert not any(psutil.pid_exists(pid) for pid in old.values())  # no zombies, either
        launcher.wait_for_line("the inference server serves again")
        _signal(launcher, "rank0", signal.SIGUSR2)
        assert launcher.end() == 0, launcher.output
        assert launcher.left() == {}
        assert f"the inference server {reason}" in launcher.output
        assert "restart 1 of 3 in 0 s" in launcher.output
        assert "1 failure (recovered after 1.5 s)" in " ".join(launcher.output.split())
    assert (tmp_path / "server.token").read_text() == token  # and its port: it is in the command
    assert [message["event"] for message in _news(tmp_path)] == ["exited", "starting"]
    assert reason in _news(tmp_path)[0]["detail"]
    assert (_logs(tmp_path) / "server.log").read_text() == "serving\n"  # the old log is kept
    assert (_logs(tmp_path) / "server.restart_1.log").read_text() == "serving\nasked to end\n"


def test_a_server_that_dies_after_every_restart_is_given_up_with_its_own_last_lines(tmp_path: Path) -> None:
    with _served(tmp_path, server="crash-again", max_restarts=2) as launcher:
        _begin(launcher)
        _signal(launcher, "server", signal.SIGUSR1)
        assert launcher.end() == 1
        assert launcher.left() == {}
        error = launcher.output[launcher.output.index("error: ") :]
        given_up = (
            "the inference server was given up after 2 consecutive restarts (inference.max_restarts): it ended with"
        )
        assert f"{given_up} exit code 3\n" in error
        assert "  KV cache does not fit\n  giving up\n" in error
        assert "the card is on fire" not in error  # that was before the first restart
        assert "server.restart_2.log" in error
        assert "there is no checkpoint yet" in error
    assert "the card is on fire" in (_logs(tmp_path) / "server.log").read_text()


def test_with_another_server_the_run_goes_on_and_ends_only_with_the_last(tmp_path: Path) -> None:
    with _served(tmp_path, max_restarts=0, replicas=2) as launcher:
        _begin(launcher, "server0", "server1")
        _signal(launcher, "server1", signal.SIGUSR1)
        launcher.wait_for_line("the run continues with 1 of 2")
        assert eventually(lambda: [m["event"] for m in _news(tmp_path)] == ["exited", "given_up"], START_S)
        assert is_alive(launcher.pids()["server0"])
        _signal(launcher, "server0", signal.SIGKILL)
        assert launcher.end() == 1
        assert launcher.left() == {}
        error = launcher.output[launcher.output.index("error: ") :]
        for index in (0, 1):
            assert f"inference server {index} was given up after 0 consecutive restarts" in error
        assert "was killed by SIGKILL" in error
        assert "server_0.log" in error


class News:
    """What is told of a server."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.notes: list[str] = []

    def server_event(self, index: int, event: ServerEvent, detail: str, num_restarts: int) -> None:
        self.events.append((event, detail, num_restarts))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        pass

    async def wait_for(self, event: str, num_restarts: int) -> None:
        await until(lambda: any((event, num_restarts) == (name, number) for name, _, number in self.events))


def _spec(command: tuple[str, ...]) -> ProcessSpec:
    names = {"name": "inference server", "log_name": "server.log"}
    return ProcessSpec(command=command, environment={}, num_processes=1, threads=1, **names)


@asynccontextmanager
async def _started(
    news: News, folder: Path, *, command: tuple[str, ...] = PAUSE, max_restarts: int = 3
) -> AsyncIterator[Servers]:
    """One server that runs `command` and is restarted without delay."""
    config = make_config(folder, inference={**FAST, "max_restarts": max_restarts})
    display: Any = news
    async with Children(folder, folder, news.warning) as children:

        async def spawn(index: int, num_restarts: int) -> Child:
            return await children.spawn(_spec(command), num_restarts=num_restarts)

        servers = Servers(config.inference, ["inference server"], spawn, display, news.server_event)
        async with servers.running():
            await until(lambda: servers.children or servers.lost.is_set())
            yield servers


def _pid() -> int:
    """Of the one server that was started here, below its keeper."""
    found: list[int] = []

    def finds() -> bool:
        found[:] = [each.pid for each in psutil.Process().children(recursive=True) if each.cmdline() == list(PAUSE)]
        return bool(found)

    assert eventually(finds, START_S)
    return found[0]


def _serves(servers: Servers, num_restarts: int = 0) -> None:
    servers.receive({"kind": "server_serving", "index": 0, "num_restarts": num_restarts})


def _ask_restart(servers: Servers, reason: str, num_restarts: int) -> None:
    servers.receive({"kind": "restart_server", "index": 0, "reason": reason, "num_restarts": num_restarts})


def test_what_a_run_starts_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    shows = (sys.executable, "-c", "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")

    async def main() -> None:
        async with _started(News(), tmp_path, command=shows) as servers:
            await until(servers.lost.is_set)

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
        async with _started(news, tmp_path) as servers:
            _serves(servers, 0)
            servers.children[0].kill()
            await news.wait_for("starting", 1)
            _ask_restart(servers, "an old request", 0)
            await asyncio.sleep(0.2)
            assert (len(servers.children), news.events[-1][0]) == (1, "starting")
            _serves(servers, 0)
            assert "serves again" not in news.notes[-1]  # what served before the restart is no news of what runs now
            _serves(servers, 1)
            assert "serves again" in news.notes[-1]
            _ask_restart(servers, "a new request", 1)
            await news.wait_for("starting", 2)
            pid = _pid()
            os.kill(pid, signal.SIGKILL)
            # the event loop, which stands still here, hears of the request before it hears of the end
            assert eventually(lambda: not psutil.pid_exists(pid), START_S)
            _ask_restart(servers, "it does not answer", 2)
            await news.wait_for("starting", 3)
            assert not servers.lost.is_set()

    asyncio.run(main())
    exits = [detail for event, detail, _ in news.events if event == "exited"]
    assert exits[1] == "was killed: a new request"
    assert exits[2].startswith("was killed by SIGKILL")  # it ended by itself


@pytest.mark.parametrize("least", [1, 2])
def test_a_server_that_cannot_start_ends_the_run_unless_that_needs_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """It is tried again and again, each time after a wait that doubles up to a minute."""
    replicas = {"replicas": {"min": least, "max": 2}}
    limits = {"restart_delay_s": 1.0, "max_restarts": 8}
    config = make_config(tmp_path, launch={"ray": "auto"}, inference={**limits, **replicas, "engine": "vllm"})
    news: Any = News()
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def main() -> str | None:
        async with Children(tmp_path, tmp_path, news.warning) as children:
            fails = asyncio.Event()

            async def spawn(index: int, num_restarts: int) -> Child:
                if index == 1:
                    await fails.wait()
                    raise RunError("no room for its cache")
                return await children.spawn(_spec(PAUSE), num_restarts=num_restarts)

            servers = Servers(config.inference, ["server 0", "server 1"], spawn, news, news.server_event)
            async with servers.running():
                _serves(servers)
                with monkeypatch.context() as patched:
                    patched.setattr(servers_module.asyncio, "sleep", wait)
                    fails.set()
                    await first_of([], [servers.lost], 5.0 if least == 1 else START_S)
                return servers.failure

    failure = asyncio.run(main())
    assert failure == (None if least == 1 else "the server 1 could not be started: no room for its cache")
    assert waits == ([1, 2, 4, 8, 16, 32, 60, 60] if least == 1 else [])
    assert [event for event, *_ in news.events][-1:] == (["given_up"] if least == 1 else [])


@pytest.mark.parametrize("served_long", [True, False])
def test_restarts_are_counted_anew_after_a_long_service_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served_long: bool
) -> None:
    """One whose machine is lost is not counted at all."""
    monkeypatch.setattr(servers_module, "_RESTART_RESET_S", 0.0 if served_long else 600.0)
    news = News()

    async def main() -> bool:
        async with _started(news, tmp_path, max_restarts=1) as servers:
            (child,) = servers.children
            child.is_lost = True
            child.kill()
            await news.wait_for("starting", 1)
            _serves(servers, 1)
            servers.children[0].kill()
            await news.wait_for("starting", 2)
            _serves(servers, 2)
            servers.children[0].kill()
            await (news.wait_for("starting", 3) if served_long else news.wait_for("given_up", 2))
            return servers.lost.is_set()

    assert asyncio.run(main()) is not served_long


def test_a_hung_server_is_killed_but_not_restarted_when_the_run_stops(tmp_path: Path) -> None:
    """The trainer waits for it in a push, and has a checkpoint to write."""
    news = News()

    async def main() -> None:
        async with _started(news, tmp_path) as servers:
            (child,) = servers.children
            os.kill(_pid(), signal.SIGSTOP)
            servers.stop_restarting()
            _ask_restart(servers, "it does not answer", 0)
            await asyncio.wait([child.exited], timeout=START_S)
            assert child.exited.result() == -signal.SIGKILL
            assert servers.children == []

    asyncio.run(main())
    assert news.events == []
