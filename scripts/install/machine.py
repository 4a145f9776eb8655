"""Looks at this computer: system, GPU, local wheels, whether PyTorch's CPU index answers; and reads what the user told pip about
where packages come from, for uv reads neither pip.conf nor PIP_* variables."""

from __future__ import annotations

import configparser
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.install.plan import CPU_INDEX, Machine

_PROBE_TIMEOUT_S = 5.0
_NVIDIA_SMI_TIMEOUT_S = 20.0
_PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "no-index": "UV_NO_INDEX",
}


def look(*, find_links: Sequence[str], torch_version: str) -> Machine:
    """Facts for `make_plan`; the CPU index is asked only when the plan needs the answer."""
    gpu, driver = _nvidia()
    cpu_index = os.environ.get("GRPO_ASYNC_TORCH_INDEX") or CPU_INDEX
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        glibc=platform.system() != "Linux" or platform.libc_ver()[0] == "glibc",
        macos=int(platform.mac_ver()[0].split(".")[0] or 0),
        gpu=gpu,
        driver=driver,
        c_compiler=any(shutil.which(name) for name in ("cc", "gcc", "clang")),
        local_torch=find_cpu_wheel(find_links, torch_version, platform.machine()),
        cpu_index=cpu_index,
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


def _nvidia() -> tuple[str | None, int]:
    """Name of the first GPU and major version of the driver; a driver that hangs is told and counts as no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None, 0
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        print(f"bootstrap: {error}; taken as no GPU", flush=True)
        return None, 0
    first = result.stdout.strip().splitlines()[:1]
    if result.returncode != 0 or not first:
        return None, 0
    name, _, driver = first[0].rpartition(",")
    major = driver.strip().split(".")[0]
    return name.strip() or None, int(major) if major.isdigit() else 0


def uv_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of uv, from pip's: a PIP_* variable wins over pip.conf, a nearer pip.conf over a farther
    one, and a UV_* variable over all."""
    settings: dict[str, str] = {}
    parser = configparser.RawConfigParser()
    try:
        parser.read(_pip_files(environment), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        print(f"bootstrap: pip's settings are not all read: {error}", flush=True)
    for section in filter(parser.has_section, ("global", "install")):
        settings |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    variables = {}
    for name, variable in _PIP_TO_UV.items():
        value = environment.get("PIP_" + name.upper().replace("-", "_")) or settings.get(name, "")
        words = "" if name == "no-index" and value.lower() not in ("1", "true", "yes", "on") else value.split()
        if words and variable not in environment:
            variables[variable] = ",".join(words) if name == "find-links" else " ".join(words)
    if "UV_INDEX" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip takes the best of all indexes
    return variables


def _pip_files(environment: Mapping[str, str]) -> list[str]:
    """pip's configuration files, the farthest first, as `pip config debug` lists them; not all need be there."""
    named = environment.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:  # pip's way to say: none at all
        return []
    home = environment.get("HOME", "/nonexistent")
    mac = f"{home}/Library/Application Support/pip"
    own = mac if os.path.isdir(mac) else f"{environment.get('XDG_CONFIG_HOME') or f'{home}/.config'}/pip"
    shared = reversed(environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"))
    files = [
        *(f"{folder}/pip/pip.conf" for folder in shared),
        "/etc/pip.conf",
        f"{home}/.pip/pip.conf",
        f"{own}/pip.conf",
    ]
    return [*files, named] if named else files
