"""The doctor: checks of this machine that matter to a run, as a table. Needs no configuration, and neither torch nor transformers.

Each check runs in its own thread, four at a time: one that breaks or hangs is a failed line, and does not affect the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_async.checks.report import Check, Found, run_check
from grpo_async.processes.machine import has_gpu_devices, query_gpus
from grpo_async.servers.vllm.command import INSTALL, distribution, installation_fault
from grpo_async.utils.processes import open_files_limit
from grpo_async.utils.text import clipped, count, format_bytes

_TIMEOUT_S = 30.0  # importing torch takes two seconds, on a busy machine or a slow disk far more
_NVIDIA_SMI_TIMEOUT_S = 8.0
_GIB = 1 << 30
_NEEDED_OPEN_FILES = 4096
"""Enough for a connection per completion in flight (rollout.max_in_flight 256), sockets, logs, the sandbox's pipes."""
_SHARED_MEMORY = Path("/dev/shm")


def run_doctor() -> list[Check]:
    """Look at this machine; the checks in the order of the table."""
    with ThreadPoolExecutor(max_workers=4) as pool:  # run_check leaves each check after its limit
        results = pool.map(lambda entry: run_check(*entry, timeout_s=_TIMEOUT_S), _CHECKS.items())
        return [check for found in results for check in found]


# ---- the machine ----


def has_gpu_driver() -> bool:
    """Whether an NVIDIA driver is there, even if it does not work."""
    return has_gpu_devices() or shutil.which("nvidia-smi") is not None


def check_gpus() -> Iterator[Found]:
    """What the driver says; torch's own view is in the line `torch`."""
    if not has_gpu_driver():
        yield "pass", "none (no NVIDIA driver): trainer and server run on the CPU"
    elif shutil.which("nvidia-smi") is None:
        yield "warn", "there is a driver, but nvidia-smi is not in PATH, so it could not be asked"
    else:
        fields = ("index", "name", "driver_version", "memory.total", "memory.used", "compute_cap", "mig.mode.current")
        rows = query_gpus(*fields, timeout_s=_NVIDIA_SMI_TIMEOUT_S)
        if not rows:
            yield "warn", "nvidia-smi lists none"
        yield from map(_gpu, rows)


def _gpu(parts: list[str]) -> Found:
    if len(parts) != 7:
        return "warn", f"nvidia-smi said something unknown: {clipped(', '.join(parts), 120)}"
    index, name, driver, total, used, capability, mig = parts
    message = f"{index}: {name}, driver {driver}, compute capability {capability}, {used} of {total} MiB used"
    if mig == "Enabled":
        return "warn", f"{message}; MIG is on: a process sees one slice only; nccl and ipc do not work between slices"
    if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
        return "warn", f"{message}: another program holds memory, which vLLM does not know of; see nvidia-smi"
    if capability.partition(".")[0].isdecimal() and float(capability) < 8.0:
        return (
            "warn",
            f"{message}: no bfloat16 in hardware; set inference.dtype and model.compute_dtype to float16 or float32",
        )
    return "pass", message


def check_limits() -> Iterator[Found]:
    """The limit of open files."""
    limit = open_files_limit()  # `train` raises the soft limit to the hard one
    message = f"open files {limit}"
    if limit >= _NEEDED_OPEN_FILES:
        yield "pass", message
        return
    advice = f"each completion in flight is a connection, on both sides; `ulimit -Hn {_NEEDED_OPEN_FILES}` as root"
    yield ("fail" if limit < 1024 else "warn"), f"{message}: {advice}"


def check_disk() -> Iterator[Found]:
    """The working directory (runs are written below it), and /dev/shm, through which NCCL and vLLM's workers talk."""
    folder = Path.cwd()
    usage = shutil.disk_usage(folder)
    message = f"working directory {folder}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if not os.access(folder, os.W_OK):
        yield "fail", f"{message}, but it is not writable; set run.dir to another disk"
    elif usage.free < _GIB // 4:
        yield "fail", f"{message}: logs and checkpoints will not fit; free space or set run.dir to another disk"
    elif usage.free < 5 * _GIB:
        yield "warn", f"{message}: a checkpoint of a model of 0.6 billion parameters takes 7 GiB"
    else:
        yield "pass", message
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        message = f"/dev/shm: {format_bytes(free)} free"
        if free < _GIB:
            message += ": too little for NCCL and vLLM with several workers; start the container with --shm-size=8g"
        yield ("warn" if free < _GIB else "pass"), message


# ---- Python and its packages ----


def check_python() -> Iterator[Found]:
    """The interpreter, and the system that it runs on."""
    yield "pass", f"{platform.python_version()}, {sys.executable}, {platform.platform()}"


def check_torch() -> Iterator[Found]:
    """torch as it imports: version, CUDA, NCCL, gloo."""
    version = _version("torch")
    if version is None:
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
    elif torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield "pass", f"{message}, sees {count(torch.cuda.device_count(), 'GPU')}, NCCL {nccl}"
    elif torch.cuda.is_available():
        yield "warn", f"{message}, NCCL missing: weights.transport: nccl and several trainer ranks on GPUs need it"
    elif torch.version.cuda is not None and has_gpu_driver():
        reason = "the driver is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs"
        yield "fail", f"{message}, but it sees no GPU although there is a driver: {reason}"
    else:
        yield "pass", f"{message}, gloo, no GPU"


def check_vllm() -> Iterator[Found]:
    """vLLM: there, of a supported version, with the plugin and the torch it wants. Without importing it."""
    found = distribution()
    if found is None:
        message = f"not installed, so inference.engine: auto selects the embedded engine; {INSTALL}"
        yield ("warn", f"{message}: on GPUs it generates far faster") if has_gpu_driver() else ("pass", message)
        return
    name, version = found
    if fault := installation_fault(name, version):
        yield "fail", fault
    elif other := _other_torch(name):
        yield "warn", f"{name} {version} wants {other}, installed is torch {_version('torch')}; {INSTALL}"
    else:
        yield "pass", f"{name} {version}, supported, with our plugin"


def _other_torch(name: str) -> str | None:
    """The torch that the package `name` requires, where the installed one is another."""
    from packaging.requirements import Requirement

    lines = [line for line in importlib.metadata.requires(name) or [] if re.match(r"torch\b", line)]
    version = _version("torch") or "0"
    others = (line for line in lines if not Requirement(line).specifier.contains(version, prereleases=True))
    return next(others, None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the sandbox ----


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
