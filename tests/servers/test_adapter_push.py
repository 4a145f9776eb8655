"""A push of adapters alone is of one base and no other. What it serves by either engine: tests/servers/contract.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_async.config.sections import LoraSection, ModelSection
from grpo_async.errors import ConfigError, WeightPushError
from grpo_async.inference.api import ServedParameters
from grpo_async.training.load import load_policy
from grpo_async.training.parameters import AdapterParameters, choose_parameters
from grpo_async.weights.adapters import LORA_A, LORA_B, BaseWeights
from grpo_async.weights.buckets import ParameterSpec
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


def _spec(name: str, *shape: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name=name, dtype_name=dtype, shape=shape)


WEIGHT = "model.layers.0.self_attn.q_proj.weight"  # (64, 64)


def test_factors_that_do_not_fit_the_base_are_named(tiny_model: Path) -> None:
    base = BaseWeights(str(tiny_model))
    shapes = {name: list(spec.shape) for name, spec in base.specs.items()}
    b, a = _spec(WEIGHT + LORA_B, 64, 4), _spec(WEIGHT + LORA_A, 4, 64)
    assert base.update_problems([b, a], shapes, []) == []
    for wrong in (
        [b],
        [b, _spec(WEIGHT + LORA_A, 3, 64)],
        [_spec("unknown.lora_B", 4, 4), _spec("unknown.lora_A", 4, 4)],
        [_spec(WEIGHT + LORA_B, 64, 4, dtype="bfloat16"), a],
    ):
        assert "needs two float32 factors" in base.update_problems(wrong, shapes, [])[0], wrong
    assert f"{WEIGHT}.middle is no factor" in base.update_problems([b, a, _spec(f"{WEIGHT}.middle", 4)], shapes, [])[0]
    twice = [b, _spec(WEIGHT + LORA_B, 64, 4), a]
    assert f"{WEIGHT}{LORA_B} is sent twice" in base.update_problems(twice, shapes, [])
    # the base itself has to be what is served
    assert base.update_problems([], {**shapes, "more": [3]}, []) == ["more is missing"]


def test_a_base_with_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.zeros(2)}, tmp_path / name)
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"w is in two files of .*; copy the model again"):
        BaseWeights(str(tmp_path)).digest  # noqa: B018 - a property that reads


def test_a_base_that_the_trainer_has_rounded_is_refused(tiny_model: Path) -> None:
    lora = LoraSection(rank=4, push="adapter")
    section = ModelSection(path=str(tiny_model), dtype="bfloat16", lora=lora)
    policy = load_policy(section, temperature=1.0, chunk_tokens=16, max_model_len=64)
    with pytest.raises(ConfigError, match=r"model\.lora\.push: .* \(float32\), the trainer has it rounded"):
        AdapterParameters(policy.model, section, served_dtype=torch.float32)
