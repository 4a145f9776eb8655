"""The control routes: pause, resume, sleep and weight update, straight on vLLM's engine client.

vLLM has routes of the same names. Ours take their place because a policy version must change at an exact point of the
token stream, errors must be `{"error": "..."}`, and an update that a dead trainer left must change nothing.
What asks the engine core waits as long as that lives, which heartbeats watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.surface import (
    FinishBody,
    InitBody,
    PauseQuery,
    ServedParameters,
    UpdateBody,
    WeightInitInfo,
    WeightUpdateInfo,
)
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.answers import RefusedError
from grpo_async.servers.vllm.patches import wait_until_handed_out
from grpo_async.servers.vllm.reports import WorkerReports, collect_reports
from grpo_async.servers.vllm.state import ServerState
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.buckets import ParameterSpec, check_names
from grpo_async.weights.receiver import (
    UpdateRefusedError,
    UpdateSupersededError,
    check_membership,
    listed,
    parameter_specs,
)

_SETTING = "weights.timeout_s"
_REPORT_MARGIN_S = 30.0  # the workers have the trainer's deadline; this is for their answer
_READ_TIMEOUT_S = 120.0  # three rows of every tensor, from a disk that may be slow
_HANDOUT_TIMEOUT_S = 30.0  # the tokens are already in this process; only a stuck event loop takes longer


class Updates:
    """Weight updates as the API server sees them: a group of workers, an update that all of them staged, and its end.

        join -> start -> receive (staged by every worker, checked) -> apply

    Nothing but `apply` touches what is served, and `apply` is one call of the engine core. What a trainer leaves behind at any
    earlier moment is dropped by the next `start`.

    Used from one event loop. Calls of one trainer come one after the other; a newer call of `join` or `start` ends the
    waiting of an older one."""

    def __init__(self) -> None:
        self._started = False
        self._staged = False
        self._waiting: WorkerReports | None = None
        self._served: ServedParameters | None = None
        self._base: BaseWeights | None = None

    @property
    def is_staged(self) -> bool:
        return self._staged

    async def parameters(self, engine: Any) -> ServedParameters:
        """What an update has to bring; the same as long as the server runs."""
        if self._served is None:
            served = await compat.served_parameters(engine)
            self._base = BaseWeights(compat.describe(engine).model)
            async with asyncio.timeout(_READ_TIMEOUT_S):
                digest = await asyncio.to_thread(self._base.digest_or_none)
            self._served = served.model_copy(update={"base_digest": digest})
        return self._served

    async def join(self, engine: Any, info: WeightInitInfo) -> None:
        """Every worker meets the trainer's group.

        Raises:
            UpdateRefusedError: no such group can exist, or no server opens such a store. WorkerFailedError, DeadlineError: the
                group did not form. UpdateSupersededError: somebody else began to join.
        """
        check_membership(info)  # the workers do so too, but what they raise is no answer
        self._forget()
        await self._wait_for_workers(
            engine,
            lambda address: compat.join_weight_group(engine, info, address),
            timeout_s=info.timeout_s,
            what=f"the workers to join the weight group at {info.where}",
        )

    async def start(self, engine: Any) -> None:
        """Begin an update; what an earlier one left is dropped."""
        self._forget()
        await compat.drop_staged_weights(engine)
        self._started = True

    async def receive(self, engine: Any, info: WeightUpdateInfo) -> None:
        """Every worker receives every parameter and keeps it apart.

        Raises:
            RefusedError: no update was started, or it does not fit the model. WorkerFailedError, DeadlineError: it did not
                arrive. In each case the old weights stay.
        """
        specs = parameter_specs(info)
        if not self._started:
            raise RefusedError(409, "no update was started: POST /start_weight_update first")
        self._started = self._staged = False
        if info.base is not None and (await self.parameters(engine)).base_digest != info.base.digest:
            raise RefusedError(400, "adapters of another base than this server's; the old weights stay")
        await self._wait_for_workers(
            engine,
            lambda address: compat.stage_weights(engine, info, address),
            timeout_s=info.timeout_s,
            what="the weights to arrive",
        )
        # only now, when nobody waits for a worker in the middle of a broadcast any more
        problems = await self._mismatches(engine, info, specs)
        if problems:
            await compat.drop_staged_weights(engine)
            raise RefusedError(400, f"the update does not fit the model, the old weights stay: {listed(problems)}")
        self._staged = True

    async def apply(self, engine: Any) -> None:
        """Serve what is staged. A worker that fails half-way ends, and the server with it."""
        assert self._staged, "nothing is staged"
        self._staged = False
        await compat.apply_staged_weights(engine)

    def _forget(self) -> None:
        self._started = self._staged = False
        if self._waiting is not None:
            self._waiting.give_up(UpdateSupersededError("another weight update began in the meantime"))

    async def _wait_for_workers(
        self, engine: Any, begin: Callable[[str], Awaitable[None]], *, timeout_s: float, what: str
    ) -> None:
        async with collect_reports() as reports:
            self._waiting = reports
            try:
                await begin(reports.address)
                await reports.wait(
                    compat.describe(engine).num_workers,
                    timeout_s=timeout_s + _REPORT_MARGIN_S,
                    what=what,
                    setting=_SETTING,
                )
            finally:
                if self._waiting is reports:
                    self._waiting = None

    async def _mismatches(self, engine: Any, info: WeightUpdateInfo, specs: Sequence[ParameterSpec]) -> list[str]:
        served = await self.parameters(engine)
        if not served.shapes:
            compat.logger.warning("cannot check the names of this update: vLLM loaded no checkpoint at start")
        if info.base is not None:
            assert self._base is not None  # its digest was compared
            return self._base.problems(specs, served.shapes, served.optional)
        return check_names(specs, served.shapes, served.optional)


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
                await wait_until_handed_out(engine.engine_core, timeout_s=_HANDOUT_TIMEOUT_S)
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
            await wait_until_handed_out(engine.engine_core, timeout_s=_HANDOUT_TIMEOUT_S)
            await self._updates.apply(engine)
            self._state.change_version(version)
            await self._state.in_flight.renew()  # under the new salt
        return {"status": "finished"}


async def _refusing(work: Any) -> None:
    """Failures of a weight group in their own words, without a traceback of ours in the log."""
    try:
        await work  # Updates has the deadlines
    except UpdateSupersededError as error:
        raise RefusedError(409, str(error)) from error
    except UpdateRefusedError as error:
        raise RefusedError(400, str(error)) from error
    except GrpoAsyncError as error:
        raise RefusedError(500, f"{error}; the old weights stay") from error
