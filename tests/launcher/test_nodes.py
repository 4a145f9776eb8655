"""Several machines: which one this is, how their launchers meet, and what each does when another one fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from grpo_async.cluster import node_channel, nodes
from grpo_async.cluster.node_channel import LostError, NodeChannel, apply, connect, proof
from grpo_async.cluster.node_hub import NodeHub
from grpo_async.cluster.node_link import NodeLink, Offer, leave_mark, own_versions
from grpo_async.cluster.nodes import choose_node_rank, leading_node, socket_names
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.errors import ConfigError, DeadlineError
from grpo_async.launcher import plan as plan_module
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, ProcessPlan, plan_processes
from grpo_async.launcher.signals import Signals
from grpo_async.processes import addresses
from grpo_async.processes.addresses import interface_of, weights_host
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.machine import Machine
from grpo_async.rundir import RunDir
from grpo_async.servers.engine_choice import choose_engine
from grpo_async.utils.loopback import is_loopback
from tests.launcher.support import LauncherProcess, make_config

TOKEN = "the-token-of-this-run"
WAIT_S = 30.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _config(folder: Path, *, nodes: int = 2, **sections: Any) -> ExperimentConfig:
    launch = {
        "nodes": nodes,
        "rdzv": f"127.0.0.1:{_free_port()}",
        "rdzv_timeout_s": WAIT_S,
        **sections.pop("launch", {}),
    }
    return make_config(folder, launch=launch, **sections)


class _Listener:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.signals: list[signal.Signals] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def remote_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


class _Meeting:
    """A hub for `config`, and links to it."""

    def __init__(self, config: ExperimentConfig, *, token: str = TOKEN, versions: dict[str, str] | None = None) -> None:
        self.config = config
        self.listener = _Listener()
        self.run_dir = RunDir(config.run_path.absolute())
        self.run_dir.create()
        attempt = self.run_dir.new_attempt()
        leave_mark(attempt, "mark")
        offer = Offer(
            config=dump_config(config),
            versions=versions or own_versions(),
            attempt=attempt.name,
            mark="mark",
            store_port=4711,
            server_urls=("http://10.0.0.3:8000",),
            transport="gloo",
            resume_step=40,
        )
        self.hub = NodeHub(
            "127.0.0.1",
            config.launch.meeting_point[1],
            count=config.launch.nodes,
            token=token,
            offer=offer.as_json(),
            listener=self.listener,
        )

    async def join(
        self,
        rank: int = 1,
        *,
        config: ExperimentConfig | None = None,
        token: str = TOKEN,
        run_dir: RunDir | None = None,
    ) -> NodeLink:
        link = await NodeLink.join(
            config or self.config,
            address="127.0.0.1",
            rank=rank,
            token=token,
            run_dir=run_dir or self.run_dir,
            interrupted=asyncio.Event(),
            on_wait=lambda: None,
        )
        assert link is not None
        return link


def _meet(meeting: _Meeting, script: Callable[[NodeHub], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S), meeting.hub as hub:
            await script(hub)

    asyncio.run(run())


def test_a_machine_joins_begins_and_ends_with_node_0(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path, nodes=3))

    async def script(hub: NodeHub) -> None:
        assert hub.describe_missing() == "nodes 1 and 2"
        second = await meeting.join(2)
        await _until(lambda: hub.missing == [1])
        first = await meeting.join(1)
        await hub.all_ready.wait()
        assert first.offer.resume_step == 40
        assert first.offer.server_urls == ("http://10.0.0.3:8000",)
        assert not first.started.is_set()
        hub.begin()
        await first.started.wait()
        await second.started.wait()
        first.exited(0, None)
        second.exited(0, None)
        await hub.settle(WAIT_S)
        await hub.end(143, "SIGTERM")
        for link in (first, second):
            await link.ended.wait()
            assert (link.exit_code, link.error) == (143, "SIGTERM")
            await link.close()
        assert not hub.trouble.is_set()

    _meet(meeting, script)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_machine_with_another_token_is_refused_and_the_run_waits_on(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        with pytest.raises(ConfigError, match=r"node 0 .* does not take this machine: the token is another one"):
            await meeting.join(token="guessed")
        await _until(lambda: bool(meeting.listener.notes))
        assert "127.0.0.1 wanted to join the run and may not" in meeting.listener.notes[0]
        assert not hub.trouble.is_set()
        await (await meeting.join()).close()

    _meet(meeting, script)


def test_what_listens_there_without_the_token_is_not_believed(tmp_path: Path) -> None:
    """Else anybody who gets hold of the port first could hand out a run, and so code."""
    meeting = _Meeting(_config(tmp_path))

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = NodeChannel(reader, writer)
        channel.send("challenge", nonce="0" * 64)
        hello = await channel.receive()
        assert TOKEN not in json.dumps(hello)
        channel.send("welcome", offer="{}", proof=hello["proof"])  # reflected: a proof of the other role
        await channel.flush(WAIT_S)

    async def run() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", meeting.config.launch.meeting_point[1])
        with pytest.raises(ConfigError, match="does not know the token, so it is not node 0"):
            await meeting.join()
        server.close()

    asyncio.run(run())


_HELLO = b'{"kind": "hello", "rank": 1}\n'


_DEEP = b"[" * 3000 + b"\n"  # more than json reads in one go


@pytest.mark.parametrize("line", [b"\n", b"GET / HTTP/1.1\r\n", b"[1]\n", _DEEP, b'{"kind": 3}\n', _HELLO, b"x" * 9000])
def test_a_stranger_gets_nothing_and_harms_nothing(tmp_path: Path, line: bytes) -> None:
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        reader, writer = await asyncio.open_connection(*meeting.config.launch.meeting_point)
        writer.write(line)
        writer.write_eof()
        answer = (await reader.read()).decode()
        assert TOKEN not in answer
        assert "model" not in answer  # nothing of the configuration
        writer.close()
        await _until(lambda: bool(meeting.listener.notes))
        assert "127.0.0.1 wanted to join the run and may not" in meeting.listener.notes[0]
        await (await meeting.join()).close()
        assert not hub.failure or "is gone" in hub.failure

    _meet(meeting, script)


def test_a_stranger_is_not_listened_to_beyond_a_first_line(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        _, writer = await asyncio.open_connection(*meeting.config.launch.meeting_point)
        writer.write(b"x" * 100_000)  # and neither a line feed nor an end
        async with asyncio.timeout(node_channel.HANDSHAKE_S / 2):  # not by the deadline
            await _until(lambda: bool(meeting.listener.notes))
        assert "a line of more than 4096 bytes" in meeting.listener.notes[0]
        writer.close()

    _meet(meeting, script)


def test_the_limit_of_a_line_is_that_of_the_one_who_reads_it() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader(limit=64)  # smaller than a line: the channel has limits of its own
        channel = NodeChannel(reader, cast("asyncio.StreamWriter", None))  # it only reads
        line = json.dumps({"kind": "x", "text": "y" * 200}).encode() + b"\n"
        reader.feed_data(line + b'{"kind": "beat"}\n' + line)
        assert len((await channel.receive(limit=len(line)))["text"]) == 200
        with pytest.raises(LostError, match=f"a line of more than {len(line) - 1} bytes"):
            await channel.receive(limit=len(line) - 1)

    asyncio.run(run())


def test_beats_do_not_renew_the_clock_of_a_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_channel, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(node_channel, "BEAT_S", 0.05)
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        stranger = await connect(*meeting.config.launch.meeting_point, WAIT_S)
        stranger.beat()
        async with asyncio.timeout(WAIT_S / 3):
            await _until(lambda: bool(meeting.listener.notes))
        assert "no message within 0 s" in meeting.listener.notes[0]
        stranger.close()

    _meet(meeting, script)


def test_one_deadline_holds_for_the_whole_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line comes in time, but not all of them."""
    monkeypatch.setattr(node_channel, "HANDSHAKE_S", 0.5)
    meeting = _Meeting(_config(tmp_path))

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = NodeChannel(reader, writer)
        await asyncio.sleep(0.3)
        channel.send("challenge", nonce="0" * 64)
        hello = await channel.receive()
        await asyncio.sleep(0.3)
        shown = proof(TOKEN, "lead", "0" * 64, hello["nonce"], "{}")
        channel.send("welcome", offer="{}", proof=shown)

    async def run() -> None:
        server = await asyncio.start_server(slow, "127.0.0.1", meeting.config.launch.meeting_point[1])
        channel = await connect(*meeting.config.launch.meeting_point, WAIT_S)
        with pytest.raises(LostError, match="no message within"):
            await apply(channel, TOKEN, rank=1, host="b")
        channel.close()
        server.close()

    asyncio.run(run())


def test_another_configuration_is_refused_on_both_sides_with_the_values(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path))
    other = meeting.config.model_copy(update={"optimizer": meeting.config.optimizer.model_copy(update={"lr": 0.5})})
    before = meeting.config.optimizer.lr

    async def script(hub: NodeHub) -> None:
        with pytest.raises(ConfigError, match=rf"not that of node 0(.|\n)*optimizer\.lr: {before} -> 0\.5"):
            await meeting.join(config=other)
        await hub.trouble.wait()
        assert hub.failure is not None
        assert f"node 1 ({socket.gethostname()}) cannot take part" in hub.failure
        assert "optimizer.lr" in hub.failure

    _meet(meeting, script)


def test_a_run_directory_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path))
    own = RunDir(tmp_path / "a folder of its own")

    async def script(hub: NodeHub) -> None:
        with pytest.raises(ConfigError, match=r"run\.dir: .* must be on a file system that all machines share"):
            await meeting.join(run_dir=own)
        await hub.trouble.wait()

    _meet(meeting, script)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path), versions=own_versions() | {"torch": "1.0"})

    async def script(hub: NodeHub) -> None:
        with pytest.raises(ConfigError, match=r"other versions .*torch 1\.0 -> "):
            await meeting.join()
        await hub.trouble.wait()

    _meet(meeting, script)


def test_a_rank_is_taken_once_and_must_exist(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path, nodes=3))

    async def script(hub: NodeHub) -> None:
        first = await meeting.join(1)
        for rank, words in ((3, "--node-rank 3 is none of 1 to 2"), (0, "--node-rank 0 is none of 1 to 2")):
            with pytest.raises(ConfigError, match=words):
                await meeting.join(rank)
        with pytest.raises(ConfigError, match="node 1 is here already"):
            await meeting.join(1)
        assert not hub.trouble.is_set()
        await first.close()

    _meet(meeting, script)


def test_a_machine_that_hangs_up_is_noticed_at_once_and_named(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        link = await meeting.join()
        await hub.all_ready.wait()
        hub.begin()
        await link.close()
        await hub.trouble.wait()
        assert hub.has_lost_a_node
        assert hub.failure is not None
        assert hub.failure.startswith(f"node 1 ({socket.gethostname()}) is gone (")
        await hub.settle(WAIT_S)  # nobody is left to wait for

    _meet(meeting, script)


def test_a_machine_that_falls_silent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the power goes, no packet says so."""
    monkeypatch.setattr(node_channel, "SILENCE_S", 0.5)
    monkeypatch.setattr(NodeChannel, "beat", lambda self: None)
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        link = await meeting.join()
        await hub.trouble.wait()
        assert hub.failure is not None
        assert "not a word for 0 s" in hub.failure
        await link.ended.wait()
        assert link.exit_code is None
        assert link.error is not None
        assert link.error.startswith("node 0 is gone")
        await link.close()

    _meet(meeting, script)


def test_signals_and_failures_reach_node_0(tmp_path: Path) -> None:
    meeting = _Meeting(_config(tmp_path))

    async def script(hub: NodeHub) -> None:
        link = await meeting.join()
        link.signal(signal.SIGTERM)
        await _until(lambda: meeting.listener.signals == [signal.SIGTERM])
        link.exited(1, "trainer rank 1 failed: out of memory")
        await hub.trouble.wait()
        assert hub.failure is not None
        assert "trainer rank 1 failed: out of memory" in hub.failure
        assert not hub.has_lost_a_node
        await link.close()

    _meet(meeting, script)


def test_a_machine_waits_for_node_0_and_its_deadline_names_the_setting(tmp_path: Path) -> None:
    config = _config(tmp_path, launch={"rdzv_timeout_s": 0.5})
    waits: list[None] = []

    async def alone() -> None:
        await NodeLink.join(
            config,
            address="127.0.0.1",
            rank=1,
            token=TOKEN,
            run_dir=RunDir(tmp_path),
            interrupted=asyncio.Event(),
            on_wait=lambda: waits.append(None),
        )

    with pytest.raises(DeadlineError, match=r"node 0 to listen at 127\.0\.0\.1:\d+ .*launch\.rdzv_timeout_s"):
        asyncio.run(alone())
    assert len(waits) == 1


def test_a_stop_of_all_machines_is_one_signal_and_a_second_of_ones_own_counts() -> None:
    async def run() -> None:
        remote_first = Signals()
        with remote_first.installed():
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

    asyncio.run(run())


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


def test_one_machine_needs_no_rank_whatever_a_job_script_sets(tmp_path: Path) -> None:
    assert choose_node_rank(make_config(tmp_path), None, {"SLURM_NODEID": "3"}) == 0


@pytest.mark.parametrize(
    ("rdzv", "words"),
    [
        (None, "2 machines need a place to meet"),
        ("node-1", "is not host:port"),
        ("node-1:0", "is not host:port"),
        ("node-1:99999", "is not host:port"),
        ("http://node-1:80", "is not host:port"),
        ("user@node-1:80", "is not host:port"),
        ("0.0.0.0:29400", "listen on every network"),
        ("[::]:29400", "listen on every network"),
    ],
)
def test_a_meeting_point_is_one_address(tmp_path: Path, rdzv: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=r"launch\.rdzv|rdzv") as caught:
        make_config(tmp_path, launch={"nodes": 2, "rdzv": rdzv})
    assert words in str(caught.value)


def test_a_host_name_that_is_loopback_for_itself_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: None
) -> None:
    """Debian's /etc/hosts: node-0 is 127.0.1.1 on node-0."""
    config = make_config(tmp_path, launch={"nodes": 2, "rdzv": "node-0:29400"})
    monkeypatch.setattr(nodes, "resolve_host", lambda host, setting: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"launch\.rdzv: node-0 is 127\.0\.1\.1 on this machine"):
        leading_node(config)


def test_gloo_and_nccl_go_over_the_interface_of_the_meeting_unless_the_user_says_otherwise() -> None:
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
        (["http://10.0.0.7:8000"], "10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_weight_group_meets_where_the_servers_can_come(
    tmp_path: Path, urls: list[str], host: str | None, found: str
) -> None:
    assert weights_host(make_config(tmp_path, inference={"urls": urls}, weights={"host": host})) == found


def test_the_weight_group_meets_at_the_address_that_the_first_server_elsewhere_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routes of a machine that is in the servers' network."""
    routes = {("10.0.0.7", 8001): "10.0.0.1", ("10.9.0.7", 8002): "10.9.0.1"}
    monkeypatch.setattr(addresses, "reachable_address", lambda address, port, setting: routes[address, port])
    urls = ["http://127.0.0.1:8000", "http://10.0.0.7:8001", "http://10.9.0.7:8002"]
    assert weights_host(make_config(tmp_path, inference={"urls": urls})) == "10.0.0.1"


def _plans(folder: Path, node: Node) -> ProcessPlan:
    config = _config(folder, launch={"num_trainer_ranks": 2, "rdzv": "10.0.0.1:29400"})
    run_dir = RunDir(Path("/runs/x"))
    given = Assignment(run_dir=run_dir, attempt_dir=run_dir.logs / "attempt_1", private=Path("/private"), node=node)
    return plan_processes(
        config,
        engine=choose_engine(config) if node.rank == 0 else SERVERS_ELSEWHERE,
        assignment=given,
        ports=(4711,) if node.rank == 0 else (),
        machine=Machine(num_cpus=8, python="/py"),
        token=TOKEN,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_plan_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    names = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(plan_module, "socket_names", lambda own_address: names)
    node = Node(rank=rank, count=2, address="10.0.0.1", store_port=555, own_address=f"10.0.0.{rank + 1}")
    plan = _plans(tmp_path, node)
    words = dict(pairwise(plan.trainer.command))
    assert words["--nnodes"] == "2"
    assert words["--rdzv-endpoint"] == "10.0.0.1:555"
    assert words["--rdzv-conf"].startswith(f"rank={rank},")
    assert words["--local-addr"] == f"10.0.0.{rank + 1}"
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


def _launcher(folder: Path, rank: int, port: int, trainer: str = "obey-stop", **more: Any) -> LauncherProcess:
    launch = {"nodes": 2, "num_trainer_ranks": 1, "rdzv": f"127.0.0.1:{port}", **more.pop("launch", {})}
    return LauncherProcess(folder, trainer=trainer, torchrun=True, node_rank=rank, launch=launch, **more)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ASYNC_TOKEN", TOKEN)


def test_node_0_says_which_machine_is_missing(tmp_path: Path, token: None) -> None:
    with _launcher(tmp_path, 0, _free_port(), launch={"nodes": 3, "rdzv_timeout_s": 1.0}) as launcher:
        launcher.wait_for_line("waiting for nodes 1 and 2")
        began = time.monotonic()
        assert launcher.end() == 1
        assert "waited 1 s for nodes 1 and 2 to join; raise `launch.rdzv_timeout_s`" in launcher.output
        assert time.monotonic() - began < 15.0
        assert launcher.left() == {}


def test_without_a_common_token_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_ASYNC_TOKEN", raising=False)
    with _launcher(tmp_path, 0, _free_port()) as launcher:
        assert launcher.end() != 0
        assert "$GRPO_ASYNC_TOKEN, which is not set" in launcher.output
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_is_said_before_anything_is_written(tmp_path: Path, token: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with _launcher(tmp_path, 0, taken.getsockname()[1]) as launcher:
            assert launcher.end() != 0
            assert "cannot be bound on this machine, which is node 0" in launcher.output
    assert not (tmp_path / "runs").exists()


def test_the_preflight_looks_at_one_machine_and_says_so(tmp_path: Path) -> None:
    launch = {"nodes": 2, "rdzv": "node-0:29400"}
    with LauncherProcess(tmp_path, trainer="preflight-pass", preflight=True, launch=launch) as launcher:
        assert launcher.end() == 0, launcher.output
        assert "the checks are made with the trainer ranks of this machine only" in launcher.output


@pytest.mark.slow
def test_a_launcher_that_is_killed_ends_the_other_and_all_ranks(tmp_path: Path, token: None) -> None:
    port = _free_port()
    with _launcher(tmp_path, 1, port, "ignore-stop") as second, _launcher(tmp_path, 0, port, "ignore-stop") as first:
        first.wait_for_processes("rank0", "rank1")
        first.process.kill()  # node 0 itself
        assert second.end() == 1
        assert "node 0 is gone" in second.output
        assert second.left().keys() <= {"server"}
