"""Our imports from vLLM, and calls that need explaining, for the versions in `command`. Only vLLM's processes import it.

Each function says on which behavior of vLLM it relies; a new vLLM version is supported if this file and patches.py fit it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from grpo_async.config.sections import SAMPLING
from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.inference.api import GenerateRequest, ServedParameters, ServerInfo, WeightInitInfo, WeightUpdateInfo
from grpo_async.records import TOP
from grpo_async.servers.requests import EngineOutput
from grpo_async.utils.text import dtype_name
from grpo_async.weights.adapters import LORA_A, BaseWeights
from grpo_async.weights.receiver import UpdateFailedError, UpdateRefusedError, WeightReceiver
from grpo_async.weights.weight_files import text_weights

logger = init_logger("vllm.grpo_async")
# it warns of every layer that was not filled, also of those that only have tables; `load_weights` returns those that matter
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)

__all__ = ["EngineDeadError", "VLLMClientError"]

# ---- workers ----


class WorkerExtension:
    """Mixed into vLLM's worker class (`--worker-extension-cls`); collective_rpc calls its methods, one at a time. They block
    the engine core, which generates nothing while weights are exchanged.

    Errors of the trainer or the group are returned, not raised: if one of several workers raises, vLLM's executor takes the
    other workers' answers for those of later calls.
    """

    device: torch.device
    model_runner: Any
    rank: int
    vllm_config: Any
    _weight_receiver: WeightReceiver

    def join_weight_group(self, init_info: dict[str, Any]) -> str:
        """Join, see `WeightReceiver.join`. Returns "", or why this worker is in no group."""
        try:
            self.get_weight_receiver().join(WeightInitInfo.model_validate(init_info))
        except GrpoAsyncError as error:
            return f"worker {self.rank}: {error}"
        return ""

    def load_pushed_weights(self, update_info: dict[str, Any], number: int = 0, in_use: Sequence[int] = ()) -> str:
        """Load an update as it arrives. Returns "", or what interrupted it. A worker that cannot load parameters that arrived ends
        itself, whatever the reason, and vLLM then ends the server: it holds parts of two versions, and would fail again.
        `number`: of the adapter that arrives, if adapters are swapped; `in_use`: those that must stay."""
        info, model_config = WeightUpdateInfo.model_validate(update_info), self.vllm_config.model_config
        base = BaseWeights(str(model_config.model), revision=model_config.revision)

        def load(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterable[str]:
            if info.swap:
                add_adapter(self.model_runner.lora_manager, dict(weights), number, in_use)
                return ()
            unfilled = load_weights(self.model_runner.get_model(), model_config, weights)
            # what the first update of these names leaves is padding, or of no update: the run compares scores after it
            known = self.__dict__.setdefault("_unfilled", {}).setdefault(tuple(info.names), unfilled)
            return [name for name, num_loaded in unfilled.items() if known.get(name) != num_loaded]

        try:
            with set_current_vllm_config(self.vllm_config):
                logger.info(self.get_weight_receiver().update(info, base, load))
        except UpdateFailedError as error:
            logger.warning("a weight update was interrupted: %s", error)
            return f"worker {self.rank}: {error}"
        except Exception:
            logger.exception("loading new weights failed: stopping this server")
            logging.shutdown()  # writes what handlers still hold
            os._exit(1)
        return ""

    def find_unadapted(self, weights: list[str]) -> str:
        """Return those of `weights` to which this worker's vLLM adds no adapter, separated by spaces: it would ignore theirs."""
        held = self.model_runner.lora_manager._adapter_manager
        _take_adapters_off_heads(held)
        adapted = {*held.modules, *chain(*held.packed_modules.values())}
        renamed = ((name, parse_fine_tuned_lora_name(_lora_name(name), _renamer(held.model))[0]) for name in weights)
        return " ".join(name for name, module in renamed if module not in adapted)

    def get_weight_receiver(self) -> WeightReceiver:
        if "_weight_receiver" not in self.__dict__:
            parallel = self.vllm_config.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + self.rank
            self._weight_receiver = WeightReceiver(rank=rank, device=torch.device(self.device))
        return self._weight_receiver


def load_weights(model: Any, model_config: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Replace the model's weights in place, as they come, by vLLM's layerwise reload of a checkpoint: it repacks a layer for the
    kernels and copies it to its old place, so that CUDA graphs see it. Each worker takes its part of whole tensors. Returns the
    layers that were not filled, with the elements that they got: padded ones, and those of parts that no update has."""
    with torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            model.load_weights(_without_others_experts(model, weights))
            layers = {name: get_layerwise_info(layer) for name, layer in model.named_modules()}
            # a layer that was filled is none that can load any more
            unfilled = {name: info.load_numel for name, info in layers.items() if info.load_numel_total}
        finally:
            finalize_layerwise_reload(model, model_config)
        _repack_tied_heads(model)
        _repack_experts(model)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return unfilled


def _without_others_experts(
    model: Any, weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out the experts that expert parallelism places on other workers, as vLLM does when it reads files: its loaders take
    0.1 to 0.2 ms for each tensor, and hold it until its layer is complete. With load balancing (EPLB) any may be needed."""
    layer = next((each for each in model.modules() if isinstance(each, RoutedExperts)), None)
    local = None
    if layer is not None and not layer.moe_config.moe_parallel_config.enable_eplb:
        places = (
            layer.expert_map_manager.expert_map
        )  # [num_experts], -1: elsewhere; None: each worker has a part of all
        local = None if places is None else set((places >= 0).nonzero().flatten().tolist())
    return (each for each in weights if not should_skip_weight(each[0], local))


def add_adapter(manager: Any, factors: Mapping[str, torch.Tensor], number: int, in_use: Collection[int]) -> None:
    """Add the adapter of `factors` to vLLM's worker manager of adapters, in place of one that is not `in_use` if all slots are
    taken. From the tensors themselves: vLLM's own way is to read a folder at the first request that names it."""
    held = manager._adapter_manager
    rank = next(factor.shape[0] for name, factor in factors.items() if name.endswith(LORA_A))
    adapter = LoRAModel.from_lora_tensors(
        number,
        {_lora_name(*name.rsplit(".", 1)): factor for name, factor in factors.items()},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # B has the scaling
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renamer(held.model),
    )
    while len(held) >= held.capacity:
        held.remove_adapter(min(set(held.list_adapters()) - set(in_use)))
    held.add_adapter(adapter)
    held.activate_adapter(number)


def _take_adapters_off_heads(held: Any) -> None:
    """Give models their plain heads back: an adapter never has one, and vLLM's, although zero, ends the server at scores, because
    it has a row for each request and not for each scored token (vLLM issues 29955, 51594)."""
    for parent in list(held.model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LogitsProcessorWithLoRA):
                setattr(parent, name, child.base_layer)
    for name in [name for name, module in held.modules.items() if isinstance(module, LogitsProcessorWithLoRA)]:
        del held.modules[name]


def _lora_name(weight: str, factor: str = "lora_A") -> str:
    """The name of a factor in a file of peft."""
    return f"base_model.model.{weight.removesuffix('.weight')}.{factor}.weight"


def _renamer(model: Any) -> Any:
    """How vLLM renames the modules of a checkpoint, for adapters; None: not at all."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper and getattr(mapper, "get_rename_mapper", lambda: mapper)()


def _repack_tied_heads(model: Any) -> None:
    """Repack tied heads: on CPU they compute with a packed copy of the embeddings, which the reload leaves as it was."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and uses[id(module.weight)] > 1:
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: Any) -> None:
    """Repack fused experts, as vLLM does on a CPU at the first load, but not at a reload."""
    for module in model.modules():
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(experts, "isa"):  # only experts on a CPU have it
            experts.process_weights_after_loading(module)


# ---- API server ----


Deliver = Callable[[str, EngineOutput, str | None], None]
"""Gets the engine's name of a request, its output, and the version (`set_version`) of the weights that sampled its tokens; None: it
has none of them."""
Abort = Callable[[], Awaitable[None]]
"""Removes a request from the engine."""


async def submit(engine: Any, request: GenerateRequest, deliver: Deliver) -> Abort:
    """Start generating. The engine's output task calls `deliver` once per batch of tokens, in order, until the last."""
    prompt, params = tokens_input(list(request.token_ids)), _sampling_params(request)
    read = partial(_generated, num_top=request.top_logprobs)
    return await _submit(engine, request.request_id, prompt, params, deliver, read)


async def submit_score(engine: Any, token_ids: Sequence[int], deliver: Deliver) -> Abort:
    """Start scoring: `deliver` gets one output, the tokens after the first with their scores.

    The last token is not part of the prompt but requested by its id, so that max_model_len tokens fit. vLLM does not read
    its prefix cache for prompt logprobs; a salt that nobody shares keeps other requests from reading this one's entries.
    """
    last = token_ids[-1]
    params = SamplingParams(
        max_tokens=1,
        temperature=1.0,
        prompt_logprobs=0,  # only for the prompt's own tokens
        logprob_token_ids=[last],
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"score-{secrets.token_hex(8)}"
    prompt = tokens_input(list(token_ids[:-1]), cache_salt=name)
    return await _submit(engine, name, prompt, params, deliver, partial(_scored, last=last))


async def _submit(
    engine: Any, request_id: str, prompt: Any, params: Any, deliver: Deliver, read: Callable[[Any], EngineOutput]
) -> Abort:
    queue = await engine.add_request(request_id, prompt, params)
    state = engine.output_processor.request_states.get(queue.request_id)  # None if it has ended already

    def put(output: Any) -> None:
        # the engine core labels every batch of outputs; vLLM notes the label of new tokens before it puts them here
        labels = state.weight_version_starts if state is not None else ()
        deliver(queue.request_id, read(output), labels[-1][0] if labels else None)

    # From here on the output task calls us instead of filling the queue, so each token is seen when it arrives,
    # whatever the HTTP client does. Earlier outputs are still in the queue.
    early = queue.output
    queue.put = put
    if early is not None:
        put(early)
    return partial(engine.abort, queue.request_id, internal=True)


async def set_version(engine: Any, version: int) -> None:
    """Label every token that is sampled from now on; before the first call they have the label "default"."""
    await engine.update_weight_version(str(version))


def _sampling_params(request: GenerateRequest) -> Any:
    """The parameters, without the request's seed: vLLM would make a generator of it on arrival, so a continued request would
    get the noise of its first tokens again, and sample from another distribution than the policy's. `--seed` seeds one stream
    for all."""
    return SamplingParams(
        **{name: getattr(request, name) for name in SAMPLING},
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        structured_outputs=StructuredOutputsParams(**request.structured_outputs)
        if request.structured_outputs
        else None,
        stop=list(request.stop),
        include_stop_str_in_output=True,
        detokenize=bool(request.stop),
        logprobs=request.top_logprobs,  # 0: only for the sampled token
        flat_logprobs=request.top_logprobs > 0,  # in lists of numbers, without an object for each
        output_kind=RequestOutputKind.DELTA,
    )


def _generated(output: Any, num_top: int) -> EngineOutput:
    if not isinstance(output, RequestOutput):
        return _failed(output)
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    entries: Any = (completion.logprobs or [])[: len(token_ids)]  # a last output without tokens repeats older logprobs
    top: list[bytes] = []
    if num_top and token_ids:
        # of each position the sampled token and the likeliest, as which it may be there again
        pairs = np.empty(len(entries.token_ids), TOP)
        pairs["id"], pairs["logprob"] = entries.token_ids, entries.logprobs
        top = [pairs[end - num_top : end].tobytes() for end in entries.end_indices]
        logprobs = [entries.logprobs[start] for start in entries.start_indices]
    else:
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, entries, strict=False) if token in entry]
    return EngineOutput(
        token_ids=token_ids,
        logprobs=logprobs,
        top_logprobs=top,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason if isinstance(completion.stop_reason, str) else None,  # else a stop token
    )


def _scored(output: Any, last: int) -> EngineOutput:
    if not isinstance(output, RequestOutput):
        return _failed(output)
    (completion,) = output.outputs
    if completion.finish_reason == "abort":
        return EngineOutput(finish_reason="abort")
    token_ids = [*output.prompt_token_ids[1:], last]
    entries = [*output.prompt_logprobs[1:], completion.logprobs[0]]  # the first token has none
    scores = [entry[token].logprob for token, entry in zip(token_ids, entries, strict=True)]
    return EngineOutput(token_ids=token_ids, logprobs=scores, finish_reason=completion.finish_reason)


def _failed(output: Any) -> EngineOutput:
    return EngineOutput(error=f"the engine failed: {message_of(output)}")


async def ask_workers(engine: Any, method: str, *arguments: Any) -> list[str]:
    """The answers of all workers of every engine core to `method` of the worker extension. (With data parallelism,
    `AsyncLLM.collective_rpc` asks all of them, but returns only the answers of the first core's workers.)"""
    client = engine.engine_core
    answers = await asyncio.gather(
        *(
            client._call_utility_async("collective_rpc", method, None, arguments, None, engine=core)
            for core in client.core_engines
        )
    )
    return [answer for of_core in answers for answer in of_core]


class _NewestStatistics(AggregateStatLoggerBase):  # type: ignore[misc]  # not typed here
    """A statistics logger of vLLM, for all engine cores."""

    def __init__(self) -> None:
        self.of_core: dict[int, Any] = {}

    def record(self, scheduler_stats: Any, *others: Any, engine_idx: int = 0, **named: Any) -> None:
        if scheduler_stats is not None:  # some steps have none
            self.of_core[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None: ...


def watch_statistics(engine: Any) -> dict[int, Any]:
    """The newest SchedulerStats of each engine core, by its number (several with data parallelism); updated from now on.
    Stays empty if vLLM takes none (`--disable-log-stats`)."""
    newest = _NewestStatistics()
    if engine.logger_manager is not None:
        engine.logger_manager.stat_loggers.append(newest)
    return newest.of_core


def describe(engine: Any) -> ServerInfo:
    """The part of the server's info that never changes; counters stay 0."""
    config = engine.vllm_config
    return ServerInfo(
        engine="vllm",
        model=str(config.model_config.model),
        dtype=dtype_name(config.model_config.dtype),
        head_dtype=dtype_name(config.model_config.head_dtype),
        max_model_len=config.model_config.max_model_len,
        vocab_size=int(config.model_config.get_vocab_size()),
        policy_version=0,
        num_workers=config.parallel_config.world_size_across_dp,
        max_running_requests=config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size,
    )


def adapter_slots(engine: Any) -> int:
    """How many adapters can be in use at a time; 0: it takes none."""
    config = engine.vllm_config.lora_config
    return 0 if config is None else int(config.max_loras)


def adapter_request(number: int) -> Any:
    """What binds a request to the adapter `number`, which the workers have. There is no such path."""
    return LoRARequest(lora_name=str(number), lora_int_id=number, lora_path=f"pushed/{number}")


def served_parameters(engine: Any, base: BaseWeights) -> ServedParameters:
    """The parameters that an update must contain: those of the text model in the files that were loaded. Unknown if it was loaded
    from none (`--load-format dummy`), or from files other than safetensors."""
    model_config = engine.vllm_config.model_config
    if model_config.quantization is not None:
        raise UpdateRefusedError(
            f"its weights are quantized by {model_config.quantization}, and pushed weights are not; serve a checkpoint that is "
            "not quantized, without --quantization in inference.vllm.extra_args"
        )
    digest, swaps = base.digest_or_none(), adapter_slots(engine) > 0
    if digest is None or str(engine.vllm_config.load_config.load_format) == "dummy":
        return ServedParameters(shapes={}, base_digest=digest, swaps_adapters=swaps)
    config = model_config.hf_text_config
    text = text_weights(base.specs, num_layers=getattr(config, "num_hidden_layers", None))
    shapes = {name: list(base.specs[name].shape) for name in text}
    if not getattr(config, "tie_word_embeddings", False):
        return ServedParameters(shapes=shapes, base_digest=digest, swaps_adapters=swaps)
    heads = [name for name in shapes if name.endswith("lm_head.weight")]
    optional = heads or ["lm_head.weight"]
    return ServedParameters(shapes=shapes, optional=optional, base_digest=digest, swaps_adapters=swaps)


async def pause(engine: Any, *, abort: bool, keep_cache: bool) -> None:
    """When this returns, generation is frozen between two tokens, and every sampled token is on its way to this process. It is
    AsyncLLM.pause_generation without its final sleep of 20 ms, and without the refusal of new requests with which 0.33 begins
    mode=abort: ours wait at the gate."""
    if not keep_cache:
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="abort" if abort else "keep", clear_cache=not keep_cache)
