"""run_in: process. Real worker processes; each test starts its own, about half a second."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_async.rewards import RewardError, RewardFunction
from tests.rewards.helpers import FAULTY, loaded, score
from tests.support.waiting import eventually, is_alive


def _in_process(function: str, use: Callable[[RewardFunction], Awaitable[Any]], **section: Any) -> Any:
    async def run() -> Any:
        with loaded(function, run_in="process", **section) as reward:
            return await use(reward)

    return asyncio.run(run())


def test_a_call_past_its_time_limit_is_killed_and_the_next_one_works() -> None:
    async def use(reward: RewardFunction) -> Any:
        await score(reward, ["warm"])
        (worker,) = _workers()
        with pytest.raises(RewardError, match=r"took longer than 2 s; raise `rewards.0.timeout_s`"):
            await score(reward, ["sleep"])
        assert not worker.is_running()
        return (await score(reward, ["next"])).values

    assert _in_process(f"{FAULTY}:sleeps_if_asked", use, timeout_s=2.0) == [1.0]


def test_a_worker_that_dies_is_an_error_of_its_call_only() -> None:
    async def use(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match="lost its worker process, which was killed by SIGSEGV during the call"):
            await score(reward, ["segfault"])
        await score(reward, ["next"])
        (idle,) = _workers()
        idle.kill()  # between two calls, as where the machine has no memory left
        idle.wait(10.0)
        return (await score(reward, ["next"])).values

    assert _in_process(f"{FAULTY}:dies_if_asked", use) == [1.0]


def test_a_cancelled_caller_ends_its_worker() -> None:
    async def use(reward: RewardFunction) -> Any:
        await score(reward, ["warm"])
        (worker,) = _workers()
        task = asyncio.create_task(score(reward, ["sleep"]))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        worker.wait(10.0)
        return (await score(reward, ["next"])).values

    assert _in_process(f"{FAULTY}:sleeps_if_asked", use) == [1.0]


def test_what_a_killed_reward_started_is_killed_too(tmp_path: Path) -> None:
    async def use(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match="took longer than"):
            await score(reward, [str(tmp_path / "pid")])
        return int((tmp_path / "pid").read_text())

    child = _in_process(f"{FAULTY}:starts_a_child", use, timeout_s=1.5)
    assert eventually(lambda: not is_alive(child))


def test_a_busy_worker_dies_with_its_killed_parent() -> None:
    script = (
        "import asyncio\nfrom tests.rewards.helpers import loaded, score\n"
        f"with loaded('{FAULTY}:prints_its_pid_and_sleeps', run_in='process') as reward:\n"
        "    asyncio.run(score(reward, ['a']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        worker = psutil.Process(int(parent.stderr.readline()))  # the worker writes to its parent's stderr
        parent.kill()
        worker.wait(10.0)


def _workers() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if any("user_code.worker" in word for word in child.cmdline())
    ]
