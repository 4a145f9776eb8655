"""Code that calls home."""

from __future__ import annotations

from tests.sandbox.support import TRIAL, run


def test_no_kind_of_socket_can_be_made() -> None:
    """Of IP, Unix, netlink, packets, crypto, vsock."""
    code = f"""{TRIAL}
import socket
for family in (1, 2, 10, 16, 17, 38, 40):
    trial(lambda: socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM))
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):  # such pairs send to any Unix socket
    trial(lambda: socket.socketpair(socket.AF_UNIX, kind))
a, b = socket.socketpair()
a.send(b"x")
print(b.recv(1))
"""
    assert run(code).stdout == "PermissionError\n" * 9 + "b'x'\n"
