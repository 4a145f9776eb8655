"""What the terminal hears of servers that others run."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from grpo_async.inference.fleet import ServerState
from grpo_async.trainer.connections import StateLogger


@dataclass
class _Fleet:
    states: list[ServerState]
    words: list[str] = field(default_factory=lambda: ["never answered"] * 2)

    def servers(self) -> list[Any]:
        return [
            SimpleNamespace(index=index, name=f"server {index}", state=state) for index, state in enumerate(self.states)
        ]

    def last_message(self, index: int) -> str:
        return self.words[index]


def test_every_change_that_matters_is_told_once() -> None:
    starting, ready, serving = ServerState.STARTING, ServerState.READY, ServerState.SERVING
    fleet = _Fleet([starting, starting])
    told: list[str] = []
    state_logger = StateLogger(fleet, told.append)  # type: ignore[arg-type]
    for states in ([ready, starting], [serving, starting], [serving, starting]):
        fleet.states = states
        state_logger()
    assert told == ["server 0 serves; 1 of 2 servers serve"]
    fleet.states, fleet.words[0] = [ServerState.DOWN, serving], "its connection was lost"
    state_logger()
    assert told[1:] == [
        "server 0 is fenced: its connection was lost; 1 of 2 servers serve", "server 1 serves; 1 of 2 servers serve",
    ]  # fmt: skip
    fleet.states, fleet.words[0] = [ServerState.GONE, serving], "401"
    state_logger()
    assert told[3:] == ["server 0 is given up: 401; 1 of 2 servers serve"]
