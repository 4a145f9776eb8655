"""Chooses addresses and network interfaces of this machine. Imports no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import psutil

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.processes.machine import free_ports
from grpo_async.utils.network import LOOPBACK, WILDCARDS, host_in_url, is_loopback, own_address_towards

_MAX_PORT = 65535
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def resolve_host(host: str, setting: str) -> str:
    """The IP address of a host name (IPv4 before IPv6); an address is returned as it is.

    Raises:
        ConfigError: the name does not resolve; `setting` is the dotted path of the setting that has it.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{setting}: the host {host} is not known on this machine ({error})") from error
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def interface_of(address: str) -> str | None:
    """Name of the network interface that has `address`: "127.0.0.1" -> "lo"; None where none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    if is_loopback(address):  # all of 127.0.0.0/8, only the first of which is listed
        return interface_of(LOOPBACK) if address != LOOPBACK else None
    return None


def socket_names(own_address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make gloo and NCCL listen on the interface with `own_address` only; without those that are set already."""
    name = interface_of(own_address)
    if name is None:
        return {}
    return {variable: name for variable in _INTERFACES if not environment.get(variable)}


def weights_host(config: ExperimentConfig, urls: Sequence[str]) -> str:
    """Master address of the weight group: `weights.host`, else the address of this machine that the first of `urls` on another
    machine reaches, else loopback. Only right on the machine of trainer rank 0.

    Raises:
        ConfigError: that server's name is not known, or no route leads there.
    """
    if config.weights.host is not None:
        return config.weights.host
    for url in filter(None, urls):
        parts = urlsplit(url)
        host = parts.hostname or ""
        if not is_loopback(host):
            setting = f"the server {url}"
            address = resolve_host(host, setting)
            try:
                return own_address_towards(address, parts.port or 80)
            except OSError as error:
                raise ConfigError(f"{setting}: no route of this machine leads to {address} ({error})") from error
    return LOOPBACK


def own_urls(config: ExperimentConfig, host: str, *, ports: Sequence[int] | None = None) -> tuple[str, ...]:
    """URLs of the servers that this machine starts, one for each of `inference.replicas`; empty when others run them.

    Args:
        host: address of the machine that the trainer reaches.
        ports: None: from `launch.server_port` on, or free ones, which nothing holds.

    Raises:
        ConfigError: the last port would be above 65535.
    """
    inference, first = config.inference, config.launch.server_port
    if inference.urls:
        return ()
    if ports is None and first is not None:
        ports = range(first, first + inference.max_replicas)
    if ports is None:
        ports = free_ports(host, inference.max_replicas)
    if max(ports) > _MAX_PORT:
        raise ConfigError(
            f"inference.replicas: {inference.max_replicas} servers need the ports {ports[0]} to {ports[-1]}, "
            f"and {_MAX_PORT} is the last"
        )
    host = host_in_url(WILDCARDS.get(host, host))
    return tuple(f"http://{host}:{port}" for port in ports)
