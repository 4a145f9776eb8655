"""The control routes: pause, resume, sleep and weight update, straight on vLLM's engine client.

vLLM has routes of the same names. Ours take their place because a policy version must change at an exact point of the
token stream, errors must be `{"error": "..."}`, and an update that a dead trainer left must change nothing.
What asks the engine core waits as long as that lives, which heartbeats watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.surface import (
    FinishBody,
    InitBody,
    PauseQuery,
    UpdateBody,
)
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.answers import RefusedError
from grpo_async.servers.vllm.state import ServerState
from grpo_async.servers.vllm.updates import SupersededError, Updates

_HANDOUT_TIMEOUT_S = 30.0  # the tokens are already in this process; only a stuck event loop takes longer


class Control:
    """Handlers of the control routes. Each takes engine, query and body, and returns the answer's JSON.

    Raises (all of them): RefusedError, ValidationError, errors of the engine.
    """

    def __init__(self, state: ServerState, updates: Updates) -> None:
        self._state = state
        self._updates = updates
        self._lock = asyncio.Lock()  # pause, resume and finish change what the engine does: one at a time
        self._attempt = 0
        self._drain: asyncio.Task[None] | None = None
        self._asleep = False
        self.routes = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
        }

    async def _pause(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        wanted = PauseQuery.model_validate(query)
        attempt = self._supersede()
        self._state.gate.close()
        try:
            if wanted.mode == "drain":
                await self._drained(engine, timeout_s=wanted.timeout_s)
            async with self._lock:
                self._state.gate.close()  # a /resume may have come before this got the lock
                await compat.pause(engine, abort=wanted.mode == "abort", keep_cache=wanted.keep_cache)
                self._state.set_paused(True)
                await compat.wait_until_outputs_are_handed_out(engine, timeout_s=_HANDOUT_TIMEOUT_S)
        except BaseException:
            if attempt == self._attempt and not self._state.paused:
                self._state.gate.open()
            raise
        return {"status": "paused"}

    async def _drained(self, engine: Any, *, timeout_s: float) -> None:
        """Return when the engine has ended all our requests. Not paused when this raises.

        Raises:
            RefusedError: 504, not within `timeout_s`; 409, another /pause or /resume came.
        """
        async with self._lock:
            if self._state.paused:  # by a trainer that is gone: frozen requests would never end
                await engine.resume_generation()
                self._state.set_paused(False)
        self._drain = drain = asyncio.create_task(self._state.in_flight.wait_until_empty())
        await asyncio.wait({drain}, timeout=timeout_s)
        if drain.cancelled():
            raise RefusedError(409, "another /pause or /resume came while requests were draining")
        if not drain.done():
            drain.cancel()
            raise RefusedError(
                504,
                f"{len(self._state.in_flight)} requests have not ended within {timeout_s:g} s, so the server is not paused; "
                "raise weights.drain_timeout_s if this is expected",
            )

    def _supersede(self) -> int:
        """End the draining of an earlier /pause, and return the number of this call."""
        self._attempt += 1
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None
        return self._attempt

    async def _resume(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        if self._asleep:
            raise RefusedError(409, "the server sleeps: POST /wake_up first")
        self._supersede()
        async with self._lock:
            await engine.resume_generation()
            self._state.set_paused(False)
            self._state.gate.open()
        return {"status": "resumed"}

    async def _is_paused(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        return {"is_paused": await engine.is_paused()}

    async def _sleep(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Give the GPU's memory back: weights move to host memory, the cache goes, requests in flight freeze."""
        if not compat.can_sleep(engine):
            raise RefusedError(409, "this server cannot sleep: it needs inference.vllm.sleep_while_training and a GPU")
        self._supersede()
        async with self._lock:
            self._state.gate.close()
            self._asleep = True
            await compat.put_to_sleep(engine)
            self._state.set_paused(True)
        return {"status": "asleep"}

    async def _wake_up(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Undo /sleep; also resumes. Always allowed."""
        async with self._lock:
            if self._asleep:
                await engine.wake_up()
            self._asleep = False
        return await self._resume(engine, query, body)

    async def _init(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        await _refusing(self._updates.join(engine, InitBody.model_validate_json(body).init_info))
        return {"status": "joined"}

    async def _start(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        await self._updates.start(engine)
        return {"status": "started"}

    async def _update(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        await _refusing(self._updates.receive(engine, UpdateBody.model_validate_json(body).update_info))
        return {"status": "staged"}

    async def _finish(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        version = int(FinishBody.model_validate_json(body).weight_version)
        async with self._lock:
            if not self._updates.is_staged:
                if version == self._state.version:
                    return {"status": "finished"}  # the client lost our answer and asks again
                raise RefusedError(
                    409,
                    f"there is no staged update to serve as version {version}: POST /start_weight_update and /update_weights",
                )
            if self._asleep or not await engine.is_paused():
                raise RefusedError(
                    409, "/finish_weight_update needs a server that is paused and awake: POST /pause first"
                )
            # Why the stamp is exact. The engine is frozen from the answer to /pause until /resume, which waits for our lock,
            # and its answers and tokens come over one ordered socket. So every token that the old weights sampled is in this
            # process by now: either in its stream, where `add` stamped it on arrival, or in the client's queue. Wait until
            # that queue is handled, then change weights and version: all that arrives later was sampled after the coming
            # /resume, by the new weights.
            await compat.wait_until_outputs_are_handed_out(engine, timeout_s=_HANDOUT_TIMEOUT_S)
            await self._updates.apply(engine)
            self._state.change_version(version)
            await self._state.in_flight.renew()  # under the new salt
        return {"status": "finished"}


async def _refusing(work: Any) -> None:
    """Failures of a weight group in their own words, without a traceback of ours in the log."""
    try:
        await work  # Updates has the deadlines
    except SupersededError as error:
        raise RefusedError(409, str(error)) from error
    except GrpoAsyncError as error:
        raise RefusedError(500, f"{error}; the old weights stay") from error
