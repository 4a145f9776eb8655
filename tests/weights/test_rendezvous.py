"""Where a weight group forms: other users of the machine can neither read nor write it, and servers open nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from grpo_async.inference.api import WeightInitInfo
from grpo_async.weights import rendezvous as rendezvous_module
from grpo_async.weights.calls import NOT_FORMED, PushFailedError
from grpo_async.weights.receiver import UpdateRefusedError, check_membership
from grpo_async.weights.rendezvous import GroupRendezvous, RendezvousAbortedError, join_rendezvous, problem_with_store
from tests.weights.servers import Workers
from tests.weights.test_transport import Parameters, make_transport, push

NOBODY = 65534
LIMIT_S = 60.0


class _Looking(Workers):
    """Calls `look` with what it is to join by."""

    def __init__(self, name: str, look: Any, *, joins: bool = True) -> None:
        super().__init__(name)
        self._look, self._joins = look, joins

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
        self._look(info)
        if self._joins:
            super().init_weight_transfer(info, timeout_s=timeout_s)


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
        answer = stream.read()
    os.waitpid(pid, 0)
    return dict(json.loads(answer))


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_can_neither_read_nor_write_what_a_group_forms_over() -> None:
    seen: list[dict[str, str]] = []

    def look(info: WeightInitInfo) -> None:
        seen.append(_try_as_another_user(str(Path(info.store_file).parent), info.store_file))

    transport = make_transport()
    servers: list[Any] = [_Looking("a", look)]
    try:
        transport.connect(servers)
    finally:
        transport.close()
    assert seen == [dict.fromkeys(("list", "read", "write", "replace"), "PermissionError")]


def test_a_group_on_one_machine_listens_on_loopback_only_and_leaves_no_file(tmp_path: Path) -> None:
    before = _listening()
    folders: list[Path] = []

    def look(info: WeightInitInfo) -> None:
        assert _listening() == before  # no store listens while the trainer waits in its own
        folders.append(Path(info.store_file).parent)

    transport = make_transport(private=tmp_path)
    servers: list[Any] = [_Looking("a", look)]
    try:
        transport.connect(servers)
        assert folders[0].parent == tmp_path  # which the launcher removes, whoever is killed
        assert list(tmp_path.iterdir()) == []  # nobody needs it anymore
        push(transport, servers, Parameters())
        assert {address for address, _ in _listening() - before} == {"127.0.0.1"}  # gloo's own, for the pairs
    finally:
        transport.close()
    assert servers[0].version == 1


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[GroupRendezvous]:
    """Of a trainer that waits for one worker."""
    rendezvous = GroupRendezvous("127.0.0.1", world_size=2, timeout_s=LIMIT_S, private=tmp_path)
    yield rendezvous
    rendezvous.close()


def _info(store_file: Path | str, key: str = "weights/0a") -> WeightInitInfo:
    return WeightInitInfo(
        master_address="127.0.0.1", store_file=str(store_file), rank_offset=1, world_size=2, timeout_s=5.0, key=key
    )


def _refusal(file: Path) -> str:
    """Why a server does not open `file`; it writes nothing, makes nothing, and does not wait."""
    before = file.read_bytes() if file.is_file() else file.exists()
    with pytest.raises(UpdateRefusedError) as refused:
        check_membership(_info(file))
    with pytest.raises(RuntimeError, match=re.escape(str(refused.value))):
        join_rendezvous(_info(file), rank=1, device="cpu")
    assert NOT_FORMED not in str(refused.value)  # it is this server that cannot join, and not others whom it waits for
    assert (file.read_bytes() if file.is_file() else file.exists()) == before
    return str(refused.value)


def test_a_server_opens_no_file_but_a_store_that_its_own_user_has_made(
    rendezvous: GroupRendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(rendezvous.store_file)
    check_membership(_info(store))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: NOBODY)
        assert "not a private folder of this server's user" in _refusal(store)
    bytes_of_it = store.read_bytes()
    ssh = tmp_path / ".ssh"
    ssh.mkdir(mode=0o700)
    for wrong in (ssh / "authorized_keys", ssh / "store", store.parent / "other"):
        assert "not the name of a trainer's store" in _refusal(wrong)
    assert "not the name of a trainer's store" in str(problem_with_store(_info(f"/\0/{store.parent.name}/store")))
    shutil.copy(store, ssh / "store")
    (tmp_path / "grpo-async-weights-link").symlink_to(ssh)
    assert "not a private folder" in _refusal(tmp_path / "grpo-async-weights-link" / "store")
    for mode in (0o755, 0o770):
        store.parent.chmod(mode)
        assert "not a private folder" in _refusal(store)
    store.parent.chmod(0o700)
    store.write_bytes(b"ssh-ed25519 of somebody")
    assert "is not a store" in _refusal(store)
    store.unlink()
    assert re.search(r"cannot see the trainer's file .*the same user .*weights\.host", _refusal(store))
    store.symlink_to(ssh / "store")
    assert "is not a file of the user" in _refusal(store)
    store.unlink()
    os.mkfifo(store)
    assert "is not a file of the user" in _refusal(store)
    assert (ssh / "store").read_bytes() == bytes_of_it
    assert "cannot see" in _refusal(tmp_path / "grpo-async-weights-gone" / "store")


def test_one_store_is_named_and_a_key_that_is_no_text_of_the_callers() -> None:
    for key in ("k", "weights/", "weights/0G", "weights/0\n", "x\nssh-ed25519 AAAA\n", "weights/0/0"):
        with pytest.raises(ValidationError, match="key"):
            _info("/tmp/grpo-async-weights-0/store", key)
    good = _info("/tmp/grpo-async-weights-0/store").model_dump()
    for wrong in ({"store_file": ""}, {"master_port": 1}):
        with pytest.raises(ValidationError, match="either master_port or store_file"):
            WeightInitInfo.model_validate(good | wrong)
    assert WeightInitInfo.model_validate(good | {"store_file": "", "master_port": 7}).where == "127.0.0.1:7"


@pytest.mark.parametrize("fails", [["_file_store"], ["wait", "abort"], []], ids=["made", "used", "no folder"])
def test_a_store_that_fails_is_the_trainers_own_failure_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: list[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no space left on device")

    for name in fails:
        monkeypatch.setattr(rendezvous_module if name == "_file_store" else GroupRendezvous, name, fail)
    private = tmp_path if fails else tmp_path / "gone"
    servers: list[Any] = [_Looking("a", lambda _: None, joins=False)]
    with pytest.raises(PushFailedError, match="no space left" if fails else "FileNotFoundError") as caught:
        make_transport(private=private).connect(servers)
    assert list(tmp_path.iterdir()) == []
    assert (caught.value.phase, caught.value.failures, list(caught.value.affected)) == ("connect", {}, ["trainer"])


@pytest.mark.parametrize("between_machines", [False, True])
def test_what_the_trainer_says_reaches_a_worker_over_a_file_and_over_tcp(
    monkeypatch: pytest.MonkeyPatch, between_machines: bool
) -> None:
    if between_machines:
        monkeypatch.setattr(rendezvous_module, "is_loopback", lambda _: False)
    before = _listening()
    for reason in ("", "another member is gone"):
        rendezvous = GroupRendezvous("127.0.0.1", world_size=2, timeout_s=LIMIT_S)
        listening = _listening() - before
        assert listening == ({("127.0.0.1", rendezvous.port)} if between_machines else set())
        info = rendezvous.init_info("gloo", rank_offset=1)
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
