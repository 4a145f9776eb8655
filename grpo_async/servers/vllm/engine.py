"""vLLM's engine client (AsyncLLM) behind the HTTP application: requests, scores, pauses, sleep, weight updates, and the warmup
of a server. It uses the client directly, without vLLM's OpenAI layer and its own control routes.

It runs in the event loop of the API server. Requests to the engine core wait as long as it lives, which heartbeats check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from grpo_async.inference.api import (
    OUT_OF_ORDER,
    GenerateRequest,
    ScoreAnswer,
    ServedParameters,
    WeightInitInfo,
    WeightUpdateInfo,
)
from grpo_async.records import FinishReason
from grpo_async.servers.app import PARAMETERS_TIMEOUT_S, Engine, NextChunk
from grpo_async.servers.requests import EngineDeadError, EngineOutput, RequestTracker, TokenStream
from grpo_async.servers.vllm import compat, patches
from grpo_async.utils.text import shortlist
from grpo_async.weights.receiver import UpdateFailedError, UpdateRefusedError

logger = logging.getLogger("vllm.grpo_async")

_DEAD = "the engine is dead; see the server's log"
_NUM_AT_ONCE = 4  # concurrent requests of the warmup
_FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}


class VllmEngine(Engine):
    """An engine on `client`, vLLM's AsyncLLM, which nobody else may pause or update."""

    def __init__(self, client: Any) -> None:
        super().__init__(compat.describe(client), revision=client.vllm_config.model_config.revision)
        self._client = client
        self._is_asleep = False
        self._version = 0
        self._num_updates = 0
        self._slots = compat.adapter_slots(client)
        self._num_adapters = self._adapter = 0  # received; and the number of the one that is served, 0: none
        self._bound: dict[str, tuple[int, int]] = {}  # adapter and version of each request, by the engine's name of it
        self._served: ServedParameters | None = None
        self._statistics = compat.watch_statistics(client)
        # the number of updates and not the version, which may repeat (a trainer that went back to a checkpoint)
        patches.prepare_requests(client, lambda: str(self._num_updates), self._bind)
        patches.on_engine_death(client, lambda: self.requests.gate.break_down(_DEAD))

    @property
    def failure(self) -> str | None:
        return _DEAD if self._client.errored else None

    @property
    def policy_version(self) -> int:
        return self._version

    def stats(self) -> dict[str, Any]:
        """An engine whose last requests are aborted makes no further step and reports nothing more, so its statistics count only
        while it has requests, including those of vLLM's own routes. `kv_usage` is that of the fullest core."""
        every = list(self._statistics.values())
        is_idle = not self.requests.num_active and not self._client.output_processor.has_unfinished_requests()
        found: dict[str, Any] = {}
        if every:
            found["kv_usage"] = 0.0 if is_idle else max(stats.kv_cache_usage for stats in every)
        if not is_idle:
            found["running_requests"] = sum(stats.num_running_reqs for stats in every)
            found["waiting_requests"] = sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in every)
        return found

    # ---- requests ----

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[NextChunk]:
        stream = TokenStream(flush_interval_s=request.flush_interval_s, num_prompt_tokens=len(request.token_ids))
        async with self._entered(stream, lambda deliver: compat.submit(self._client, request, deliver)):
            yield stream.next_chunk

    async def score(self, token_ids: Sequence[int]) -> ScoreAnswer:
        """Score. A pause that aborts requests, or new weights, make it start over, so that the scores are of one version."""
        while True:
            await self.requests.gate.wait()
            num_updates, stream = self._num_updates, TokenStream()
            submit = partial(compat.submit_score, self._client, token_ids)
            async with self._entered(stream, submit, is_generated=False):
                scored = await stream.next_chunk()  # ends with the engine's answer or end, or the client's disconnect
            if scored.error is not None:
                raise HTTPException(500, scored.error) if self.failure is None else EngineDeadError(_DEAD)
            if scored.finish_reason is not FinishReason.ABORT and num_updates == self._num_updates:
                return ScoreAnswer(logprobs=scored.logprobs, policy_version=scored.policy_version)

    @asynccontextmanager
    async def _entered(
        self,
        stream: TokenStream,
        submit: Callable[[compat.Deliver], Awaitable[compat.Abort]],
        *,
        is_generated: bool = True,
    ) -> AsyncIterator[None]:
        """A context in which a request is in the engine, until the engine has ended it or the block is left."""
        abort = None

        def deliver(name: str, output: EngineOutput, label: str | None) -> None:
            if name in self._bound:
                version = self._bound[name][1]
            else:
                version = self._version if label is None else int(label) if label.isdigit() else 0
            self.requests.receive(stream, output, version=version, is_generated=is_generated)

        self.requests.enter(stream)
        try:
            try:
                abort = await submit(deliver)
            except compat.EngineDeadError as error:
                raise EngineDeadError(f"the engine is dead: {error}") from error
            except (compat.VLLMClientError, ValueError) as error:
                raise HTTPException(400, str(error)) from error
            yield
        finally:
            # the client has left, or the stream ended with an error of ours
            if self.requests.leave(stream) and abort is not None:
                await abort()

    async def warm_up(self) -> None:
        """Make the first requests of a server before others may come: one alone, several at once, with filters, and a score.

        vLLM compiles at the first request of a kind, on a machine without its caches for minutes, in which the engine answers
        nothing: heartbeats would consider it hung, and each restart would compile again. Raises the engine's errors.
        """
        began = time.monotonic()
        await self._generate_once("alone")
        await asyncio.gather(*(self._generate_once(f"among {number}") for number in range(_NUM_AT_ONCE)))
        await asyncio.gather(*(self._generate_once(f"filtered {number}", **_FILTERS) for number in range(_NUM_AT_ONCE)))
        await self.score([0, 0, 0])
        # counters begin with the first request from outside
        self.requests = RequestTracker()
        logger.info("warmed up in %.1f s", time.monotonic() - began)

    async def _generate_once(self, name: str, **fields: Any) -> None:
        request = GenerateRequest(
            request_id=f"warmup, {name}", token_ids=[0, 0], max_tokens=2, temperature=1.0, ignore_eos=True, **fields
        )
        async with self.stream(request) as next_chunk:
            while (chunk := await next_chunk()).finish_reason is None:
                if chunk.error is not None:
                    raise EngineDeadError(chunk.error)

    # ---- pauses ----

    async def pause(self, *, abort: bool, keep_cache: bool) -> None:
        await compat.pause(self._client, abort=abort, keep_cache=keep_cache)
        self.requests.set_paused(True)

    async def resume(self) -> None:
        if self._is_asleep:
            raise HTTPException(OUT_OF_ORDER, "the server sleeps: POST /wake_up first")
        await self._client.resume_generation()
        self.requests.set_paused(False)

    async def is_paused(self) -> bool:
        return bool(await self._client.is_paused())

    async def sleep(self) -> None:
        """Move weights to host memory, drop the cache, and freeze requests in flight."""
        if not self._client.vllm_config.model_config.enable_sleep_mode:
            await super().sleep()
        self._is_asleep = True
        # level 1: weights come back from host memory, so a trainer that dies meanwhile costs nothing
        await self._client.sleep(level=1, mode="keep")
        self.requests.set_paused(True)

    async def wake_up(self) -> None:
        if self._is_asleep:
            await self._client.wake_up()
        self._is_asleep = False

    # ---- weight updates ----

    async def parameters(self) -> ServedParameters:
        if self._served is None:
            async with asyncio.timeout(PARAMETERS_TIMEOUT_S):
                self._served = await asyncio.to_thread(compat.served_parameters, self._client, self.base)
            if not self._served.shapes:
                logger.warning("cannot check the names of updates: vLLM loaded no safetensors files at start")
        return self._served

    async def join_weight_group(self, info: WeightInitInfo) -> None:
        await self._on_workers("join_weight_group", info)

    async def check_update(self, info: WeightUpdateInfo) -> None:
        if self._is_asleep:
            raise HTTPException(OUT_OF_ORDER, "the server sleeps: POST /wake_up first")
        await super().check_update(info)
        if info.swap:
            weights = list(dict.fromkeys(name.rpartition(".")[0] for name in info.names))
            answers = await compat.ask_workers(self._client, "find_unadapted", weights)
            # with pipeline parallelism each worker has some of the layers
            if ignored := set.intersection(*(set(answer.split()) for answer in answers)):
                raise UpdateRefusedError(
                    f"vLLM adds no adapter to {shortlist(sorted(ignored))}; set model.lora.push: merged, or other target_modules"
                )

    async def load_update(self, info: WeightUpdateInfo) -> None:
        """Load an update in one call of the engine core: no step runs between its first and its last parameter. A worker that fails
        for a reason of its own ends, and the server with it."""
        if info.swap:
            self._num_adapters += 1
            await self._on_workers("load_pushed_weights", info, self._num_adapters, await self._keep_adapters())
        else:
            await self._on_workers("load_pushed_weights", info)

    def _bind(self, name: str) -> Any:
        """Bind a request to the newest adapter, which it keeps to its end. Returns what vLLM takes for it."""
        if not self._adapter:
            return None
        self._bound[name] = self._adapter, self._version
        return compat.adapter_request(self._adapter)

    async def _keep_adapters(self) -> list[int]:
        """The adapters that must stay when another one comes: the newest, and those of requests in flight. With more of them than
        slots, requests of the oldest are aborted, and their clients send them again with the tokens they have."""
        running = self._client.output_processor.request_states
        self._bound = {name: bound for name, bound in self._bound.items() if name in running}
        in_use = sorted({adapter for adapter, _ in self._bound.values()} | ({self._adapter} - {0}))
        keep = in_use[-(self._slots - 1) :]
        if too_old := [name for name, (adapter, _) in self._bound.items() if adapter not in keep]:
            logger.info("%d requests hold the oldest of %d adapters: they are aborted", len(too_old), len(in_use))
            await self._client.abort(too_old, internal=True)
        return keep

    async def finish_update(self, version: int) -> None:
        if self._slots:  # requests keep their versions
            self._adapter = self._num_adapters
        else:
            # frozen until /resume: the engine core labels what the new weights sample, however late older tokens come here
            await compat.set_version(self._client, version)
        self._version = version
        self._num_updates += 1

    async def _on_workers(self, method: str, info: WeightInitInfo | WeightUpdateInfo, *more: Any) -> None:
        """Call the workers; raise UpdateFailedError with the errors they return."""
        answers = await compat.ask_workers(self._client, method, info.model_dump(), *more)
        if problems := [answer for answer in answers if answer]:
            raise UpdateFailedError(shortlist(problems))
