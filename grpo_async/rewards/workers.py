"""Worker processes of one reward function, both ends of them: started at the first call, killed on time-out, replaced when they
die. A death or a time-out is an error of that call only.

    WorkerPool     threads, each of which serves one call at a time with a worker that nobody else uses
    WorkerProcess  one worker as its owner sees it: start, exchange bytes, kill
    main           its inside: imports the function by its name, so it may be a lambda, a partial or an object, then answers calls

A worker is a fresh interpreter with a socket to its owner. (multiprocessing's spawn would import the trainer's main module, and so
torch, into every worker.) It has a process group of its own, so Ctrl-C does not reach it and killing it also kills what the
function started. It dies with the *thread* that made it (see `grpo_async.utils.lifetime`). Requests and answers are bytes, pickled
at either end, so that what cannot be pickled is an error of one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

from grpo_async.rewards.call import RewardCallable, RewardError, RewardOutcome, RewardRequest, call_of
from grpo_async.user_code.calls import Raised
from grpo_async.user_code.references import resolve
from grpo_async.utils.lifetime import die_with_parent

START_TIMEOUT_S = 120.0  # a new worker imports the function's module, which may import torch on a busy machine
READY = b"ready"
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[4]).main(int(sys.argv[2]), sys.argv[3])"
)
_REAP_TIMEOUT_S = 10.0  # after SIGKILL; more means a process stuck in the kernel


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a call raised, in a form that crosses a process border: `error` is None where it cannot."""

    summary: str
    trace: str
    error: BaseException | None


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
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []  # the last one used is taken first
        self._closed = threading.Event()

    async def run(self, request: RewardRequest, timeout_s: float) -> RewardOutcome:
        """Run one call. TimeoutError after `timeout_s` seconds in a worker; RewardError when the function raised, with the trace in
        its text (a pickled error has none), or the worker died."""
        try:
            call = _Call(pickle.dumps(request), timeout_s)
        except Exception as error:
            raise RewardError(self._name, f"its arguments cannot be sent to a worker process: {error}") from error
        if self._closed.is_set():
            raise self._closed_error()
        try:
            # Those before it have limits too.
            answer = await asyncio.wrap_future(self._threads.submit(self._serve, call))
        except asyncio.CancelledError as error:
            call.cancel()
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise self._closed_error() from error  # `close` cancelled the waiting call, not our caller
            raise
        try:
            result: RewardOutcome | _Failure = pickle.loads(answer)
        except Exception as error:
            raise RewardError(self._name, f"a value given to log_extra cannot be read back: {error}") from error
        if not isinstance(result, _Failure):
            return result
        if isinstance(result.error, RewardError):
            raise result.error
        raise RewardError(self._name, f"raised {result.summary}\n{result.trace.rstrip()}") from result.error

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
        try:
            answer = call.exchange_with(worker)
        except TimeoutError:
            worker.kill()
            self._forget(worker)
            raise
        except (EOFError, OSError) as error:
            ending = _ending(self._forget(worker))
            if self._closed.is_set():
                raise self._closed_error() from error
            raise RewardError(self._name, f"its worker process {ending} during the call") from error
        with self._lock:
            self._idle.append(worker)
        return answer

    def _ready_worker(self) -> WorkerProcess:
        """An idle one that lives, or a new one."""
        while True:
            with self._lock:
                if self._closed.is_set():
                    raise self._closed_error()
                worker = self._idle.pop() if self._idle else None
                if worker is None:
                    worker = WorkerProcess(self._reference)
                    self._workers.add(worker)
                    break
            if worker.is_alive:
                return worker
            self._forget(worker)
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
            ending = _ending(self._forget(worker))
            raise RewardError(self._name, f"its worker process {ending} while it started") from error
        return worker

    def _forget(self, worker: WorkerProcess) -> int:
        with self._lock:
            self._workers.discard(worker)
        return worker.reap()

    def _closed_error(self) -> RewardError:
        return RewardError(self._name, "was closed, and cannot be called any more")


class _Call:
    """One call on its way, which its caller may give up while a thread waits for the answer."""

    def __init__(self, payload: bytes, timeout_s: float) -> None:
        self._payload, self._timeout_s = payload, timeout_s
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._is_cancelled = False

    def exchange_with(self, worker: WorkerProcess) -> bytes:
        """The worker's answer; b"" for a call that was given up before it began, which nobody reads."""
        with self._lock:
            if self._is_cancelled:
                return b""
            self._worker = worker
        try:
            return worker.exchange(self._payload, self._timeout_s)
        finally:
            with self._lock:
                self._worker = None

    def cancel(self) -> None:
        """Give the call up; kills the worker that runs it."""
        with self._lock:
            self._is_cancelled = True
            if self._worker is not None:
                self._worker.kill()


class WorkerProcess:
    """A worker that serves the function `reference` (`module:attribute`); `module` holds its `main(descriptor, reference)`."""

    def __init__(self, reference: str, *, module: str = __name__) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            command = [
                sys.executable,
                "-u",  # workers end by SIGKILL, and what a function has printed must not be lost with them
                "-c",
                _BOOT,
                json.dumps([str(entry) for entry in sys.path]),
                str(theirs.fileno()),
                reference,
                module,
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the function is imported. TimeoutError, or EOFError / OSError when the worker died."""
        self.receive(timeout_s)

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        """Send a request and wait for its answer. TimeoutError, or EOFError / OSError when the worker died."""
        self.send(request, timeout_s)
        return self.receive(timeout_s)

    def send(self, request: bytes, timeout_s: float) -> None:
        """Send one message. TimeoutError: the worker took nothing of it for so long, and must be killed; OSError: it died."""
        self._limit(socket.SO_SNDTIMEO, timeout_s)
        try:
            self._connection.send_bytes(request)  # SO_SNDTIMEO ends it
        except BlockingIOError as error:
            raise TimeoutError from error

    def receive(self, timeout_s: float) -> bytes:
        """Wait for the next message. TimeoutError, or EOFError / OSError when the worker died."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        self._limit(socket.SO_RCVTIMEO, timeout_s)  # the rest of a message whose beginning is there
        try:
            return self._connection.recv_bytes()  # SO_RCVTIMEO ends it
        except BlockingIOError as error:
            raise TimeoutError from error

    def _limit(self, direction: int, timeout_s: float) -> None:
        """Bound every single read or write of the socket; multiprocessing's connections have no time-outs."""
        seconds = max(1e-3, timeout_s)  # 0 would mean: no limit
        with socket.socket(fileno=os.dup(self._connection.fileno())) as handle:
            handle.setblocking(True)  # whatever socket.setdefaulttimeout says
            handle.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def kill(self) -> int:
        """Kill the worker and its group and reap it; returns the exit code, negative for a signal. From any thread."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself since `poll`
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait(_REAP_TIMEOUT_S)

    def reap(self) -> int:
        """Wait for a worker that hung up, and close its socket; returns the exit code. Kills it if it does not end."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = self.kill()
        self.close()
        return code

    def close(self) -> None:
        """Close the socket; only when no thread uses it."""
        self._connection.close()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


# ------------------------------------------------------------------------------------------------- inside the worker


def main(descriptor: int, reference: str) -> None:
    """Serve `reference` on the socket `descriptor` until the owner hangs up. The import happens before the first call, outside its
    time limit."""
    die_with_parent()
    with Connection(descriptor) as connection:
        with contextlib.suppress(Exception):  # the first call meets it again and reports it
            _load(reference)
        connection.send_bytes(READY)  # the owner kills this process
        with contextlib.suppress(EOFError):  # the owner hung up
            while True:
                connection.send_bytes(_answer(reference, connection.recv_bytes()))  # the owner kills this process


def _answer(reference: str, request: bytes) -> bytes:
    """Run one pickled RewardRequest; returns a pickled RewardOutcome or _Failure."""
    try:
        loaded: RewardRequest = pickle.loads(request)
        result = call_of(_load(reference), loaded).attempt()
    except BaseException as error:  # noqa: BLE001 - travels as a value, see grpo_async.user_code.calls
        result = Raised(error)
    if not isinstance(result, Raised):
        try:
            return pickle.dumps(result)
        except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises
            result = Raised(TypeError(f"a value given to log_extra cannot leave the worker process: {error}"))
    try:
        payload = pickle.dumps(_Failure(result.summary, result.trace, result.error))
        pickle.loads(payload)  # exceptions with an `__init__` of their own often pickle but do not unpickle
    except Exception:  # noqa: BLE001 - as above
        return pickle.dumps(_Failure(result.summary, result.trace, None))
    return payload


@functools.cache
def _load(reference: str) -> RewardCallable:
    """Import once; the module's `prepare_worker()`, if it has one, does what should not count as part of a call."""
    function: RewardCallable = resolve(reference)
    prepare = getattr(sys.modules[reference.partition(":")[0]], "prepare_worker", None)
    if callable(prepare):
        prepare()
    return function
