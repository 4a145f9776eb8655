"""The control routes: pause, resume and weight update, straight on vLLM's engine client.

vLLM has routes of the same names. Ours take their place because a policy version must change at an exact point of the
token stream, errors must be `{"error": "..."}`, and an update that a dead trainer left open must not block the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from grpo_async.inference.surface import GlooInitInfo, GlooUpdateInfo, Message
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.state import ServerState
from grpo_async.weights.buckets import ITEM_SIZES

_DRAIN_TIMEOUT_S = 30.0  # the tokens are already in this process; only a stuck event loop takes longer


class ControlError(Exception):
    """A control call that is refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InitBody(Message):
    init_info: GlooInitInfo


class UpdateBody(Message):
    update_info: GlooUpdateInfo


class FinishBody(Message):
    weight_version: str = Field(pattern=r"^\d{1,18}$")


class Control:
    """Handlers of the control routes. Each takes engine, query and body, and returns the answer's JSON."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._update_is_open = False
        self.routes = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
        }

    async def _pause(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        mode = query.get("mode", "keep")
        if mode not in ("keep", "abort", "wait") or set(query) - {"mode"}:
            raise ControlError(400, f"/pause takes mode=keep, abort or wait and nothing else, got {dict(query)}")
        await compat.pause(engine, mode)
        self._state.set_paused(True)
        return {"status": "paused"}

    async def _resume(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        await engine.resume_generation()
        self._state.set_paused(False)
        return {"status": "resumed"}

    async def _is_paused(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        return {"is_paused": await engine.is_paused()}

    async def _init(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        await compat.init_weight_transfer(engine, InitBody.model_validate_json(body).init_info)
        return {"status": "joined"}

    async def _start(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        await compat.start_weight_update(engine)
        self._update_is_open = True
        return {"status": "started"}

    async def _update(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        info = UpdateBody.model_validate_json(body).update_info
        unknown = sorted(set(info.dtype_names) - set(ITEM_SIZES))
        if unknown or not len(info.names) == len(info.dtype_names) == len(info.shapes):
            raise ControlError(
                400,
                f"an update needs a dtype of {sorted(ITEM_SIZES)} and a shape per name, got {len(info.names)} names, "
                f"{len(info.dtype_names)} dtypes (unknown: {unknown}), {len(info.shapes)} shapes",
            )
        await self._require_pause(engine, "/update_weights")
        await compat.update_weights(engine, info)
        return {"status": "updated"}

    async def _finish(self, engine: Any, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        version = int(FinishBody.model_validate_json(body).weight_version)
        if not self._update_is_open and version == self._state.version:
            return {"status": "finished"}  # the client lost our answer and asks again
        await self._require_pause(engine, "/finish_weight_update")
        await engine.finish_weight_update(str(version))
        # Why the stamp is exact. The engine is frozen from the answer to /pause until /resume, and its answers and tokens
        # come over one ordered socket. So every token that the old weights sampled is in this process by now: either in its
        # stream, where `add` stamped it on arrival, or in the client's queue. Wait until that queue is handled, then change
        # the version: all that arrives later was sampled after the coming /resume, by the new weights.
        await compat.wait_until_outputs_are_handed_out(engine, timeout_s=_DRAIN_TIMEOUT_S)
        self._state.change_version(version)
        self._update_is_open = False
        return {"status": "finished"}

    @staticmethod
    async def _require_pause(engine: Any, path: str) -> None:
        if not await engine.is_paused():
            raise ControlError(
                409, f"{path} needs a paused server, else tokens of two versions mix: POST /pause?mode=keep first"
            )
