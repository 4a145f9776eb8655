"""Two machines that train and a third that serves, each a network namespace of its own; the run directory is shared."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.e2e.support import REPOSITORY, SMALL, Run, finish, make_run, wait_for
from tests.support.namespaces import Machine, machines, why_not

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PORT = 29400
TOKEN = "a-token-of-the-three-machines"


@dataclass
class Cluster:
    """node 0, node 1 and a server, each on its machine."""

    nodes: list[Machine]
    server: Machine
    run: Run
    listened: set[tuple[str, str]] = field(default_factory=set)
    """(machine, address) of everything that listened while `watch_listeners` ran."""

    def start(self, rank: int, *arguments: str) -> subprocess.Popen[str]:
        return self.nodes[rank].popen(
            [sys.executable, "-m", "grpo_async", "train", str(self.run.config), "--node-rank", str(rank), *arguments],
            cwd=REPOSITORY,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start_both(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """Node 1 first: it waits for node 0."""
        return [self.start(1, *arguments), self.start(0, *arguments)][::-1]

    def serve(self) -> subprocess.Popen[str]:
        return self.server.popen(
            [
                *(sys.executable, "-m", "grpo_async", "serve-embedded", str(self.run.config), "--port", "8000"),
                *("--set", f"inference.host={self.server.address}"),
            ],
            cwd=REPOSITORY,
            env=self._environment(),
        )

    def processes_on(self, rank: int) -> list[psutil.Process]:
        """Living processes of the run on one machine, without the one that holds its namespace."""
        space = os.readlink(f"/proc/{self.nodes[rank].holder}/ns/net")
        found = []
        for process in psutil.process_iter():
            try:
                is_here = os.readlink(f"/proc/{process.pid}/ns/net") == space
                if is_here and process.pid != self.nodes[rank].holder and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def assert_nothing_is_left(self) -> None:
        def is_empty() -> bool:
            return not self.processes_on(0) and not self.processes_on(1)

        wait_for(is_empty, what="every process on both nodes to end", timeout_s=15.0)

    def watch_listeners(self, ended: threading.Event) -> None:
        """Note (machine, address) of everything that listens, until `ended`."""
        while not ended.wait(0.1):
            for machine in (*self.nodes, self.server):
                self.listened |= {(machine.address, address) for address in machine.listening()}

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "GRPO_ASYNC_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def network() -> Iterator[list[Machine]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with machines("10.77.0.1", "10.77.0.2", "10.77.0.3") as found:
        yield found


@pytest.fixture
def cluster(network: list[Machine], tmp_path: Path) -> Iterator[Cluster]:
    *nodes, server = network
    settings = (
        *SMALL,
        "optimizer.lr=0.001",
        "evaluation.num_prompts=8",
        "checkpoint.every_steps=2",
        "launch.nodes=2",
        "training.max_steps=5000",
        f"launch.rdzv={nodes[0].address}:{PORT}",
        f"inference.urls=[http://{server.address}:8000]",
    )
    cluster = Cluster(nodes=nodes, server=server, run=make_run(tmp_path, "quickstart.yaml", settings))
    serving = cluster.serve()
    try:
        yield cluster
    finally:
        serving.kill()
        serving.wait(30.0)
        for rank in (0, 1):
            for process in cluster.processes_on(rank):
                process.kill()


def _ends(processes: list[subprocess.Popen[str]], *codes: int) -> list[str]:
    """What both printed; their exit codes are checked."""
    done = [finish(process, timeout_s=300.0) for process in processes]
    assert tuple(one.returncode for one in done) == codes, "\n=====\n".join(one.stdout[-3000:] for one in done)
    return [one.stdout for one in done]


def _resume_to_the_end(cluster: Cluster) -> None:
    last = cluster.run.checkpoints()[-1] + 2
    _ends(cluster.start_both("--resume", "--set", f"training.max_steps={last}"), 0, 0)
    assert [line["step"] for line in cluster.run.metrics()] == list(range(1, last + 1))
    summary = cluster.run.summary()
    assert (summary["status"], summary["ledger_closed"], summary["num_devices"]) == ("finished", True, 2)


def test_two_machines_train_and_push_to_a_third_one_that_dies_ends_all_and_a_resume_goes_on(cluster: Cluster) -> None:
    ended = threading.Event()
    watching = threading.Thread(target=cluster.watch_listeners, args=(ended,))
    watching.start()
    try:
        processes = cluster.start_both("--set", "weights.verify_every_pushes=1")
        cluster.run.wait_for_step(5, processes[0])
    finally:
        ended.set()
        watching.join(10.0)
    for process in cluster.processes_on(1):  # all at once, as when the power goes
        with contextlib.suppress(psutil.NoSuchProcess):  # it died with its parent
            process.kill()
    outputs = _ends(processes, 1, -signal.SIGKILL)
    assert "error: node 1 (" in outputs[0]
    assert "--resume" in outputs[0]
    cluster.assert_nothing_is_left()
    lines = cluster.run.metrics()
    # after every push the server has the weights that both machines hold together, with a learning rate at which one that was
    # missed would show: samples that are a step old differ by far more
    compared = [line["sync/verify_max"] for line in lines if "sync/verify_max" in line]
    assert len(compared) >= 4
    assert max(compared) < 1e-4
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) > 1e-2
    # node 0, node 1 and server each listen on loopback or on their own address, and nowhere else
    for machine, address in cluster.listened:
        assert address in (machine, "127.0.0.1"), f"something on {machine} listened on {address}"
    first, second, server = (machine.address for machine in (*cluster.nodes, cluster.server))
    assert {(first, first), (second, second), (server, server)} <= cluster.listened
    assert "node 1     trainer rank 1" in (cluster.run.folder / "plan.txt").read_text()
    assert (cluster.run.folder / "logs" / "latest" / "trainer_node1.log").is_file()
    assert TOKEN not in "".join(outputs)
    _resume_to_the_end(cluster)


def test_a_rank_that_is_killed_on_one_machine_ends_both_and_is_named(cluster: Cluster) -> None:
    processes = cluster.start_both()
    cluster.run.wait_for_step(2, processes[0])
    (rank,) = [
        p for p in cluster.processes_on(1) if "grpo_async.trainer.main" in p.cmdline() and "--nnodes" not in p.cmdline()
    ]
    rank.kill()
    outputs = _ends(processes, 1, 1)
    for output in outputs:
        assert f"trainer rank 1 (pid {rank.pid}) was killed by SIGKILL" in output
    assert "reported by node 1 (" in outputs[0]
    cluster.assert_nothing_is_left()


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_sigterm_on_either_machine_or_both_is_one_stop_with_a_checkpoint(cluster: Cluster, ranks: list[int]) -> None:
    """A scheduler sends it to both: it is no second signal, which would end the run without a checkpoint."""
    processes = cluster.start_both()
    cluster.run.wait_for_step(2, processes[0])
    for rank in ranks:
        processes[rank].send_signal(signal.SIGTERM)
    _ends(processes, 143, 143)
    assert cluster.run.checkpoints()[-1] == len(cluster.run.metrics())
    assert cluster.run.summary()["status"] == "stopped"
    cluster.assert_nothing_is_left()
    if ranks == [1]:  # the other ways round a resume is the same
        _resume_to_the_end(cluster)
