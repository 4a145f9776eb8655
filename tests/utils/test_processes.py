"""A child that ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

_CHILD = """
import sys
from grpo_async.utils.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
print("goes on")
"""


def _child_of(parent: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _CHILD, str(parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)


def test_a_child_whose_parent_ended_while_it_was_starting_ends() -> None:
    """By then it is init's child, or that of whoever else adopts orphans: not of the process that it was told."""
    assert _child_of(os.getpid()).stdout == "goes on\n"
    orphan = _child_of(os.getpid() + 1)
    assert (orphan.returncode, orphan.stdout) == (1, "")
