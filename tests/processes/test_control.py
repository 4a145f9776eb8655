"""Both ends of the control channel over a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_async.processes.control import ControlClient, ControlServer
from tests.support.waiting import eventually

LIMIT_S = 10.0


class Inbox:
    """What the launcher's end received; `closed` of a client is seen by `read_the_rest`."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.broken: list[str] = []

    def server(self, path: Path) -> ControlServer:
        return ControlServer(path, self.messages.append, self.broken.append)


def test_messages_of_several_threads_arrive_whole_and_in_order_per_thread(tmp_path: Path) -> None:
    inbox = Inbox()

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

    async def main() -> None:
        async with inbox.server(tmp_path / "control") as server:
            await asyncio.to_thread(train)
            await server.read_the_rest(LIMIT_S)

    asyncio.run(main())
    names = [message["name"] for message in inbox.messages]
    assert inbox.broken == []
    assert [name for name in names if name.startswith("a")] == [f"a {number}" for number in range(100)]
    assert [name for name in names if name.startswith("b")] == [f"b {number}" for number in range(100)]


@pytest.mark.parametrize("is_connected_first", [True, False])
def test_a_stop_reaches_the_trainer_also_when_it_connects_later(tmp_path: Path, is_connected_first: bool) -> None:
    async def main() -> ControlClient:
        async with Inbox().server(tmp_path / "control") as server:
            if not is_connected_first:
                server.request_stop()
            assert not server.has_connected
            client = await asyncio.to_thread(ControlClient, tmp_path / "control")
            if is_connected_first:
                server.request_stop()
            assert await asyncio.to_thread(client.stop_requested.wait, LIMIT_S)
            assert server.has_connected
            await asyncio.to_thread(client.close)
        return client

    assert asyncio.run(main()).stop_requested.is_set()


def test_a_launcher_that_goes_away_asks_to_stop_and_sending_never_raises(tmp_path: Path) -> None:
    async def main() -> ControlClient:
        async with Inbox().server(tmp_path / "control"):
            client = await asyncio.to_thread(ControlClient, tmp_path / "control")
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
    heard: list[tuple[int, str, str]] = []

    def listen(message: Mapping[str, Any]) -> None:
        heard.append((message["index"], message["event"], message["detail"]))
        if message["event"] == "broken":
            raise ZeroDivisionError  # a listener that fails must not silence the channel

    async def main() -> None:
        async with Inbox().server(tmp_path / "control") as server:
            server.send_server_event(0, "exited", "before it connected", 0)
            client = await asyncio.to_thread(ControlClient, tmp_path / "control")
            server.send_server_event(0, "starting", "before it listened", 1)
            await asyncio.to_thread(_until, lambda: len(client._kept) == 2)
            assert heard == []
            client.listen(listen)
            assert len(heard) == 2
            for number in range(50):
                server.send_server_event(1, "exited", str(number), 0)
            server.send_server_event(1, "broken", "", 0)
            server.request_stop()
            assert await asyncio.to_thread(client.stop_requested.wait, LIMIT_S)
            await asyncio.to_thread(client.close)

    asyncio.run(main())
    assert heard[:2] == [(0, "exited", "before it connected"), (0, "starting", "before it listened")]
    assert [detail for _, event, detail in heard[2:] if event == "exited"] == [str(number) for number in range(50)]
    assert len(heard) == 53


def test_what_the_trainer_says_of_a_server_names_the_incarnation_that_it_knew(tmp_path: Path) -> None:
    inbox = Inbox()

    async def main() -> None:
        async with inbox.server(tmp_path / "control") as server:
            client = await asyncio.to_thread(ControlClient, tmp_path / "control")
            client.send("server_serving", index=1)
            client.send("restart_server", index=1, reason="it hangs")
            told = threading.Event()
            client.listen(lambda message: told.set())
            server.send_server_event(1, "starting", "restart 1", 4)
            assert await asyncio.to_thread(told.wait, LIMIT_S)
            client.send("restart_server", index=1, reason="it hangs again")
            client.send("restart_server", index=0, reason="this one, too")
            client.send("phase", name="training")
            await asyncio.to_thread(client.close)
            await server.read_the_rest(LIMIT_S)

    asyncio.run(main())
    incarnations = [(message.get("index"), message.get("incarnation")) for message in inbox.messages]
    assert incarnations == [(1, 0), (1, 0), (1, 4), (0, 0), (None, None)]


def _until(condition: Callable[[], bool]) -> None:
    assert eventually(condition, LIMIT_S)
