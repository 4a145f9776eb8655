"""What the terminal hears of servers that others run."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from grpo_async.inference.fleet import ServerState
from grpo_async.trainer.connections import FleetReporter


@dataclass
class _Fleet:
    states: list[ServerState]
    words: list[str] = field(default_factory=lambda: ["never answered"] * 2)

    def servers(self) -> list[Any]:
        return [
            SimpleNamespace(index=index, name=f"server {index}", state=state, url="")
            for index, state in enumerate(self.states)
        ]

    def last_message(self, index: int) -> str:
        return self.words[index]

    def restarts(self, index: int) -> int:
        return 0

    def current_info(self, index: int) -> None:
        return None


def test_every_change_that_matters_is_told_once() -> None:
    starting, ready, serving = ServerState.STARTING, ServerState.READY, ServerState.SERVING
    fleet = _Fleet([starting, starting])
    told: list[str] = []
    statuses: list[list[str]] = []

    def send(kind: str, **content: Any) -> None:
        if kind in ("note", "warning"):
            told.append(f"{kind}: {content['text']}")
        else:
            statuses.append([server["state"] for server in content["servers"]])

    control: Any = SimpleNamespace(send=send)
    reporter = FleetReporter(fleet, control, tells_changes=True)  # type: ignore[arg-type]
    reporter.on_change()
    for states in ([ready, starting], [serving, starting], [serving, starting]):
        fleet.states = states
        reporter.on_change()
    assert told == ["note: server 0 serves; 1 of 2 servers serve"]
    fleet.states, fleet.words[0] = [ServerState.DOWN, serving], "its connection was lost"
    reporter.on_change()
    assert told[1:] == [
        "warning: server 0 is down: its connection was lost; 1 of 2 servers serve", "note: server 1 serves; 1 of 2 servers serve",
    ]  # fmt: skip
    fleet.states, fleet.words[0] = [ServerState.GONE, serving], "401"
    reporter.on_change()
    assert told[3:] == ["warning: server 0 is given up: 401; 1 of 2 servers serve"]
    assert statuses[-1] == ["gone", "serving"]
    reporter.on_load()
    assert len(statuses) == 6, "load alone is told once a second"
