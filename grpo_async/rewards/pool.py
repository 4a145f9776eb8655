"""Worker processes of one reward function: started at the first call, killed on time-out, replaced when they die.

One thread owns one worker: it starts it, sends it one call at a time and waits for the answer. Workers import the function
by its name, so it may be a lambda, a partial or an object. A death or a time-out is an error of that call only.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from grpo_async.rewards.call import Failure, RewardOutcome, RewardRequest
from grpo_async.rewards.errors import RewardError
from grpo_async.rewards.process import WorkerProcess

START_TIMEOUT_S = 120.0  # a new worker imports the function's module, which may import torch on a busy machine


class WorkerPool:
    """Worker processes that all serve one function.

    Args:
        name: name of the reward function, for errors.
        reference: `module:attribute` of the function.
        num_workers: processes, and so calls that run at once; more wait. None = half the CPUs, 1 to 4.
    """

    def __init__(self, name: str, reference: str, *, num_workers: int | None = None) -> None:
        self._name, self._reference = name, reference
        count = num_workers or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"reward-{name}")
        self._own = threading.local()  # .worker: the worker of the current thread
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._closed = threading.Event()

    async def run(self, request: RewardRequest, timeout_s: float) -> RewardOutcome | Failure:
        """Run one call. TimeoutError after `timeout_s` seconds in a worker; RewardError when the worker died."""
        try:
            call = _Call(pickle.dumps(request), timeout_s)
        except Exception as error:
            raise RewardError(self._name, f"its arguments cannot be sent to a worker process: {error}") from error
        if self._closed.is_set():
            raise self._closed_error()
        try:
            # Those before it have limits too.
            answer = await asyncio.wrap_future(self._threads.submit(self._serve, call))
        except asyncio.CancelledError:
            call.cancel()
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise self._closed_error() from None  # `close` cancelled the waiting call, not our caller
            raise
        try:
            result: RewardOutcome | Failure = pickle.loads(answer)
        except Exception as error:
            raise RewardError(self._name, f"a value given to log_extra cannot be read back: {error}") from error
        return result

    def close(self) -> None:
        """Kill the workers; calls in progress fail. Safe to call twice."""
        with self._lock:
            self._closed.set()
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)  # only for threads whose worker was just killed
        for worker in workers:
            worker.close()

    def _serve(self, call: _Call) -> bytes:
        worker = self._ready_worker()
        if not call.begin(worker):
            return b""  # cancelled before it began; nobody reads this
        try:
            return worker.exchange(call.payload, call.timeout_s)
        except TimeoutError:
            worker.kill()
            self._forget(worker)
            raise
        except (EOFError, OSError) as error:
            code = self._forget(worker)
            if self._closed.is_set():
                raise self._closed_error() from error
            raise RewardError(self._name, f"its worker process {_ending(code)} during the call") from error
        finally:
            call.end()

    def _ready_worker(self) -> WorkerProcess:
        """The worker of this thread; a new one if it has none that lives."""
        worker: WorkerProcess | None = getattr(self._own, "worker", None)
        if worker is not None:
            if worker.is_alive:
                return worker
            self._forget(worker)
        with self._lock:
            if self._closed.is_set():
                raise self._closed_error()
            worker = WorkerProcess(self._reference)
            self._workers.add(worker)
        try:
            worker.wait_until_ready(START_TIMEOUT_S)
        except TimeoutError as error:
            worker.kill()
            self._forget(worker)
            module = self._reference.partition(":")[0]
            raise RewardError(
                self._name, f"importing `{module}` in a worker process took over {START_TIMEOUT_S:.0f} s"
            ) from error
        except (EOFError, OSError) as error:
            code = self._forget(worker)
            raise RewardError(self._name, f"its worker process {_ending(code)} while it started") from error
        self._own.worker = worker
        return worker

    def _forget(self, worker: WorkerProcess) -> int:
        self._own.worker = None
        with self._lock:
            self._workers.discard(worker)
        return worker.reap()

    def _closed_error(self) -> RewardError:
        return RewardError(self._name, "was closed, and cannot be called any more")


class _Call:
    """One call on its way, which its caller may give up while a thread waits for the answer."""

    def __init__(self, payload: bytes, timeout_s: float) -> None:
        self.payload, self.timeout_s = payload, timeout_s
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._is_cancelled = False

    def begin(self, worker: WorkerProcess) -> bool:
        """Note who runs it; False if it was given up."""
        with self._lock:
            self._worker = worker
            return not self._is_cancelled

    def end(self) -> None:
        with self._lock:
            self._worker = None

    def cancel(self) -> None:
        """Give the call up; kills the worker that runs it."""
        with self._lock:
            self._is_cancelled = True
            if self._worker is not None:
                self._worker.kill()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
