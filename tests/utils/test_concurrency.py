"""Closing one thing after the other."""

from __future__ import annotations

import asyncio

from grpo_async.utils.concurrency import close_all


def test_what_cannot_be_closed_or_hangs_keeps_nothing_else_open() -> None:
    closed: list[str] = []

    async def fails() -> None:
        raise ValueError("an environment of a user")

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def closes() -> None:
        closed.append("client")

    asyncio.run(asyncio.wait_for(close_all([fails, hangs, closes], timeout_s=0.05), 10.0))
    assert closed == ["client"]
