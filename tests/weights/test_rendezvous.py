"""Where a weight group forms: other users of the machine can neither read nor write it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from grpo_async.inference.surface import WeightInitInfo
from grpo_async.weights import rendezvous as rendezvous_module
from grpo_async.weights.participants import NOT_FORMED
from grpo_async.weights.rendezvous import Rendezvous, RendezvousAbortedError, join_rendezvous
from tests.weights.servers import Workers
from tests.weights.test_transport import _Parameters, _push, _transport

NOBODY = 65534
LIMIT_S = 60.0


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == "LISTEN"}


def _try_as_another_user(folder: str, file: str) -> dict[str, str]:
    """What a child process of another user gets for each attempt."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(NOBODY)
        found = {}
        for name, attempt in {
            "list": lambda: os.listdir(folder),
            "read": lambda: os.open(file, os.O_RDONLY),
            "write": lambda: os.open(file, os.O_WRONLY | os.O_CREAT),
            "replace": lambda: os.rename(folder, f"{folder}-taken"),
        }.items():
            try:
                found[name] = repr(attempt())
            except OSError as error:
                found[name] = type(error).__name__
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        words = stream.read()
    os.waitpid(pid, 0)
    return dict(json.loads(words))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_can_neither_read_nor_write_what_a_group_forms_over() -> None:
    before = _listening()
    seen: list[dict[str, str]] = []
    folders: list[Path] = []

    class Looks(Workers):
        def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
            assert _listening() == before  # no store listens while the trainer waits in its own
            folders.append(Path(info.store_file).parent)
            seen.append(_try_as_another_user(str(folders[0]), info.store_file))
            super().init_weight_transfer(info, timeout_s=timeout_s)

    transport, server = _transport(), Looks("a")
    try:
        transport.connect([server])
        assert seen == [dict.fromkeys(("list", "read", "write", "replace"), "PermissionError")]
        assert not folders[0].exists()  # nobody needs it any more
        _push(transport, [server], _Parameters())
        assert {address for address, _ in _listening() - before} == {"127.0.0.1"}  # gloo's own, for the pairs
    finally:
        transport.close()
    assert server.version == 1


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_worker_takes_no_file_from_a_folder_that_others_can_enter(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    info = WeightInitInfo(
        master_address="127.0.0.1",
        store_file=str(folder / "store"),
        rank_offset=1,
        world_size=2,
        timeout_s=5.0,
        key="k",
    )
    with pytest.raises(RuntimeError, match=f"{NOT_FORMED}: .* is not a private folder"):
        join_rendezvous(info, rank=1, device="cpu")
    gone = info.model_copy(update={"store_file": str(tmp_path / "gone" / "store")})
    with pytest.raises(RuntimeError, match=r"cannot see the trainer's folder .*weights\.host"):
        join_rendezvous(gone, rank=1, device="cpu")


@pytest.mark.parametrize("between_machines", [False, True])
def test_the_trainers_word_reaches_a_worker_over_a_file_and_over_tcp(
    monkeypatch: pytest.MonkeyPatch, between_machines: bool
) -> None:
    if between_machines:
        monkeypatch.setattr(rendezvous_module, "is_loopback", lambda _: False)
    before = _listening()
    for reason in ("", "another member is gone"):
        rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=LIMIT_S)
        listening = _listening() - before
        assert listening == ({("127.0.0.1", rendezvous.port)} if between_machines else set())
        info = WeightInitInfo(
            master_address="127.0.0.1",
            master_port=rendezvous.port,
            store_file=rendezvous.store_file,
            rank_offset=1,
            world_size=2,
            timeout_s=LIMIT_S,
            key=rendezvous.key,
        )
        if reason:
            rendezvous.abort(reason)
            with pytest.raises(RendezvousAbortedError, match=reason):
                join_rendezvous(info, rank=1, device="cpu")
        else:
            rendezvous.begin()
            join_rendezvous(info, rank=1, device="GPU-7")
            assert rendezvous.wait("cpu") == ["cpu", "GPU-7"]
        rendezvous.close()
        del rendezvous
        before = _listening()
