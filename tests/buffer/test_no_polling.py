"""Waits are awaited or woken, never slept through."""

from __future__ import annotations

import ast
import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_async.buffer.sample_buffer import BufferInterrupted, SampleBuffer, Watch
from grpo_async.errors import RunError
from grpo_async.records import GroupStatus, ScoredGroup
from tests.support.records import make_scored

PACKAGE = Path(__file__).parents[2] / "grpo_async"
PACKAGES = ("rollout", "buffer", "training", "scoring", "envs", "tools", "inference", "weights")
BACK_OFF = {"inference/client.py: self._retry.delay_s(attempt)"}
"""The only sleep: the pause before a request is tried again."""


def _sleeps(source: str) -> Iterator[str]:
    """The argument of every call of something named sleep, also of one imported under that name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "sleep":
                yield ast.unparse(node.args[0]) if node.args else ""


def test_the_only_sleep_on_the_way_of_the_data_is_the_clients_back_off() -> None:
    """R1.3: no sleep-polling."""
    files = [file for name in PACKAGES for file in sorted((PACKAGE / name).rglob("*.py"))]
    assert len(files) > 40
    found = {
        f"{file.relative_to(PACKAGE).as_posix()}: {argument}"
        for file in files
        for argument in _sleeps(file.read_text(encoding="utf-8"))
    }
    assert found == BACK_OFF


def test_the_search_finds_every_form_of_sleep() -> None:
    source = "import time\nfrom asyncio import sleep\nasync def f():\n    time.sleep(1)\n    await sleep(2)\n"
    assert list(_sleeps(source)) == ["1", "2"]


def _ignore(scored: ScoredGroup, status: GroupStatus, step: int | None) -> None: ...


def _buffer() -> SampleBuffer:
    return SampleBuffer(max_groups=1, max_staleness=1, on_drop=_ignore)


def test_a_waiting_take_is_woken_by_the_put_not_by_its_next_look() -> None:
    """R1.3: the next look would be in 20 s."""
    buffer = _buffer()
    timer = threading.Timer(0.2, lambda: asyncio.run(buffer.put(make_scored())))
    timer.start()
    began = time.monotonic()
    watch = Watch(timeout_s=60.0, setting="s", progress=lambda: 0, heartbeat_s=20.0)
    assert len(buffer.take(1, trainer_version=0, watch=watch)) == 1
    assert time.monotonic() - began < 5.0
    timer.join()


@pytest.mark.parametrize("what", ["failure", "interruption"])
def test_a_waiting_take_is_woken_by_the_end_of_generation_not_by_its_next_look(what: str) -> None:
    """R1.3, R1.4: an empty queue goes on waiting, but not a moment longer than there is somebody to wait for."""
    buffer = _buffer()
    end = buffer.interrupt if what == "interruption" else lambda: buffer.fail(RunError("generation died"))
    timer = threading.Timer(0.2, end)
    timer.start()
    began = time.monotonic()
    watch = Watch(timeout_s=60.0, setting="s", progress=lambda: 0, heartbeat_s=20.0)
    with pytest.raises(BufferInterrupted if what == "interruption" else RunError):
        buffer.take(1, trainer_version=0, watch=watch)
    assert time.monotonic() - began < 5.0
    timer.join()


def test_neither_side_of_a_wait_logs_while_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    """R1.3: 50 looks at an empty queue, and a put that waits for room: no log line."""
    buffer = _buffer()
    looks: list[int] = []

    async def put_two() -> None:
        await buffer.put(make_scored(0))
        await buffer.put(make_scored(1))

    timer = threading.Timer(0.5, lambda: asyncio.run(put_two()))
    watch = Watch(timeout_s=30.0, setting="s", progress=lambda: 0, heartbeat=lambda: looks.append(1), heartbeat_s=0.01)
    with caplog.at_level(logging.DEBUG):
        timer.start()
        for _ in range(2):
            assert len(buffer.take(1, trainer_version=0, watch=watch)) == 1
        timer.join()
    assert len(looks) > 10
    assert [record for record in caplog.records if record.name.startswith("grpo_async")] == []
