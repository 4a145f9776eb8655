"""The ranks that the tests of training run on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_on_ranks


def spoil(failing: int | None) -> dict[str, Any]:
    """What a job finds, which it then changes; one rank fails where the others wait for it."""
    found = {
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "spoiled": hasattr(torch, "spoiled"),
    }
    torch.set_default_dtype(torch.float64)
    torch.spoiled = True  # type: ignore[attr-defined]
    if dist.get_rank() == failing:
        raise RuntimeError(f"rank {failing} of {os.environ['WORLD_SIZE']} breaks")
    ones = torch.ones(())
    dist.all_reduce(ones)
    return {**found, "sum": float(ones)}


def test_a_failing_rank_ends_its_job_with_its_traceback_and_the_next_job_finds_nothing_of_it(tmp_path: Path) -> None:
    clean = {"dtype": "torch.float32", "threads": 1, "spoiled": False}
    assert run_on_ranks("spoil", 1, tmp_path / "first", module=__name__, failing=None) == {**clean, "sum": 1.0}
    with pytest.raises(AssertionError, match="RuntimeError: rank 1 of 2 breaks"):
        run_on_ranks("spoil", 2, tmp_path / "failing", module=__name__, failing=1)
    assert run_on_ranks("spoil", 2, tmp_path / "second", module=__name__, failing=None) == {**clean, "sum": 2.0}
