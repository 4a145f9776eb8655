"""A push of adapters alone is of one base and no other. What it serves by either engine: tests/servers/contract.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.config.sections import LoraSection, ModelSection
from grpo_async.errors import ConfigError, WeightPushError
from grpo_async.inference.api import ServedParameters
from grpo_async.training.load import load_policy
from grpo_async.training.parameters import AdapterParameters, choose_parameters
from tests.servers.embedded_support import live, load
from tests.support.adapter_push import adapted_policy, merged, push
from tests.support.tiny_model import build_tiny_model


def _served(server: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in server.engine.parameters().items()}


def test_an_adapter_push_changes_projections_alone_and_as_a_merged_push_does_to_the_last_bit(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, tie_word_embeddings=False)
    policy, section = adapted_policy(folder)
    with live(load(folder), model_path=str(folder)) as server:
        found = [_served(server)]
        for version, kind in enumerate((section, merged(section), section), start=1):
            push(server.url, None, policy, kind, version)
            found.append(_served(server))
    before, *after = found
    for served in after:
        assert {name for name in before if not torch.equal(before[name], served[name])} == {
            name for name in before if "proj" in name
        }
        assert all(torch.equal(served[name], tensor) for name, tensor in after[0].items())


def test_a_server_with_another_base_or_none_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model")
    other = build_tiny_model(tmp_path / "other", seed=1)
    policy, section = adapted_policy(folder)
    parameters = choose_parameters(policy.model, section, served_dtype=torch.float32, device=torch.device("cpu"))
    with live(load(other), model_path=str(other)) as server:
        before = _served(server)
        served = ServedParameters.model_validate_json(server.client.get("/rollout/parameters").content)
        assert "are not those of model.path" in parameters.problems(served)[0]
        # a trainer that does not ask is refused by the server itself
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AdapterParameters, "problems", lambda *_: [])
            with pytest.raises(WeightPushError, match="these adapters have a different base model"):
                push(server.url, None, policy, section, 1)
        assert all(torch.equal(tensor, before[name]) for name, tensor in _served(server).items())
        assert server.info().policy_version == 0
    assert "no safetensors files" in parameters.problems(ServedParameters(shapes={}))[0]


def test_a_base_that_the_trainer_has_rounded_is_refused(tiny_model: Path) -> None:
    lora = LoraSection(rank=4, push="adapter")
    section = ModelSection(path=str(tiny_model), dtype="bfloat16", lora=lora)
    policy = load_policy(section, temperature=1.0, chunk_tokens=16, max_model_len=64)
    with pytest.raises(ConfigError, match=r"model\.lora\.push: .* \(float32\), the trainer has it rounded"):
        AdapterParameters(policy.model, section, served_dtype=torch.float32)
