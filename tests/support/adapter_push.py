"""The trainer's end of a push of adapters, or of merged weights, to a server that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_async.config.sections import LoraSection, ModelSection, WeightsSection
from grpo_async.inference.control import ServerControl
from grpo_async.training.load import load_policy
from grpo_async.training.model import Policy
from grpo_async.training.parameters import choose_parameters
from grpo_async.weights.push import WeightTransport, push_weights

LIMIT_S = 60.0


def adapted_policy(folder: Path, *, seed: int = 0, **lora: Any) -> tuple[Policy, ModelSection]:
    """A policy whose adapters change what it says; `push` is adapter unless `lora` says otherwise."""
    section = ModelSection(path=str(folder), lora=LoraSection(**{"rank": 4, "push": "adapter", **lora}))
    policy = load_policy(section, temperature=1.0, chunk_tokens=16, max_model_len=512)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)
    return policy, section


def push(url: str, token: str | None, policy: Policy, section: ModelSection, version: int) -> dict[str, float]:
    """One push as a run makes it, of what `model.lora.push` says; its metrics."""
    parameters = choose_parameters(policy.model, section, served_dtype=torch.float32, device=torch.device("cpu"))
    control = ServerControl(url, token=token, timeout_s=LIMIT_S)
    transport = WeightTransport(
        "gloo", host="127.0.0.1", bucket_bytes=10_000, timeout_s=LIMIT_S, device=torch.device("cpu")
    )
    try:
        control.info()
        assert parameters.problems(control.parameters()) == []
        return push_weights(
            parameters,
            version=version,
            servers=[control],
            transport=transport,
            settings=WeightsSection(timeout_s=LIMIT_S),
        )
    finally:
        transport.close()
        control.close()


def merged(section: ModelSection) -> ModelSection:
    """The same with `push: merged`."""
    assert section.lora is not None
    return section.model_copy(update={"lora": section.lora.model_copy(update={"push": "merged"})})
