"""Worker processes that run one function: started at the first call, killed on timeout, replaced when they die. A
death or a timeout is an error of that call only.

A worker is a fresh interpreter (multiprocessing's spawn would import the trainer's main module, and so torch) in a
process group of its own, which dies with the thread that made it. What cannot be pickled is an error of one call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, cast

from grpo_async.user_code.calls import CallError, Raised, UserCall
from grpo_async.user_code.references import resolve
from grpo_async.user_code.threads import UserLoop
from grpo_async.utils.processes import KILL_TIMEOUT_S, describe_exit, die_with_parent, usable_cpus
from grpo_async.utils.resilient_stream import MAX_PRINTED_CHARS, ResilientStream

START_TIMEOUT_S = 120.0  # a new worker imports the function's module, which may import torch on a busy machine
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module('grpo_async.user_code.workers').main(int(sys.argv[2]), *sys.argv[3:])"
)
_LOAD_TIMEOUT_S = 1800.0  # for a worker that first loads a model from a network file system
_LENGTH = struct.Struct(">Q")  # prefix of each message


class Request(Protocol):
    """A picklable request to a worker."""

    def call(self, function: Callable[..., Any]) -> UserCall[Any]: ...


class WorkerPool:
    """Worker processes for one function."""

    def __init__(self, name: str, reference: str, *, first: Request | None = None, size: int | None = None) -> None:
        """Serve the function `reference`. `first` is a call that loads something large in the only worker, as part of its start;
        what it raises, the next call raises again and reports. Otherwise there is a worker for every second CPU, 1 to 4."""
        self._reference = reference
        self._first = None if first is None else pickle.dumps(first)
        self._loop = UserLoop(f"workers of {name}")  # nothing but this class runs there
        self.size = size or (1 if first is not None else max(1, min(4, usable_cpus() // 2)))
        self._slots = asyncio.Semaphore(self.size)
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []  # the most recently used worker is taken first
        self._is_closed = False

    async def run(self, request: Request, timeout_s: float) -> Any:
        """Run one call; if cancelled, kill the worker. CallError: it raised (its traceback is a note of the error), took longer
        than `timeout_s` seconds in a worker, or the worker died."""
        try:
            answer = await asyncio.wrap_future(self._post(request, timeout_s))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # `close` cancelled the call
                raise _closed_error() from error
            raise
        return _read(answer)

    def ask(self, request: Request, timeout_s: float) -> Any:
        """Run one call like `run`, from a thread, which waits for the answer."""
        try:
            return _read(self._post(request, timeout_s).result())
        except concurrent.futures.CancelledError as error:
            raise _closed_error() from error

    def _post(self, request: Request, timeout_s: float) -> concurrent.futures.Future[bytes]:
        try:
            payload = pickle.dumps(request)
        except Exception as error:
            raise CallError(f"cannot be called: its arguments cannot be sent to a worker process: {error}") from error
        if self._is_closed:
            raise _closed_error()
        return self._loop.post(lambda: self._serve(payload, type(request).__module__, timeout_s))

    def close(self) -> None:
        """Kill the workers; current and waiting calls fail. Safe to call twice."""
        self._is_closed = True
        if self._workers:
            self._loop.post(self._kill_all).result(2 * KILL_TIMEOUT_S)
        self._loop.close()

    async def _kill_all(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    async def _serve(self, payload: bytes, module: str, timeout_s: float) -> bytes:
        async with self._slots:  # earlier calls have limits, too
            if self._is_closed:
                raise _closed_error()
            while self._idle and not self._idle[-1].is_alive:
                self._end(self._idle.pop())
            is_new = not self._idle
            try:
                worker = Worker(self._reference, module) if is_new else self._idle.pop()
            except OSError as error:
                raise CallError(
                    f"cannot be called: no worker process can be started for it ({error}); allow more processes (`ulimit -u`), "
                    "open files (`ulimit -n`) or memory"
                ) from error
            self._workers.add(worker)
            start_timeout_s = START_TIMEOUT_S if self._first is None else _LOAD_TIMEOUT_S
            try:
                if is_new:
                    async with asyncio.timeout(start_timeout_s):
                        await worker.wait_until_ready()
                        if self._first is not None:
                            await worker.exchange(self._first)
                    is_new = False
                async with asyncio.timeout(timeout_s):
                    answer = await worker.exchange(payload)
            except TimeoutError as error:
                self._end(worker)
                what = f"took longer than {timeout_s:g} s"
                if is_new:
                    what = f"took over {start_timeout_s:.0f} s to be imported or loaded in a worker process"
                # no setting governs the start, so that is no timeout of the call
                raise CallError(what, is_timeout=not is_new, is_lost=True) from error
            except (EOFError, OSError) as error:
                ending = describe_exit(self._end(worker, hung_up=True))
                if self._is_closed:
                    raise _closed_error() from error
                when = "while it started" if is_new else "during the call"
                raise CallError(f"lost its worker process, which {ending} {when}", is_lost=True) from error
            except asyncio.CancelledError:
                self._end(worker)
                raise
            self._idle.append(worker)
            return answer

    def _end(self, worker: Worker, *, hung_up: bool = False) -> int:
        self._workers.discard(worker)
        return worker.reap() if hung_up else worker.kill()


def _read(answer: bytes) -> Any:
    """The result of a call, from the answer of `_answer`; CallError if it has none."""
    try:
        is_result, result, traceback, error_of_call = pickle.loads(answer)
    except Exception as error:
        raise CallError(f"returned something that cannot be read back: {error}") from error
    if is_result:
        return result
    if error_of_call is not None:
        error_of_call.add_note(traceback)
    raise CallError(result, error=error_of_call) from error_of_call


def _closed_error() -> CallError:
    return CallError("was closed, and can no longer be called")


class Worker:
    """A process that serves the function `reference` (`module:attribute`), for requests of `module`. It belongs to the event loop
    in which it is created, whose thread must outlive it. Messages raise EOFError or OSError once it has died; callers set
    their own time limits."""

    def __init__(self, reference: str, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with theirs:
            command = [
                sys.executable,
                "-u",  # workers end by SIGKILL, which must not lose what a function has printed
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

    async def wait_until_ready(self) -> None:
        """Wait until the function is imported."""
        self._streams = await asyncio.open_unix_connection(sock=self._socket)
        await self._receive()

    async def exchange(self, request: bytes) -> bytes:
        """Send a request and wait for its answer."""
        assert self._streams is not None
        self._streams[1].write(_LENGTH.pack(len(request)) + request)
        await self._streams[1].drain()
        return await self._receive()

    async def _receive(self) -> bytes:
        assert self._streams is not None
        (length,) = _LENGTH.unpack(await self._streams[0].readexactly(_LENGTH.size))
        return await self._streams[0].readexactly(length)

    def kill(self) -> int:
        """Kill the worker and its group and reap it; returns the exit code, negative for a signal. Blocks for a moment."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()
        return self._process.wait(KILL_TIMEOUT_S)

    def reap(self) -> int:
        """The exit code of a worker that closed its connection. Kills it if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self.kill()


# ------------------------------------------------------------------- stand-ins for tools and environments in workers

_made: list[Any] = []
"""In the worker of an instance: the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A call of the worker's function, whose result is kept if it is the factory of an instance; or of a method of the instance;
    or, without arguments, a look at an attribute of the instance."""

    arguments: Mapping[str, Any] | None = None
    attribute: str = ""
    is_factory: bool = False

    def call(self, function: Callable[..., Any]) -> UserCall[Any]:
        if self.attribute:
            owner = _made[0]
            if self.arguments is None:
                return UserCall(lambda: getattr(owner, self.attribute))
            function = getattr(owner, self.attribute)
        return UserCall(function, finish=_keep if self.is_factory else lambda raw: raw, live=self.arguments or {})


def _keep(instance: Any) -> type:
    _made.append(instance)
    return type(instance)


def remote_function(function: Callable[..., Any], pool: WorkerPool, timeout_s: float) -> Callable[..., Any]:
    """Return a stand-in for the function of the pool. A call takes at most `timeout_s` seconds in a worker."""

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        return pool.ask(_Request(arguments=arguments), timeout_s)

    return call


def remote_instance(reference: str, name: str, timeout_s: float, **arguments: Any) -> Any:
    """Return a stand-in for what the factory `reference` makes of `arguments` in a process of its own. Its attributes are those
    of the original. `close` also ends the process; so does a call that takes longer than `timeout_s` seconds."""
    pool = WorkerPool(name, reference, size=1)
    try:
        kind = pool.ask(_Request(arguments=arguments, is_factory=True), timeout_s)
    except BaseException:
        pool.close()
        raise
    instance: Any = object.__new__(_stand_in(kind))
    vars(instance).update(_pool=pool, _ask_worker=lambda request: pool.ask(request, timeout_s))
    return instance


@functools.cache
def _stand_in(kind: type) -> type:
    """Return the class of the stand-ins for instances of `kind`."""

    def method(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(kind, name))
        def call(self: Any, **arguments: Any) -> Any:
            try:
                return self._ask_worker(_Request(arguments=arguments, attribute=name))
            except CallError as error:
                if error.is_lost:
                    self._pool.close()  # another worker would not have the instance
                raise

        return call

    def read(self: Any, name: str) -> Any:
        if name.startswith("__") or name in ("_pool", "_ask_worker") or callable(getattr(type(self), name, None)):
            return object.__getattribute__(self, name)
        return self._ask_worker(_Request(attribute=name))

    def close(self: Any) -> None:
        try:
            if hasattr(kind, "close"):
                self._ask_worker(_Request(arguments={}, attribute="close"))
        finally:
            self._pool.close()

    names = [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]
    methods = {name: method(name) for name in names if not isinstance(inspect.getattr_static(kind, name), staticmethod)}
    return type(kind.__name__, (kind,), {**methods, "close": close, "__getattribute__": read})


# ------------------------------------------------------------------------------------------------- inside the worker


def main(descriptor: int, reference: str, module: str) -> None:
    """Serve `reference` on the socket `descriptor` until the owner closes it. The import happens before the first call, outside its
    time limit. The function's output goes to stderr: the owner's stdout may be a report."""
    die_with_parent()
    os.dup2(2, 1)
    # not sys.stdout: it was opened on the file that descriptor 1 was before
    prints = ResilientStream(sys.stderr, "standard error", lambda text: None, max_chars=MAX_PRINTED_CHARS)
    sys.stdout = cast(TextIO, prints)
    stream = socket.socket(fileno=descriptor).makefile("rwb")

    def send(message: bytes) -> None:
        stream.write(_LENGTH.pack(len(message)) + message)
        stream.flush()  # the owner kills this process

    importlib.import_module(module)  # the module of the requests, so that its import is not part of the first call
    with contextlib.suppress(Exception):  # the first call raises the same error again and reports it
        _load(reference)
    send(b"")
    with asyncio.Runner() as runner:  # one loop for all calls, because an HTTP client that they share belongs to it
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:  # until the owner closes the socket
            send(_answer(reference, stream.read(_LENGTH.unpack(head)[0]), runner))


def _answer(reference: str, request: bytes, runner: asyncio.Runner) -> bytes:
    """Run one pickled request. Returns, pickled: whether it has a result; the result or the problem; the traceback; and the error
    if it can be pickled."""
    try:
        call = pickle.loads(request).call(_load(reference))
        result = runner.run(call.attempt_async()) if call.is_async else call.attempt()
    except BaseException as error:  # noqa: BLE001 - passed as a value, see `calls`
        result = Raised(error)
    if not isinstance(result, Raised):
        try:
            return pickle.dumps((True, result, "", None))
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may raise anything
            result = Raised(
                TypeError(f"a value that it returned or gave to log_extra cannot leave the worker process: {error}")
            )
    try:
        answer = pickle.dumps((False, result.problem, result.traceback, result.error))
        pickle.loads(answer)  # exceptions with their own `__init__` often pickle but do not unpickle
    except Exception:  # noqa: BLE001 - as above
        return pickle.dumps((False, result.problem, result.traceback, None))
    return answer


@functools.cache
def _load(reference: str) -> Callable[..., Any]:
    """Import once; the module's `prepare_worker()`, if it has one, does work that must not count as part of a call."""
    function: Callable[..., Any] = resolve(reference)
    prepare = getattr(sys.modules[reference.partition(":")[0]], "prepare_worker", None)
    if callable(prepare):
        prepare()
    return function
