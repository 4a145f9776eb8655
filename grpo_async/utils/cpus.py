"""How many CPUs there are for this process."""

from __future__ import annotations

import os
import sys


def usable_cpus() -> int:
    """A scheduler or a container may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
