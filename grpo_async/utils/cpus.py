"""How many CPUs there are for this process, and which packages are built for CPUs."""

from __future__ import annotations

import os
import sys


def usable_cpus() -> int:
    """A scheduler or a container may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_cpu_build(version: str) -> bool:
    """Whether a version of torch or vLLM is one built for CPUs: "2.13.0+cpu"."""
    return version.partition("+")[2].startswith("cpu")
