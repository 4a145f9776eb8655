"""One command on a Ray cluster: nodes that are lost, nodes that join, a stop, a resume. The nodes are raylets on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.support import SMALL, Run, finish, make_run
from tests.support.network_namespaces import SUBNET, inside, network
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

MARK = {"HF_MARK_OF_A_TEST": uuid.uuid4().hex}  # what begins with HF_ reaches every process of a run on Ray
LIMIT_S = 400.0  # a raylet takes seconds to start, and so does every process of a run
NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
SETTINGS = (
    *SMALL,
    "launch={ray: auto, trainer_nodes: 2, device: cpu, max_restarts: 1, colocate: false}",
    "inference.replicas={min: 1, max: 2}",
    "evaluation=null",
    "checkpoint.every_steps=2",
    "training.max_steps=5000",
    "rollout.max_rounds_without_signal=5000",  # it trains until it is ended, whatever becomes of the policy
)


class Nodes:
    """A head without room for any process, and nodes with room for one each."""

    def __init__(self, cluster: Any, address: str, namespaces: list[tuple[str, str]]) -> None:
        self._cluster, self._address, self._namespaces = cluster, address, namespaces

    def join(self) -> None:
        """Start another node: in the next network namespace, where there are some."""
        name, address = self._namespaces.pop(0) if self._namespaces else (None, self._address)
        with inside(name):
            self._cluster.add_node(**NODE, node_ip_address=address)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Four nodes: with the address of this machine, or ("namespaces") each with a network of its own."""
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with ExitStack() as stack:
        address, namespaces = ray.util.get_node_ip_address(), []
        if request.param == "namespaces":
            if os.geteuid() != 0 or shutil.which("ip") is None:
                pytest.skip("network namespaces need root and the command `ip` (iproute2)")
            namespaces, address = stack.enter_context(network(6)), f"{SUBNET}.1"
        head = {**NODE, "num_cpus": 0, "node_ip_address": address}
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        stack.callback(cluster.shutdown)
        joining = Nodes(cluster, address, namespaces)
        for _ in range(4):
            joining.join()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield joining


def _start(run: Run, *arguments: str) -> subprocess.Popen[str]:
    # nobody reads what it prints before it ends, and a pipe holds 64 KiB
    return run.start("--quiet", *arguments, environment=MARK)


def _processes(part: str = "") -> list[psutil.Process]:
    """The processes of the run whose command contains `part`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().items() >= MARK.items() and part in " ".join(process.cmdline()):
                found.append(process)
    return found


def _ranks() -> dict[str, psutil.Process]:
    """The trainer's ranks, without the processes that start them."""
    started = [(process, process.environ()) for process in _processes("trainer.main")]
    return {environment["RANK"]: process for process, environment in started if "RANK" in environment}


def _kill_node_of(process: psutil.Process) -> None:
    """Kill -9 the raylet that the process descends from."""
    (raylet,) = [each for each in process.parents() if each.name() == "raylet"]
    raylet.kill()


def _nothing_is_left() -> bool:
    return eventually(lambda: not _processes(), 60.0)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("nodes", "file", "server"),
    [
        ("one network", "quickstart.yaml", "serve-embedded"),
        ("namespaces", "quickstart.yaml", "serve-embedded"),
        pytest.param("namespaces", "quickstart-vllm.yaml", "vllm.entrypoints.", marks=pytest.mark.vllm),
    ],
    indirect=["nodes"],
)
def test_nodes_are_lost_and_join_and_the_run_goes_on_until_it_is_stopped(
    nodes: Nodes, file: str, server: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, file, SETTINGS)
    command = _start(run)
    run.wait_for_servers(command, serving=2, timeout_s=LIMIT_S)
    run.wait_for_step(2, command, timeout_s=LIMIT_S)
    assert set(_ranks()) == {"0", "1"}

    _kill_node_of(_processes(server)[0])
    run.wait_for_servers(command, serving=1, timeout_s=LIMIT_S)
    run.wait_for_step(len(run.metrics()) + 2, command, timeout_s=LIMIT_S)
    nodes.join()
    run.wait_for_servers(command, serving=2, timeout_s=LIMIT_S)
    assert len({process.ppid() for process in _processes(server)}) == 2

    _kill_node_of(_ranks()["1"])
    nodes.join()
    assert eventually(lambda: (run.folder / "logs" / "attempt_2" / "trainer.log").exists(), LIMIT_S)
    run.wait_for_step(len(run.metrics()) + 4, command, timeout_s=LIMIT_S)

    command.send_signal(signal.SIGINT)
    done = finish(command, timeout_s=LIMIT_S)
    assert done.returncode == 130, done.stdout[-3000:]
    assert "trainer node 1 (" in done.stdout
    assert "begins again by itself" in done.stdout
    assert _nothing_is_left()
    summary = run.summary()
    assert (summary["status"], summary["ledger_closed"]) == ("stopped", True)
    last = len(run.metrics())
    assert run.checkpoints()[-1] == last
    assert [line["step"] for line in run.metrics()] == list(range(1, last + 1))

    again = finish(_start(run, "--resume", "--set", f"training.max_steps={last + 2}"), timeout_s=LIMIT_S)
    assert again.returncode == 0, again.stdout[-3000:]
    assert run.summary()["ledger_closed"]
    assert _nothing_is_left()

    killed = _start(run, "--clean")
    run.wait_for_step(1, killed, timeout_s=LIMIT_S)
    os.kill(killed.pid, signal.SIGKILL)
    assert _nothing_is_left()
