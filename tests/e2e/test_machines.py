"""Two machines that train and two that serve, each a network namespace of its own, started by one and the same command; the run
directory is shared."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.support import REPOSITORY, SMALL, Run, finish, make_run
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PORT = "29400"
RANKS = range(4)  # 0 and 1 train, 2 and 3 serve
LIMIT_S = 600.0  # a dozen processes import torch


# -- machines: network namespaces with a bridge in the middle, which live as long as the processes that hold them

_LISTEN = "0A"
_PREFIX = 24


@dataclass(frozen=True)
class Machine:
    """One namespace. `holder` is the process that keeps it alive."""

    address: str
    holder: int

    def command(self, *words: str) -> list[str]:
        """`words` as a command line that runs in this machine; the process is the same one (nsenter replaces itself)."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", "--", *words]

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*words), text=True, **options)

    def listening(self) -> set[str]:
        """Addresses that something in this machine listens on now (TCP)."""
        found: set[str] = set()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.holder}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    found.add(_address(fields[1].partition(":")[0]))
        return found


def why_not() -> str | None:
    """Why there can be no namespaces on this machine, or None."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} (util-linux) is not installed"
    try:
        with machines("10.78.0.1", "10.78.0.2"):
            return None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the kernel gives no namespace with a bridge: {error}"
    except Exception as error:  # noqa: BLE001 - pyroute2's errors have no common base
        return f"the kernel gives no namespace with a bridge: {type(error).__name__}: {error}"


@contextlib.contextmanager
def machines(*addresses: str) -> Iterator[list[Machine]]:
    """Machines with these IPv4 addresses in one network; every process in them is killed at the end."""
    from pyroute2 import NetNS

    with contextlib.ExitStack() as stack:
        holders = [_hold(stack) for _ in range(len(addresses) + 1)]
        *ends, middle = holders
        bridge = stack.enter_context(contextlib.closing(NetNS(f"/proc/{middle}/ns/net", flags=0)))
        bridge.link("add", ifname="br0", kind="bridge")
        (index,) = bridge.link_lookup(ifname="br0")
        bridge.link("set", index=index, state="up")
        for number, (address, holder) in enumerate(zip(addresses, ends, strict=True)):
            port = f"port{number}"
            bridge.link("add", ifname=port, kind="veth", peer={"ifname": "eth0", "net_ns_pid": holder})
            (end,) = bridge.link_lookup(ifname=port)
            bridge.link("set", index=end, master=index, state="up")
            with contextlib.closing(NetNS(f"/proc/{holder}/ns/net", flags=0)) as inside:
                for name in ("lo", "eth0"):
                    (link,) = inside.link_lookup(ifname=name)
                    if name == "eth0":
                        inside.addr("add", index=link, address=address, prefixlen=_PREFIX)
                    inside.link("set", index=link, state="up")
        found = [Machine(address=address, holder=holder) for address, holder in zip(addresses, ends, strict=True)]
        try:
            yield found
        finally:
            _kill_all_in({_namespace(holder) for holder in holders})


def _hold(stack: contextlib.ExitStack) -> int:
    """Start a process in a new namespace; returns its pid when it is there."""
    program = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]
    process = subprocess.Popen(["unshare", "--net", "--", *program], stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != "here\n":
        raise RuntimeError("unshare --net failed")
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10.0)
    assert process.stdout is not None
    process.stdout.close()


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _kill_all_in(namespaces: set[str]) -> None:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "net") in namespaces:
                    os.kill(int(folder.name), signal.SIGKILL)


def _address(text: str) -> str:
    """As /proc/net/tcp writes it: 32-bit words in the byte order of the machine. "0100007F" -> "127.0.0.1"."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    packed = b"".join(words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ip_address(socket.inet_ntop(family, packed))
    return str(getattr(address, "ipv4_mapped", None) or address)


# -- a run on them


@dataclass
class Cluster:
    """The machines by their node rank."""

    nodes: list[Machine]
    run: Run
    listened: set[tuple[str, str]] = field(default_factory=set)
    """(machine, address) of everything that listened while `watch_listeners` ran."""

    def start(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """The same command on every machine; the last ones first, which wait for node 0."""
        return [self._start(rank, *arguments) for rank in reversed(RANKS)][::-1]

    def _start(self, rank: int, *arguments: str) -> subprocess.Popen[str]:
        place = {"NODE_RANK": str(rank), "NNODES": "4", "MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": PORT}
        return self.nodes[rank].popen(
            [sys.executable, "-m", "grpo_async", "train", str(self.run.config), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def processes_on(self, rank: int, part_of_command: str = "") -> list[psutil.Process]:
        """Living processes of the run on one machine, without the one that holds its namespace."""
        space = os.readlink(f"/proc/{self.nodes[rank].holder}/ns/net")
        found = []
        for process in psutil.process_iter():
            try:
                is_here = os.readlink(f"/proc/{process.pid}/ns/net") == space
                is_other = process.pid == self.nodes[rank].holder or process.status() == psutil.STATUS_ZOMBIE
                if is_here and not is_other and part_of_command in " ".join(process.cmdline()):
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def assert_nothing_is_left(self) -> None:
        assert eventually(lambda: not any(map(self.processes_on, RANKS)), 30.0), "every process on all nodes to end"

    def watch_listeners(self, ended: threading.Event) -> None:
        """Note (machine, address) of everything that listens, until `ended`."""
        while not ended.wait(0.1):
            for machine in self.nodes:
                self.listened |= {(machine.address, address) for address in machine.listening()}


@pytest.fixture(scope="module")
def network() -> Iterator[list[Machine]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with machines("10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4") as found:
        yield found


SETTINGS = (
    *SMALL,
    "optimizer.lr=0.001",
    "evaluation.num_prompts=8",
    "checkpoint.every_steps=2",
    "launch.nodes.train=2",
    "launch.nodes.infer=2",
    "training.max_steps=5000",
    "rollout.max_rounds_without_signal=5000",  # it trains until it is ended, whatever becomes of the policy
)


@pytest.fixture
def cluster(network: list[Machine], tmp_path: Path) -> Iterator[Cluster]:
    with _running(network, make_run(tmp_path, "quickstart.yaml", SETTINGS)) as cluster:
        yield cluster


@contextlib.contextmanager
def _running(nodes: list[Machine], run: Run) -> Iterator[Cluster]:
    cluster = Cluster(nodes=nodes, run=run)
    try:
        yield cluster
    finally:
        for rank in RANKS:
            for process in cluster.processes_on(rank):
                process.kill()


def _ends(processes: Sequence[subprocess.Popen[str]], *codes: int) -> list[str]:
    """What all printed; their exit codes are checked."""
    done = [finish(process, timeout_s=LIMIT_S) for process in processes]
    assert tuple(one.returncode for one in done) == codes, "\n=====\n".join(one.stdout[-3000:] for one in done)
    return [one.stdout for one in done]


def _resume_to_the_end(cluster: Cluster) -> None:
    last = cluster.run.checkpoints()[-1] + 2
    _ends(cluster.start("--resume", "--set", f"training.max_steps={last}"), 0, 0, 0, 0)
    assert [line["step"] for line in cluster.run.metrics()] == list(range(1, last + 1))
    summary = cluster.run.summary()
    assert (summary["status"], summary["ledger_closed"], summary["num_devices"]) == ("finished", True, 2)


def test_one_command_on_four_machines_trains_a_killed_server_is_restarted_and_a_lost_trainer_ends_all(
    cluster: Cluster,
) -> None:
    run, ended = cluster.run, threading.Event()
    watching = threading.Thread(target=cluster.watch_listeners, args=(ended,))
    watching.start()
    try:
        processes = cluster.start("--set", "weights.verify_every_pushes=1")
        run.wait_for_servers(processes[0], serving=2, timeout_s=LIMIT_S)
    finally:
        ended.set()
        watching.join(10.0)
    (server,) = cluster.processes_on(3, "serve-embedded")
    server.kill()
    run.wait_for_servers(processes[0], serving=2, restarts=1, timeout_s=LIMIT_S)
    run.wait_for_step(len(run.metrics()) + 2, processes[0], timeout_s=LIMIT_S)
    logs = run.folder / "logs" / "latest"
    for log in ("server_0.log", "server_1.log", "server_1.restart_1.log", "trainer.log", "trainer_node1.log"):
        assert (logs / log).is_file(), log
    for process in cluster.processes_on(1):  # all at once, as when the power goes
        with contextlib.suppress(psutil.NoSuchProcess):  # it died with its parent
            process.kill()
    outputs = _ends(processes, 1, -signal.SIGKILL, 1, 1)
    assert "error: node 1 (" in outputs[0]
    assert "--resume" in outputs[0]
    assert "the inference server 1 was killed by SIGKILL" in outputs[0]
    assert "restart 1 of 3" in outputs[0]
    cluster.assert_nothing_is_left()
    lines = run.metrics()
    # after every push the servers have the weights that both machines hold together, with a learning rate at which one that was
    # missed would show: samples that are a step old differ by far more
    compared = [line["sync/verify_max"] for line in lines if "sync/verify_max" in line]
    assert len(compared) >= 4
    assert max(compared) < 1e-4
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) > 1e-2
    # every machine listens on loopback or on its own address, and nowhere else
    for machine, address in cluster.listened:
        assert address in (machine, "127.0.0.1"), f"something on {machine} listened on {address}"
    assert {(machine.address, machine.address) for machine in cluster.nodes} <= cluster.listened
    plan = (run.folder / "plan.txt").read_text()
    assert "node 1     trainer rank 1\n" in plan
    assert "node 3     server 1\n" in plan
    _resume_to_the_end(cluster)


def test_a_machine_that_only_serves_may_be_lost_and_sigterm_on_one_stops_all_with_a_checkpoint(
    cluster: Cluster,
) -> None:
    processes = cluster.start()
    cluster.run.wait_for_servers(processes[0], serving=2, timeout_s=LIMIT_S)
    for process in cluster.processes_on(2):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.run.wait_for(
        lambda: json.loads((cluster.run.folder / "status.json").read_text())["servers"][0]["state"] == "gone",
        processes[0],
        what="node 2 to be missed",
        timeout_s=LIMIT_S,
    )
    cluster.run.wait_for_step(len(cluster.run.metrics()) + 2, processes[0], timeout_s=LIMIT_S)
    processes[0].send_signal(signal.SIGTERM)
    _ends(processes, 143, 143, -signal.SIGKILL, 143)
    assert cluster.run.checkpoints()[-1] == len(cluster.run.metrics())
    assert cluster.run.summary()["status"] == "stopped"
    assert cluster.run.summary()["ledger_closed"]
    cluster.assert_nothing_is_left()
