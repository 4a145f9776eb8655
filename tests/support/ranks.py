"""Runs a function of tests.support.rank_jobs on several gloo ranks under the real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_ranks(
    job: str, num_ranks: int, folder: Path, *, module: str = "tests.support.rank_jobs", **arguments: Any
) -> dict[str, Any]:
    """Run `{module}:{job}` on every rank; returns what rank 0 returned (JSON)."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", str(folder / "rendezvous"), "--rdzv-conf", "store_type=file",
        "--rdzv-id", folder.name, "-m", module, job, str(result), json.dumps(arguments, default=str),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "RANK_STORE": str(folder / "store"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(result.read_text())
