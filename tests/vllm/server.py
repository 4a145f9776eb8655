"""Starts real vLLM servers the way a run does, and talks to them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.servers.embedded_support import Served
from tests.support.configs import SMALLEST
from tests.support.ports import free_port

START_TIMEOUT_S = 300.0
MAX_MODEL_LEN = 1024

_MAIN = """
import json, sys
from grpo_async.config import ExperimentConfig
from grpo_async.servers.vllm.command import serve_vllm
serve_vllm(ExperimentConfig.model_validate(json.loads(sys.argv[1])), int(sys.argv[2]))
"""


def experiment(model: str, **vllm: Any) -> dict[str, Any]:
    """The smallest config that names `model`, as the mapping that a YAML file would hold."""
    return {
        **SMALLEST,
        "model": {"path": model},
        "rollout": {"max_completion_tokens": 512},
        "training": {"micro_batch_tokens": MAX_MODEL_LEN},
        "inference": {"max_model_len": MAX_MODEL_LEN, "vllm": {"kv_cache_mb": 64, **vllm}},
    }


class VllmServer(Served):
    def __init__(self, url: str, *, token: str, process: subprocess.Popen[bytes], log: Path) -> None:
        super().__init__(url, token=token)
        self.process, self.log = process, log

    def engine_core(self) -> psutil.Process:
        """The process that runs the model's steps (with one worker, also the worker)."""
        (engine,) = [process for process in self.processes() if "EngineCore" in " ".join(process.cmdline())]
        return engine

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@contextmanager
def running_server(config: Mapping[str, Any], folder: Path) -> Iterator[VllmServer]:
    """Start a server by serve_vllm in a separate process, wait until it is healthy, and end it with all of its children."""
    port, token = free_port(), secrets.token_hex(8)
    log = folder / "server.log"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    sockets = tempfile.mkdtemp(prefix="vllm-")  # short: a socket's path has at most 107 characters
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps(config), str(port)],
            env={**environment, "GRPO_ASYNC_TOKEN": token, "VLLM_RPC_BASE_PATH": sockets},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = VllmServer(f"http://127.0.0.1:{port}", token=token, process=process, log=log)
    below: list[psutil.Process] = []
    try:
        _wait_until_healthy(server)
        below = server.processes()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for survivor in psutil.wait_procs(below, timeout=10)[1]:
            survivor.kill()
        server.close()
        shutil.rmtree(sockets, ignore_errors=True)


def _wait_until_healthy(server: VllmServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if server.client.get("/health", timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        ended = server.process.poll() is not None
        if ended or time.monotonic() > deadline:
            tail = server.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"the server {'ended' if ended else 'is not healthy in time'}; its log:\n{tail}")
        try:
            server.process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
