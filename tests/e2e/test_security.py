"""Who can reach a run while it trains: sockets, tokens, files and processes of the whole process tree, and HTTPS."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.support import Run, finish, make_run, rewards
from tests.e2e.test_failures import ENDLESS
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

READABLE = ("/rollout/info", "/rollout/parameters", "/is_paused")


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


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two servers, two ranks, a reward in a process of its own. The last two tests kill what is in it."""
    settings = (
        *ENDLESS,
        "inference.replicas=2",
        "inference.restart_delay_s=0.2",
        "launch.num_trainer_ranks=2",
        "weights.verify_every_pushes=1",
        rewards("user_rewards:by_place_in_no_hurry", run_in="process"),
    )
    run = make_run(tmp_path_factory.mktemp("live"), "quickstart.yaml", settings)
    process = run.start()
    try:
        run.wait_for_step(2, process, timeout_s=180.0)
        plan = (run.folder / "plan.txt").read_text().splitlines()
        urls = [line.split()[1] for line in plan if line.startswith("server ")]
        yield Live(run, process, (run.folder / "token").read_text().strip(), urls)
    finally:
        if process.poll() is None:  # a test has failed
            run.kill_everything(process)
    run.assert_nothing_is_left()


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


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
    """TCP and UDP sockets are bound to loopback, Unix sockets are out of the reach of others; nothing shows the token."""
    processes = live.tree()
    assert len(processes) >= 6  # launcher, two servers, torchrun, two ranks, a reward's worker
    every, beyond = _open_to_others(processes)
    assert len(every) >= 4, every  # two servers, gloo of each rank
    assert beyond == []
    sockets = _unix_listeners(processes)
    assert any(path.endswith("/control") for path in sockets), sockets
    assert [path for path in sockets if _others_can_reach(path)] == []
    shown = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in processes]
    assert not any(live.token.encode() in command for command in shown)
    assert _files_with(live.run.folder, live.token) == ["token"]
    assert len(live.token) >= 32
    assert stat.S_IMODE((live.run.folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(live.run.folder.stat().st_mode) == 0o700


def test_both_servers_answer_401_without_the_token(live: Live) -> None:
    """And without another one; whatever is not GET /health: tests/servers/test_guard.py. All paths of vLLM: tests/vllm."""
    assert len(live.urls) == 2
    for url in live.urls:
        assert httpx.get(f"{url}/health").status_code == 200
        for path in READABLE:
            for given, status in (("", 401), (f"Bearer {live.token}x", 401), (f"Bearer {live.token}", 200)):
                assert httpx.get(url + path, headers={"authorization": given}).status_code == status, path
        assert httpx.post(f"{url}/pause").status_code == 401
        assert httpx.get(f"{url}/rollout/info?token={live.token}").status_code == 401


def _files_with(folder: Path, secret: str) -> list[str]:
    """Files below a folder that contain the secret."""
    found = []
    for root, _, names in os.walk(folder):  # checkpoints come and go meanwhile; `rglob` would raise
        for file in (Path(root) / name for name in names):
            with contextlib.suppress(FileNotFoundError):  # a temporary one
                if secret.encode() in file.read_bytes():
                    found.append(file.relative_to(folder).as_posix())
    return found


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
