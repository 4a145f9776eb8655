"""The doctor: checks of this machine that matter to a run, as a table. Needs no configuration, and neither torch nor transformers.

A check that breaks is a failed line, and does not affect the others.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
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
    """Look at this machine; the checks in the order of the table."""
    return [check for name, look in _CHECKS.items() for check in run_check(name, look)]


def has_gpu_driver() -> bool:
    """Whether an NVIDIA driver is there, even if it does not work."""
    return has_gpu_devices() or shutil.which("nvidia-smi") is not None


def check_python() -> Iterator[Found]:
    yield "pass", f"{platform.python_version()}, {sys.executable}, {platform.platform()}"


def check_gpus() -> Iterator[Found]:
    """What the driver says; torch's own view is in the line `torch`."""
    if not has_gpu_driver():
        yield "pass", "none (no NVIDIA driver): trainer and server run on the CPU"
    elif shutil.which("nvidia-smi") is None:
        yield "warn", "there is a driver, but nvidia-smi is not in PATH, so it could not be asked"
    else:
        fields = ("index", "name", "driver_version", "memory.total", "memory.used")
        rows = query_gpus(*fields, timeout_s=_NVIDIA_SMI_TIMEOUT_S)
        if not rows:
            yield "warn", "nvidia-smi lists none"
        for index, name, driver, total, used in rows:
            yield "pass", f"{index}: {name}, driver {driver}, {used} of {total} MiB used"


def check_torch() -> Iterator[Found]:
    """torch as it imports: version, CUDA, NCCL, gloo."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield "fail", "not installed: run ./scripts/bootstrap.sh, which takes the build that fits this machine"
        return
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError, RuntimeError) as error:
        yield "fail", f"{version} cannot be imported ({error}): reinstall it"
        return
    message = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}"
    if not dist.is_available() or not dist.is_gloo_available():
        yield "fail", f"{message}: without gloo, so weights cannot be sent to the servers; install an official build"
    elif torch.cuda.is_available():
        nccl = "with NCCL" if dist.is_nccl_available() else "without NCCL, which several trainer ranks on GPUs need"
        yield "pass", f"{message}, sees {count(torch.cuda.device_count(), 'GPU')}, {nccl}"
    elif torch.version.cuda is not None and has_gpu_driver():
        reason = "the driver is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs"
        yield "fail", f"{message}, but it sees no GPU although there is a driver: {reason}"
    else:
        yield "pass", f"{message}, gloo, no GPU"


def check_vllm() -> Iterator[Found]:
    """vLLM: there, of a supported version, with the plugin. Without importing it."""
    found = distribution()
    if found is None:
        message = f"not installed, so inference.engine: auto selects the embedded engine; {INSTALL}"
        yield ("warn", f"{message}: on GPUs it generates far faster") if has_gpu_driver() else ("pass", message)
    elif fault := installation_fault(*found):
        yield "fail", fault
    else:
        yield "pass", f"{' '.join(found)}, supported, with our plugin"


def check_limits() -> Iterator[Found]:
    """The limit of open files."""
    limit = open_files_limit()  # `train` raises the soft limit to the hard one
    advice = f": each completion in flight is a connection, on both sides; `ulimit -Hn {_NEEDED_OPEN_FILES}` as root"
    is_enough = limit >= _NEEDED_OPEN_FILES
    yield ("pass" if is_enough else "warn"), f"open files {limit}{'' if is_enough else advice}"


def check_disk() -> Iterator[Found]:
    """The working directory (runs are written below it), and /dev/shm, through which NCCL and vLLM's workers talk."""
    folder, shared = Path.cwd(), Path("/dev/shm")
    free = shutil.disk_usage(folder).free
    message = f"working directory {folder}: {format_bytes(free)} free"
    if not os.access(folder, os.W_OK):
        yield "fail", f"{message}, but it is not writable; set run.dir to another disk"
    elif free < 5 * _GIB:
        yield "warn", f"{message}: a checkpoint of a model of 0.6 billion parameters takes 7 GiB"
    else:
        yield "pass", message
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < _GIB:
        advice = "too little for NCCL and vLLM with several workers; start the container with --shm-size=8g"
        yield "warn", f"/dev/shm: {format_bytes(free)} free: {advice}"


def check_sandbox() -> Iterator[Found]:
    """The restrictions on code that a model wrote: needed by the Python tool and the code reward only."""
    from grpo_async.sandbox import SandboxError, startup_notes

    try:
        notes = startup_notes(require=())
    except SandboxError as error:
        yield "warn", f"it cannot run at all ({error}): the Python tool and the code reward do not work here"
        return
    if not notes:
        yield "pass", "has Landlock and seccomp"
    for note in notes:
        yield "warn", f"{note}. The Python tool and the code reward refuse to work without it"


_CHECKS: dict[str, Callable[[], Iterable[Found]]] = {
    "python": check_python,
    "gpus": check_gpus,
    "torch": check_torch,
    "vllm": check_vllm,
    "limits": check_limits,
    "disk": check_disk,
    "sandbox": check_sandbox,
}
