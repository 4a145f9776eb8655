"""Which address and which network interface of this machine something goes over. Sends nothing; imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import psutil

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.utils.network import is_loopback, own_address_towards

_LOOPBACK = "127.0.0.1"


def resolve_host(host: str, setting: str) -> str:
    """The IP address of a host name (IPv4 before IPv6); an address is returned as it is.

    Raises:
        ConfigError: nobody knows the name; `setting` is the dotted path that it stands at.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{setting}: the host {host} is not known on this machine ({error})") from error
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def reachable_address(address: str, port: int, setting: str) -> str:
    """The address of this machine that the machine with `address` can reach.

    Raises:
        ConfigError: no route leads there; `setting` is the dotted path that it stands at.
    """
    try:
        return own_address_towards(address, port)
    except OSError as error:
        raise ConfigError(f"{setting}: no route of this machine leads to {address} ({error})") from error


def interface_of(address: str) -> str | None:
    """Name of the network interface that has `address`: "127.0.0.1" -> "lo"; None where none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    if is_loopback(address):  # all of 127.0.0.0/8, only the first of which is listed
        return interface_of(_LOOPBACK) if address != _LOOPBACK else None
    return None


def weights_host(config: ExperimentConfig, urls: Sequence[str]) -> str:
    """Where the weight group meets: `weights.host`, else the address of this machine that the first of `urls` on another machine
    reaches, else loopback. Only right on the machine of trainer rank 0.

    Raises:
        ConfigError: that server's name is not known, or no route leads there.
    """
    if config.weights.host is not None:
        return config.weights.host
    for url in urls:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if not is_loopback(host):
            setting = f"the server {url}"
            return reachable_address(resolve_host(host, setting), parts.port or 80, setting)
    return _LOOPBACK
