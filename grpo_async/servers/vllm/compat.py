"""What we import from vLLM, and calls that need explaining, for the versions of `command`. Imported in vLLM's processes only.

Each function says which behaviour of vLLM it relies on; a new vLLM version is supported when this file and patches.py fit it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from grpo_async.inference.api import GenerateRequest, ServedParameters, ServerInfo, WeightInitInfo, WeightUpdateInfo
from grpo_async.servers.vllm.command import release
from grpo_async.servers.vllm.patches import checkpoint_shapes
from grpo_async.servers.vllm.reports import run_and_report
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.receiver import WeightReceiver

logger = init_logger("vllm.grpo_async")

__all__ = ["EngineDeadError", "VLLMClientError"]

# What came with which release. The only differences between those versions that this module meets.
_RELEASE = release(vllm.__version__)
if _RELEASE >= (0, 27):
    from vllm.exceptions import VLLMClientError
else:
    VLLMClientError = ValueError  # of a wrong request


# ---- workers ----


class WorkerExtension:
    """Mixed into vLLM's worker class (`--worker-extension-cls`); its methods are called by collective_rpc, one at a time.

    vLLM's own weight-transfer engines are not used: they receive inside such a call, which holds up the engine core, and
    apply while they receive.
    """

    device: torch.device
    model_runner: Any
    rank: int
    vllm_config: Any
    _weight_receiver: WeightReceiver

    def recorded_parameters(self) -> dict[str, list[int]]:
        """Name -> shape of what this worker's model was loaded from; empty when vLLM loaded nothing (`--load-format dummy`)."""
        return {name: list(shape) for name, shape in checkpoint_shapes.items()}

    def join_weight_group(self, init_info: dict[str, Any], report_to: str) -> None:
        """Begin to join; see `WeightReceiver.join`."""
        receiver = self.get_weight_receiver()
        join = receiver.join(WeightInitInfo.model_validate(init_info))
        run_and_report(join, report_to, rank=receiver.rank, device=receiver.device)

    def drop_staged_weights(self) -> None:
        self.get_weight_receiver().drop()

    def stage_weights(self, update_info: dict[str, Any], report_to: str) -> None:
        """Begin to receive; see `WeightReceiver.receive`."""
        receiver = self.get_weight_receiver()
        receive = receiver.receive(WeightUpdateInfo.model_validate(update_info))
        run_and_report(receive, report_to, rank=receiver.rank, device=receiver.device)

    def apply_staged_weights(self) -> None:
        """Replace the weights by the staged ones. A worker that cannot ends itself, whatever the reason, and vLLM then ends the
        server: serving on would answer with garbage, or with other weights than the other workers."""
        try:
            weights = self.get_weight_receiver().take()
            if weights is None:
                raise RuntimeError("this worker has no staged update")
            with set_current_vllm_config(self.vllm_config):
                began = time.monotonic()
                load_weights(self.model_runner.get_model(), self.vllm_config.model_config, weights)
                logger.info("loaded %d parameters in %.4f s", len(weights), time.monotonic() - began)
        except Exception:
            logger.exception("replacing the weights failed: ending this server")
            for handler in logger.handlers:
                handler.flush()
            os._exit(1)

    def get_weight_receiver(self) -> WeightReceiver:
        if "_weight_receiver" not in self.__dict__:
            parallel = self.vllm_config.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + self.rank
            self._weight_receiver = WeightReceiver(
                rank=rank,
                device=torch.device(self.device),
                base=BaseWeights(str(self.vllm_config.model_config.model)),
                shapes=checkpoint_shapes,
            )
        return self._weight_receiver


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
        _repack_tied_heads(model)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _repack_tied_heads(model: Any) -> None:
    """A tied head shares the parameter of the embeddings but, on CPU, computes with a packed copy of its own. The reload
    renews the parameter; without this the head would go on with the old weights (Llama; Qwen from 0.28)."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and uses[id(module.weight)] > 1:
            module.quant_method.process_weights_after_loading(module)


# ---- API server ----


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """Tokens that one request just got; `logprobs` is short when vLLM left some out. A `finish_reason` ends the request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    scores: Sequence[float] = ()
    """Of a score request only."""


Deliver = Callable[[EngineOutput | Exception], None]


Abort = Callable[[], Awaitable[None]]
"""Takes a request out of the engine."""


async def submit(engine: Any, request: GenerateRequest, deliver: Deliver) -> Abort:
    """Start generating. `deliver` is called from the engine's output task, once per batch of tokens and in order, until it
    got a finish_reason or an exception.

    Raises:
        VLLMClientError: the request is wrong. EngineDeadError: the engine is gone.
    """
    prompt = tokens_input(list(request.token_ids))
    return await _submit(
        engine, request.request_id, prompt, _sampling_params(request), lambda output: deliver(_engine_output(output))
    )


async def submit_score(engine: Any, token_ids: Sequence[int], deliver: Deliver) -> Abort:
    """Start scoring: `deliver` gets one EngineOutput with `scores`, [num_tokens - 1], or an exception.

    The last token is not part of the prompt but asked for by its id, so that max_model_len tokens fit. vLLM does not read
    its prefix cache for prompt logprobs; a salt that nobody shares keeps it from being read for others.

    Raises:
        VLLMClientError, EngineDeadError: as `submit`.
    """
    last = token_ids[-1]
    params = SamplingParams(
        max_tokens=1,
        temperature=1.0,
        prompt_logprobs=0,  # of the prompt's own tokens only
        logprob_token_ids=[last],
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"score-{secrets.token_hex(8)}"
    prompt = tokens_input(list(token_ids[:-1]), cache_salt=name)
    return await _submit(engine, name, prompt, params, lambda output: deliver(_score_output(output, last)))


async def _submit(engine: Any, request_id: str, prompt: Any, params: Any, put: Callable[[Any], None]) -> Abort:
    queue = await engine.add_request(request_id, prompt, params)
    # From here the output task calls us instead of filling the queue, so each token is seen at the moment it arrives,
    # whatever the HTTP client does. What came before this line waits in the queue.
    early = queue.output
    queue.put = put
    if early is not None:
        put(early)
    return partial(engine.abort, queue.request_id, internal=True)


def _sampling_params(request: GenerateRequest) -> Any:
    """Without the request's seed. vLLM would make a generator from it when the request arrives, so one that is continued (after an
    abort, a failure or a resume) would get the noise of its first tokens again, and sample from another distribution than the
    policy's. Generators of requests also make its sampler loop over them in Python, and on a CPU end the server ("CPU Generator
    does not use offset"). `--seed` seeds the one stream that all requests draw from."""
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _engine_output(output: Any) -> EngineOutput | Exception:
    if not isinstance(output, RequestOutput):
        return _error(output)
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    entries = (completion.logprobs or [])[: len(token_ids)]  # an end without tokens repeats older logprobs
    logprobs = [
        entry[token_id].logprob for token_id, entry in zip(token_ids, entries, strict=False) if token_id in entry
    ]
    return EngineOutput(token_ids=token_ids, logprobs=logprobs, finish_reason=completion.finish_reason)


def _score_output(output: Any, last: int) -> EngineOutput | Exception:
    if not isinstance(output, RequestOutput):
        return _error(output)
    (completion,) = output.outputs
    reason = completion.finish_reason
    if reason == "abort":
        return EngineOutput(token_ids=[], logprobs=[], finish_reason=reason)
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)  # the first has none
    scores = [entry[token_id].logprob for token_id, entry in pairs]
    scores.append(completion.logprobs[0][last].logprob)
    return EngineOutput(token_ids=[], logprobs=[], finish_reason=reason, scores=scores)


def _error(output: Any) -> Exception:
    return output if isinstance(output, Exception) else TypeError(f"unexpected output of vLLM: {type(output).__name__}")


def describe(engine: Any) -> ServerInfo:
    """What does not change while the server runs; counters are left at 0."""
    config = engine.vllm_config
    return ServerInfo(
        engine="vllm",
        engine_version=vllm.__version__,
        model=str(config.model_config.model),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        # 0.25 takes it from models that pool only, and says the weights' dtype of others
        head_dtype=str(config.model_config.head_dtype).removeprefix("torch."),
        max_model_len=config.model_config.max_model_len,
        vocab_size=int(config.model_config.get_vocab_size()),
        policy_version=0,
        num_workers=config.parallel_config.world_size_across_dp,
        per_request_seed=False,
        max_running_requests=config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size,
    )


async def served_parameters(engine: Any) -> ServedParameters:
    """What the workers' models were loaded from, all workers together: with expert parallelism each reads some experts."""
    shapes: dict[str, list[int]] = {}
    for recorded in await engine.collective_rpc("recorded_parameters"):
        shapes |= recorded
    # some old checkpoints hold rotary tables, which are not parameters
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}
    if not getattr(engine.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False):
        return ServedParameters(shapes=shapes)
    heads = [name for name in shapes if name.endswith("lm_head.weight")]
    return ServedParameters(shapes=shapes, optional=heads or ["lm_head.weight"])


async def pause(engine: Any, *, abort: bool, keep_cache: bool) -> None:
    """Frozen between two tokens when this returns, and every token sampled until then is on its way to this process. Without
    `keep_cache`, requests that go on recompute their context. (vLLM's documentation of clear_cache is wrong for mode=keep.)

    This is AsyncLLM.pause_generation without its sleep of 20 ms at the end, which waits for tokens that this process already has;
    `patches.wait_until_handed_out` waits for those."""
    if not keep_cache:
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="abort" if abort else "keep", clear_cache=not keep_cache)
