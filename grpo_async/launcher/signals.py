"""Signals to the launcher as an event of its loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Signals:
    """SIGINT, SIGTERM, SIGHUP and SIGQUIT as an event of the loop. `arrived` may be cleared to wait for the next one."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.first: signal.Signals | None = None
        self._has_own = False

    @property
    def exit_code(self) -> int:
        """By the shell's convention, 128 + number; SIGHUP and SIGQUIT count as SIGTERM."""
        return 130 if self.first is signal.SIGINT else 143

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        caught = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is ignored on purpose
            caught.append(signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in caught}
        for number in caught:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)  # which leaves the system's default
                if handler is not None:  # None: not set from Python, which cannot set it again
                    signal.signal(number, handler)

    def take_remote(self, number: signal.Signals) -> None:
        """The launcher of another machine got one. A scheduler sends it to every machine, so it is never a second one."""
        if self.first is None:
            self.first = number
            self.arrived.set()

    def _take(self, number: signal.Signals) -> None:
        is_repeat = self.first is not None and not self._has_own  # another machine has passed it on already
        self._has_own = True
        self.first = self.first or number
        if not is_repeat:
            self.arrived.set()


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """While no event loop handles signals (`Signals.installed`), before it and after it: SIGTERM, SIGHUP and SIGQUIT raise
    SystemExit(143), so that context managers clean up (the token's file, a temporary folder)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
