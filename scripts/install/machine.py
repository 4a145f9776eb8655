"""Looks at this computer: system, GPU, free disk, local wheels, and whether PyTorch's CPU index answers."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from scripts.install.plan import Machine

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PROBE_TIMEOUT_S = 5.0
_NVIDIA_SMI_TIMEOUT_S = 20.0


def look(*, find_links: Sequence[str], torch_version: str, cpu_index: str) -> Machine:
    """Facts for `make_plan`; the CPU index is asked only when the plan needs the answer."""
    gpu, driver = _nvidia()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        glibc=platform.system() != "Linux" or platform.libc_ver()[0] == "glibc",
        macos=int(platform.mac_ver()[0].split(".")[0] or 0),
        gpu=gpu,
        driver=driver,
        c_compiler=any(shutil.which(name) for name in ("cc", "gcc", "clang")),
        local_torch=find_cpu_wheel(find_links, torch_version, platform.machine()),
        cpu_index_answers=lambda: answers(cpu_index),
    )


def has_gpu() -> bool:
    return _nvidia()[0] is not None


def find_cpu_wheel(find_links: Sequence[str], version: str, architecture: str) -> str | None:
    """The first folder of `find_links` with torch's +cpu wheel for this Python and processor. Pages are not read."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = re.compile(
        rf"torch-{re.escape(version)}(\+|%2B)cpu-{tag}-{tag}-(many)?linux.*_{re.escape(architecture)}\.whl"
    )
    for link in find_links:
        folder = Path(urllib.parse.unquote(urllib.parse.urlsplit(link).path) if link.startswith("file:") else link)
        if folder.is_dir() and any(wheel.fullmatch(entry) for entry in os.listdir(folder)):
            return str(folder)
    return None


def answers(index: str) -> bool:
    """Whether the index serves a page for torch within five seconds. An index that is down is an answer: no."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=_PROBE_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def free_gb(folder: Path) -> float:
    return shutil.disk_usage(folder).free / 1e9


def _nvidia() -> tuple[str | None, int]:
    """Name of the first GPU and major version of the driver; a driver that hangs is told and counts as no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None, 0
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        print(
            f"bootstrap: nvidia-smi does not answer within {_NVIDIA_SMI_TIMEOUT_S:.0f} s; taken as no GPU", flush=True
        )
        return None, 0
    first = result.stdout.strip().splitlines()[:1]
    if result.returncode != 0 or not first:
        return None, 0
    name, _, driver = first[0].rpartition(",")
    major = driver.strip().split(".")[0]
    return name.strip() or None, int(major) if major.isdigit() else 0
