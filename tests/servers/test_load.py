"""What the embedded engine says of its load, over HTTP, and what the fleet makes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_async.inference.fleet import Fleet, FleetSettings
from grpo_async.servers.vllm.load import EngineLoad, is_idle, watch_load
from tests.servers.embedded_support import Live, live, load, make_request, prompt, wait_until


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Live]:
    with live(load(tiny_model), num_slots=2, max_model_len=512) as running:
        yield running


def _fleet(server: Live) -> Fleet:
    settings = FleetSettings(
        heartbeat_interval_s=0.05, heartbeat_timeout_s=30.0, startup_timeout_s=30.0, longest_startup_s=30.0
    )
    return Fleet([server.url], token=None, settings=settings, control_timeout_s=10.0)


def test_a_busy_engine_says_what_runs_what_waits_and_how_full_it_is(server: Live) -> None:
    idle = server.info()
    assert (idle.running_requests, idle.waiting_requests, idle.kv_usage, idle.max_running_requests) == (0, 0, 0.0, 2)
    server.client.post("/pause")  # frozen, so the figures stand still
    requests = [make_request(prompt(100, start=number), max_tokens=300) for number in range(3)]
    threads = [threading.Thread(target=server.generate, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.info().active_requests == 3, "the engine to have all three")
    server.client.post("/resume")
    wait_until(lambda: server.info().running_requests == 2, "two to run")
    info = server.info()
    assert (info.running_requests, info.waiting_requests) == (2, 1)
    # 2 x 100 prompt tokens and up to 2 x 300 more, of 2 x 512 positions
    assert info.kv_usage is not None
    assert 200 / 1024 <= info.kv_usage <= 800 / 1024
    for thread in threads:
        thread.join(30.0)
    assert server.info().kv_usage == 0.0


def test_the_fleet_hears_the_load_and_makes_metrics_of_it(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.005), step())[1])  # so that requests last
    fleet = _fleet(server)
    heard = threading.Semaphore(0)
    fleet.subscribe_load(heard.release)
    assert "servers/running" not in fleet.metrics(), "nobody has said anything yet"
    fleet.start()
    try:
        assert fleet.wait_for_members(stop=threading.Event(), deadline_s=30.0, setting="x")
        for _ in range(2):
            assert heard.acquire(timeout=10.0)
        assert fleet.metrics()["servers/running"] == 0.0
        threads = [
            threading.Thread(target=server.generate, args=(make_request(prompt(50, start=number), max_tokens=400),))
            for number in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(
            lambda: (server.info().running_requests, server.info().waiting_requests) == (2, 1),
            "two to run and one to wait",
        )
        while heard.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have been asked before
            assert heard.acquire(timeout=10.0)
        fleet.metrics()  # what was heard until now is over
        fleet.read()
        metrics = fleet.metrics()
        assert metrics["servers/running"] == 2.0
        assert metrics["servers/waiting"] == 1.0
        assert 0.09 < metrics["servers/kv_usage"] < 0.9  # 100 to 900 of 1024
        known = fleet.load(0)
        assert known is not None
        assert known.max_running_requests == 2
        assert fleet.restarts(0) == 0
        for thread in threads:
            thread.join(30.0)
        fleet.fence(fleet.server(0), "for the test")
        assert fleet.load(0) is None, "what a server said before it was lost is no news of it"
        assert "servers/running" not in fleet.metrics()
    finally:
        fleet.close()


class _Stats:
    """As vLLM's SchedulerStats."""

    def __init__(self, running: int, waiting: int, usage: float) -> None:
        self.num_running_reqs, self.num_waiting_reqs, self.kv_cache_usage = running, waiting, usage


class _Manager:
    def __init__(self) -> None:
        self.calls = 0

    def record(
        self, scheduler_stats: object, iteration_stats: object, mm_cache_stats: object = None, engine_idx: int = 0
    ) -> str:
        self.calls += 1
        return "recorded"


class _Engine:
    def __init__(self, manager: _Manager | None) -> None:
        self.logger_manager = manager


def test_statistics_of_several_engine_cores_are_added_and_still_recorded() -> None:
    manager = _Manager()
    watched = watch_load(_Engine(manager))
    assert watched.describe(is_idle=False) == {"running_requests": 0, "waiting_requests": 0, "kv_usage": None}
    assert manager.record(engine_idx=0, scheduler_stats=_Stats(3, 1, 0.25), iteration_stats=None) == "recorded"
    manager.record(_Stats(2, 4, 0.75), None, engine_idx=1)
    manager.record(engine_idx=0, scheduler_stats=None, iteration_stats=None)  # a step without statistics
    assert manager.calls == 3
    assert watched.describe(is_idle=False) == {"running_requests": 5, "waiting_requests": 5, "kv_usage": 0.75}
    assert watched.describe(is_idle=True) == {"running_requests": 0, "waiting_requests": 0, "kv_usage": 0.0}


def test_an_engine_without_statistics_has_no_load_and_strange_statistics_do_no_harm() -> None:
    nothing = {"running_requests": 0, "waiting_requests": 0, "kv_usage": None}
    assert watch_load(_Engine(None)).describe(is_idle=False) == nothing
    assert watch_load(object()).describe(is_idle=False) == nothing
    strange = EngineLoad()
    strange.note(0, object())
    assert strange.describe(is_idle=False) == nothing


def test_an_engine_is_idle_when_nobody_has_a_request_in_it_whichever_way_it_came() -> None:
    class Processor:
        def __init__(self, unfinished: bool) -> None:
            self.has_unfinished_requests = lambda: unfinished

    class Engine:
        def __init__(self, processor: object) -> None:
            self.output_processor = processor

    assert is_idle(Engine(Processor(False)), active_requests=0)
    assert not is_idle(Engine(Processor(True)), active_requests=0), "sent through vLLM's own API"
    assert not is_idle(Engine(Processor(False)), active_requests=1)
    for engine in (Engine(None), Engine(object()), object()):  # of another version
        assert is_idle(engine, active_requests=0)
        assert not is_idle(engine, active_requests=1)


def test_the_mean_over_the_heartbeats_of_a_step_counts(server: Live) -> None:
    fleet = _fleet(server)
    fleet.start()
    try:
        assert fleet.wait_for_members(stop=threading.Event(), deadline_s=30.0, setting="x")
        record, info = fleet.server(0), server.info()
        fleet.close()  # no further heartbeat: what follows is all that is heard
        fleet.metrics()
        for running in (2, 1):
            fleet.note(record, info.model_copy(update={"running_requests": running, "kv_usage": running / 4}))
        metrics = fleet.metrics()
        assert metrics["servers/running"] == pytest.approx(1.5)
        assert metrics["servers/kv_usage"] == pytest.approx(0.375)
        assert fleet.metrics()["servers/running"] == 1.0, "nothing new: the last word holds"
    finally:
        fleet.close()
