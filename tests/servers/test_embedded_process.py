"""The embedded engine as a separate process: start, token, signals, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.api import GenerateChunk
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.servers.embedded.main import (
    bind_listener,
    load_engine,
)
from tests.servers.embedded_support import make_request, prompt
from tests.support.configs import small_config
from tests.support.ports import free_port

SERVE = """
import sys
from grpo_async.config import ExperimentConfig
from grpo_async.servers.embedded.main import serve_embedded
{patch}
with open(sys.argv[1]) as file:
    config = ExperimentConfig.model_validate_json(file.read())
serve_embedded(config, int(sys.argv[2]))
"""
FAIL_AT_TENTH_STEP = """
from grpo_async.servers.embedded.engine import SlotEngine
step, steps = SlotEngine.step, iter(range(10**6))
def fail(self):
    if next(steps) == 10:
        raise RuntimeError("out of luck")
    step(self)
SlotEngine.step = fail
"""
HEADERS = {"authorization": "Bearer secret"}


def _config(model: Path, **inference: object) -> ExperimentConfig:
    return small_config(model={"path": str(model)}, inference={"engine": "embedded", **inference})


@contextmanager
def _served(
    model: Path, folder: Path, patch: str = "", **inference: object
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    config = folder / "config.json"
    config.write_text(_config(model, **inference).model_dump_json())
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(patch=patch), str(config), str(port)],
        env={**os.environ, TOKEN_VARIABLE: "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # ends at the latest when the process does
        assert line == f"serving {model.name} on http://127.0.0.1:{port}\n"
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate(timeout=20.0)


def test_a_server_whose_engine_fails_logs_the_traceback_and_exits_with_1(tiny_model: Path, tmp_path: Path) -> None:
    with _served(tiny_model, tmp_path, FAIL_AT_TENTH_STEP) as (process, url):
        body = make_request(prompt(4), max_tokens=500).model_dump_json()
        httpx.post(url + "/rollout/generate", content=body, headers=HEADERS, timeout=60.0)
        _, errors = process.communicate(timeout=20.0)
        assert process.returncode == 1
        assert "RuntimeError: out of luck" in errors


def test_a_server_asks_for_the_token_and_ends_at_sigterm_with_an_open_stream(tiny_model: Path, tmp_path: Path) -> None:
    with (
        _served(tiny_model, tmp_path) as (process, url),
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
    ):
        assert client.get("/health").status_code == 200
        assert client.get("/rollout/info").status_code == 401
        body = make_request(prompt(4), max_tokens=1500, flush_interval_s=0.0).model_dump_json()
        with client.stream("POST", "/rollout/generate", content=body, headers=HEADERS) as response:
            lines = response.iter_lines()
            assert GenerateChunk.model_validate_json(next(lines)).token_ids
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            last = GenerateChunk.model_validate_json(list(lines)[-1])
        assert last.finish_reason == "abort"
        process.wait(timeout=10.0)
        assert time.monotonic() - began < 10.0


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
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_engine(_config(tmp_path / "nothing"))
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
