"""Runs jobs on ranks, of gloo or of NCCL: `run_on_ranks`.

One process for each test process, started by its first job (`python -m tests.support.ranks`), imports torch once and then forks
the ranks of every job: any number of them, each a fresh process with the environment that torchrun sets and a process group of
its own. So a job starts without importing anything, and nothing that it patches, seeds or breaks is there for the next one.
torchrun itself is tested by tests/launch and tests/e2e.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from grpo_async.utils.processes import die_with_parent, importing_much

LIMIT_S = 300.0
PRELOADED = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3",
    "tests.support.checkpoint_jobs", "tests.training.statistics_jobs",
)  # fmt: skip
"""What most jobs need, libraries import late, and a fork would otherwise import again."""


def run_on_ranks(
    job: str, world_size: int, folder: Path, *, module: str = "tests.support.rank_jobs", **arguments: Any
) -> dict[str, Any]:
    """Run `{module}.{job}` on every rank; returns what rank 0 returned (JSON). `folder`: of this job alone. With an argument
    `device: cuda` the ranks have NCCL, and take turns with the GPUs if there are fewer."""
    folder.mkdir(parents=True, exist_ok=True)
    order = {"module": module, "job": job, "world_size": world_size, "folder": folder, "arguments": arguments}
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(order, default=str) + "\n")
    server.stdin.flush()
    answered, _, _ = select.select([server.stdout], [], [], LIMIT_S)
    answer = server.stdout.readline() if answered else ""
    if not answer:
        _end(server)
        _server.cache_clear()  # the next job starts another one
    logs = "\n".join(f"-- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(folder.glob("rank_*.log")))
    assert answered, f"{job} has not ended within {LIMIT_S:.0f} s\n{logs}"
    assert answer, f"the server of the ranks ended during {job}: exit status {server.returncode}\n{logs}"
    assert json.loads(answer) == [0] * world_size, f"{job}: exit statuses of its ranks {answer.strip()}\n{logs}"
    return json.loads((folder / "result.json").read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ranks", str(os.getpid())],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """Its ranks end with it."""
    server.kill()
    server.wait(30.0)


# -- in the server, and in the ranks that it forks


def main() -> None:
    """Answers each line of stdin, an order for a job, by a line of stdout: the exit statuses of its ranks."""
    die_with_parent(int(sys.argv[1]))
    with importing_much():
        for module in PRELOADED:
            importlib.import_module(module)
    gc.freeze()
    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "only a process of one thread can be forked"
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(order: dict[str, Any]) -> list[int]:
    """As torchrun does: the first rank that fails takes the others with it."""
    statuses: dict[int, int] = {}
    ranks: dict[int, int] = {}
    server = os.getpid()
    for rank in range(order["world_size"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, server, **order)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        if status != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return [status for _, status in sorted(statuses.items())]


def _be_rank(
    rank: int, server: int, *, module: str, job: str, world_size: int, folder: str, arguments: dict[str, Any]
) -> NoReturn:
    status = 1
    try:
        die_with_parent(server)
        log = os.open(Path(folder) / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        on_gpu = arguments.get("device") == "cuda"
        local_rank = rank % torch.cuda.device_count() if on_gpu else rank
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
        if on_gpu:
            os.environ["NCCL_HOSTID"] = str(rank)  # NCCL refuses two ranks of one host on one GPU
            torch.cuda.set_device(local_rank)
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        returned = getattr(importlib.import_module(module), job)(**arguments)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(returned))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:  # noqa: BLE001 - its log has the traceback, its status says the rest
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a thread of gloo that outlives the group aborts a busy interpreter at its end, rarely


if __name__ == "__main__":
    main()
