"""Chooses a run's inference engine, and says why: the configured one, otherwise one that this machine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_async.config import ExperimentConfig
from grpo_async.config.base import EngineName
from grpo_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The decision. `engine` is external if this machine starts no servers; `on_gpu`: those that it starts work on GPUs."""

    engine: Literal[EngineName, "external"]
    reason: str
    on_gpu: bool = False


def choose_engine(config: ExperimentConfig, *, is_here: bool = True) -> EngineChoice:
    """Choose the engine. `is_here`: false for other machines, which are assumed to have what the configuration needs."""
    inference = config.inference
    if inference.urls:
        what = "a running server" if len(inference.urls) == 1 else f"{len(inference.urls)} running servers"
        return EngineChoice(engine="external", reason=f"inference.urls names {what}")
    embedded_on_gpu = inference.embedded.device == "cuda"
    if inference.engine == "embedded":
        return EngineChoice(engine="embedded", reason="set by inference.engine", on_gpu=embedded_on_gpu)
    if not is_here:
        reason = f"inference.engine: {inference.engine}; not checked on this machine"
        return EngineChoice(engine="vllm", reason=reason, on_gpu=config.launch.device != "cpu")

    from grpo_async.servers.vllm.command import installed_platform, vllm_usable

    usable, reason = vllm_usable()
    if inference.engine == "vllm":
        if not usable:
            raise ConfigError(f"inference.engine: vllm is not usable here: {reason}; or set inference.engine: embedded")
        return EngineChoice(engine="vllm", reason="set by inference.engine", on_gpu=installed_platform() == "gpu")
    reason = f"{reason} (inference.engine: auto)"
    if not usable:
        return EngineChoice(engine="embedded", reason=reason, on_gpu=embedded_on_gpu)
    return EngineChoice(engine="vllm", reason=reason, on_gpu=installed_platform() == "gpu")
