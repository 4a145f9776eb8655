"""LoRA through peft: adapters inside the Hugging Face model, their initial values, and the folder that peft loads.

Adapters and the modules of `modules_to_save` are float32 on a base of any dtype; only they get gradients. Adapters of the head and
the embedding are refused: servers merge linear layers, and a tied pair would no longer match."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_async.config.sections import LoraSection
from grpo_async.errors import ConfigError
from grpo_async.training.parameters import ADAPTER, is_leader, list_sources, whole_of
from grpo_async.utils.extras import needs


def add_adapters(model: Any, section: LoraSection) -> None:
    """Add adapters to the layers that `target_modules` names, and freeze everything else except `modules_to_save`. A model on
    "meta" stays there."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora: {needs('peft')} ({error})") from error
    saved = _saved_modules(model, section)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft only divides it, so a float works
        target_modules=[name for name in _target_names(model, section) if not _is_in(name, saved)],
        lora_dropout=section.dropout,
        bias="none",
    )
    try:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.lora.target_modules: {error}") from error
    # whole names for the adapter's files, because peft matches suffixes without a dot (q_norm ends in norm)
    model.peft_config[ADAPTER].modules_to_save = saved or None
    for layer in _adapter_layers(model).values():
        layer.lora_A.float()
        layer.lora_B.float()
        if section.dropout:
            layer.lora_dropout[ADAPTER] = _Dropout(section.dropout)
    whole: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for name in saved:
        for module in model.get_submodule(name).modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = whole.setdefault(id(parameter), nn.Parameter(parameter.detach().float()))


class _Dropout(nn.Dropout):
    """Dropout that acts only where a gradient is computed: in the forward pass of an update, and where that is recomputed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(input, self.p, training=torch.is_grad_enabled())


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model without its adapters, inside the context. No weight changes: the layers skip the adapters' product."""
    layers = _adapter_layers(model).values()
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True  # peft's enable_adapters() would also switch requires_grad, which FSDP has read
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


def adapter_values(model: Any, *, seed: int) -> dict[str, torch.Tensor]:
    """peft's initial values, unsharded, by parameter name: A uniform in +-1/sqrt(columns) (Kaiming, a = sqrt 5), B zero."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, torch.Tensor] = {}
    for name, layer in _adapter_layers(model).items():
        a, b = (torch.zeros(factor[ADAPTER].weight.shape) for factor in (layer.lora_A, layer.lora_B))
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        values |= {f"{name}.lora_A.{ADAPTER}.weight": a, f"{name}.lora_B.{ADAPTER}.weight": b}
    return values


def gather_weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gather the state of the Hugging Face model with adapters merged, tied tensors once, in `dtype`, on the CPU, as
    `save_pretrained(state_dict=...)` takes it. A collective: every rank calls it; rank 0 gets everything, the others {}."""
    weights = {}
    for source in list_sources(model):
        whole = source.gather()
        if is_leader():
            weights[source.name] = whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype).contiguous()
    return weights


def gather_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Gather the adapter, and the fully trained modules, under the names of peft's files. A collective; {} without adapters."""
    if not _adapter_layers(model):
        return {}
    return {
        # cloned: safetensors refuses tied tensors
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": whole_of(parameter).to("cpu").clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def write_adapter(folder: Path, model: Any, state: dict[str, torch.Tensor]) -> None:
    """Write the `state` that `gather_adapter` returned as a folder for `PeftModel.from_pretrained(base, folder)`. Rank 0 only."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config[ADAPTER]
    config.base_model_name_or_path = model.config.name_or_path
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(state, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})


def _target_names(model: Any, section: LoraSection) -> list[str]:
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if section.target_modules == "all-linear":
        return linear
    return _ending_in(section.target_modules, linear, "model.lora.target_modules")


def _ending_in(wanted: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """The names that are one of `wanted` or end in it. Raises ConfigError, for the setting `key`, where there is none."""
    chosen: list[str] = []
    for end in wanted:
        fitting = [name for name in names if name == end or name.endswith(f".{end}")]
        if not fitting:
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"{key}: no module that can be trained so has a name that ends in {end!r}; there are {known}"
            )
        chosen += [name for name in fitting if name not in chosen]
    return chosen


def _saved_modules(model: Any, section: LoraSection) -> list[str]:
    holding = [name for name, each in model.named_modules() if name and any(True for _ in each.parameters())]
    chosen = _ending_in(section.modules_to_save, holding, "model.lora.modules_to_save")
    own = {id(parameter) for name in chosen for parameter in model.get_submodule(name).parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not _is_in(name, chosen):
            raise ConfigError(
                f"model.lora.modules_to_save: {name} is tied to one of {section.modules_to_save} and would change with it; "
                "name both"
            )
    return chosen


def _is_in(name: str, modules: Sequence[str]) -> bool:
    """Whether `name` is one of the modules or lies inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _adapter_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
