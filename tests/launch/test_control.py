"""Both ends of the control channel over a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_async.launch.control import ControlServer
from grpo_async.processes.control import ControlClient
from tests.support.waiting import eventually, until

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


def test_messages_of_several_threads_arrive_whole_and_in_order_per_thread(tmp_path: Path) -> None:
    def send(client: ControlClient, name: str) -> None:
        for number in range(100):
            client.send("phase", name=f"{name} {number}", padding="x" * 5000)

    def train() -> None:
        client = ControlClient(tmp_path / "control")
        threads = [threading.Thread(target=send, args=(client, name)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        client.close()

    names = [each["name"] for each in _serve(tmp_path / "control", lambda server: asyncio.to_thread(train))]
    for thread in "ab":
        assert [name for name in names if name.startswith(thread)] == [f"{thread} {number}" for number in range(100)]


@pytest.mark.parametrize("is_connected_first", [True, False])
def test_a_stop_reaches_the_trainer_also_when_it_connects_later(tmp_path: Path, is_connected_first: bool) -> None:
    async def scene(server: ControlServer) -> None:
        if not is_connected_first:
            server.send("stop")
        assert not server.has_connected
        client = await asyncio.to_thread(ControlClient, tmp_path / "control")
        if is_connected_first:
            server.send("stop")
        assert await asyncio.to_thread(client.stop_requested.wait, LIMIT_S)
        assert server.has_connected
        await asyncio.to_thread(client.close)

    _serve(tmp_path / "control", scene)


def test_a_launcher_that_goes_away_asks_to_stop_and_sending_never_raises(tmp_path: Path) -> None:
    async def main() -> ControlClient:
        async with ControlServer(tmp_path / "control", lambda message: None, lambda text: None) as server:
            client = await asyncio.to_thread(ControlClient, tmp_path / "control")
            await until(lambda: server.has_connected)
            assert not client.stop_requested.is_set()
        return client

    client = asyncio.run(main())
    assert client.stop_requested.wait(LIMIT_S)
    for _ in range(3):
        client.send("phase", name="training")
    client.close()


def test_a_stuck_launcher_does_not_block_the_sender(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen(1)
        client = ControlClient(tmp_path / "control")
        sender = threading.Thread(
            target=lambda: [client.send("phase", name="x" * 1_000_000) for _ in range(20)], daemon=True
        )
        sender.start()
        sender.join(LIMIT_S)
        assert not sender.is_alive()
    assert client.stop_requested.wait(LIMIT_S)


def test_news_of_servers_reach_the_trainer_in_order_also_those_from_before_it_listened(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []

    def listen(message: Mapping[str, Any]) -> None:
        heard.append((message["index"], message["event"]))
        if message["event"] == "broken":
            raise ZeroDivisionError  # a listener that fails must not silence the channel

    async def scene(server: ControlServer) -> None:
        server.send("server_event", index=0, event="before it connected")
        client = await asyncio.to_thread(ControlClient, tmp_path / "control")
        server.send("server_event", index=0, event="before it listened")
        client.listen(listen)
        assert await asyncio.to_thread(eventually, lambda: len(heard) == 2, LIMIT_S)
        for event in ["broken", *map(str, range(50))]:
            server.send("server_event", index=1, event=event)
        server.send("stop")
        assert await asyncio.to_thread(client.stop_requested.wait, LIMIT_S)
        assert await asyncio.to_thread(eventually, lambda: len(heard) == 53, LIMIT_S)
        await asyncio.to_thread(client.close)

    _serve(tmp_path / "control", scene)
    assert heard[:3] == [(0, "before it connected"), (0, "before it listened"), (1, "broken")]
    assert heard[3:] == [(1, str(number)) for number in range(50)]


def test_what_the_trainer_says_of_a_server_names_the_restarts_that_it_knew(tmp_path: Path) -> None:
    async def scene(server: ControlServer) -> None:
        client = await asyncio.to_thread(ControlClient, tmp_path / "control")
        client.send("server_serving", index=1)
        told = threading.Event()
        client.listen(lambda message: told.set())
        server.send("server_event", index=1, event="starting", detail="restart 1", num_restarts=4)
        assert await asyncio.to_thread(told.wait, LIMIT_S)
        client.send("restart_server", index=1, reason="it hangs")
        client.send("restart_server", index=0, reason="this one, too")
        client.send("phase", name="training")
        await asyncio.to_thread(client.close)

    messages = _serve(tmp_path / "control", scene)
    restarts = [(message.get("index"), message.get("num_restarts")) for message in messages]
    assert restarts == [(1, 0), (1, 4), (0, 0), (None, None)]
