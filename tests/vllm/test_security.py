"""Who may talk to the server, and where it listens."""

from __future__ import annotations

import ipaddress
import socket

import httpx
import psutil
import pytest

from grpo_async.inference.surface import GENERATE_PATH, INFO_PATH
from tests.support.weight_push import WeightPusher
from tests.vllm.server import VllmServer

pytestmark = pytest.mark.vllm

HIDDEN = ["/docs", "/openapi.json", "/metrics", "/no_such_path", GENERATE_PATH, INFO_PATH]


def test_every_path_but_health_asks_for_the_token(vllm_server: VllmServer) -> None:
    paths = vllm_server.client.get("/openapi.json").json()["paths"]
    assert "/collective_rpc" in paths  # the development routes are there, so this test sees them
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    routes += [(method, path) for path in HIDDEN for method in ("get", "post")]
    routes += [("get", "/health/"), ("post", "/health"), ("get", "//health")]
    with httpx.Client(base_url=vllm_server.url) as stranger:
        assert stranger.get("/health").status_code == 200
        open_routes = []
        for method, path in routes:
            if (method, path) != ("get", "/health") and stranger.request(method, path).status_code != 401:
                open_routes.append((method, path))
        assert not open_routes
        wrong = stranger.get(INFO_PATH, headers={"Authorization": f"Bearer {vllm_server.token}x"})
        assert wrong.status_code == 401
        assert "GRPO_ASYNC_TOKEN" in wrong.json()["error"]


def test_the_token_is_not_in_the_command_line(vllm_server: VllmServer) -> None:
    for process in vllm_server.processes():
        assert vllm_server.token not in " ".join(process.cmdline())


def test_nothing_listens_on_an_address_that_other_machines_reach(vllm_server: VllmServer) -> None:
    with WeightPusher(vllm_server.url, vllm_server.token) as pusher:
        pusher.connect()  # so that the weight group's sockets are there
        processes = [*vllm_server.processes(), psutil.Process()]
        listening = [
            (process.pid, connection.laddr)
            for process in processes
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and connection.laddr)
        ]
    assert len(listening) >= 2  # the HTTP server, and a store or a gloo device
    assert [entry for entry in listening if not ipaddress.ip_address(entry[1].ip).is_loopback] == []
