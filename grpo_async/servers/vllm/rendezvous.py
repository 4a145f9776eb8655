"""Where torch's rendezvous listens, in all of vLLM's processes. It depends on torch alone, on a function that is private there; a
torch without it, or one that ignores the replacement, shows in tests/vllm/test_security.py."""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def bind_rendezvous_to_its_own_address() -> None:
    """Make torch's tcp:// rendezvous listen on the address it was told; on its own it listens on every interface, where anybody may
    read and write the store. One process alone meets nobody, and listens nowhere. (`import torch.distributed.rendezvous` as an
    attribute gives the function.)"""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous._create_c10d_store = _create_store_on_its_own_address


def _create_store_on_its_own_address(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    listener: dict[str, int] = {}
    if rank == 0:
        sock = socket.socket(socket.AF_INET6 if ":" in hostname else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((hostname, port))
        sock.listen(128)
        listener["master_listen_fd"] = sock.detach()  # the store owns it from here
    return dist.TCPStore(
        hostname, port, world_size, rank == 0, timeout, multi_tenant=False, use_libuv=use_libuv, **listener
    )
