"""Servers that die or hang after they have served: real processes, real signals, stand-ins for server and trainer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from grpo_async.launch import servers as servers_module
from grpo_async.launch.children import Child, Children
from grpo_async.launch.plan import ProcessSpec
from grpo_async.launch.servers import Servers
from grpo_async.utils.processes import START_VARIABLE
from tests.launch.support import START_S, LauncherProcess, make_config
from tests.support.waiting import eventually, is_alive, until

FAST: dict[str, Any] = {"restart_delay_s": 0.0}


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
    assert (tmp_path / "server.token").read_text() == token  # and its port: it is in the command
    assert [message["event"] for message in _news(tmp_path)] == ["exited", "starting"]
    assert reason in _news(tmp_path)[0]["detail"]
    assert (_logs(tmp_path) / "server.log").read_text() == "serving\n"  # the old log is kept
    assert (_logs(tmp_path) / "server.restart_1.log").read_text() == "serving\nasked to end\n"


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


@asynccontextmanager
async def _started(folder: Path, told: list[tuple[str, int]], *, max_restarts: int = 3) -> AsyncIterator[Servers]:
    """One server, which does nothing and is restarted without delay; `told` gets events, with the restarts until then."""
    config = make_config(folder, inference={**FAST, "max_restarts": max_restarts})
    command = (sys.executable, "-c", "import signal; signal.pause()")
    names = {"name": "inference server", "log_name": "server.log"}
    spec = ProcessSpec(command=command, environment={}, num_processes=1, threads=1, **names)
    display: Any = SimpleNamespace(note=print, warning=print)

    def tell(event: str, num_restarts: int, **_: Any) -> None:
        told.append((event, num_restarts))

    async with Children(folder, folder, display.warning) as children:

        async def spawn(index: int, num_restarts: int) -> Child:
            return await children.spawn(spec, num_restarts=num_restarts)

        servers = Servers(config.inference, ["inference server"], spawn, display, tell)
        async with servers.running():
            await until(lambda: bool(servers.children))
            yield servers


@pytest.mark.parametrize("served_long", [True, False])
def test_restarts_are_counted_anew_after_a_long_service_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served_long: bool
) -> None:
    """One whose machine is lost is not counted at all."""
    monkeypatch.setattr(servers_module, "_RESTART_RESET_S", 0.0 if served_long else 600.0)
    told: list[tuple[str, int]] = []

    async def main() -> bool:
        async with _started(tmp_path, told, max_restarts=1) as servers:

            async def kill(event: str, num_restarts: int, *, is_lost: bool = False) -> None:
                (child,) = servers.children
                child.is_lost = is_lost
                child.kill()
                await until(lambda: (event, num_restarts) in told)

            await kill("starting", 1, is_lost=True)
            servers.receive({"kind": "server_serving", "index": 0, "num_restarts": 1})
            await kill("starting", 2)
            servers.receive({"kind": "server_serving", "index": 0, "num_restarts": 2})
            await (kill("starting", 3) if served_long else kill("given_up", 2))
            return servers.lost.is_set()

    assert asyncio.run(main()) is not served_long


def test_a_hung_server_is_killed_but_not_restarted_when_the_run_stops(tmp_path: Path) -> None:
    """The trainer waits for it in a push, and has a checkpoint to write."""
    told: list[tuple[str, int]] = []

    async def main() -> int:
        async with _started(tmp_path, told) as servers:
            (child,) = servers.children
            servers.stop_restarting()
            servers.receive({"kind": "restart_server", "index": 0, "reason": "it does not answer", "num_restarts": 0})
            await asyncio.wait([child.exited], timeout=START_S)
            return child.exited.result()

    assert asyncio.run(main()) == -signal.SIGKILL
    assert told == []
