"""Processes that an event loop starts and ends."""

from __future__ import annotations

import asyncio
import signal

import psutil

from grpo_async.utils.child_process import ChildProcess


def test_a_process_that_ignores_sigterm_is_killed_and_what_it_started_with_it() -> None:
    async def run() -> None:
        code = "trap '' TERM; sleep 1000 & echo $!; wait; wait"
        process = await ChildProcess.start("sh", "-c", code)
        try:
            other = psutil.Process(int(await process.stdout.readline()))
            await process.end(0.2)
            assert process.returncode == -signal.SIGKILL
            other.wait(10.0)
        finally:
            process.close()

    asyncio.run(run())
