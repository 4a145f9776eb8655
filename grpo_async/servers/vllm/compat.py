"""The one module that depends on vLLM's version: written for 0.27. Imported inside vLLM's processes only.

Every function says which behaviour of vLLM it relies on; a new vLLM version is supported when this file fits it.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import vllm
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from grpo_async.inference.surface import GenerateRequest, GlooInitInfo, GlooUpdateInfo, ServerInfo
from grpo_async.servers.vllm.drain import mark_asking, wait_until_handed_out

WEIGHT_BACKEND = "gloo"

__all__ = ["EngineDeadError", "VLLMClientError", "WeightTransferEngine"]


# ---- all processes ----


def register_weight_engine() -> None:
    """Make `--weight-transfer-config '{"backend": "gloo"}'` mean our engine."""
    if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:  # plugins are loaded more than once
        WeightTransferEngineFactory.register_engine(
            WEIGHT_BACKEND, "grpo_async.servers.vllm.weight_engine", "StagedGlooEngine"
        )


def bind_rendezvous_to_its_own_address() -> None:
    """Make torch's tcp:// rendezvous listen on the address it was told; on its own it listens on every interface, where
    anybody may read and write the store. (`import torch.distributed.rendezvous` as an attribute gives the function.)"""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous._create_c10d_store = _create_store_on_its_own_address


def _create_store_on_its_own_address(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> dist.Store:
    listener: dict[str, int] = {}
    if rank == 0:
        sock = socket.socket(socket.AF_INET6 if ":" in hostname else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((hostname, port))
        sock.listen(128)
        listener["master_listen_fd"] = sock.detach()  # the store owns it from here
    return dist.TCPStore(
        hostname, port, world_size, rank == 0, timeout, multi_tenant=False, use_libuv=use_libuv, **listener
    )


# ---- workers ----

_checkpoint_shapes: dict[str, tuple[int, ...]] = {}


def record_checkpoint_parameters() -> None:
    """Remember name and shape of everything that the model is loaded from at start; see `checkpoint_shapes`."""
    original = DefaultModelLoader.get_all_weights
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def get_all_weights(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in original(*args, **kwargs):
            _checkpoint_shapes[name] = tuple(tensor.shape)
            yield name, tensor

    DefaultModelLoader.get_all_weights = get_all_weights


def checkpoint_shapes() -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of the checkpoint's tensors; empty when vLLM did not load one (`--load-format dummy`)."""
    return _checkpoint_shapes


def load_weights(model: Any, model_config: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Replace the model's weights in place. Takes the way over layerwise reload, because kernels repack weights after
    loading (on CPU `weight` is empty afterwards). Finalizing also puts back the tensors of layers that got no weights.
    """
    with torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            model.load_weights(iter(weights))
        finally:
            finalize_layerwise_reload(model, model_config)


class WorkerExtension:
    """Mixed into vLLM's worker class (`--worker-extension-cls`); its methods are called by collective_rpc."""

    _weight_update_active: bool
    weight_transfer_engine: Any

    def abandon_weight_update(self) -> None:
        """Forget an update that a dead trainer began; vLLM would refuse the next one."""
        if self._weight_update_active:
            self.weight_transfer_engine.reset_weight_update_target()
            self._weight_update_active = False


# ---- API server ----


def mark_handled_outputs() -> None:
    """Prepare `wait_until_outputs_are_handed_out`: see `drain`."""
    if not hasattr(AsyncMPClient.get_output_async, "__wrapped__"):
        AsyncMPClient.get_output_async = mark_asking(AsyncMPClient.get_output_async)


async def wait_until_outputs_are_handed_out(engine: Any, *, timeout_s: float) -> None:
    """Return when every token that the engine core has sent so far is with its request. Raises TimeoutError."""
    await wait_until_handed_out(engine.engine_core, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """Tokens that one request just got; `logprobs` is short when vLLM left some out. A `finish_reason` ends the request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


Deliver = Callable[[EngineOutput | Exception], None]


class RunningRequest:
    """A request inside the engine."""

    def __init__(self, engine: Any, internal_id: str) -> None:
        self._engine, self._internal_id = engine, internal_id

    async def abort(self) -> None:
        await self._engine.abort(self._internal_id, internal=True)


async def submit(engine: Any, request: GenerateRequest, deliver: Deliver) -> RunningRequest:
    """Start generating. `deliver` is called from the engine's output task, once per batch of tokens and in order, until it
    got a finish_reason or an exception.

    Raises:
        VLLMClientError: the request is wrong. EngineDeadError: the engine is gone.
    """
    queue = await engine.add_request(
        request.request_id,
        tokens_input(list(request.token_ids), cache_salt=request.cache_salt or None),  # vLLM refuses an empty salt
        _sampling_params(request),
    )
    # From here the output task calls us instead of filling the queue, so each token is seen at the moment it arrives,
    # whatever the HTTP client does. What came before this line waits in the queue.
    early = queue.output
    queue.put = lambda output: deliver(_engine_output(output))
    if early is not None:
        deliver(_engine_output(early))
    return RunningRequest(engine, queue.request_id)


def honours_seed() -> bool:
    """False on CPU: vLLM dies there ("CPU Generator does not use offset") when a request with a seed of its own is prefilled
    in chunks, which also happens when it goes on after a pause. vLLM's own `--seed` still seeds the server."""
    return not current_platform.is_cpu()


def _sampling_params(request: GenerateRequest) -> Any:
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed if honours_seed() else None,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _engine_output(output: Any) -> EngineOutput | Exception:
    if not isinstance(output, RequestOutput):
        return (
            output
            if isinstance(output, Exception)
            else TypeError(f"unexpected output of vLLM: {type(output).__name__}")
        )
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    entries = (completion.logprobs or [])[: len(token_ids)]  # an end without tokens repeats older logprobs
    logprobs = [
        entry[token_id].logprob for token_id, entry in zip(token_ids, entries, strict=False) if token_id in entry
    ]
    return EngineOutput(token_ids=token_ids, logprobs=logprobs, finish_reason=completion.finish_reason)


def describe(engine: Any) -> ServerInfo:
    """What does not change while the server runs; version and counters are left at 0."""
    config = engine.vllm_config
    return ServerInfo(
        engine="vllm",
        engine_version=vllm.__version__,
        model=str(config.model_config.model),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        max_model_len=config.model_config.max_model_len,
        policy_version=0,
        num_workers=config.parallel_config.world_size_across_dp,
        per_request_seed=honours_seed(),
    )


def vocabulary_size(engine: Any) -> int:
    return int(engine.vllm_config.model_config.get_vocab_size())


async def pause(engine: Any, mode: str) -> None:
    """keep: frozen between two tokens when this returns, and every token sampled until then is in this process. Caches are
    cleared, so requests that go on recompute their context."""
    await engine.pause_generation(mode=mode, clear_cache=True)


async def init_weight_transfer(engine: Any, info: GlooInitInfo) -> None:
    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info.model_dump()))


async def start_weight_update(engine: Any) -> None:
    await engine.collective_rpc("abandon_weight_update")
    await engine.start_weight_update()


async def update_weights(engine: Any, info: GlooUpdateInfo) -> None:
    await engine.update_weights(WeightTransferUpdateRequest(update_info=info.model_dump()))
