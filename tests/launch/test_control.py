"""Both ends of the control channel over a real socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_async.processes.control import ControlClient, ControlServer
from tests.support.waiting import eventually

LIMIT_S = 10.0


def _serve(path: Path, scene: Callable[[ControlServer], Awaitable[None]]) -> list[Mapping[str, Any]]:
    """What the launcher's end received while `scene` went on, and until all was read."""
    messages: list[Mapping[str, Any]] = []
    broken: list[str] = []

    async def main() -> None:
        async with ControlServer(path, messages.append, broken.append) as server:
            await scene(server)
            await server.read_the_rest(LIMIT_S)

    asyncio.run(main())
    assert broken == []
    return messages


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_trainer_stops_when_it_is_asked_to_before_it_connects_and_when_the_launcher_goes_away(
    tmp_path: Path, is_asked: bool
) -> None:
    async def main() -> ControlClient:
        is_accepted = asyncio.Event()
        async with ControlServer(tmp_path / "control", lambda message: is_accepted.set(), lambda text: None) as server:
            if is_asked:
                server.send("stop")
            client = await asyncio.to_thread(ControlClient, tmp_path / "control")
            client.send("phase", name="loading")
            async with asyncio.timeout(LIMIT_S):
                await is_accepted.wait()
            if is_asked:
                assert await asyncio.to_thread(client.stop_requested.wait, LIMIT_S)
            assert client.stop_requested.is_set() == is_asked
        return client

    client = asyncio.run(main())
    assert client.stop_requested.wait(LIMIT_S)
    for _ in range(3):
        client.send("phase", name="training")  # never raises
    client.close()


def test_news_of_servers_reach_the_trainer_in_order_and_what_it_says_names_the_restarts_that_it_knew(
    tmp_path: Path,
) -> None:
    """Also news from before it connected or listened; a listener that fails does not silence the channel."""
    heard: list[tuple[int, str]] = []

    def listen(message: Mapping[str, Any]) -> None:
        heard.append((message["index"], message["event"]))
        if message["event"] == "broken":
            raise ZeroDivisionError

    async def scene(server: ControlServer) -> None:
        server.send("server_event", index=0, event="before it connected")
        client = await asyncio.to_thread(ControlClient, tmp_path / "control")
        client.send("server_serving", index=1)
        server.send("server_event", index=0, event="before it listened")
        client.listen(listen)
        for event in ["broken", *map(str, range(50))]:
            server.send("server_event", index=1, event=event, num_restarts=4)
        assert await asyncio.to_thread(eventually, lambda: len(heard) == 53, LIMIT_S)
        client.send("restart_server", index=1, reason="it hangs")
        client.send("restart_server", index=0, reason="this one, too")
        client.send("phase", name="training")
        await asyncio.to_thread(client.close)

    messages = _serve(tmp_path / "control", scene)
    assert heard[:3] == [(0, "before it connected"), (0, "before it listened"), (1, "broken")]
    assert heard[3:] == [(1, str(number)) for number in range(50)]
    restarts = [(message.get("index"), message.get("num_restarts")) for message in messages]
    assert restarts == [(1, 0), (1, 4), (0, 0), (None, None)]


def test_a_process_that_ends_at_once_loses_no_message_to_those_that_it_did_not_read(tmp_path: Path) -> None:
    """As torchrun says how its ranks ended, after the launcher has said much about servers."""
    script = (
        "import os, sys; from pathlib import Path; from grpo_async.processes.control import ControlClient\n"
        "client = ControlClient(Path(sys.argv[1])); client.send('phase', name='last'); client.close(); os._exit(1)"
    )

    async def scene(server: ControlServer) -> None:
        for number in range(50):
            server.send("server_event", index=0, event="starting", detail="x" * 200, num_restarts=number)
        command = [sys.executable, "-c", script, str(tmp_path / "control")]
        processes = [subprocess.Popen(command) for _ in range(4)]  # noqa: ASYNC220
        time.sleep(1.0)  # noqa: ASYNC251 - the launcher is busy, and has accepted none of them
        await asyncio.to_thread(lambda: [process.wait(timeout=60) for process in processes])

    assert [message["name"] for message in _serve(tmp_path / "control", scene)] == ["last"] * 4
