"""Several machines: which one this is, how their launchers find each other, and what each does when another one fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from grpo_async.cluster import node_channel, node_link, nodes
from grpo_async.cluster.node_channel import NodeChannel, connect
from grpo_async.cluster.node_hub import NodeHub
from grpo_async.cluster.node_link import NodeLink, Offer, join
from grpo_async.cluster.nodes import choose_node_rank, leading_node, socket_names
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.errors import ConfigError, DeadlineError
from grpo_async.launcher import plan as plan_module
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, plan_processes
from grpo_async.launcher.signals import Signals
from grpo_async.processes import addresses
from grpo_async.processes.addresses import interface_of, weights_host
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.machine import Machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import choose_engine
from grpo_async.utils.network import is_loopback
from tests.e2e.support import free_port
from tests.launcher.support import LauncherProcess, make_config

TOKEN = "the-token-of-this-run"
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ASYNC_TOKEN", TOKEN)


def _config(folder: Path, *, nodes: int = 2, **launch: Any) -> ExperimentConfig:
    rdzv = {"nodes": nodes, "rdzv": f"127.0.0.1:{free_port()}", "rdzv_timeout_s": WAIT_S}
    return make_config(folder, launch=rdzv | launch)


class _Cluster:
    """A hub for `config`, and links to it."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.notes: list[str] = []
        self.signals: list[signal.Signals] = []
        self.run_dir = RunDir(config.run_path.absolute())
        self.run_dir.create(dump_config(config))
        assignment = Assignment(
            run_dir=self.run_dir,
            attempt_dir=self.run_dir.new_attempt(),
            private=Path("/private"),
            server_urls=("http://10.0.0.3:8000",),
            resume_step=40,
            node=Node(count=config.launch.nodes, address="127.0.0.1", store_port=4711),
        )
        self.hub = NodeHub(config, assignment, note=self.notes.append, on_signal=self.signals.append)

    async def join(
        self, rank: int = 1, *, config: ExperimentConfig | None = None, run_dir: RunDir | None = None
    ) -> NodeLink:
        link = await join(
            config or self.config,
            Node(rank=rank, count=self.config.launch.nodes, address="127.0.0.1"),
            run_dir or self.run_dir,
            interrupted=asyncio.Event(),
            on_wait=lambda: None,
        )
        assert link is not None
        return link

    async def wait_for_note(self, text: str) -> None:
        await _until(lambda: any(text in note for note in self.notes))

    def run(self, script: Callable[[], Awaitable[None]], *, listens: bool = True) -> None:
        async def run() -> None:
            async with asyncio.timeout(WAIT_S), self.hub if listens else nullcontext():
                await script()

        asyncio.run(run())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_machine_joins_starts_and_ends_with_node_0(tmp_path: Path) -> None:
    cluster = _Cluster(_config(tmp_path, nodes=3))
    hub = cluster.hub

    async def script() -> None:
        assert hub.describe_missing() == "nodes 1 and 2"
        second = await cluster.join(2)
        await _until(lambda: hub.missing == [1])
        first = await cluster.join(1)
        await hub.all_ready.wait()
        assert first.offer.assignment.resume_step == 40
        assert first.offer.assignment.server_urls == ("http://10.0.0.3:8000",)
        assert not first.started.is_set()
        hub.start()
        await first.started.wait()
        await second.started.wait()
        first.signal(signal.SIGTERM)
        await _until(lambda: cluster.signals == [signal.SIGTERM])
        first.exited(0, None)
        second.exited(0, None)
        await hub.wait_for_ends(WAIT_S)
        hub.end(143, "SIGTERM")
        for link in (first, second):
            await link.ended.wait()
            assert (link.exit_code, link.error) == (143, "SIGTERM")
            await link.close()
        assert not hub.trouble.is_set()

    cluster.run(script)


def test_a_machine_with_another_token_is_refused_and_the_run_waits_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = _Cluster(_config(tmp_path))

    async def script() -> None:
        monkeypatch.setattr(node_link, "shared_token", lambda: "guessed")
        with pytest.raises(ConfigError, match=r"node 0 .* does not admit this machine: the token is another one"):
            await cluster.join()
        await cluster.wait_for_note("127.0.0.1 wanted to join the run and may not")
        assert not cluster.hub.trouble.is_set()
        monkeypatch.setattr(node_link, "shared_token", lambda: TOKEN)
        await (await cluster.join()).close()

    cluster.run(script)


def test_what_listens_there_without_the_token_is_not_believed(tmp_path: Path) -> None:
    """Else anybody who gets hold of the port first could hand out a run."""
    cluster = _Cluster(_config(tmp_path))

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = NodeChannel(reader, writer)
        channel.send("challenge", nonce="0" * 64)
        hello = await channel.receive()
        assert TOKEN not in json.dumps(hello)
        channel.send("welcome", attempt="attempt_1", secret="s", proof=hello["proof"])  # reflected: of the other role
        await channel.close()

    async def script() -> None:
        server = await asyncio.start_server(impostor, *cluster.config.launch.meeting_point)
        with pytest.raises(ConfigError, match="does not know the token, so it is not node 0"):
            await cluster.join()
        server.close()

    cluster.run(script, listens=False)


_HELLO = b'{"kind": "hello", "rank": 1}\n'
_DEEP = b"[" * 3000 + b"\n"  # more than json reads in one go


@pytest.mark.parametrize(
    "line", [b"\n", b"GET / HTTP/1.1\r\n", b"[1]\n", _DEEP, b'{"kind": 3}\n', _HELLO, b"x" * 900_000]
)
def test_who_does_not_know_the_protocol_gets_nothing_and_harms_nothing(tmp_path: Path, line: bytes) -> None:
    cluster = _Cluster(_config(tmp_path))

    async def script() -> None:
        reader, writer = await asyncio.open_connection(*cluster.config.launch.meeting_point)
        writer.write(line)
        if line.endswith(b"\n"):  # a line without an end is too long for a message
            writer.write_eof()
            answer = (await reader.read()).decode()
            assert TOKEN not in answer
            assert "model" not in answer  # nothing of the configuration
        await cluster.wait_for_note("127.0.0.1 wanted to join the run and may not")
        writer.close()
        await (await cluster.join()).close()
        assert not cluster.hub.failure or "is gone" in cluster.hub.failure

    cluster.run(script)


def test_one_deadline_holds_for_the_whole_handshake_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_channel, "HANDSHAKE_S", 0.3)
    cluster = _Cluster(_config(tmp_path))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        NodeChannel(reader, writer).send("challenge", nonce="0" * 64)
        await reader.read()

    async def script() -> None:
        stranger = await connect(*cluster.config.launch.meeting_point, WAIT_S)  # and says nothing
        await cluster.wait_for_note("the handshake was not done within 0 s")
        await stranger.close()

    cluster.run(script)

    async def other_side() -> None:
        server = await asyncio.start_server(silent, *cluster.config.launch.meeting_point)
        with pytest.raises(ConfigError, match="the handshake was not done within 0 s"):
            await cluster.join()
        server.close()

    cluster.run(other_side, listens=False)


@pytest.mark.parametrize("what", ["configuration", "versions", "folder"])
def test_what_is_not_the_same_on_both_machines_is_refused_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    cluster = _Cluster(_config(tmp_path))
    config, run_dir = cluster.config, cluster.run_dir
    expected = r"other versions .*torch .* -> 1\.0"
    if what == "configuration":
        expected = rf"not that of node 0(.|\n)*optimizer\.lr: {config.optimizer.lr} -> 0\.5"
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.5})})
    elif what == "folder":
        expected = r"run\.dir: .* must be on a file system that all machines share"
        run_dir = RunDir(tmp_path / "a folder of its own")
        run_dir.create(dump_config(config))
        run_dir.new_attempt()

    async def script() -> None:
        if what == "versions":  # that of node 0 is written already
            monkeypatch.setattr(node_link, "version", lambda name: "1.0")
        if what == "folder":  # it has an attempt of the same name, from another run
            text = Offer.path(cluster.run_dir.latest_logs).read_text()
            other = {**json.loads(text), "secret": "that of another attempt"}
            Offer.path(run_dir.latest_logs).write_text(json.dumps(other))
        with pytest.raises(ConfigError, match=f"cannot take part as node 1: .*{expected}"):
            await cluster.join(config=config, run_dir=run_dir)
        await cluster.hub.trouble.wait()
        assert cluster.hub.failure is not None
        assert cluster.hub.failure.startswith(f"node 1 ({socket.gethostname()}) cannot take part: ")

    cluster.run(script)


def test_a_rank_is_taken_once_and_must_exist(tmp_path: Path) -> None:
    cluster = _Cluster(_config(tmp_path, nodes=3))

    async def script() -> None:
        first = await cluster.join(1)
        refused = {
            3: "--node-rank 3 is none of 1 to 2",
            0: "--node-rank 0 is none of 1 to 2",
            1: "node 1 is here already",
        }
        for rank, reason in refused.items():
            with pytest.raises(ConfigError, match=reason):
                await cluster.join(rank)
        assert not cluster.hub.trouble.is_set()
        await first.close()

    cluster.run(script)


def test_a_machine_that_hangs_up_is_noticed_at_once_and_named(tmp_path: Path) -> None:
    cluster = _Cluster(_config(tmp_path))
    hub = cluster.hub

    async def script() -> None:
        link = await cluster.join()
        await hub.all_ready.wait()
        hub.start()
        await link.close()
        await hub.trouble.wait()
        assert hub.has_lost_a_node
        assert hub.failure is not None
        assert hub.failure.startswith(f"node 1 ({socket.gethostname()}) is gone (")
        await hub.wait_for_ends(WAIT_S)  # nobody is left to wait for

    cluster.run(script)


def test_a_trainer_that_fails_on_another_machine_is_trouble(tmp_path: Path) -> None:
    cluster = _Cluster(_config(tmp_path))
    hub = cluster.hub

    async def script() -> None:
        link = await cluster.join()
        link.exited(1, "trainer rank 1 failed: out of memory" + "x" * 1_000_000)  # cut off: a line has its limit
        await hub.trouble.wait()
        assert hub.failure is not None
        assert "trainer rank 1 failed: out of memory" in hub.failure
        assert not hub.has_lost_a_node
        await link.close()

    cluster.run(script)


def test_a_connection_whose_other_end_falls_silent_is_broken_by_the_kernel(tmp_path: Path) -> None:
    """When the power goes, no packet says so. That the kernel does what it is told to is its own business."""
    cluster = _Cluster(_config(tmp_path))

    async def script() -> None:
        channel = await connect(*cluster.config.launch.meeting_point, WAIT_S)
        connection = channel._writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        await channel.close()

    cluster.run(script)


def test_a_machine_waits_for_node_0_and_its_deadline_names_the_setting(tmp_path: Path) -> None:
    config = _config(tmp_path, rdzv_timeout_s=0.5)
    waits: list[None] = []
    node = Node(rank=1, count=2, address="127.0.0.1")
    with pytest.raises(DeadlineError, match=r"node 0 to listen at 127\.0\.0\.1:\d+ .*launch\.rdzv_timeout_s"):
        asyncio.run(
            join(config, node, RunDir(tmp_path), interrupted=asyncio.Event(), on_wait=lambda: waits.append(None))
        )
    assert len(waits) == 1


def test_a_stop_of_all_machines_is_one_signal_and_a_second_of_ones_own_counts() -> None:
    remote_first = Signals()
    remote_first.take_remote(signal.SIGTERM)
    assert remote_first.arrived.is_set()
    remote_first.arrived.clear()
    remote_first._take(signal.SIGTERM)  # the scheduler's, which node 1 got first
    remote_first.take_remote(signal.SIGTERM)
    assert not remote_first.arrived.is_set()
    remote_first._take(signal.SIGINT)  # the user's
    assert remote_first.arrived.is_set()
    assert remote_first.exit_code == 143
    own_first = Signals()
    own_first._take(signal.SIGINT)
    own_first.arrived.clear()
    own_first.take_remote(signal.SIGTERM)
    assert not own_first.arrived.is_set()
    own_first._take(signal.SIGINT)
    assert own_first.arrived.is_set()


@pytest.mark.parametrize(
    ("given", "environment", "rank"),
    [
        (1, {"GRPO_ASYNC_NODE_RANK": "0", "SLURM_NODEID": "0"}, 1),
        (None, {"GRPO_ASYNC_NODE_RANK": "1", "SLURM_NODEID": "0"}, 1),
        (None, {"SLURM_NODEID": "1"}, 1),
        (None, {}, None),
        (2, {}, None),
        (None, {"SLURM_NODEID": "2"}, None),
        (None, {"GRPO_ASYNC_NODE_RANK": "first"}, None),
    ],
)
def test_the_rank_of_a_machine(
    tmp_path: Path, given: int | None, environment: dict[str, str], rank: int | None
) -> None:
    config = _config(tmp_path)
    if rank is None:
        with pytest.raises(ConfigError, match=r"no machine of this run|add --node-rank K"):
            choose_node_rank(config, given, environment)
    else:
        assert choose_node_rank(config, given, environment) == rank
    # one machine needs none, whatever a job script sets
    assert choose_node_rank(make_config(tmp_path), None, {"SLURM_NODEID": "3"}) == 0


@pytest.mark.parametrize(
    ("rdzv", "problem"),
    [
        (None, "2 machines need a place to meet"),
        ("node-1", "is not host:port"),
        ("node-1:99999", "is not host:port"),
        ("http://node-1:80", "is not host:port"),
        ("user@node-1:80", "is not host:port"),
        ("0.0.0.0:29400", "listen on every network"),
        ("[::]:29400", "listen on every network"),
    ],
)
def test_the_rendezvous_is_one_address(tmp_path: Path, rdzv: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=r"launch\.rdzv|rdzv") as caught:
        make_config(tmp_path, launch={"nodes": 2, "rdzv": rdzv})
    assert problem in str(caught.value)


def test_a_host_name_that_is_loopback_for_itself_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts: node-0 is 127.0.1.1 on node-0."""
    config = make_config(tmp_path, launch={"nodes": 2, "rdzv": "node-0:29400"})
    monkeypatch.setattr(nodes, "resolve_host", lambda host, setting: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"launch\.rdzv: node-0 is 127\.0\.1\.1 on this machine"):
        leading_node(config)


def test_gloo_and_nccl_go_over_the_interface_of_the_rendezvous_unless_the_user_says_otherwise() -> None:
    assert socket_names("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert socket_names("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_of("192.0.2.1") is None
    assert interface_of("127.0.1.1") == "lo"
    assert is_loopback("127.0.1.1")


@pytest.mark.parametrize(
    ("urls", "host", "found"),
    [
        ([], None, "127.0.0.1"),
        (["http://127.0.0.1:8000"], None, "127.0.0.1"),
        (["http://localhost:8000"], None, "127.0.0.1"),
        (["http://10.0.0.7:8001"], "10.0.0.2", "10.0.0.2"),
        (["http://127.0.0.1:8000", "http://10.0.0.7:8001", "http://10.9.0.7:8002"], None, "10.0.0.1"),
    ],
)
def test_the_weight_group_meets_at_the_address_that_the_first_server_elsewhere_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: list[str], host: str | None, found: str
) -> None:
    routes = {("10.0.0.7", 8001): "10.0.0.1", ("10.9.0.7", 8002): "10.9.0.1"}
    monkeypatch.setattr(addresses, "reachable_address", lambda address, port, setting: routes[address, port])
    assert weights_host(make_config(tmp_path, inference={"urls": urls}, weights={"host": host})) == found


@pytest.mark.parametrize("rank", [0, 1])
def test_the_plan_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    names = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(plan_module, "socket_names", lambda own_address: names)
    config = _config(tmp_path, num_trainer_ranks=2, rdzv="10.0.0.1:29400")
    run_dir = RunDir(Path("/runs/x"))
    node = Node(rank=rank, count=2, address="10.0.0.1", store_port=555, own_address=f"10.0.0.{rank + 1}")
    plan = plan_processes(
        config,
        engine=choose_engine(config) if rank == 0 else SERVERS_ELSEWHERE,
        assignment=Assignment(
            run_dir=run_dir, attempt_dir=run_dir.logs / "attempt_1", private=Path("/private"), node=node
        ),
        ports=(4711,) if rank == 0 else (),
        machine=Machine(num_cpus=8, python="/py"),
        token=TOKEN,
    )
    options = dict(pairwise(plan.trainer.command))
    assert options["--nnodes"] == "2"
    assert options["--rdzv-endpoint"] == "10.0.0.1:555"
    assert options["--rdzv-conf"].startswith(f"rank={rank},")
    assert options["--local-addr"] == f"10.0.0.{rank + 1}"
    assert names.items() <= plan.trainer.environment.items()
    assert plan.assignment.store is None
    assert len(plan.servers) == (1 if rank == 0 else 0)
    assert plan.trainer.log_name == ("trainer.log" if rank == 0 else "trainer_node1.log")
    text = plan.describe()
    assert "nodes      2, which meet at 10.0.0.1:29400" in text
    assert ("trainer ranks 0 to 1 (this machine)" in text) == (rank == 0)
    assert ("node 1     trainer ranks 2 to 3 (this machine)" in text) == (rank == 1)
    assert f"interface  eth7 (10.0.0.{rank + 1})" in text
    assert TOKEN not in text


def _launcher(folder: Path, rank: int, port: int, trainer: str = "obey-stop", **launch: Any) -> LauncherProcess:
    section = {"nodes": 2, "num_trainer_ranks": 1, "rdzv": f"127.0.0.1:{port}", **launch}
    return LauncherProcess(folder, trainer=trainer, torchrun=True, node_rank=rank, launch=section)


def test_node_0_says_which_machine_is_missing(tmp_path: Path) -> None:
    with _launcher(tmp_path, 0, free_port(), nodes=3, rdzv_timeout_s=1.0) as launcher:
        launcher.wait_for_line("waiting for nodes 1 and 2")
        began = time.monotonic()
        assert launcher.end() == 1
        assert "waited 1 s for nodes 1 and 2 to join; raise `launch.rdzv_timeout_s`" in launcher.output
        assert time.monotonic() - began < 15.0
        assert launcher.left() == {}


def test_without_a_common_token_or_with_a_taken_port_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = _config(tmp_path, rdzv=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="cannot be bound on this machine, which is node 0"):
            leading_node(config)
    monkeypatch.delenv("GRPO_ASYNC_TOKEN")
    with pytest.raises(ConfigError, match=r"\$GRPO_ASYNC_TOKEN, which is not set"):
        leading_node(config)


@pytest.mark.slow
def test_a_launcher_that_is_killed_ends_the_other_and_all_ranks(tmp_path: Path) -> None:
    port = free_port()
    with _launcher(tmp_path, 1, port, "ignore-stop") as second, _launcher(tmp_path, 0, port, "ignore-stop") as first:
        first.wait_for_processes("rank0", "rank1")
        first.process.kill()  # node 0 itself
        assert second.end() == 1
        assert "node 0 is gone" in second.output
        assert second.left().keys() <= {"server"}
