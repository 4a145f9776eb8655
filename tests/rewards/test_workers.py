"""run_in: process. Real worker processes; each test starts its own, about half a second."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_async.rewards import RewardError, RewardFunction
from grpo_async.user_code import workers
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


def test_the_time_limit_of_a_call_is_not_to_blame_for_a_worker_that_starts_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(reward: RewardFunction) -> Any:
        monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.01)
        with pytest.raises(RewardError, match=r"to be imported or loaded in a worker process$") as caught:
            await score(reward, ["x"])
        assert caught.value.is_lost

    _in_process(f"{FAULTY}:sleeps_if_asked", use)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "ended with exit code 3"),
        ("segfault", "was killed by SIGSEGV"),
    ],
)
def test_a_worker_that_dies_is_an_error_of_its_call_only(how: str, text: str) -> None:
    async def use(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match=f"lost its worker process, which {text} during the call"):
            await score(reward, [how])
        await score(reward, ["next"])
        (idle,) = _workers()
        idle.kill()  # between two calls, as where the machine has no memory left
        idle.wait(10.0)
        return (await score(reward, ["next"])).values

    assert _in_process(f"{FAULTY}:dies_if_asked", use) == [1.0]


def test_a_worker_that_cannot_be_started_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def use(reward: RewardFunction) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(workers.subprocess, "Popen", refuse)
            with pytest.raises(
                RewardError, match=r"no worker process can be started for it \(.*unavailable\); allow more"
            ) as error:
                await score(reward, ["first"])
        assert not error.value.is_lost
        return (await score(reward, ["next"])).values

    assert _in_process(f"{FAULTY}:sleeps_if_asked", use) == [1.0]


def test_an_error_in_a_worker_is_chained_and_carries_the_trace() -> None:
    async def use(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match="reward `raises`: raised KeyError") as caught:
            await score(reward, ["a"])
        return caught.value

    error = _in_process(f"{FAULTY}:raises", use)
    assert isinstance(error.__cause__, KeyError)
    assert "faulty_rewards.py" in str(error)


def test_what_cannot_cross_the_border_is_an_error_of_the_call_that_says_what_it_was() -> None:
    async def use(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match="log_extra cannot leave the worker"):
            await score(reward, ["a"])
        with pytest.raises(RewardError, match="its arguments cannot be sent to a worker process"):
            await score(reward, ["a"], columns={"odd": [lambda: None]})

    _in_process(f"{FAULTY}:logs_something_odd", use)

    async def use_picky(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match="raised PickyError: this and that"):  # it does not unpickle
            await score(reward, ["a"])

    _in_process(f"{FAULTY}:raises_picky", use_picky)


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


def test_close_fails_running_and_waiting_calls_at_once() -> None:
    async def use(reward: RewardFunction) -> Any:
        await score(reward, ["warm"])
        tasks = [asyncio.create_task(score(reward, ["sleep"])) for _ in range(2)]
        await asyncio.sleep(0.2)  # one runs in the only worker, the other waits for it
        start = time.monotonic()
        await asyncio.to_thread(reward.close)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert "was closed" in str(error)
        assert time.monotonic() - start < 5.0

    _in_process(f"{FAULTY}:sleeps_if_asked", use)


def test_what_a_killed_reward_started_is_killed_too(tmp_path: Path) -> None:
    async def use(reward: RewardFunction) -> Any:
        with pytest.raises(RewardError, match="took longer than"):
            await score(reward, [str(tmp_path / "pid")])
        return int((tmp_path / "pid").read_text())

    child = _in_process(f"{FAULTY}:starts_a_child", use, timeout_s=1.5)
    assert eventually(lambda: not is_alive(child))


def test_what_a_worker_prints_is_cut_off_where_it_would_fill_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    _in_process(f"{FAULTY}:prints_17_mb", lambda reward: score(reward, ["a"]))
    printed = capfd.readouterr().err
    assert len(printed) < 17 * 2**20
    assert printed.endswith("is dropped]\n")


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
