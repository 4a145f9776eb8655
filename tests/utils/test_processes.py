"""How a process ended, in words."""

from __future__ import annotations

import pytest

from grpo_async.utils.processes import describe_exit


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL (often the kernel, out of memory: see `dmesg`)"),
        (-35, "was killed by signal 35"),  # a real-time signal without a name
    ],
)
def test_a_status_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words
