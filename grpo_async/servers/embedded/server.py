"""The embedded engine behind the HTTP application: a thread that owns the engine, and the event loop's side of it.

The event loop changes the engine only by commands, which the thread runs between two steps; it reads version and statistics
directly. Joining a weight group and loading an update are commands, too: both wait for the trainer, up to their deadlines.
When the engine raises, every request gets an error line, later commands fail with the cause, and `on_failure` is called.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import uvicorn
from starlette.exceptions import HTTPException

from grpo_async.errors import DeadlineError, GrpoAsyncError, message_of
from grpo_async.inference.api import (
    KEEP_ALIVE_S,
    GenerateRequest,
    ScoreAnswer,
    ServedParameters,
    ServerInfo,
    WeightInitInfo,
    WeightUpdateInfo,
)
from grpo_async.inference.guard import GuardedProtocol, TokenGuard
from grpo_async.servers.app import PARAMETERS_TIMEOUT_S, Engine, NextChunk, RolloutApp
from grpo_async.servers.embedded.engine import RunningSequence, SlotEngine
from grpo_async.servers.requests import EngineDeadError, EngineOutput, TokenStream
from grpo_async.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)

_MIN_TEMPERATURE = 1e-4
_STOP_TIMEOUT_S = 2.0  # time for open responses to end after SIGTERM

Result = TypeVar("Result")


class EmbeddedEngine(Engine):
    """The embedded engine as the HTTP application sees it, and the daemon thread that runs it.

    `from_hub`: `revision` and `trust_remote_code` with which the model was loaded. `on_failure` is called in the event loop after
    the engine failed and every request got the error. A step may take `timeout_s`, after which the answer is 503.
    """

    def __init__(
        self,
        engine: SlotEngine,
        *,
        description: ServerInfo,
        on_failure: Callable[[], object],
        timeout_s: float = 60.0,
        from_hub: Mapping[str, Any] | None = None,
    ) -> None:
        known = {"vocab_size": engine.vocab_size, "max_running_requests": engine.num_slots}
        self._from_hub = from_hub or {}
        super().__init__(description.model_copy(update=known), revision=self._from_hub.get("revision"))
        self._tokenizer: Any = None
        self._engine = engine
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._receiver = WeightReceiver(device=engine.device)
        self._shapes = {name: list(tensor.shape) for name, tensor in engine.parameters().items()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failure: str | None = None  # why no further command will run; set once
        # only the thread uses these
        self._is_stopping = self._is_paused = self._keeps_cache = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start generating; call it in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, *, timeout_s: float) -> None:
        """End every request with reason "abort", and the thread, within `timeout_s`."""
        self.requests.gate.break_down("the server is shutting down")

        def end() -> None:
            self._engine.abort_all()
            self._is_stopping = True

        self._call(end)
        await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                can_step = self._engine.num_active > 0 and not self._is_paused
                if can_step and self._commands.empty():
                    self._engine.step()
                else:
                    self._commands.get()()
                self._deliver()
            self._end("the server is shutting down")
        except Exception as error:
            logger.exception("the engine failed; every request fails")
            reason = f"the engine failed: {message_of(error)}"
            self._end(reason)
            self._engine.fail_all(reason)
            self._deliver()
            self._in_loop(self.requests.gate.break_down, reason)
            self._in_loop(self._on_failure)

    def _deliver(self) -> None:
        if outputs := self._engine.take_outputs():
            self._in_loop(self._receive, outputs, self._engine.policy_version)

    def _receive(self, outputs: Sequence[tuple[RunningSequence, EngineOutput]], version: int) -> None:
        for sequence, output in outputs:
            self.requests.receive(sequence.stream, output, version=version)

    def _end(self, reason: str) -> None:
        self._failure = reason
        self._run_commands_left()

    def _run_commands_left(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    # ---- commands, from the event loop ----

    def _call(self, command: Callable[[], Result]) -> Future[Result]:
        """Run `command` in the thread, before the engine's next step. An exception ends the engine, which may be left half changed;
        except a GrpoAsyncError, which concerns the trainer."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise EngineDeadError(self._failure)
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)
                if not isinstance(error, GrpoAsyncError):
                    raise

        self._commands.put(run)
        if self._failure is not None:  # the thread may have read its last command
            self._run_commands_left()
        return future

    async def _command(self, command: Callable[[], Result]) -> Result:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(self._call(command))
        except TimeoutError as error:
            raise DeadlineError(
                "the engine to finish its step", waited_s=self._timeout_s, setting="inference.heartbeat_timeout_s"
            ) from error

    # ---- requests ----

    async def prepare_stop_strings(self) -> None:
        """Load the tokenizer. Raises HTTPException (400) if there is none."""
        from transformers import AutoTokenizer  # slow import

        if self._tokenizer is not None:
            return
        try:
            self._tokenizer = await asyncio.to_thread(
                AutoTokenizer.from_pretrained, self.description.model, **self._from_hub
            )
        except Exception as error:  # transformers may raise anything for a folder without a tokenizer
            raise HTTPException(400, f"the model's tokenizer cannot be loaded: {message_of(error)}") from error

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[NextChunk]:
        if 0.0 < request.temperature < _MIN_TEMPERATURE:
            raise HTTPException(400, f"temperature {request.temperature} is too small to divide by; 0 is greedy")
        if request.structured_outputs is not None:
            raise HTTPException(400, "the embedded engine has no structured outputs; set inference.engine: vllm")
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        stream = TokenStream(flush_interval_s=request.flush_interval_s, num_prompt_tokens=len(request.token_ids))
        sequence = RunningSequence(request, eos_ids=self._engine.eos_ids, stream=stream, decode=self._decode)

        def fail_if_lost(added: Future[None]) -> None:
            """The engine ended before it took the request, so end the stream here."""
            if (error := added.exception()) is not None:
                self._in_loop(self._receive, [(sequence, EngineOutput(error=str(error)))], self.policy_version)

        self.requests.enter(stream)
        try:
            self._call(lambda: self._engine.add(sequence)).add_done_callback(fail_if_lost)
            yield stream.next_chunk
        finally:
            if self.requests.leave(stream):  # the client left before the end
                self._call(lambda: self._engine.abort(sequence))

    async def score(self, token_ids: Sequence[int]) -> ScoreAnswer:
        # One command, so that no update comes between the scores and their version. Also works while paused: nothing is generated.
        scores, version = await self._command(lambda: (self._engine.score(token_ids), self._engine.policy_version))
        return ScoreAnswer(logprobs=scores, policy_version=version)

    # ---- pauses and weights ----

    async def pause(self, *, abort: bool, keep_cache: bool) -> None:
        def freeze() -> None:
            if abort:
                self._engine.abort_all()
            self._is_paused, self._keeps_cache = True, keep_cache

        await self._command(freeze)
        self.requests.set_paused(True)

    async def resume(self) -> None:
        def go_on() -> None:
            self._is_paused = self._keeps_cache = False

        await self._command(go_on)
        self.requests.set_paused(False)

    async def is_paused(self) -> bool:
        return await self._command(lambda: self._is_paused)

    async def parameters(self) -> ServedParameters:
        async with asyncio.timeout(PARAMETERS_TIMEOUT_S):
            digest = await asyncio.to_thread(self.base.digest_or_none)
        return ServedParameters(shapes=self._shapes, base_digest=digest)

    async def join_weight_group(self, info: WeightInitInfo) -> None:
        await asyncio.wrap_future(self._call(lambda: self._receiver.join(info)))  # `join` has its own deadline

    async def load_update(self, info: WeightUpdateInfo) -> None:
        def load() -> None:
            logger.info(self._receiver.update(info, self.base, self._engine.load_weights, wanted=self._shapes))

        await asyncio.wrap_future(self._call(load))  # each bucket has a deadline

    async def finish_update(self, version: int) -> None:
        await self._command(lambda: self._engine.finish_update(policy_version=version, keep_cache=self._keeps_cache))


class EmbeddedServer(uvicorn.Server):
    """An engine over HTTP, until the process is asked to end. `greeting` is printed when it listens."""

    def __init__(self, engine: EmbeddedEngine, *, greeting: str = "") -> None:
        config = uvicorn.Config(
            TokenGuard(RolloutApp(engine).app),
            http=GuardedProtocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_STOP_TIMEOUT_S),
        )
        super().__init__(config)
        self._engine, self._greeting = engine, greeting
        self.has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.start()
        await super().startup(sockets)
        print(self._greeting, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.has_failed = self._engine.failure is not None
        await self._engine.stop(timeout_s=_STOP_TIMEOUT_S)  # ends the open responses, for which uvicorn then waits
        await super().shutdown(sockets)  # within timeout_graceful_shutdown
