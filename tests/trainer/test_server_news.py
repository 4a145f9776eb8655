"""What the terminal hears of servers that others run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from grpo_async.inference.api import ServerInfo
from grpo_async.inference.fleet import Fleet
from grpo_async.tracking.timeline import NO_TIMELINE
from grpo_async.trainer.connections import FleetReporter
from tests.support.configs import small_config


def test_every_change_that_matters_is_told_once() -> None:
    told: list[str] = []
    statuses: list[list[str]] = []

    def send(kind: str, **content: Any) -> None:
        if kind in ("note", "warning"):
            told.append(f"{kind}: {content['text']}")
        else:
            statuses.append([server["state"] for server in content["servers"]])

    control: Any = SimpleNamespace(send=send)
    fleet = Fleet(["http://a", "http://b"], small_config().inference, token=None, control_timeout_s=1.0)
    reporter = FleetReporter(fleet, control, timeline=NO_TIMELINE, tells_changes=True)
    fleet.subscribe(reporter.on_change)

    def serves(index: int) -> None:
        info = ServerInfo(
            engine="embedded", instance_id=str(index), model="m", dtype="float32", max_model_len=9, policy_version=0
        )
        fleet.found(fleet.server(index), info)
        fleet.mark_serving([fleet.server(index)], version=0)

    serves(0)
    reporter.on_change()
    fleet.fence(fleet.server(0), "its connection was lost")
    serves(1)
    fleet.give_up(fleet.server(0), "401")
    assert told == [
        "note: server 0 (http://a) serves; 1 of 2 servers serve",
        "warning: server 0 (http://a) is down: its connection was lost; 0 of 2 servers serve",
        "note: server 1 (http://b) serves; 1 of 2 servers serve",
        "warning: server 0 (http://a) is given up: 401; 1 of 2 servers serve",
    ]
    assert statuses[-1] == ["gone", "serving"]
    num_told = len(statuses)
    reporter.on_load()
    assert len(statuses) == num_told, "load alone is told once a second"
    fleet.close()
