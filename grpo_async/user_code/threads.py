"""Runs users' functions off the event loop, in daemon threads: blocking ones in threads of their own, async ones on a
separate event loop (`UserLoop`), which they may block without blocking the run's.

A thread cannot be killed. One that outlives its call's time limit is abandoned and counted until it ends; once as
many are stuck as calls may run, further calls are refused. A thread whose caller was cancelled keeps its slot until
it ends or its limit has passed.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from grpo_async.errors import GrpoAsyncError
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.loop_thread import LoopThread

Result = TypeVar("Result")

_MIN_ABANDONED = 4
"""The number of threads that may be stuck if fewer calls may run."""


class ThreadsExhaustedError(GrpoAsyncError):
    """Too many threads outlived their deadlines: the function hangs, and threads cannot be killed."""


class ThreadRunner:
    """Threads for one function."""

    def __init__(self, name: str, *, max_threads: int = 8) -> None:
        self._name = name
        self._max_threads = max_threads
        # An asyncio semaphore belongs to one event loop, but a function may serve several in turn.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._max_abandoned = max(max_threads, _MIN_ABANDONED)
        self._abandoned: set[Future[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()  # event loops hold only weak references to tasks

    @property
    def num_abandoned(self) -> int:
        """Threads that outlived their call's time limit and still run."""
        return len(self._abandoned)

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`, which must not raise, in a thread.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds; its thread is abandoned.
            ThreadsExhaustedError: too many abandoned threads are still running.
        """
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_threads))
        await slots.acquire()  # the calls that hold slots have time limits
        # A separate task keeps the slot if the caller is cancelled.
        task = asyncio.create_task(self._run(work, timeout_s, slots))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # if the caller was cancelled, nobody else reads it, and asyncio would log an error

    async def _run(self, work: Callable[[], Result], timeout_s: float, slots: asyncio.Semaphore) -> Result:
        try:
            if self.num_abandoned >= self._max_abandoned:
                raise ThreadsExhaustedError(
                    f"{self._name}: {self.num_abandoned} of its threads still run past their time limit, and threads "
                    "cannot be killed"
                )
            future = in_thread(functools.partial(contextvars.copy_context().run, work), name=self._name)
            try:
                return await _await_within(future, timeout_s)
            except (TimeoutError, asyncio.CancelledError):  # the latter: the event loop ends
                self._abandoned.add(future)
                future.add_done_callback(self._abandoned.discard)
                raise
        finally:
            slots.release()


class InstanceThread:
    """The only thread of an environment's instance: the instance is constructed there, and all its plain methods run there.

    Environments may hold objects that belong to a thread (an sqlite connection, a browser, an event loop of a client library), and
    one thread also makes sure that no two calls overlap.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def post(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`, which must not raise. It gets the caller's context variables."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # so that set_result cannot raise after a cancellation
        context = contextvars.copy_context()
        self._queue.put(lambda: future.set_result(context.run(work)))
        return future

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`; it continues in the thread if this is cancelled or too slow (TimeoutError)."""
        return await _await_within(self.post(work), timeout_s)

    def stop(self) -> None:
        """End the thread after the queued work."""
        self._queue.put(None)


async def _await_within(future: Future[Result], timeout_s: float) -> Result:
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(future)


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    # A function without `self`: the thread must not keep its owner alive.
    while (make := queue.get()) is not None:  # stop() posts the None
        make()
        del make  # it holds the call's arguments, and the next call may come much later


# ------------------------------------------------------------------------------------------------ async functions

_ANSWER_TIMEOUT_S = 0.5  # within which an unblocked loop answers
_CLOSE_TIMEOUT_S = 5.0
_MAX_BLOCKED = 4  # loops; when that many are blocked, calls are refused


class BlockedLoopError(TimeoutError):
    """The call took too long, and its event loop does not respond; `where` says what blocks it: `reward.py:7 in score`."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(f"its event loop is blocked at {where}")


class UserLoop:
    """An event loop for some functions; started at the first call. One that is blocked past a call's limit is abandoned; if too
    many are blocked, further calls are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._current: _Loop | None = None
        self._abandoned: list[_Loop] = []

    async def run(self, work: Callable[[], Coroutine[Any, Any, Result]], timeout_s: float) -> Result:
        """Run the coroutine that `work` makes, which must not raise SystemExit or KeyboardInterrupt. TimeoutError: it took longer
        than `timeout_s` seconds, and was cancelled; BlockedLoopError: it cannot be; ThreadsExhaustedError: see `post`."""
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
