"""The only address that code in the sandbox can reach, if its owner wants one: a loopback port in its own network namespace.

The launcher creates the listening socket there and sends it to the owner, who accepts the connections. The sandbox has no other
network, so the code can connect to that port or to nothing.
"""

from __future__ import annotations

import fcntl
import socket
import struct

PORT = 8000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_BACKLOG = 1024


def listen(descriptor: int) -> None:
    """Listen on 127.0.0.1:PORT and send the socket through the Unix socket `descriptor`, which is then closed. OSError if the
    kernel refuses. This process must be alone in its network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    with (
        socket.create_server(("127.0.0.1", PORT), backlog=_BACKLOG) as server,
        socket.socket(fileno=descriptor) as owner,
    ):
        socket.send_fds(owner, [b"!"], [server.fileno()])
