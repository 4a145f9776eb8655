"""Loads the policy from a Hugging Face folder, and refuses models whose log-probabilities the trainer would get wrong.

    build_policy (structure on the device "meta") -> [adapters, checkpointing, compile, shard_policy] -> load_weights

No rank ever holds the whole model: parameters get memory only when they are sharded, and each rank reads its own rows of each
tensor. What transformers fuses (experts) is read whole, one fused tensor at a time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from grpo_async.config.model_sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.training.attention import choose_attention
from grpo_async.training.families import check_family
from grpo_async.training.lora import add_adapters, initialize_adapters, saved_modules
from grpo_async.training.model import Policy, recompute_activations
from grpo_async.training.nf4 import quantize_layers
from grpo_async.training.parameters import NamedTensor, TensorRead, list_sources, plan_reads
from grpo_async.utils.text import shortlist
from grpo_async.weights.checkpoint_files import CheckpointFiles

# old checkpoints hold these buffers, which are computed now
_COMPUTED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
_COMPARED_ROWS = 4096

logger = logging.getLogger(__name__)


def load_policy(section: ModelSection, *, temperature: float, chunk_tokens: int, max_model_len: int) -> Policy:
    """The whole model in `model.dtype` in this process's memory; see `build_policy` for the rest.

    Raises:
        ConfigError: no model at `model.path`, or one whose log-probabilities the trainer would get wrong.
    """
    policy = build_policy(section, temperature=temperature, chunk_tokens=chunk_tokens, max_model_len=max_model_len)
    load_weights(policy, section.path, revision=section.revision, device=torch.device("cpu"))
    return policy


def build_policy(
    section: ModelSection, *, temperature: float, chunk_tokens: int, max_model_len: int, device_type: str = "cpu"
) -> Policy:
    """The model without memory for its parameters (device "meta"), with adapters and activation checkpointing as configured, and
    without dropout but that of adapters: the server that samples has none either. Buffers that are computed have their values.

    Args:
        max_model_len: longest sample, in tokens.
        device_type: "cpu" or "cuda", where it will compute.

    Raises:
        ConfigError: no model at `model.path`, one whose log-probabilities the trainer would get wrong, or adapters that do not fit.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            section.path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
        check_family(config.get_text_config().to_dict(), section.path, max_model_len)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model = _build_model(section, config)
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers makes of a broken config.json
        raise ConfigError(
            f"model.path: cannot load a causal language model from {section.path!r}: {type(error).__name__}: {error}"
        ) from error
    if section.lora is not None:
        if section.lora.quantization is not None:
            quantize_layers(model, keep=saved_modules(model, section.lora))
        add_adapters(model, section.lora)
    has_dropout = section.lora is not None and section.lora.dropout > 0.0
    recompute_activations(model, section.activation_checkpointing, has_dropout=has_dropout)
    model.train()
    compute_dtype = getattr(torch, section.compute_dtype_in_use)
    attention, why = choose_attention(
        section.attention, device=torch.device(device_type), dtype=compute_dtype, config=config
    )
    logger.info("attention: %s, %s", attention, why)
    return Policy(
        model,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        attention=attention,
        with_router_loss=section.router_aux_loss > 0,
        head_in_float32=section.head_dtype == "float32",
    )


def load_weights(
    policy: Policy, path: str, *, device: torch.device, revision: str | None = None, seed: int = 0
) -> None:
    """Give every parameter of `policy` memory on `device` (each rank its shard) and fill it from the files at `path`; adapters get
    the values that they begin with. Reads no more than this rank's rows, and talks to no other rank.

    Args:
        revision: of a hub name.
        seed: of the adapters. The same on every rank.

    Raises:
        ConfigError: files are missing or broken, or hold other tensors than the model has.
    """
    _materialize(policy, device)
    files = CheckpointFiles.of(path, revision=revision)
    model: Any = policy.model
    sources = {source.name: source for source in list_sources(model)}
    tied = {name: source for name, source in _tied_names(model).items() if source in sources}
    reads, unexpected = plan_reads(model, {*sources, *tied}, files.specs)
    _check_expected(model, unexpected, path)
    filled: set[str] = set()
    with torch.no_grad():
        for read in sorted(reads, key=lambda read: read.target in tied):
            filled |= _load(model, read, sources, tied, files, filled, path)
    missing = sorted(set(sources) - filled)
    if missing:
        raise ConfigError(f"model.path: {path!r} lacks {shortlist(missing, ', ')}; copy the model again")
    initialize_adapters(model, seed=seed)


def _build_model(section: ModelSection, config: Any) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers import initialization as init

    dtype = getattr(torch, section.dtype)
    safe_ops = getattr(
        init, "meta_device_safe_creation_ops", nullcontext
    )  # remote code that computes while it is built
    with torch.device("meta"), safe_ops():
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation="eager",  # which every model has, until Policy puts its own in place
            trust_remote_code=section.trust_remote_code,
        )
    with suppress(OSError):  # there may be none; exports get one from the model's config
        model.generation_config = GenerationConfig.from_pretrained(section.path, revision=section.revision)
    model.config.name_or_path = section.path
    _keep_some_in_float32(model, dtype)
    _compute_buffers(model, section.path)
    return model


def _keep_some_in_float32(model: Any, dtype: torch.dtype) -> None:
    """What transformers never rounds to 16 bits, such as some routers."""
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


def _compute_buffers(model: Any, path: str) -> None:
    """Rotary tables and the like, which no checkpoint holds: the model's own initialization, which does nothing on "meta", is run
    with only the buffers in memory."""
    computed = []
    for name, module in model.named_modules():
        module._is_hf_initialized = False
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
            if buffer.is_floating_point():
                module._buffers[key].fill_(torch.nan)
                if key in module._non_persistent_buffers_set:
                    computed.append((f"{name}.{key}".lstrip("."), module, key))
    model.initialize_weights()
    unknown = [name for name, module, key in computed if bool(module._buffers[key].isnan().any())]
    if unknown:
        raise ConfigError(
            f"model.path: {path!r} has buffers that neither its files hold nor its `_init_weights` computes: "
            f"{shortlist(unknown, ', ')}; models of this family cannot be trained yet"
        )


def _materialize(policy: Policy, device: torch.device) -> None:
    """Memory for every parameter on "meta", tied ones once. FSDP takes the new ones over in its first forward pass."""
    made: dict[int, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter.device.type == "meta":
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter.detach(), device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _tied_names(model: Any) -> dict[str, str]:
    """Name that a checkpoint leaves out -> the name under which its values are."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {str(name): str(source) for name, source in tied.items()}


def _load(
    model: Any,
    read: TensorRead,
    sources: Mapping[str, NamedTensor],
    tied: Mapping[str, str],
    files: CheckpointFiles,
    filled: Collection[str],
    path: str,
) -> set[str]:
    """Fill what one TensorRead brings; returns the names of the sources that have their values now."""
    if read.target in tied:
        name = tied[read.target]
        if name in filled:
            _check_tied(sources[name], read, files, path)
            return set()
        sources = {read.target: sources[name]}
    else:
        name = read.target
    if read.converter is None:
        source, key = sources[read.target], read.keys[0]
        _check_shape(read.target, source.shape, files.specs[key].shape, path)
        source.fill(partial(files.read_rows, key))
        return {name}
    try:
        converted = read.convert(model, partial(_whole, files))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.path: {path!r} lacks what {read.target} is made of: {error}; copy the model again"
        ) from error
    done = set()
    for target, tensor in converted.items():
        if target not in sources:
            raise ConfigError(f"model.path: {path!r} holds parts of {target}, which the model does not have")
        _check_shape(target, sources[target].shape, tuple(tensor.shape), path)
        sources[target].fill(partial(_slice, tensor))
        done.add(target)
    return done


def _slice(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop] if tensor.ndim else tensor


def _whole(files: CheckpointFiles, key: str) -> torch.Tensor:
    shape = files.specs[key].shape
    return files.read_rows(key, 0, shape[0] if shape else 1)


def _check_shape(name: str, wanted: tuple[int, ...], found: tuple[int, ...], path: str) -> None:
    if wanted != found:
        raise ConfigError(
            f"model.path: {path!r} has {name} in the shape {list(found)}, but its config.json says {list(wanted)}; copy the "
            f"model again"
        )


def _check_tied(source: NamedTensor, read: TensorRead, files: CheckpointFiles, path: str) -> None:
    """A file may hold a tied tensor twice, but then with the same values: servers tie them whatever the file says."""
    tensor, offset = source.local_rows()
    for start in range(0, tensor.shape[0], _COMPARED_ROWS):
        ours = tensor[start : start + _COMPARED_ROWS]
        theirs = files.read_rows(read.keys[0], offset + start, offset + start + ours.shape[0])
        if not torch.equal(ours, theirs.to(device=ours.device, dtype=ours.dtype)):
            raise ConfigError(
                f"model.path: the config.json of {path!r} ties {read.target} to {source.name}, but its files hold both with other "
                "values; set tie_word_embeddings: false there, or remove the one that is not used"
            )


def _check_expected(model: Any, unexpected: Iterable[str], path: str) -> None:
    ignored = [*_COMPUTED_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    left = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if left:
        raise ConfigError(
            f"model.path: {path!r} holds tensors that {type(model).__name__} does not have: {shortlist(left, ', ')}; "
            "is its config.json that of another model?"
        )
