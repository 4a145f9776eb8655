"""Signals to the launcher: an event while its loop runs, SystemExit before and after."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Signals:
    """SIGINT, SIGTERM, SIGHUP and SIGQUIT as an event of the loop. `arrived` may be cleared to wait for the next one."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.first: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """By the shell's convention, 128 + number; SIGHUP and SIGQUIT count as SIGTERM."""
        return 130 if self.first is signal.SIGINT else 143

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if not _is_main_thread():  # on a node of a cluster, which is told by the one that leads
            yield
            return
        loop = asyncio.get_running_loop()
        caught = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is ignored on purpose
            caught.append(signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in caught}
        for number in caught:
            loop.add_signal_handler(number, self.take, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)  # which leaves the system's default
                if handler is not None:  # None: not set from Python, which cannot set it again
                    signal.signal(number, handler)

    def take(self, number: signal.Signals) -> None:
        """A signal has come; call it in the loop."""
        self.first = self.first or number
        self.arrived.set()


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """While no event loop handles signals: SIGTERM, SIGHUP and SIGQUIT raise SystemExit(143), so that context managers
    clean up (the token's file, a temporary folder)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if _is_main_thread() else ()
    before = {n: signal.signal(n, leave) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_main_thread() -> bool:
    """No other thread may set handlers."""
    return threading.current_thread() is threading.main_thread()
