"""router.Servers whose members a test changes, as a fleet does it: from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from grpo_async.inference.router import ANY_VERSION, ServerAddress


def address(index: int, url: str, instance_id: str = "first") -> ServerAddress:
    return ServerAddress(index=index, name=url.removeprefix("http://"), url=url, instance_id=instance_id)


class ScriptedServers:
    """`on_suspect` is called when a client reports a failure; it may change the members."""

    def __init__(self, *urls: str) -> None:
        self.members = [address(index, url) for index, url in enumerate(urls)]
        self.versions = ANY_VERSION
        self.suspected: list[int] = []
        self.on_suspect: Callable[[int], None] = lambda _: None
        self._listeners: list[Callable[[], None]] = []

    def serving(self) -> list[ServerAddress]:
        return self.members

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def suspect(self, index: int) -> None:
        self.suspected.append(index)
        self.on_suspect(index)

    def set(self, *members: ServerAddress) -> None:
        self.members = list(members)
        for listener in self._listeners:
            thread = threading.Thread(target=listener)
            thread.start()
            thread.join(20.0)
