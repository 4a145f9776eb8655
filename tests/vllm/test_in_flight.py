"""Gate, requests in flight and workers' reports, without vLLM."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch

from grpo_async.errors import DeadlineError, GrpoAsyncError
from grpo_async.servers.vllm.patches import _create_store_on_its_own_address
from grpo_async.servers.vllm.reports import WorkerFailedError, collect_reports, run_and_report
from grpo_async.servers.vllm.state import Gate, GateBrokenError, InFlight, InFlightRequests
from grpo_async.weights.participants import NOT_ARRIVED


@dataclass(frozen=True)
class _Output:
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class _Engine:
    """As compat: entries, and aborts that end a request with an output, as vLLM's do."""

    events: list[str] = field(default_factory=list)
    deliver: list[Callable[[Any], None]] = field(default_factory=list)
    may_enter: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, deliver: Callable[[Any], None]) -> _Running:
        number = len(self.deliver)
        self.deliver.append(deliver)
        await self.may_enter.wait()
        self.events.append(f"entered {number}")
        return _Running(self, number)


@dataclass(frozen=True)
class _Running:
    engine: _Engine
    number: int

    async def abort(self) -> None:
        self.engine.events.append(f"aborted {self.number}")
        self.engine.deliver[self.number](_Output([], "abort"))


def _in_flight(engine: _Engine) -> tuple[InFlight, list[Any]]:
    taken: list[Any] = []
    return InFlight(engine.submit, taken.append), taken


def test_a_request_without_a_token_enters_again_and_nobody_outside_notices() -> None:
    async def run() -> None:
        engine = _Engine()
        engine.may_enter.set()
        requests = InFlightRequests(on_change=lambda: None)
        (idle, of_idle), (begun, of_begun) = _in_flight(engine), _in_flight(engine)
        with requests.holding(begun), requests.holding(idle):
            await begun.enter()
            await idle.enter()
            engine.deliver[0](_Output([5]))
            await requests.renew()
            assert engine.events == ["entered 0", "entered 1", "aborted 1", "entered 2"]
            assert of_idle == []  # not the end that the abort brought
            engine.deliver[1](_Output([9]))  # the old entry is not heard any more
            engine.deliver[2](_Output([7], "stop"))
            engine.deliver[0](_Output([6], "length"))
            assert [output.token_ids for output in of_idle] == [[7]]
            assert [output.token_ids for output in of_begun] == [[5], [6]]
            assert len(requests) == 0
            await asyncio.wait_for(requests.wait_until_empty(), 5)
            await requests.renew()  # ended requests stay ended
            assert len(engine.deliver) == 3

    asyncio.run(run())


def test_renewing_waits_for_a_request_that_is_just_entering() -> None:
    async def run() -> None:
        engine = _Engine()
        requests = InFlightRequests(on_change=lambda: None)
        request, _ = _in_flight(engine)
        with requests.holding(request):
            entering = asyncio.create_task(request.enter())
            await asyncio.sleep(0)
            renewing = asyncio.create_task(requests.renew())
            for _ in range(5):
                await asyncio.sleep(0)
            assert not renewing.done()
            engine.may_enter.set()
            await asyncio.wait_for(asyncio.gather(entering, renewing), 5)
            assert engine.events == ["entered 0", "aborted 0", "entered 1"]

    asyncio.run(run())


def test_a_client_that_leaves_while_its_request_enters_again_takes_the_new_entry_with_it() -> None:
    async def run() -> None:
        engine = _Engine()
        engine.may_enter.set()
        request, taken = _in_flight(engine)
        await request.enter()
        engine.may_enter.clear()
        again = asyncio.create_task(request.enter_again())
        for _ in range(5):
            await asyncio.sleep(0)
        await request.leave()
        engine.may_enter.set()
        await asyncio.wait_for(again, 5)
        assert engine.events[-2:] == ["entered 1", "aborted 1"]
        assert all(output.finish_reason == "abort" for output in taken)

    asyncio.run(run())


def test_an_engine_that_fails_while_a_request_enters_again_ends_it_with_the_error() -> None:
    async def run() -> None:
        engine = _Engine()
        engine.may_enter.set()
        taken: list[Any] = []

        async def submit(deliver: Callable[[Any], None]) -> _Running:
            if engine.deliver:
                raise RuntimeError("dead")
            return await engine.submit(deliver)

        requests = InFlightRequests(on_change=lambda: None)
        request = InFlight(submit, taken.append)
        with requests.holding(request):
            await request.enter()
            await requests.renew()
        (error,) = taken
        assert str(error) == "dead"
        assert request.ended

    asyncio.run(run())


def test_a_gate_lets_through_only_while_it_is_open() -> None:
    async def run() -> None:
        gate, passed = Gate(), []

        async def go(name: str) -> None:
            await gate.wait()
            assert gate.is_open
            passed.append(name)

        await go("a")
        gate.close()
        waiting = asyncio.create_task(go("b"))
        await asyncio.sleep(0)
        gate.open()
        gate.close()  # before the waiting task got to run: it has to wait on
        for _ in range(5):
            await asyncio.sleep(0)
        assert passed == ["a"]
        gate.open()
        await asyncio.wait_for(waiting, 5)
        gate.close()
        broken = asyncio.create_task(go("c"))
        await asyncio.sleep(0)
        gate.break_down("gone")
        with pytest.raises(GateBrokenError, match="gone"):
            await asyncio.wait_for(broken, 5)
        gate.close()  # a broken gate holds nobody
        with pytest.raises(GateBrokenError):
            await go("d")

    asyncio.run(run())


def _reports(work: Callable[[str], None], *, num_workers: int = 2, timeout_s: float = 5.0) -> None:
    async def run() -> None:
        async with collect_reports() as reports:
            with ThreadPoolExecutor(1) as pool:
                working = asyncio.get_running_loop().run_in_executor(pool, work, reports.address)
                try:
                    await reports.wait(num_workers, timeout_s=timeout_s, what="them", setting="a.b_s")
                finally:
                    with suppress(Exception):
                        await working

    asyncio.run(run())


def _worker(address: str, rank: int, error: str = "") -> None:
    def job() -> None:
        if error:
            raise RuntimeError(error)

    run_and_report(job, address, rank=rank, device=torch.device("cpu"))


def test_the_first_failure_is_told_although_others_are_still_at_work() -> None:
    may_end = threading.Event()

    def work(address: str) -> None:
        run_and_report(lambda: _wait(may_end), address, rank=0, device=torch.device("cpu"))
        _worker(address, 1, "no memory")

    with pytest.raises(WorkerFailedError, match="worker 1: RuntimeError: no memory"):
        _reports(work, timeout_s=60.0)
    may_end.set()


def _wait(event: threading.Event) -> None:
    assert event.wait(60.0)


def test_the_worker_that_broke_an_update_is_told_and_not_one_that_saw_it_break() -> None:
    def work(address: str) -> None:
        _worker(address, 0, f"{NOT_ARRIVED} (bucket 3)")
        _worker(address, 1, "no memory")

    with pytest.raises(WorkerFailedError, match="worker 1: RuntimeError: no memory"):
        _reports(work)
    with pytest.raises(WorkerFailedError, match=NOT_ARRIVED):
        _reports(lambda address: _worker(address, 0, f"{NOT_ARRIVED} (bucket 3)"), num_workers=1)


def test_a_worker_that_dies_before_its_report_is_a_failure_at_once() -> None:
    def work(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as dying:
            dying.connect(address)

    with pytest.raises(WorkerFailedError, match="ended in the middle"):
        _reports(work, timeout_s=60.0)


def test_reports_that_do_not_come_are_waited_for_until_the_deadline() -> None:
    with pytest.raises(DeadlineError, match=r"a\.b_s"):
        _reports(lambda _: None, timeout_s=0.05)


def test_waiting_for_reports_can_be_given_up() -> None:
    async def run() -> None:
        async with collect_reports() as reports:
            reports.give_up(GrpoAsyncError("another began"))
            with pytest.raises(GrpoAsyncError, match="another began"):
                await reports.wait(1, timeout_s=60.0, what="them", setting="a.b_s")

    asyncio.run(run())


def test_a_process_that_meets_nobody_opens_no_store() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = _create_store_on_its_own_address("127.0.0.1", port, 0, 1, timedelta(seconds=5))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
