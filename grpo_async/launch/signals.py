"""Signals to the launcher as an event of its loop."""

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
        if (
            threading.current_thread() is not threading.main_thread()
        ):  # on a node of a cluster: `take` has those of the command
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
    """While no event loop handles signals (`Signals.installed`), before it and after it: SIGTERM, SIGHUP and SIGQUIT raise
    SystemExit(143), so that context managers clean up (the token's file, a temporary folder)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if is_main else ()
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
