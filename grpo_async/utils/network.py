"""Addresses of this machine, and sockets that listen on one of them alone."""

from __future__ import annotations

import ipaddress
import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1"}
"""Addresses that listen on every network, and what this machine connects to instead."""


def is_loopback(host: str) -> bool:
    """Whether `host` is reached from this machine only; a name other than localhost may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address_towards(address: str, port: int) -> str:
    """The address of this machine that the machine with `address` can reach. Sends nothing."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # a datagram socket only notes the address
        return str(probe.getsockname()[0])


def family_of(address: str) -> socket.AddressFamily:
    """IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def host_in_url(address: str) -> str:
    """The address as it stands before a port: "::1" -> "[::1]", "127.0.0.1" as it is."""
    return f"[{address}]" if ":" in address else address


def check_host(host: str) -> str:
    """`host`, as it is.

    Raises:
        ValueError: it is neither a name that resolvers and HTTP clients take nor an IP address.
    """
    if ":" in host or re.fullmatch(r"[\d.]+", host, re.ASCII):
        try:
            ipaddress.ip_address(host.replace("%", "/"))  # no zones: HTTP clients do not take them
        except ValueError as error:
            raise ValueError(f"{host!r} is no IP address; write it without a port and without brackets") from error
    elif not re.fullmatch(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", host, re.ASCII):
        raise ValueError(f"{host!r} cannot be the name of a host; write letters, digits, '-' and '.'")
    return host


def binding_error(address: str, port: int = 0) -> OSError | None:
    """Why no server can listen at `address`:`port` on this machine now (port 0: at any port of it); None where one can."""
    with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server: a port in use a moment ago is free
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def listening_store(address: str, port: int, world_size: int, timeout: timedelta, **options: bool) -> TCPStore:
    """The server of a torch TCP store that listens on `address` alone (a plain TCPStore listens on every interface)."""
    from torch.distributed import TCPStore

    with socket.socket(family_of(address), socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store's from here on
    return TCPStore(address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor, **options)
