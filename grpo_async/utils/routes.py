"""Which address of this machine another one reaches."""

from __future__ import annotations

import socket


def own_address_towards(address: str, port: int) -> str:
    """The address of this machine that the machine with `address` can reach. Sends nothing.

    Raises:
        OSError: no route leads there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # a datagram socket only notes the address
        return str(probe.getsockname()[0])
