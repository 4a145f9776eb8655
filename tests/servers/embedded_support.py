"""Builders for the tests of the embedded engine: models, requests, and the server on a real port in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import torch

from grpo_async.inference.api import GenerateChunk, GenerateRequest, ScoreAnswer, ServedParameters, ServerInfo
from grpo_async.servers.embedded.engine import SlotEngine
from grpo_async.servers.embedded.main import bind_listener
from grpo_async.servers.embedded.server import EmbeddedEngine, EmbeddedServer
from grpo_async.servers.requests import EngineOutput
from tests.support.waiting import eventually


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def make_request(token_ids: Sequence[int], **fields: Any) -> GenerateRequest:
    settings = {"request_id": "r", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True, **fields}
    return GenerateRequest(token_ids=list(token_ids), **settings)


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [(31 * start + 7 * i + i * i) % 300 for i in range(length)]


@dataclass
class Output:
    """Everything one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None

    def add(self, chunk: GenerateChunk | EngineOutput, version: int) -> None:
        assert len(chunk.token_ids) == len(chunk.logprobs)
        assert self.finish_reason is None, "a chunk after the last"
        assert self.error is None, "a chunk after the last"
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top += chunk.top_logprobs
        self.versions += [version] * len(chunk.token_ids)
        self.finish_reason, self.stop_reason, self.error = chunk.finish_reason, chunk.stop_reason, chunk.error


@torch.no_grad()
def teacher_forced(model: Any, context: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / temperature) of each output token after the context, by one plain forward. [len(output)]"""
    tokens = torch.tensor([[*context, *output]])
    logprobs: torch.Tensor = (model(tokens).logits[0] / temperature).log_softmax(-1)
    return logprobs[len(context) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]


def by_version(
    models: Mapping[int, Any], context: Sequence[int], output: Sequence[int], versions: Sequence[int]
) -> torch.Tensor:
    """Logprob of each output token under the model of its version, with the context recomputed. [len(output)]"""
    each = {version: teacher_forced(model, context, output) for version, model in models.items()}
    return torch.stack([each[version][place] for place, version in enumerate(versions)])


@torch.no_grad()
def over_kept_cache(
    models: Mapping[int, Any], context: Sequence[int], output: Sequence[int], versions: Sequence[int]
) -> torch.Tensor:
    """Logprob of each output token where each model continues over the keys and values of those before it. [len(output)]

    `versions` say which model drew which token: that model also computed keys and values of the token before it.
    """
    from transformers.cache_utils import DynamicCache

    tokens, cache = torch.tensor([[*context, *output]]), DynamicCache()
    start, end, logits = 0, len(context) - 1, []
    for version, drawn in groupby(versions):
        end += len(list(drawn))
        logits.append(models[version](tokens[:, start:end], past_key_values=cache, use_cache=True).logits[0])
        start = end
    logprobs: torch.Tensor = torch.cat(logits)[len(context) - 1 :].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]


def worst_error(model: Any, request: GenerateRequest, output: Output) -> float:
    """0 where there is no token."""
    expected = teacher_forced(model, request.token_ids, output.token_ids, request.temperature or 1.0)
    return max((expected - torch.tensor(output.logprobs)).abs().tolist(), default=0.0)


def assert_exact(model: Any, request: GenerateRequest, output: Output, version: int, tolerance: float) -> None:
    """Every token is of `version`, with the logprob that `model` has for it."""
    assert set(output.versions) == {version}
    assert worst_error(model, request, output) < tolerance


class Served:
    """A server of either engine that runs, and a client of it. `tolerance`: of log-probabilities, against a plain forward."""

    tolerance = 1e-4

    def __init__(self, url: str, *, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url, self.token = url, token
        self.client = httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False)
        self.pool = ThreadPoolExecutor(32)

    def close(self) -> None:
        self.pool.shutdown()
        self.client.close()

    def info(self) -> ServerInfo:
        return ServerInfo.model_validate_json(self.client.get("/rollout/info").raise_for_status().content)

    def wait_until(self, condition: Callable[[ServerInfo], bool]) -> None:
        assert eventually(lambda: condition(self.info()), 30.0), self.info()

    def post(self, path: str, json: Any = None, **query: str) -> httpx.Response:
        return self.client.post(path, json=json, params=query)

    def is_paused(self) -> bool:
        return bool(self.client.get("/is_paused").json()["is_paused"])

    def parameters(self) -> ServedParameters:
        return ServedParameters.model_validate_json(self.client.get("/rollout/parameters").content)

    def generate(self, request: GenerateRequest) -> Output:
        output = Output()
        for chunk in self.stream(request):
            output.add(chunk, chunk.policy_version)
        return output

    def stream(self, request: GenerateRequest) -> Generator[GenerateChunk, None, None]:
        with self.client.stream("POST", "/rollout/generate", content=request.model_dump_json()) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                yield GenerateChunk.model_validate_json(line)

    def score(self, token_ids: Sequence[int]) -> ScoreAnswer:
        response = self.post("/rollout/score", {"token_ids": list(token_ids)}).raise_for_status()
        return ScoreAnswer.model_validate_json(response.content)

    def ask(self, *requests: GenerateRequest) -> list[Future[Output]]:
        """Send requests, and return when the server has them: in the engine, or held by a pause."""
        wanted = self.info().active_requests + len(requests)
        answers = [self.pool.submit(self.generate, request) for request in requests]
        self.wait_until(lambda info: info.active_requests == wanted)
        return answers


class Live(Served):
    """An embedded engine that is served in this process. `engine` belongs to its thread: patch it, but call nothing on it."""

    tolerance = 1e-5

    def __init__(self, url: str, engine: SlotEngine) -> None:
        super().__init__(url)
        self.engine = engine
        self.failed = threading.Event()


@contextmanager
def live(
    model: Any,
    *,
    num_slots: int = 8,
    max_model_len: int = 512,
    engine_timeout_s: float = 60.0,
    model_path: str = "nowhere/tiny",
) -> Iterator[Live]:
    """Serve `model` over HTTP on a free port, with a real engine thread. `model_path` is where it says that it comes from."""
    engine = SlotEngine(model, num_slots=num_slots, max_model_len=max_model_len)
    description = ServerInfo(
        engine="embedded", model=model_path, dtype="float32", max_model_len=max_model_len, policy_version=0
    )
    listener = bind_listener("127.0.0.1", 0)
    running = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", engine)
    served = EmbeddedEngine(engine, description=description, on_failure=running.failed.set, timeout_s=engine_timeout_s)
    server = EmbeddedServer(served)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="live-server")
    thread.start()
    try:
        assert eventually(lambda: server.started, 30.0), "the server did not start"
        yield running
    finally:
        server.should_exit = True  # ends open answers, for which the pool waits
        running.close()
        thread.join(30.0)
        assert not thread.is_alive(), "the server did not end"
