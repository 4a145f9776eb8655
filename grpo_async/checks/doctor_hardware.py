"""Doctor: system, CPUs, memory, GPUs, limits, disks, clock."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_async.checks.memory import format_bytes
from grpo_async.checks.report import Check, failed, passed, warned

_GIB = 1 << 30
_MIN_OPEN_FILES = (
    4096  # a connection per completion in flight (rollout.max_in_flight 256), sockets, logs, the sandbox's pipes
)
_FEW_OPEN_FILES = 1024
_MIN_PROCESSES = 1024
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")
_NVIDIA_SMI_LIMIT_S = 8.0
_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes; of the machine, or of the container where that allows less."""

    total: int
    available: int


def machine_memory(
    limit_files: tuple[str, ...] = _CGROUP_FILES, usage_files: tuple[str, ...] = _CGROUP_USAGE
) -> Memory:
    """RAM that this process may use. `limit_files` and `usage_files` are those of the control group, v2 and v1."""
    import psutil

    machine = psutil.virtual_memory()
    limit, usage = _first_number(limit_files), _first_number(usage_files)
    if limit is None or limit >= machine.total:
        return Memory(total=machine.total, available=machine.available)
    return Memory(total=limit, available=max(0, min(machine.available, limit - (usage or 0))))


def check_system() -> Check:
    """Linux is what everything runs on; macOS runs the embedded engine."""
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() == "Linux":
        return passed("system", name)
    if platform.system() == "Darwin":
        return warned(
            "system", f"{name}: inference.engine: embedded works here; vLLM and the sandbox's walls want Linux"
        )
    return failed("system", f"{name}: not supported; use Linux (WSL 2 on Windows)")


def check_cpus() -> Check:
    """Server and trainer want a core each, and the rollout thread one."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cpu_quota()
    words = f"{usable} usable of {os.cpu_count()}"
    if quota is not None and quota < usable:
        words += f", the container may use {quota:g} of them"
    load = os.getloadavg()[0]
    words += f", load {load:.1f}"
    if min(usable, quota or usable) < 2:
        return warned("cpus", f"{words}: server and trainer take turns on one core; everything works, slowly")
    if load > 2 * usable:
        return warned("cpus", f"{words}: other programs keep them busy; timings and time limits will suffer")
    return passed("cpus", words)


def check_memory() -> Check:
    """RAM of the machine, or of the container where that allows less."""
    import psutil

    memory = machine_memory()
    swap = psutil.swap_memory().total
    words = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} free, swap {format_bytes(swap)}"
    if memory.available < 2 * _GIB:
        return warned("memory", f"{words}: torch alone takes half a GiB in each of three processes; end other programs")
    return passed("memory", words)


def has_gpu_driver() -> bool:
    """Whether an NVIDIA driver is there, whatever else works of it."""
    return _DRIVER.is_file() or shutil.which("nvidia-smi") is not None


def check_gpus() -> list[Check]:
    """What the driver says; torch's own view is in the line `torch`."""
    if not has_gpu_driver():
        return [passed("gpus", "none (no NVIDIA driver): trainer and server run on the CPU")]
    if shutil.which("nvidia-smi") is None:
        driver = _DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0]
        return [
            warned("gpus", f"there is a driver ({driver}), but nvidia-smi is not in PATH, so it could not be asked")
        ]
    fields = "index,name,driver_version,memory.total,memory.used,compute_cap,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return [
            failed(
                "gpus",
                f"nvidia-smi did not answer within {_NVIDIA_SMI_LIMIT_S:g} s: the driver hangs; restart the machine",
            )
        ]
    if answer.returncode != 0:
        message = (answer.stdout + answer.stderr).strip()[:300]
        return [
            failed("gpus", f"nvidia-smi failed ({message}): driver and kernel module do not fit; reinstall the driver")
        ]
    return [_gpu(line) for line in answer.stdout.splitlines() if line.strip()] or [
        warned("gpus", "nvidia-smi lists none")
    ]


def _gpu(line: str) -> Check:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 7:
        return warned("gpus", f"nvidia-smi said something unknown: {line[:120]}")
    index, name, driver, total, used, capability, mig = parts
    words = f"{index}: {name}, driver {driver}, compute capability {capability}, {used} of {total} MiB used"
    if mig == "Enabled":
        return warned(
            "gpus", f"{words}; MIG is on: a process sees one slice only, and nccl and ipc do not work between slices"
        )
    if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
        return warned(
            "gpus", f"{words}: another program holds memory, which vLLM's share does not know of; see nvidia-smi"
        )
    if capability.replace(".", "", 1).isdecimal() and float(capability) < 8.0:
        return warned(
            "gpus", f"{words}: no bfloat16 in hardware; keep inference.dtype and model.compute_dtype at float32"
        )
    return passed("gpus", words)


def check_limits() -> list[Check]:
    """ulimits: open files, processes, locked memory."""
    return [_open_files(), _processes(), _locked_memory()]


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"open files {_limit(soft)} (hard {_limit(hard)})"
    if _is_below(soft, _FEW_OPEN_FILES):
        return failed("limits", f"{words}: too few for a run; `ulimit -n {_MIN_OPEN_FILES}` before it")
    if _is_below(soft, _MIN_OPEN_FILES):
        return warned(
            "limits",
            f"{words}: each completion in flight is a connection, on both sides; above rollout.max_in_flight "
            f"{(soft - 200) // 2} do `ulimit -n {_MIN_OPEN_FILES}` first",
        )
    return passed("limits", words)


def _processes() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    words = f"processes and threads {_limit(soft)}"
    if _is_below(soft, _MIN_PROCESSES):
        return warned(
            "limits", f"{words}: vLLM and torch start some hundreds of threads; `ulimit -u {4 * _MIN_PROCESSES}`"
        )
    return passed("limits", words)


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = f"locked memory {'unlimited' if soft == resource.RLIM_INFINITY else format_bytes(soft)}"
    if soft != resource.RLIM_INFINITY and soft < 64 << 20 and Path("/dev/infiniband").is_dir():
        return warned("limits", f"{words}: NCCL over InfiniBand needs more; `ulimit -l unlimited`")
    return passed("limits", words)


def check_shared_memory() -> Check:
    """NCCL and vLLM's workers talk through /dev/shm."""
    if not _SHARED_MEMORY.is_dir():
        if platform.system() == "Linux":
            return warned("shared memory", "there is no /dev/shm: vLLM with several workers, and NCCL, need it")
        return passed("shared memory", "not used on this system")
    usage = shutil.disk_usage(_SHARED_MEMORY)
    words = f"/dev/shm: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < _GIB:
        return warned(
            "shared memory",
            f"{words}: a container's default of 64 MiB is too little for NCCL and vLLM with several workers; start it with "
            "--shm-size=8g or --ipc=host",
        )
    return passed("shared memory", words)


def check_disk() -> list[Check]:
    """The working directory (runs are written below it) and the temporary folder."""
    checks = []
    for what, folder in (("working directory", Path.cwd()), ("TMPDIR", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(folder)
        words = f"{what} {folder}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
        if not os.access(folder, os.W_OK):
            checks.append(failed("disk", f"{words}, but it is not writable; {_elsewhere(what)}"))
        elif usage.free < _GIB // 4:
            checks.append(
                failed("disk", f"{words}: logs and checkpoints will not fit; free space or {_elsewhere(what)}")
            )
        elif usage.free < 5 * _GIB:
            checks.append(
                warned(
                    "disk",
                    f"{words}: a checkpoint of a model of 0.6 billion parameters takes 7 GiB; {_elsewhere(what)}",
                )
            )
        else:
            checks.append(passed("disk", words))
    return checks


def check_clock() -> Check:
    """The clock of day must be plausible (certificates, logs of several machines), the monotonic one must move."""
    now, ticks = time.time(), time.monotonic()
    year = time.gmtime(now).tm_year
    newest_file = max((path.stat().st_mtime for path in Path(__file__).parent.glob("*.py")), default=0.0)
    words = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < newest_file - 86400:
        return warned(
            "clock", f"{words}: before this package was installed; set the clock, or TLS certificates look invalid"
        )
    if time.monotonic() < ticks or not 2024 <= year < 2100:
        return failed("clock", f"{words}: the clock does not work; time limits rely on it")
    return passed("clock", words)


def _cpu_quota() -> float | None:
    """CPUs that the control group allows; None: no limit."""
    file = Path("/sys/fs/cgroup/cpu.max")
    if not file.is_file():
        return None
    quota, period = file.read_text(encoding="ascii").split()
    return None if quota == "max" else int(quota) / int(period)


def _elsewhere(what: str) -> str:
    return "set run.dir to another disk" if what == "working directory" else "set TMPDIR to another folder"


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _first_number(files: tuple[str, ...]) -> int | None:
    for file in files:
        path = Path(file)
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            return int(text) if text.isdecimal() else None  # "max": no limit
    return None
