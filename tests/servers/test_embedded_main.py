"""The embedded engine before it serves: how its model is loaded, and who may reach it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.servers.embedded.main import bind_listener, load_engine
from tests.support.configs import small_config


def _config(model: Path, **inference: object) -> ExperimentConfig:
    return small_config(model={"path": str(model)}, inference={"engine": "embedded", **inference})


def test_a_model_loads_in_bfloat16_and_its_own_code_runs_only_where_the_config_says_so(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "tiny_own", "architectures": ["Own"]}
    settings["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'tiny_own'\n"
        "class Own(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = _config(folder, dtype="bfloat16")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_engine(config)
    trusted = config.model.model_copy(update={"trust_remote_code": True})
    parameters = load_engine(config.model_copy(update={"model": trusted})).parameters()
    assert {str(parameter.dtype) for parameter in parameters.values()} == {"torch.bfloat16"}


def test_logits_are_in_float32_where_the_config_says_so(tiny_model: Path) -> None:
    config, tokens = _config(tiny_model, dtype="bfloat16"), list(range(5, 25))
    rounded = load_engine(config)
    head = config.model.model_copy(update={"head_dtype": "float32"})
    engine = load_engine(config.model_copy(update={"model": head}))
    model = engine._model
    with torch.no_grad():
        states = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        logits = states.float() @ model.lm_head.weight.float().T
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(engine.score(tokens)), wanted, atol=1e-4, rtol=0)
    assert (torch.tensor(rounded.score(tokens)) - wanted).abs().max() > 1e-3


def test_an_address_that_others_reach_is_refused_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        bind_listener("0.0.0.0", 0)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    bind_listener("0.0.0.0", 0).close()
