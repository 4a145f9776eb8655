"""Starts real vLLM servers the way a run does, and talks to them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_async.inference.api import (
    GENERATE_PATH,
    INFO_PATH,
    SCORE_PATH,
    GenerateChunk,
    ScoreAnswer,
    ServerInfo,
)
from tests.servers.embedded_support import Output, make_request
from tests.support.ports import free_port

START_TIMEOUT_S = 300.0
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 4
"""Requests that the shared server runs at once; more wait in vLLM's queue."""

_MAIN = """
import json, sys
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.servers.vllm.command import serve_vllm
serve_vllm(ExperimentConfig.model_validate(json.loads(sys.argv[1])), int(sys.argv[2]))
"""


def experiment(model: str, **vllm: Any) -> dict[str, Any]:
    """The smallest config that names `model`, as the mapping that a YAML file would hold."""
    return {
        "run": {"name": "vllm-test"},
        "model": {"path": model},
        "data": {"train": {"type": "jsonl", "path": "unused.jsonl"}},
        "rewards": [{"function": "unused:unused"}],
        "rollout": {"max_completion_tokens": 512},
        "training": {"micro_batch_tokens": MAX_MODEL_LEN},
        "inference": {"max_model_len": MAX_MODEL_LEN, "vllm": {"kv_cache_mb": 64, **vllm}},
    }


@dataclass(slots=True, kw_only=True)
class VllmServer:
    """One running server."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    log: Path
    ca_certs: str | None = None
    """PEM file of the certificates to trust; None over plain HTTP."""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60.0, verify=self.verify
        )

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """For httpx."""
        return True if self.ca_certs is None else ssl.create_default_context(cafile=self.ca_certs)

    def info(self) -> ServerInfo:
        return ServerInfo.model_validate_json(self.client.get(INFO_PATH).raise_for_status().content)

    def chunks(self, token_ids: list[int], **fields: Any) -> Generator[GenerateChunk, None, None]:
        """Stream one completion; fields are those of GenerateRequest."""
        body = request_body(token_ids, **fields)
        with self.client.stream("POST", GENERATE_PATH, json=body) as response:
            if response.is_error:
                response.read()
                raise AssertionError(f"generate answered {response.status_code}: {response.text}")
            assert response.headers["content-type"] == "application/x-ndjson"
            for line in response.iter_lines():
                yield GenerateChunk.model_validate_json(line)

    def generate(self, token_ids: list[int], **fields: Any) -> Output:
        return join(self.chunks(token_ids, **fields))

    def score(self, token_ids: list[int]) -> ScoreAnswer:
        response = self.client.post(SCORE_PATH, json={"token_ids": token_ids}).raise_for_status()
        return ScoreAnswer.model_validate_json(response.content)

    def engine_core(self) -> psutil.Process:
        """The process that runs the model's steps (with one worker, also the worker)."""
        (engine,) = [process for process in self.processes() if "EngineCore" in " ".join(process.cmdline())]
        return engine

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def request_body(token_ids: list[int], **fields: Any) -> dict[str, Any]:
    """A request in full: every sampling field is sent."""
    defaults = {"request_id": secrets.token_hex(4), "max_tokens": 16, "seed": 7, "flush_interval_s": 0.02}
    return make_request(token_ids, **{**defaults, **fields}).model_dump()


def join(chunks: Iterable[GenerateChunk]) -> Output:
    output = Output()
    for chunk in chunks:
        output.add(chunk, chunk.policy_version)
    return output


@contextmanager
def running_server(config: Mapping[str, Any], folder: Path) -> Iterator[VllmServer]:
    """Start a server by serve_vllm in a process of its own, wait until it is healthy, end it and all below it."""
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
    tls = config["inference"].get("tls")
    scheme = "https" if tls else "http"
    server = VllmServer(
        process=process,
        url=f"{scheme}://127.0.0.1:{port}",
        token=token,
        log=log,
        ca_certs=tls["ca_certs"] if tls else None,
    )
    below: list[psutil.Process] = []
    try:
        _wait_until_healthy(server)
        below = server.processes()
        yield server
    finally:
        server.client.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for survivor in psutil.wait_procs(below, timeout=10)[1]:
            survivor.kill()
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
