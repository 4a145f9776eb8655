"""Ports for what a test starts."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """One that nobody listens on. The kernel gives it to nobody meanwhile: it chooses those of connections from 32768 on."""
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
