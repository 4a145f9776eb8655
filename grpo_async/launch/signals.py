"""Signals to the launcher: an event while its loop runs, SystemExit before and after."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def handling(take: Callable[[signal.Signals], object], *numbers: signal.Signals) -> Iterator[None]:
    """Call `take` with each of these signals that arrives, but for a SIGHUP that is ignored on purpose, as under nohup."""

    def handle(number: int, frame: FrameType | None) -> None:
        take(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in numbers}
    before = {n: old for n, old in before.items() if n is not signal.SIGHUP or old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: not set from Python


class Signals:
    """The signals of a run, as an event of its loop. `arrived` may be cleared to wait for the next one."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.first: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.first)

    @contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def take(number: signal.Signals) -> None:
            self.first = self.first or number
            loop.call_soon_threadsafe(self.arrived.set)

        with handling(take, *ENDING):
            yield


def exit_code_of(number: signal.Signals | None) -> int:
    """By the shell's convention, 128 + number; SIGHUP and SIGQUIT count as SIGTERM."""
    return 130 if number is signal.SIGINT else 143


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """While no event loop handles signals: SIGTERM, SIGHUP and SIGQUIT raise SystemExit(143), so that context managers
    clean up (the token's file, a temporary folder)."""

    def leave(number: signal.Signals) -> None:
        raise SystemExit(143)

    with handling(leave, *ENDING[1:]):
        yield
