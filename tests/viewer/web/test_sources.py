"""Threads and names behind the API."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from grpo_async.errors import ConfigError, RunError
from grpo_async.rundir import RunDir
from grpo_async.store.index import Index, Sql
from grpo_async.viewer.web import sources
from grpo_async.viewer.web.answers import error_answer
from grpo_async.viewer.web.sources import Library


def test_what_takes_longer_than_its_deadline_is_504(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEADLINE_S", 0.05)
    library, stop = Library([RunDir(tmp_path)]), threading.Event()
    try:
        with pytest.raises(TimeoutError) as caught:
            asyncio.run(library.ask(lambda: stop.wait(30)))
    finally:
        stop.set()
    assert error_answer(caught.value).status_code == 504


def test_slow_queries_are_ended_and_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that went on for good would have taken all threads: 10^14 rows are more than anybody waits for."""
    library, index = Library([RunDir(tmp_path)]), Index(tmp_path)
    slow = Sql("SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b")

    async def ask() -> object:
        monkeypatch.setattr(sources, "DEADLINE_S", 0.2)
        for each in await asyncio.gather(
            *(library.ask(lambda: index.fetch(slow)) for _ in range(4)), return_exceptions=True
        ):
            assert isinstance(each, TimeoutError)
        monkeypatch.setattr(sources, "DEADLINE_S", 20.0)
        deadline = time.monotonic() + 20
        while library._threads.num_abandoned:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return await library.ask(lambda: index.fetch(Sql("SELECT 1")))

    try:
        assert asyncio.run(ask()) == [(1,)]
    finally:
        index.close()


def test_an_error_of_a_thread_comes_back_with_its_type(tmp_path: Path) -> None:
    def work() -> None:
        raise RunError("the store is damaged")

    with pytest.raises(RunError, match="damaged") as caught:
        asyncio.run(Library([RunDir(tmp_path)]).ask(work))
    assert error_answer(caught.value).status_code == 503


def test_at_most_four_queries_run_at_once(tmp_path: Path) -> None:
    library, lock = Library([RunDir(tmp_path)]), threading.Lock()
    running, most = 0, 0
    together = threading.Barrier(4)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(timeout=20)
        with lock:
            running -= 1

    async def ask() -> None:
        await asyncio.gather(*(library.ask(work) for _ in range(12)))

    asyncio.run(ask())
    assert most == 4


def test_a_fault_of_ours_is_no_answer() -> None:
    with pytest.raises(ZeroDivisionError):
        error_answer(ZeroDivisionError())


def test_unknown_runs_are_named_with_those_that_there_are(tmp_path: Path) -> None:
    library = Library([RunDir(tmp_path / "a"), RunDir(tmp_path / "b")])
    with pytest.raises(ConfigError, match="no run 'c' here; there are a, b"):
        library.source("c")
    assert library.source(None).name == "a"
