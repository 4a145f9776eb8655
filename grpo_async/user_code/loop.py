"""A separate event loop for users' async functions, in a daemon thread: a function that blocks it does not block the
run's. A loop that is blocked past a call's limit is abandoned; if too many are blocked, further calls are refused."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_async.user_code.threads import ThreadsExhaustedError
from grpo_async.utils.loop_thread import LoopThread

Result = TypeVar("Result")

_ANSWER_TIMEOUT_S = 0.5  # within which an unblocked loop answers
_CLOSE_TIMEOUT_S = 5.0
_MAX_BLOCKED = 4  # loops; when that many are blocked, calls are refused


class BlockedLoopError(TimeoutError):
    """The call took too long, and its event loop does not respond; `where` says what blocks it: `reward.py:7 in score`."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(f"its event loop is blocked at {where}")


class UserLoop:
    """An event loop for some functions; started at the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._current: _Loop | None = None
        self._abandoned: list[_Loop] = []

    async def run(self, work: Callable[[], Coroutine[Any, Any, Result]], timeout_s: float) -> Result:
        """Run the coroutine that `work` makes, which must not raise SystemExit or KeyboardInterrupt.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds, and was cancelled; BlockedLoopError: it cannot be cancelled.
            ThreadsExhaustedError: too many loops are blocked.
        """
        future, loop = self._start(work)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            waiter.cancel()  # also cancels the coroutine; no effect if it is done
        if done and not waiter.cancelled():
            return waiter.result()
        if not done and not await loop.answers():
            where = loop.blocked_at()
            self._abandon(loop)
            raise BlockedLoopError(where)
        raise TimeoutError  # or the loop was closed meanwhile

    def post(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Like `run`, without a time limit: the caller waits for the future. ThreadsExhaustedError: too many loops are blocked."""
        return self._start(work)[0]

    def close(self) -> None:
        """End the loop and cancel its tasks. Safe to call twice."""
        with self._lock:
            loop, self._current = self._current, None
        if loop is not None:
            loop.stop()
            loop.thread.join(_CLOSE_TIMEOUT_S)

    def _start(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> tuple[Future[Result], _Loop]:
        with self._lock:
            self._abandoned = [loop for loop in self._abandoned if loop.thread.is_alive()]
            if len(self._abandoned) >= _MAX_BLOCKED:
                raise ThreadsExhaustedError(
                    f"{self._name}: {len(self._abandoned)} of its event loops are still blocked past the time limit, the last "
                    f"at {self._abandoned[-1].blocked_at()}, and threads cannot be killed"
                )
            if self._current is None:
                self._current = _Loop(self._name, asyncio.new_event_loop())
                weakref.finalize(self, self._current.stop)
            return self._current.submit(work()), self._current

    def _abandon(self, loop: _Loop) -> None:
        """Replace a blocked loop; if several calls find it blocked, only the first one does."""
        with self._lock:
            if self._current is loop:
                self._current = None
                self._abandoned.append(loop)
        loop.stop()  # takes effect when it is free again


class _Loop(LoopThread):
    """Says whether a function blocks it, and where."""

    async def answers(self) -> bool:
        """Whether the loop runs callbacks, so that no function blocks it."""
        answer: Future[None] = Future()
        self.post(lambda: answer.set_result(None))
        done, _ = await asyncio.wait({asyncio.wrap_future(answer)}, timeout=_ANSWER_TIMEOUT_S)
        return bool(done)

    def blocked_at(self) -> str:
        """The line of the user's function, and the innermost one: `reward.py:7 in score > api.py:70 in post`."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        ours = [number for number, each in enumerate(stack) if each.filename.endswith("grpo_async/user_code/calls.py")]
        theirs = stack[ours[-1] + 1 :] if ours else stack[-1:]
        shown = theirs[:1] + theirs[1:][-1:]
        return " > ".join(f"{each.filename}:{each.lineno} in {each.name}" for each in shown) or "an unknown line"
