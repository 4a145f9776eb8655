"""The thread that owns the engine. Everyone else hands it commands, which it runs between two steps.

Waits on a condition for work or commands; unblocked by `call` and `stop`. Chunks go to `deliver`, one batch per step.
Paused, it runs commands only. From the beginning of a pause, draining included, new requests are held until `resume`.
When the engine raises, every request gets an error line, later commands fail with the cause, and `on_failure` is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from grpo_async.inference.surface import GenerateChunk, PauseMode
from grpo_async.servers.embedded.engine import RunningSequence, SlotEngine

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Chunks = Sequence[tuple[RunningSequence, GenerateChunk]]


class EngineDeadError(RuntimeError):
    """The engine thread has ended; the message says why."""


class SupersededError(RuntimeError):
    """A later call of somebody else made this one pointless."""


class EngineWorker:
    """Runs `engine` in a daemon thread.

    Args:
        engine: touched by this thread only, from `start` on.
        deliver: gets the chunks of a step; called in the engine thread.
        on_failure: called in the engine thread after the engine raised and everybody was told.
    """

    def __init__(
        self, engine: SlotEngine, *, deliver: Callable[[Chunks], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._wake = threading.Condition()
        self._commands: list[tuple[Callable[[], object], Future[object]]] = []
        self._end_reason: str | None = None  # set once, when no further command will run
        self._stopping = False
        # These belong to the engine thread.
        self._paused = False
        self._keeps_cache = False
        self._drain: Future[None] | None = None  # resolved when nothing is in flight any more
        self._busy = BusyClock()
        self._figures = _figures_of(engine)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine is not running any more, or None."""
        return self._end_reason

    @property
    def is_paused(self) -> bool:
        """Read it in the engine thread (through `call`) to know that the engine answers."""
        return self._paused

    @property
    def busy_s(self) -> float:
        """Seconds in which some request was generating and the engine was not paused."""
        return self._busy.total_s()

    @property
    def figures(self) -> dict[str, int | float]:
        """What changes of the server's description (`ServerInfo`), by field, as of the engine's last step or command: whoever asks
        does not wait for the step that is being made, which takes long when contexts are recomputed. Any thread."""
        return self._figures

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Run `command` in the engine thread, before its next step.

        Raises (in the future):
            EngineDeadError: the engine thread has ended.
        """
        future: Future[Result] = Future()
        with self._wake:
            if self._end_reason is None:
                self._commands.append((command, future))  # type: ignore[arg-type]  # Future is invariant
                self._wake.notify()
                return future
        future.set_exception(EngineDeadError(self._end_reason))
        return future

    def stop(self, *, timeout_s: float) -> None:
        """Abort every request and end the thread; returns after `timeout_s` at the latest (the thread is a daemon)."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    # Commands: for `call` alone, because they touch the engine.

    def pause(self, mode: PauseMode, *, keep_cache: bool) -> Future[None]:
        """Begin to pause: new requests are held from here on. What is in flight: see `surface`.

        Returns:
            A future that is done when no step will run before `resume`: at once, but with mode "drain". It raises
            SupersededError when another pause or a resume came, EngineDeadError when the engine thread ended.
        """
        self._supersede_drain()
        self._engine.hold_new()
        self._keeps_cache = keep_cache
        frozen: Future[None] = Future()
        if mode == "drain":
            self._paused = False  # what an earlier pause froze runs to its end too
            self._drain = frozen
            return frozen
        if mode == "abort":
            self._engine.abort_in_flight()
        self._engine.flush()  # a client that is lost during the pause has what was sampled before it
        self._paused = True
        frozen.set_result(None)
        return frozen

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Serve `weights` as `policy_version` from the next step on, running sequences as the pause said."""
        began = time.monotonic()
        self._engine.load_weights(weights, policy_version=policy_version, keep_cache=self._keeps_cache)
        logger.info("loaded %d parameters in %.4f s", len(weights), time.monotonic() - began)

    def give_up_drain(self, frozen: Future[None]) -> bool:
        """Go on instead of waiting for what is in flight; False when that pause is over, one way or the other."""
        if self._drain is not frozen:
            return False
        self._drain = None
        self.resume()
        return True

    def resume(self) -> None:
        """Go on, with the requests that were held. Does nothing when nobody paused."""
        self._supersede_drain()
        self._paused = self._keeps_cache = False
        self._engine.admit_held()

    def _supersede_drain(self) -> None:
        if self._drain is not None:
            drain, self._drain = self._drain, None
            drain.set_exception(SupersededError("another /pause or /resume came while requests were draining"))

    def _end_drain_when_empty(self) -> None:
        if self._drain is not None and self._engine.num_in_flight == 0:
            self._paused = True
            drain, self._drain = self._drain, None
            drain.set_result(None)

    def _has_work(self) -> bool:
        return not self._paused and self._engine.num_in_flight > 0

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                self._busy.set(self._has_work())
                if self._has_work():
                    self._engine.step()
                    self._busy.set(self._has_work())
                    self._figures = _figures_of(self._engine)
                self._send_chunks()
                self._end_drain_when_empty()
            self._engine.abort_all()
            self._send_chunks()
            self._end("the server is shutting down")
        except Exception as error:
            logger.exception("the engine failed; every request ends with an error")
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self._end(reason)
            self._engine.fail_all(reason)
            self._send_chunks()
            self._on_failure(error)

    def _take_commands(self) -> None:
        with self._wake:
            while not (self._commands or self._stopping or self._has_work()):
                self._wake.wait()
            commands, self._commands = self._commands, []
        for command, future in commands:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = command()
                self._figures = _figures_of(self._engine)  # before anybody hears that it was done
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)
                raise  # a command that fails may have left the engine half changed

    def _send_chunks(self) -> None:
        chunks = self._engine.drain()
        if chunks:
            self._deliver(chunks)

    def _end(self, reason: str) -> None:
        with self._wake:
            self._end_reason = reason
            commands, self._commands = self._commands, []
        self._busy.set(False)
        if self._drain is not None:
            self._drain.set_exception(EngineDeadError(reason))
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(reason))


def _figures_of(engine: SlotEngine) -> dict[str, int | float]:
    return {
        "policy_version": engine.policy_version,
        "active_requests": engine.num_active,
        "running_requests": engine.num_running,
        "waiting_requests": engine.num_waiting,
        "kv_usage": engine.kv_usage,
        "generated_tokens": engine.num_generated_tokens,
    }


class BusyClock:
    """Adds up the time between set(True) and set(False). Written by one thread, read by any."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # (finished seconds, start of the running interval)

    def set(self, busy: bool) -> None:
        finished, since = self._state
        now = time.monotonic()
        if busy and since is None:
            self._state = (finished, now)
        elif not busy and since is not None:
            self._state = (finished + now - since, None)

    def total_s(self) -> float:
        finished, since = self._state
        return finished if since is None else finished + time.monotonic() - since
