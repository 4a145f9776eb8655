"""Several machines: which one this is, how their launchers meet, and what each does when another one fails."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from grpo_async.cluster import launcher_store, nodes, rendezvous
from grpo_async.cluster.launcher_store import ForgedError, LauncherStore
from grpo_async.cluster.nodes import find_node, first_host, leading_node, socket_names
from grpo_async.cluster.rendezvous import JoinedRun, NodeInfo, gather, hosting, join
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.errors import ConfigError, DeadlineError, RunError
from grpo_async.launcher import plan as plan_module
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, plan_dry, plan_processes
from grpo_async.launcher.signals import Signals
from grpo_async.processes import addresses
from grpo_async.processes.addresses import interface_of, weights_host
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.machine import Machine
from grpo_async.run_directory import RunDir, attempt_number
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.network import is_loopback
from tests.launcher.support import EMBEDDED, MACHINE, LauncherProcess, make_config
from tests.support.ports import free_port
from tests.support.waiting import eventually

TOKEN = "the-token-of-this-run"
WAIT_S = 60.0


def _config(folder: Path, *, train: int = 2, infer: int = 0, **launch: Any) -> ExperimentConfig:
    return make_config(folder, launch={"nodes": {"train": train, "infer": infer}, "rdzv_timeout_s": WAIT_S, **launch})


# ---- which machine this is ----

_TORCHRUN = {"NNODES": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "555"}
_SLURM = {"SLURM_NODEID": "2", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "node[08-10],gpu3"}


@pytest.mark.parametrize(
    ("given", "environment", "place"),
    [
        ((1, "10.0.0.7:99"), _TORCHRUN | {"NODE_RANK": "3"}, (1, "10.0.0.7", 99)),
        ((None, None), _TORCHRUN | {"NODE_RANK": "3"}, (3, "10.0.0.1", 555)),
        ((None, None), _TORCHRUN | {"GROUP_RANK": "3", "SLURM_NODEID": "1"}, (3, "10.0.0.1", 555)),
        ((None, None), _SLURM, (2, "node08", 29400)),
        ((None, None), _SLURM | {"SLURM_STEP_NODELIST": "gpu[3-6]"}, (2, "gpu3", 29400)),
        ((None, None), {"JOB_COMPLETION_INDEX": "2"}, (2, "run-0.svc.space.svc.cluster.local", 29400)),
        ((None, None), {}, "add --node-rank K"),
        ((4, "a"), {}, "--node-rank: '4' is not a machine of this run"),
        ((None, None), _SLURM | {"SLURM_NODEID": "4"}, r"\$SLURM_NODEID: '4' is not a machine of this run"),
        ((None, None), _SLURM | {"SLURM_NNODES": "3"}, r"2 machines to train and 2 to serve, and \$SLURM_NNODES is 3"),
        ((1, None), {}, "no rendezvous address is set"),
        ((1, "a/b"), {}, "neither HOST nor HOST:PORT"),
        ((1, "a:0"), {}, "has port 0"),
        ((1, "gpu..cluster"), {}, "neither HOST nor HOST:PORT"),
        (
            (1, None),
            _TORCHRUN | {"MASTER_ADDR": "gpu..cluster"},
            r"MASTER_ADDR\): .*'gpu\.\.cluster' cannot be the name of a host",
        ),
        ((1, None), _TORCHRUN | {"MASTER_PORT": "tcp"}, r"\$MASTER_PORT: 'tcp' is not a port"),
        ((1, None), _TORCHRUN | {"MASTER_PORT": "123456"}, r"\$MASTER_PORT: '123456' is not a port"),
    ],
)
def test_a_machine_finds_its_place_by_what_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, environment: Mapping[str, str], place: Any
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "run-2.svc.space.svc.cluster.local")
    config = _config(tmp_path, infer=2)
    rank, master = given

    def find(config: ExperimentConfig) -> Node:
        return find_node(config, node_rank=rank, master_addr=master, environment=environment)

    if isinstance(place, str):
        with pytest.raises(ConfigError, match=place):
            find(config)
        return
    assert find(config) == Node(rank=place[0], num_train=2, num_infer=2, address=place[1], port=place[2])
    own = _config(tmp_path, infer=2, rdzv="10.9.9.9:1")
    assert find(own).address == (
        place[1] if master else "10.9.9.9"
    )  # what the user has written goes before what is found


def test_one_machine_needs_no_place_whatever_a_job_script_sets(tmp_path: Path) -> None:
    assert find_node(make_config(tmp_path), environment=_SLURM) == Node()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[01-04,7],gpu3", "node01"), ("gpu3,gpu4", "gpu3"), ("rack[1-2]n[3,5]x", "rack1n3x"), ("a", "a")],
)
def test_the_first_machine_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "rdzv",
    ["node-1", "http://node-1:80", "0.0.0.0:1", "[::]:1", "::1:29400", "fe80::1:29400", "a:70000", "gpu..cluster:1"],
)
def test_the_rendezvous_is_one_address(tmp_path: Path, rdzv: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|listen on every network"):
        _config(tmp_path, rdzv=rdzv)


def test_a_host_name_that_is_loopback_for_itself_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts: node-0 is 127.0.1.1 on node-0."""
    monkeypatch.setattr(nodes, "resolve_host", lambda host, setting: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"node-0 is 127\.0\.1\.1 on this machine"):
        leading_node(Node(num_train=2, address="node-0"))


def test_a_host_that_is_not_known_is_said_with_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"launch\.rdzv: the host no-such-host\.invalid is not known"):
        addresses.resolve_host("no-such-host.invalid", "launch.rdzv")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0"])
def test_a_rendezvous_that_would_listen_on_every_network_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address} would listen on every network"):
        leading_node(Node(num_train=2, address=address, port=free_port()))


def test_a_port_that_is_taken_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be bound on this machine, which is node 0"):
            leading_node(Node(num_train=2, address="127.0.0.1", port=taken.getsockname()[1]))


def test_an_ipv6_address_has_brackets_before_its_port(tmp_path: Path) -> None:
    plan = plan_dry(_config(tmp_path), Node(num_train=2, address="fd00::1", port=29400), machine=MACHINE)
    assert "nodes      2, which meet at [fd00::1]:29400" in plan.describe()


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
        (["http://127.0.0.1:8000", "http://localhost:8000"], None, "127.0.0.1"),
        (["http://10.0.0.7:8001"], "10.0.0.2", "10.0.0.2"),
        (["http://127.0.0.1:8000", "http://10.0.0.7:8001", "http://10.9.0.7:8002"], None, "10.0.0.1"),
    ],
)
def test_the_weight_group_meets_at_the_address_that_the_first_server_elsewhere_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: list[str], host: str | None, found: str
) -> None:
    routes = {("10.0.0.7", 8001): "10.0.0.1", ("10.9.0.7", 8002): "10.9.0.1"}
    monkeypatch.setattr(addresses, "own_address_towards", lambda address, port: routes[address, port])
    assert weights_host(make_config(tmp_path, weights={"host": host}), urls) == found


# ---- the plan of each machine ----

URLS = tuple(f"http://10.0.0.{host}:{port}" for host in (3, 4) for port in (8000, 8001))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_plan_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    names = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(plan_module, "socket_names", lambda own_address: names)
    config = make_config(
        tmp_path,
        launch={"nodes": {"train": 2, "infer": 2}, "num_trainer_ranks": 2},
        inference={"engine": "vllm", "replicas": 2, "vllm": {"tensor_parallel_size": 2, "data_parallel_size": 2}},
    )
    node = Node(rank=rank, num_train=2, num_infer=2, address="10.0.0.1", port=555, own_address=f"10.0.0.{rank + 1}")
    folders = {
        "run_dir": RunDir(Path("/runs/x")),
        "attempt_dir": Path("/runs/x/logs/a"),
        "private_dir": Path("/private"),
    }
    plan = plan_processes(
        config,
        engine=EngineChoice(engine="vllm", reason="test", on_gpu=True) if rank != 1 else SERVERS_ELSEWHERE,
        assignment=Assignment(**folders, node=node, server_urls=URLS),
        machine=Machine(num_cpus=16, gpus=tuple("01234567"), python="/py"),
        token=TOKEN,
    )
    text = plan.describe()
    assert "nodes      4, which meet at 10.0.0.1:555" in text
    assert "node 0     leads; trainer ranks 0-1 on GPU 0,1" in text
    where = (" on GPU 0,1,2,3", " on GPU 4,5,6,7") if rank != 1 else ("", "")  # one that only trains does not know them
    assert f"node 3     servers 2{where[0]}, 3{where[1]}" in text
    assert f"interface  eth7 (10.0.0.{rank + 1})" in text
    assert TOKEN not in text
    assert plan.assignment.transport == ("nccl" if rank == 0 else "gloo")  # the others are told by node 0
    if rank == 3:
        assert plan.trainer is None
        assert [spec.gpus for spec in plan.servers] == [tuple("0123"), tuple("4567")]
        assert [spec.log_name for spec in plan.servers] == ["server_2.log", "server_3.log"]
        assert [dict(pairwise(spec.command))["--port"] for spec in plan.servers] == ["8000", "8001"]
        assert all("inference.host=10.0.0.4" in spec.command for spec in plan.servers)
        return
    assert plan.servers == ()
    assert plan.trainer is not None
    options = dict(pairwise(plan.trainer.command))
    assert (options["--nnodes"], options["--rdzv-endpoint"]) == ("2", "10.0.0.1:555")
    assert options["--rdzv-conf"].startswith(f"rank={rank},")
    assert options["--local-addr"] == f"10.0.0.{rank + 1}"
    assert names.items() <= plan.trainer.environment.items()
    assert plan.assignment.file_store is None
    assert plan.trainer.log_name == ("trainer.log" if rank == 0 else "trainer_node1.log")


def test_one_machine_that_trains_keeps_its_ranks_off_the_network(tmp_path: Path) -> None:
    config = _config(tmp_path, train=1, infer=1)
    plan = plan_dry(config, machine=Machine(num_cpus=8))
    assert plan.trainer is not None
    assert "store_type=file" in plan.trainer.command
    assert plan.assignment.file_store is not None


# ---- how they meet ----


class _Run:
    """Node 0 of a run, and machines that join it in threads of their own."""

    def __init__(self, config: ExperimentConfig, stack: ExitStack) -> None:
        count = config.launch.nodes.count
        self.config = config
        self.run_dir = RunDir(config.run_path.absolute())
        self.run_dir.create(dump_config(config))
        stack.enter_context(self.run_dir.new_token(TOKEN))
        self.node = node = Node(num_train=count, address="127.0.0.1", port=free_port(), own_address="127.0.0.1")
        self.assignment = Assignment(
            run_dir=self.run_dir, attempt_dir=self.run_dir.new_attempt(), private_dir=Path("/private"), node=node
        )
        self.launchers = stack.enter_context(hosting(node, TOKEN))
        self.notes: list[str] = []

    def gather(self) -> list[NodeInfo]:
        return gather(self.launchers, self.config, self.assignment, NodeInfo(rank=0, host="h0"), self.notes.append)

    def join(self, rank: int, *, config: ExperimentConfig | None = None, run_dir: RunDir | None = None) -> JoinedRun:
        return join(
            config or self.config,
            self.node.model_copy(update={"rank": rank, "address": "localhost"}),
            run_dir or self.run_dir,
            engine=EMBEDDED,
            say=lambda text: None,
        )


def test_machines_join_in_any_order_start_with_node_0_and_hear_its_messages_and_its_end(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = _Run(_config(tmp_path, train=3, server_port=4711), stack)
        joining = [in_thread(partial(run.join, rank), name="join") for rank in (2, 1)]
        found = run.gather()
        assert [(node.rank, node.urls) for node in found] == [
            (1, ("http://127.0.0.1:4711",)),
            (2, ("http://127.0.0.1:4711",)),
        ]
        assert "waiting for nodes 1 and 2" in run.notes[0]
        for rank in (1, 2):
            run.launchers.post(rank, "start", assignment=run.assignment.model_dump(mode="json"))
        run.launchers.exchange()
        second, first = (each.result(WAIT_S) for each in joining)
        assert first.assignment.attempt_dir == run.assignment.attempt_dir
        assert (first.assignment.node.rank, first.assignment.node.own_address) == (1, "127.0.0.1")
        first.launchers.post(0, "note", text="x" * 1_000_000)
        second.launchers.post(0, "note", text="b")
        first.launchers.exchange()
        second.launchers.exchange()
        assert sorted((m["from"], len(m["text"])) for m in run.launchers.exchange()) == [(1, 20_000), (2, 1)]
        run.launchers.post(2, "end", exit_code=143)
        run.launchers.exchange()
        assert not run.launchers.has_read(2)
        assert [m["kind"] for m in second.launchers.exchange()] == ["end"]
        assert run.launchers.has_read(2)


def test_a_machine_without_a_heartbeat_is_silent_and_one_that_has_it_is_not(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = _Run(_config(tmp_path, train=3), stack)
        store = TCPStore("127.0.0.1", run.node.port, is_master=False, wait_for_workers=False)
        other = LauncherStore(store, TOKEN, rank=1, count=3)
        for _ in range(5):
            other.exchange()
            run.launchers.exchange()
        assert run.launchers.silent([1, 2], longer_than_s=4 * launcher_store.HEARTBEAT_S) == [2]


def _with_lr(config: ExperimentConfig, lr: float) -> ExperimentConfig:
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": lr})})


def test_another_configuration_is_refused_on_both_sides(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = _Run(_config(tmp_path), stack)
        gathering = in_thread(run.gather, name="gather")
        lr = run.config.optimizer.lr
        with pytest.raises(ConfigError, match=rf"not that of node 0(.|\n)*optimizer\.lr: {lr} -> 0\.5"):
            run.join(1, config=_with_lr(run.config, 0.5))
        host = socket.gethostname()
        with pytest.raises(RunError, match=rf"node 1 \({host}\) cannot take part: its configuration"):
            gathering.result(WAIT_S)


@pytest.mark.parametrize("during", ["own_urls", "_wait_for_start"])
@pytest.mark.parametrize(
    ("error", "reason"), [(SystemExit(143), "SystemExit: 143"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
def test_a_machine_that_ends_while_it_joins_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str, error: BaseException, reason: str
) -> None:
    def end(*_: object) -> tuple[str, ...]:
        raise error

    monkeypatch.setattr(rendezvous, during, end)
    with ExitStack() as stack:
        run = _Run(_config(tmp_path, train=3), stack)  # node 2 is still missing
        gathering = in_thread(run.gather, name="gather")
        with pytest.raises(type(error)):
            run.join(1)
        with pytest.raises(RunError, match=f"cannot take part: {reason}"):
            gathering.result(WAIT_S)


def test_other_versions_another_folder_and_a_rank_that_is_taken_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        run = _Run(_config(tmp_path, rdzv_timeout_s=5.0), stack)
        found = rendezvous.versions()
        run.launchers.put("run", {"attempt": attempt_number(run.assignment.attempt_dir), "versions": found})
        own_folder = RunDir(tmp_path / "a folder of its own")
        own_folder.create("")
        stack.enter_context(own_folder.new_token())
        with pytest.raises(ConfigError, match=r"run\.dir: .* must be on a file system that all machines share"):
            run.join(1, run_dir=own_folder)
        monkeypatch.setattr(rendezvous, "versions", lambda: {**found, "torch": "1.0"})
        with pytest.raises(ConfigError, match=r"other versions .*torch .* -> 1\.0"):
            run.join(1, config=_with_lr(run.config, 0.5))  # another version may have other settings and defaults
        with pytest.raises(ConfigError, match="node 1 has joined already"):
            run.join(1)


def test_what_a_stranger_puts_into_the_store_is_not_believed(tmp_path: Path) -> None:
    """Else the trainer would send the token to a server of his."""
    with ExitStack() as stack:
        run = _Run(_config(tmp_path), stack)
        store = TCPStore("127.0.0.1", run.node.port, is_master=False, wait_for_workers=False)
        stranger = LauncherStore(store, "guessed", rank=1, count=2)
        stranger.post(0, "ready", node={"rank": 1, "host": "evil", "urls": ["http://evil:1"]})
        stranger.exchange()
        with pytest.raises(ForgedError, match="not signed with the token of this run"):
            run.gather()
        assert TOKEN.encode() not in b"".join(PrefixStore("launchers", store).get(key) for key in ("run", "to/0/1"))


def test_node_0_and_the_others_say_who_is_missing_and_name_the_setting(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = _Run(_config(tmp_path, train=3, rdzv_timeout_s=1.0), stack)
        with pytest.raises(DeadlineError, match=r"nodes 1 and 2 to join; raise `launch\.rdzv_timeout_s`"):
            run.gather()
    run.node = run.node.model_copy(update={"port": free_port()})
    with pytest.raises(DeadlineError, match=r"node 0 to listen at localhost:\d+; raise `launch\.rdzv_timeout_s`"):
        run.join(1)


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


# ---- real launchers, with stand-ins for what they start ----


def _launchers(folder: Path, trainer: str, *, server: str = "serve") -> tuple[LauncherProcess, LauncherProcess]:
    """Of node 0, which trains, and node 1, which serves."""
    launch = {"nodes": {"train": 1, "infer": 1}, "num_trainer_ranks": 1, "rdzv": f"127.0.0.1:{free_port()}"}
    options: dict[str, Any] = {"trainer": trainer, "server": server, "launch": launch}
    second = LauncherProcess(folder, node_rank=1, inference={"restart_delay_s": 0.0}, **options)
    return LauncherProcess(folder, node_rank=0, inference={"restart_delay_s": 0.0}, **options), second


@pytest.mark.slow
def test_a_server_that_is_killed_on_another_machine_is_started_again_there_and_the_trainer_hears_of_it(
    tmp_path: Path,
) -> None:
    first, second = _launchers(tmp_path, "served")
    with second as serves, first as trains:
        trains.wait_for_line("servers serve")
        trains.wait_for_processes("server", "rank0")
        assert serves.pids().keys() == {"server", "rank0"}
        news, logs = tmp_path / "news", tmp_path / "runs" / "test" / "logs" / "latest"
        for number in (1, 2):
            old = serves.pids()["server"]
            if number == 1:  # by the trainer; what it has sent before, that the server serves, has come by then, too
                os.kill(trains.pids()["rank0"], signal.SIGUSR1)
            else:
                os.kill(old, signal.SIGKILL)
            assert eventually(lambda old=old: serves.pids()["server"] != old, WAIT_S)
            trains.wait_for_line(
                f"the inference server was killed{': it did not answer' if number == 1 else ' by SIGKILL'}"
            )
            assert eventually(lambda number=number: news.read_text().count('"event": "starting"') == number, WAIT_S)
            assert (logs / f"server.restart_{number}.log").is_file()
        os.kill(trains.pids()["rank0"], signal.SIGUSR2)  # it finishes
        assert trains.end() == 0, trains.output
        assert serves.end() == 0, serves.output
        assert trains.left() == {}


@pytest.mark.slow
def test_a_launcher_that_is_killed_ends_the_other_and_all_that_it_has_started(tmp_path: Path) -> None:
    first, second = _launchers(tmp_path, "ignore-stop")
    with second, first:
        first.wait_for_processes("rank0", "server")
        first.process.kill()  # node 0 itself
        assert second.end() == 1
        assert "node 0 is gone" in second.output
        assert eventually(lambda: second.left() == {}, WAIT_S)


@pytest.mark.slow
def test_a_machine_that_cannot_start_its_servers_says_so_at_once(tmp_path: Path) -> None:
    first, second = _launchers(tmp_path, "ignore-stop", server="missing")
    with second as serves, first as trains:
        assert serves.end() == 1
        trains.wait_for_line(f"node 1 ({socket.gethostname()}) has left the run: cannot start the inference server")
        assert trains.end() == 1
        assert "is gone" not in trains.output
        assert trains.left() == {}


@pytest.mark.slow
def test_a_server_that_fails_before_it_serves_ends_the_run_with_its_last_words_on_both_machines(tmp_path: Path) -> None:
    first, second = _launchers(tmp_path, "ignore-stop", server="crash")
    with second as serves, first as trains:
        assert trains.end() == 1
        assert serves.end() == 1
        for launcher in (trains, serves):
            assert "KV cache does not fit" in launcher.output
        assert f"on node 1 ({socket.gethostname()}) the inference server" in trains.output
        assert trains.left() == {}
