"""Loads the policy from a Hugging Face folder, and refuses models whose log-probabilities the trainer would get wrong.

    build_policy (structure on the device "meta") -> [adapters, checkpointing, compile, shard_policy] -> load_weights

Rank 0 opens the files with transformers, mapped into memory in their own dtype, and sends each rank its rows, one tensor at a
time: no rank holds more than its shards and one whole tensor. What transformers converts, the experts of a mixture, rank 0
holds until it is sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError, message_of
from grpo_async.training.attention import choose_attention
from grpo_async.training.context_parallel import ContextGroup
from grpo_async.training.families import check_context_parallel, check_family
from grpo_async.training.flash import activate_newest, trial_of
from grpo_async.training.lora import adapter_values, add_adapters
from grpo_async.training.model import Policy, recompute_activations
from grpo_async.training.parameters import is_leader, list_sources, local_of, num_ranks
from grpo_async.training.quantize import layers_in_4_bits, quantized, use_4_bits
from grpo_async.utils.text import shortlist
from grpo_async.weights.adapters import BaseWeights

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


def load_policy(section: ModelSection, *, temperature: float, chunk_tokens: int, max_model_len: int) -> Policy:
    """Load the whole model in `model.dtype` into this process's memory; see `build_policy` for the rest. A collective if there are
    several ranks."""
    policy = build_policy(section, temperature=temperature, chunk_tokens=chunk_tokens, max_model_len=max_model_len)
    load_weights(policy, section, device=torch.device("cpu"))
    return policy


def build_policy(
    section: ModelSection,
    *,
    temperature: float,
    chunk_tokens: int,
    max_model_len: int,
    device_type: str = "cpu",
    router_aux: float = 0.0,
    context: ContextGroup | None = None,
) -> Policy:
    """Build the model without memory for its parameters and buffers (device "meta"), with adapters and activation checkpointing as
    configured. Only adapters keep their dropout: the server that samples has none. It will compute samples of at most
    `max_model_len` tokens on a device of the type `device_type`."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            section.path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
        check_family(config.get_text_config().to_dict(), section.path, max_model_len)
        if context is not None:
            check_context_parallel(config.get_text_config().to_dict(), section.path, context.size)
        for part in (config, config.get_text_config()):
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        model = _build_model(section, config)
    except ConfigError:
        raise
    except Exception as error:  # transformers may raise anything for a broken config.json
        raise ConfigError(
            f"model.path: cannot load a causal language model from {section.path!r}: {message_of(error)}"
        ) from error
    if section.lora is not None:
        if section.lora.load_in_4bit:
            use_4_bits(model)
        add_adapters(model, section.lora)
    has_dropout = section.lora is not None and section.lora.dropout > 0.0
    recompute_activations(model, section.activation_checkpointing, has_dropout=has_dropout)
    model.train()
    compute_dtype = getattr(torch, section.resolved_compute_dtype)
    attention, why = choose_attention(
        section.attention, device=torch.device(device_type), dtype=compute_dtype, config=config
    )
    if attention == "varlen":
        device = torch.device("cuda", torch.cuda.current_device())
        why += f"; {activate_newest(trial_of(config.get_text_config(), compute_dtype, device))}"
    logger.info("attention: %s, %s", attention, why)
    return Policy(
        model,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        attention=attention,
        head_in_float32=section.head_dtype == "float32",
        router_aux=router_aux,
        device_type=device_type,
        context=context,
    )


def load_weights(policy: Policy, section: ModelSection, *, device: torch.device, seed: int = 0) -> None:
    """Give every parameter and buffer of `policy` memory on `device` (each rank its shard) and its values from the files at
    `model.path`; adapters get initial values by `seed`. A collective. Raises ConfigError on every rank."""
    model: Any = policy.model
    values = _open_on_leader(model, section)
    if is_leader():
        values |= adapter_values(model, seed=seed)
        for name, _ in layers_in_4_bits(model):
            values[f"{name}.weight"], values[f"{name}.absmax"] = quantized(values[f"{name}.weight"])
    dtypes: dict[str, torch.dtype] = _from_leader({name: value.dtype for name, value in values.items()})
    _materialize(policy, device)
    targets = {source.name: source.tensor for source in list_sources(model)}
    targets |= {name.replace(".base_layer", ""): buffer for name, buffer in model.named_buffers()}
    targets |= {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    with torch.no_grad():
        for name, target in targets.items():
            _fill(target, values.pop(name) if is_leader() else None, dtypes[name])


def _open_on_leader(model: Any, section: ModelSection) -> dict[str, torch.Tensor]:
    """On rank 0, the values of the model; elsewhere nothing. Give `model` transformers' conversions. A collective, in which the
    others wait as long as it takes. Raises ConfigError."""
    result: Any = None  # what is wrong; how transformers converted the files
    values: dict[str, torch.Tensor] = {}
    if is_leader():
        dtypes = {name.replace(".base_layer", ""): buffer.dtype for name, buffer in model.named_buffers()}
        with ThreadPoolExecutor(1) as reader:
            opened = reader.submit(_open, section, dtypes)
            while not wait([opened], timeout=_HEARTBEAT_S).done:
                _from_leader(None)
        try:
            values, conversions = opened.result()
            result = None, conversions
        except ConfigError as error:
            result = str(error), None
        _from_leader(result)
    else:
        while result is None:
            result = _from_leader(None)
    problem, model._weight_conversions = result
    if problem is not None:
        raise ConfigError(problem)
    return values


def _from_leader(value: Any) -> Any:
    values = [value]
    if num_ranks() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _fill(target: torch.Tensor, whole: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Copy this rank's part of `whole`, of `dtype`, which rank 0 has, to `target`. A collective."""
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        if whole is None:
            whole = torch.empty(target.shape, dtype=dtype, device=mesh.device_type)
        sharded = distribute_tensor(whole.to(mesh.device_type), mesh, target.placements)
        local_of(target).copy_(sharded.to_local())
        return
    if whole is not None:
        target.copy_(whole)
    if num_ranks() > 1:
        dist.broadcast(target, src=0)


def _open(section: ModelSection, buffer_dtypes: Mapping[str, torch.dtype]) -> tuple[dict[str, torch.Tensor], Any]:
    """The model's tensors as transformers loads them, those of the files in the files' dtype, buffers that are not in them in
    `buffer_dtypes`; and how it converted those of the files."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would fill the log
    path = section.path
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            dtype=_dtype_of_files(section),  # tensors of another would be copied
            attn_implementation="eager",
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers may raise anything for broken files
        raise ConfigError(
            f"model.path: cannot load the weights of {path!r}: {message_of(error)}; copy the model again, or save it as "
            "safetensors with save_pretrained"
        ) from error
    model, info = loaded
    problems = [f"lacks {shortlist(sorted(info['missing_keys']), ', ')}"] if info["missing_keys"] else []
    if info["unexpected_keys"]:
        unexpected = shortlist(sorted(info["unexpected_keys"]), ", ")
        problems.append(f"holds tensors that {type(model).__name__} does not have: {unexpected}")
    for name, in_file, in_model in info["mismatched_keys"]:
        problems.append(f"has {name} in the shape {list(in_file)}, but its config.json says {list(in_model)}")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False) and head is not embedding:
        problems.append("ties the head to the embedding in its config.json, but they differ in its files")
    if problems:
        raise ConfigError(f"model.path: {path!r} {'; it '.join(problems)}; copy the model again")
    for name, buffer in list(model.named_buffers()):
        module, _, last = name.rpartition(".")
        owner = model.get_submodule(module)
        if last in owner._non_persistent_buffers_set and buffer.dtype != buffer_dtypes[name]:
            owner._buffers[last] = torch.full_like(buffer, math.nan, dtype=buffer_dtypes[name])
    for owner in model.modules():
        owner._is_hf_initialized = False
    model.initialize_weights()  # what has not this mark: these buffers
    values = {source.name: source.tensor.detach() for source in list_sources(model)}
    return values | dict(model.named_buffers()), model._weight_conversions


def _dtype_of_files(section: ModelSection) -> torch.dtype:
    """That of all tensors of the model's files; `model.dtype` if they differ or are not on this machine."""
    with suppress(ConfigError):
        dtypes = {spec.dtype for spec in BaseWeights(section.path, revision=section.revision).specs.values()}
        if len(dtypes) == 1 and (dtype := dtypes.pop()).is_floating_point:
            return dtype
    configured: torch.dtype = getattr(torch, section.dtype)
    return configured


def _build_model(section: ModelSection, config: Any) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers import initialization as init

    class AsItIs(GenerationConfig):  # type: ignore[misc]  # mypy does not see transformers' class
        """Transformers reads one with a flag that has no effect, and only warns; an export must not fail because of it."""

        def validate(self, *_: Any, **__: Any) -> None: ...

    dtype = getattr(torch, section.dtype)
    # for remote code that computes while it is built
    safe_ops = getattr(init, "meta_device_safe_creation_ops", nullcontext)
    with torch.device("meta"), safe_ops():
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation="eager",  # every model has it; Policy replaces it
            trust_remote_code=section.trust_remote_code,
        )
    with suppress(OSError):  # it may be missing; exports then derive it from the model's config
        model.generation_config = AsItIs.from_pretrained(section.path, revision=section.revision)
    model.config.name_or_path = section.path
    _keep_some_in_float32(model, dtype)
    return model


def _keep_some_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Keep in float32 what transformers never rounds to 16 bits, such as some routers."""
    from transformers.core_model_loading import build_glob_alternation

    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern = build_glob_alternation(list(plan))[0]
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            module = model.get_submodule(name.rpartition(".")[0])
            kept = torch.empty_like(parameter, dtype=torch.float32)
            module._parameters[name.rpartition(".")[2]] = nn.Parameter(kept)


def _materialize(policy: Policy, device: torch.device) -> None:
    """Allocate memory for every tensor on "meta", once for tied ones. FSDP adopts the new tensors in its first forward pass."""
    made: dict[int, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter.detach(), device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
