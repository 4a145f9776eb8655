"""Code that calls home."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

import pytest

from tests.sandbox.support import TRIAL, run


def test_no_kind_of_socket_can_be_made() -> None:
    """Of IP, Unix, netlink, packets, crypto, vsock."""
    code = f"""{TRIAL}
import socket
for family in (1, 2, 10, 16, 17, 38, 40):
    trial(lambda: socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM))
a, b = socket.socketpair()
a.send(b"x")
print(b.recv(1))
"""
    assert run(code).stdout == "PermissionError\n" * 7 + "b'x'\n"


def test_unix_sockets_outside_are_not_reached(tmp_path: Path) -> None:
    """By path (docker.sock) and by abstract name (session buses)."""
    name = f"\0grpo-async-{uuid.uuid4().hex}"
    os.chmod(tmp_path, 0o777)
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as by_name:
        for listener, address in ((by_path, path), (by_name, name)):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        code = f"""{TRIAL}
import socket
def connect(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
trial(lambda: connect({path!r}))
trial(lambda: connect({name!r}))
"""
        assert "went through" not in run(code).stdout
        for listener in (by_path, by_name):
            with pytest.raises(BlockingIOError):
                listener.accept()
