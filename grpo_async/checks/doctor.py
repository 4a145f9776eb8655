"""The doctor: checks of this machine that matter to a run. Needs no configuration, and neither torch nor transformers."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_async.checks.report import Check, Found, run_check
from grpo_async.processes.machine import has_gpu_devices, query_gpus
from grpo_async.servers.vllm.command import INSTALL, distribution, installation_fault
from grpo_async.utils.processes import open_files_limit
from grpo_async.utils.text import count, format_bytes

_NVIDIA_SMI_TIMEOUT_S = 8.0
_GIB = 1 << 30
_NEEDED_OPEN_FILES = 4096
"""Enough for a connection per completion in flight (rollout.max_in_flight 256), sockets, logs, the sandbox's pipes."""


def run_doctor() -> list[Check]:
    return [run_check(name, look) for name, look in _CHECKS.items()]


def has_gpu_driver() -> bool:
    """Whether an NVIDIA driver is there, even if it does not work."""
    return has_gpu_devices() or shutil.which("nvidia-smi") is not None


def check_gpus() -> Found:
    """What the driver says; torch's own view is in the line `torch`."""
    if not has_gpu_driver():
        return "pass", "none (no NVIDIA driver): trainer and server run on the CPU"
    if shutil.which("nvidia-smi") is None:
        return "warn", "there is a driver, but nvidia-smi is not in PATH, so it could not be asked"
    rows = query_gpus("index", "name", "driver_version", "memory.total", timeout_s=_NVIDIA_SMI_TIMEOUT_S)
    if not rows:
        return "warn", "nvidia-smi lists none"
    return "pass", "; ".join(f"{index}: {name}, driver {driver}, {total} MiB" for index, name, driver, total in rows)


def check_torch() -> Found:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "fail", "not installed: run ./scripts/bootstrap.sh, which takes the build that fits this machine"
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError, RuntimeError) as error:
        return "fail", f"{version} cannot be imported ({error}): reinstall it"
    message = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}"
    if not dist.is_available() or not dist.is_gloo_available():
        return "fail", f"{message}: without gloo, so weights cannot be sent to the servers; install an official build"
    if torch.cuda.is_available():
        nccl = "with NCCL" if dist.is_nccl_available() else "without NCCL, which several trainer ranks on GPUs need"
        return "pass", f"{message}, sees {count(torch.cuda.device_count(), 'GPU')}, {nccl}"
    if torch.version.cuda is not None and has_gpu_driver():
        reason = "the driver is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs"
        return "fail", f"{message}, but it sees no GPU although there is a driver: {reason}"
    return "pass", f"{message}, gloo, no GPU"


def check_vllm() -> Found:
    """vLLM: there, of a supported version, with the plugin. Without importing it."""
    found = distribution()
    if found is None:
        message = f"not installed, so inference.engine: auto selects the embedded engine; {INSTALL}"
        return ("warn", f"{message}: on GPUs it generates far faster") if has_gpu_driver() else ("pass", message)
    if fault := installation_fault(*found):
        return "fail", fault
    return "pass", f"{' '.join(found)}, supported, with our plugin"


def check_limits() -> Found:
    limit = open_files_limit()  # `train` raises the soft limit to the hard one
    if limit >= _NEEDED_OPEN_FILES:
        return "pass", f"open files {limit}"
    advice = f"each completion in flight is a connection, on both sides; `ulimit -Hn {_NEEDED_OPEN_FILES}` as root"
    return "warn", f"open files {limit}: {advice}"


def check_shared_memory() -> Found:
    """/dev/shm, through which NCCL and vLLM's workers talk."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or (free := shutil.disk_usage(shared).free) >= _GIB:
        return "pass", "enough for NCCL and vLLM with several workers"
    return "warn", f"/dev/shm: {format_bytes(free)} free: start the container with --shm-size=8g"


def check_sandbox() -> Found:
    """The restrictions on code that a model wrote: needed by the Python tool and the code reward only."""
    from grpo_async.sandbox import SandboxError, problem

    try:
        why = problem()
    except SandboxError as error:
        why = f"it cannot run at all ({error})"
    if why is None:
        return "pass", "has Landlock and seccomp"
    return "warn", f"{why}. The Python tool and the code reward refuse to work without it"


_CHECKS: dict[str, Callable[[], Found]] = {
    "gpus": check_gpus,
    "torch": check_torch,
    "vllm": check_vllm,
    "limits": check_limits,
    "shared memory": check_shared_memory,
    "sandbox": check_sandbox,
}
