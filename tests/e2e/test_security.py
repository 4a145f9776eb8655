"""Who can reach a run while it trains: sockets, tokens, files and processes of the whole process tree, and HTTPS."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.support import Run, finish, make_run, rewards
from tests.e2e.test_failures import ENDLESS
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
READABLE = ("/rollout/info", "/rollout/parameters", "/is_paused")
PATHS = (
    *READABLE,
    "/rollout/generate",
    "/rollout/score",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    # what is not there, and what looks like /health to some but not to others (the guard alone: tests/servers/test_guard.py)
    "/docs",
    "/no_such_path",
    "/./health",
    "/health/../rollout/info",
    "/health%2f..%2frollout/info",
    "/rollout/info?/health",
    "/rollout/info#/health",
    "http://127.0.0.1/rollout/info",
)
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS")


@dataclass
class Live:
    """A run that trains, with its secret."""

    run: Run
    process: subprocess.Popen[str]
    token: str
    urls: list[str]

    def tree(self) -> list[psutil.Process]:
        """The launcher and everything below it, and whatever carries the run's mark without being below it."""
        launcher = psutil.Process(self.process.pid)
        return list({process.pid: process for process in [*self.run.processes(), *_below(launcher)]}.values())

    def assert_only_its_user_can_reach_it(self, *, least_sockets: int) -> None:
        """TCP and UDP sockets are bound to loopback, Unix sockets are out of the reach of others; nothing shows the token."""
        processes = self.tree()
        every, beyond = _open_to_others(processes)
        assert len(every) >= least_sockets, every
        assert beyond == []
        sockets = _unix_listeners(processes)
        assert any(path.endswith("/control") for path in sockets), sockets
        assert [path for path in sockets if _others_can_reach(path)] == []
        shown = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in processes]
        assert not any(self.token.encode() in command for command in shown)
        assert _files_with(self.run.folder, self.token) == ["token"]


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


@contextlib.contextmanager
def _live(run: Run, *, step: int, timeout_s: float = 180.0) -> Iterator[Live]:
    process = run.start(environment={INSECURE: "1"})
    try:
        run.wait_for_step(step, process, timeout_s=timeout_s)
        plan = (run.folder / "plan.txt").read_text().splitlines()
        urls = [line.split()[1] for line in plan if line.startswith("server ")]
        yield Live(run, process, (run.folder / "token").read_text().strip(), urls)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            finish(process, timeout_s=90.0)
        try:
            run.assert_nothing_is_left()
        finally:
            for left in run.processes():  # of a test that fails
                left.kill()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two servers, two ranks, a reward in a process of its own. The last two tests kill what is in it."""
    folder = tmp_path_factory.mktemp("live")
    settings = (
        *ENDLESS,
        "inference.replicas=2",
        "inference.restart_delay_s=0.2",
        "launch.num_trainer_ranks=2",
        "weights.verify_every_pushes=1",
        rewards("user_rewards:by_place_in_no_hurry", run_in="process"),
    )
    run = make_run(folder, "quickstart.yaml", settings)
    with _live(run, step=2) as live:
        yield live


# -- sockets


def _open_to_others(processes: Iterable[psutil.Process]) -> tuple[list[str], list[str]]:
    """TCP sockets that listen and UDP sockets that are bound: all, and those beyond loopback."""
    every, beyond = [], []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="inet"):
                is_udp = connection.type == socket.SOCK_DGRAM and bool(connection.laddr)
                if connection.status == psutil.CONN_LISTEN or is_udp:
                    told = f"{' '.join(process.cmdline())[:120]}: {connection.laddr.ip}:{connection.laddr.port}"
                    every.append(told)
                    if not ipaddress.ip_address(connection.laddr.ip.partition("%")[0]).is_loopback:
                        beyond.append(told)
    return every, beyond


def _unix_listeners(processes: Iterable[psutil.Process]) -> list[str]:
    """Paths of the UNIX sockets that these processes listen on; one without a file begins with `@`."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry))
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and f"socket:[{fields[6]}]" in inodes:  # __SO_ACCEPTCON
            found.append(fields[7] if len(fields) > 7 else "(no name)")
    return found


def _others_can_reach(path: str) -> bool:
    """Whether another user can open this socket: they may write to it, and no folder above it keeps them out."""
    if not path.startswith("/"):
        return True  # has no file, and so no permissions
    may_write = Path(path).stat().st_mode & stat.S_IWOTH
    return bool(may_write) and all(above.stat().st_mode & stat.S_IXOTH for above in Path(path).parents)


def test_a_run_can_be_reached_by_its_user_on_this_machine_only_and_the_token_stands_in_its_file_only(
    live: Live,
) -> None:
    assert len(live.tree()) >= 6  # launcher, two servers, torchrun, two ranks, a reward's worker
    live.assert_only_its_user_can_reach_it(least_sockets=4)  # two servers, gloo of each rank
    assert len(live.token) >= 32
    assert stat.S_IMODE((live.run.folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(live.run.folder.stat().st_mode) == 0o700


# -- HTTP


def _status(url: str, method: str, target: str, authorization: str | None, *, body: bytes = b"") -> int:
    """The status of a request that is sent as it is written here; a client would tidy the path."""
    address = urlsplit(url)
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {address.netloc}",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    if authorization is not None:
        lines.append(f"Authorization: {authorization}")
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20.0) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1]) if answer else 0


def test_every_path_of_every_server_answers_401_without_the_token_which_opens_each(live: Live) -> None:
    assert len(live.urls) == 2
    token = live.token
    open_paths = []
    for url, paths in zip(live.urls, (PATHS, READABLE), strict=True):  # both servers are the same program
        assert _status(url, "GET", "/health", None) == 200
        for path in paths:
            for method in METHODS:
                for given in (None, f"Bearer {token}x"):
                    status = _status(url, method, path, given)
                    # 400: no request at all to the HTTP parser, so that it reaches no path
                    if status != 401 and not ("#" in path and status == 400):
                        open_paths.append((method, path, given and given.replace(token, "TOKEN"), status))
        assert _status(url, "POST", "/health", None) == 401
        assert _status(url, "GET", f"/rollout/info?token={token}", None) == 401
        assert _status(url, "GET", "/rollout/info", "Bearer wrong\r\nX-Authorization: Bearer " + token) == 401
        right = f"Bearer {token}"
        assert [_status(url, "GET", path, right) for path in READABLE] == [200, 200, 200]
        assert _status(url, "GET", "/no_such_path", right) == 404
        assert _status(url, "POST", "/rollout/generate", right, body=b"{}") in (400, 422)
    assert open_paths == []


# -- the token


def _files_with(folder: Path, secret: str) -> list[str]:
    """Files below a folder that contain the secret."""
    found = []
    for root, _, names in os.walk(folder):  # checkpoints come and go meanwhile; `rglob` would raise
        for file in (Path(root) / name for name in names):
            with contextlib.suppress(FileNotFoundError):  # a temporary one
                if secret.encode() in file.read_bytes():
                    found.append(file.relative_to(folder).as_posix())
    return found


# -- processes


def _still_run(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that live; psutil tells a new process with an old pid from the old one."""
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def test_what_both_ranks_hold_together_is_what_the_servers_got_after_every_push(live: Live) -> None:
    live.run.wait_for_step(4, live.process)
    compared = [line["sync/verify_max"] for line in live.run.metrics() if "sync/verify_max" in line]
    assert len(compared) >= 3
    assert max(compared) < 1e-4


def test_of_two_servers_one_is_killed_with_all_its_processes_and_training_goes_on_meanwhile(live: Live) -> None:
    first, second = live.run.processes("serve-embedded")
    dying = _below(second)
    before = len(live.run.metrics())
    second.kill()
    assert eventually(lambda: not _still_run(dying), 10.0), "the killed server's processes to end"
    live.run.wait_for_servers(live.process, serving=2, restarts=1, timeout_s=120.0)
    assert _still_run([first])
    lines = live.run.metrics()[before:]
    assert [line for line in lines if line["servers/serving"] == 1], "no step was made while one server was down"
    assert not [line for line in lines if "sync/skipped" in line], "a push found no server"


def test_a_killed_rank_ends_the_run_with_its_number_and_afterwards_no_process_and_no_token_is_left(live: Live) -> None:
    """The second server is in its second life by then."""
    everything = live.tree()
    ranks = live.run.ranks()
    assert sorted(ranks) == [0, 1]
    ranks[1].kill()
    done = finish(live.process, timeout_s=90.0)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "rank 1" in done.stdout
    assert "SIGKILL" in done.stdout
    assert eventually(lambda: not _still_run(everything), 15.0), "every process of the run to end"
    assert live.token not in done.stdout
    assert _files_with(live.run.folder, live.token) == []
    assert not (live.run.folder / "token").exists()


# -- the real vLLM


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.usefixtures("needs_vllm")
def test_a_run_on_vllm_is_closed_to_others_and_its_dead_server_leaves_no_orphan(tmp_path: Path) -> None:
    """vLLM starts processes of its own, which open sockets of their own and outlive their parent unless they are kept from it."""
    run = make_run(tmp_path, "quickstart-vllm.yaml", ENDLESS)
    with _live(run, step=2, timeout_s=400.0) as live:
        live.assert_only_its_user_can_reach_it(least_sockets=2)
        (server,) = [process for process in live.tree() if _is_a_vllm_server(process)]
        dying = _below(server)
        assert len(dying) >= 2, "vLLM's engine is a process of its own"
        for process in dying:
            assert INSECURE.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
        server.kill()
        assert eventually(lambda: not _still_run(dying), 20.0), "the processes of the killed server to end"
        assert live.process.poll() is None, "one dead server does not end the run"
    assert not (run.folder / "token").exists()


def _is_a_vllm_server(process: psutil.Process) -> bool:
    """The API server itself: it listens for HTTP."""
    command = process.cmdline()
    return "vllm" in " ".join(command) and ("api_server" in " ".join(command) or "--port" in command)
