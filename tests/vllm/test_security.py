"""Who may talk to the server, and where it listens."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from grpo_async.inference import api
from tests.support.weight_push import WeightPusher
from tests.vllm.server import VllmServer

pytestmark = pytest.mark.vllm

METHODS = ("get", "post", "put", "delete", "patch", "head", "options")
OURS = [
    (method.lower(), path)
    for method, path in re.findall(r"^    (GET|POST) +(/[\w/]+)", api.__doc__ or "", re.MULTILINE)
    if path != "/health"
]
HIDDEN = ["/docs", "/redoc", "/openapi.json", "/metrics", "/ping", "/v1/realtime", "/no_such_path", "/"]


def _all_routes(server: VllmServer) -> list[tuple[str, str]]:
    """Every route of the app, by its own description and by the list that vLLM writes into its log (routes without a
    schema are in the log only), and what no list names; paths tried with every method that they do not announce too."""
    described = server.client.get("/openapi.json").json()["paths"]
    routes = {(method, path) for path, methods in described.items() for method in methods}
    for line in server.log.read_text(errors="replace").splitlines():
        if "Route: " in line:
            path, _, methods = line.split("Route: ")[1].partition(", Methods: ")
            routes |= {(method.strip().lower(), path) for method in methods.split(",") if method.strip()}
            routes.add(("get", path))
    paths = {path for _, path in routes} | set(HIDDEN) | {path for _, path in OURS}
    routes |= {(method, path) for path in paths for method in METHODS}
    routes |= {("get", "/health/"), ("get", "//health"), ("get", "/health/../metrics"), ("post", "/health")}
    return sorted(routes - {("get", "/health")})


def test_every_path_but_health_asks_for_the_token(vllm_server: VllmServer) -> None:
    routes = _all_routes(vllm_server)
    paths = {path for _, path in routes}
    assert {"/v1/completions", "/tokenize", "/metrics", "/docs"} <= paths, "the lists of routes were not read"
    wrong_tokens = [{}, {"Authorization": f"Bearer {vllm_server.token}x"}, {"Authorization": vllm_server.token}]
    with httpx.Client(base_url=vllm_server.url) as stranger:
        assert stranger.get("/health").status_code == 200
        open_routes = [
            (method, path)
            for method, path in routes
            for headers in wrong_tokens
            if stranger.request(method, path, headers=headers).status_code != 401
        ]
        assert not open_routes
        answer = stranger.get("/rollout/info", headers=wrong_tokens[1])
        assert "GRPO_ASYNC_TOKEN" in answer.json()["error"]
    print(f"{len(routes)} routes on {len(paths)} paths answer 401")


def test_the_token_opens_every_path_of_ours_and_development_routes_are_not_there(vllm_server: VllmServer) -> None:
    assert len(OURS) == 13
    for method, path in OURS:
        assert vllm_server.client.request(method, path).status_code not in (401, 404, 405), path
    vllm_server.client.post("/resume")
    for path in ("/metrics", "/v1/models", "/openapi.json"):
        assert vllm_server.client.get(path).status_code == 200
    described = vllm_server.client.get("/openapi.json").json()["paths"]
    assert not {"/collective_rpc", "/server_info", "/reset_prefix_cache"} & set(described)
    assert vllm_server.client.post("/collective_rpc", json={"method": "load_model"}).status_code == 404


def test_the_token_is_in_no_command_line_and_no_log(vllm_server: VllmServer) -> None:
    for process in vllm_server.processes():
        assert vllm_server.token not in " ".join(process.cmdline())
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment
    assert vllm_server.token not in vllm_server.log.read_text(errors="replace")


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
