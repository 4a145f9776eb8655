"""A server that computes nothing: it answers the client's requests at once, or streams as the real servers do.

    python -m benchmarks._rollout_server PARENT_PID '{"rate": 30, "tokens": 256, ...}'     prints its address; ends with the parent

It implements inference.api for requests and policy versions. Like the real servers it respects a request's `flush_interval_s`: a
chunk holds the tokens of that time. Lengths are drawn between tokens / 2 and tokens * 3 / 2, by the request's seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import uvicorn

from grpo_async.utils.processes import die_with_parent

_NUM_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """`rate`: tokens per second of each request; 0: all at once. `tokens`: mean length of an answer. `ids`: the range of its
    random ids; `answer`: the ids of every answer instead."""

    rate: float
    tokens: int
    ids: tuple[int, int] = (0, 1)
    answer: tuple[int, ...] = ()
    end_id: int
    seed: int = 0


class Server:
    """An ASGI application."""

    def __init__(self, settings: ServerSettings) -> None:
        draw = np.random.default_rng(settings.seed)
        table = settings.answer or draw.integers(*settings.ids, size=_NUM_TOKENS)
        self._settings = settings
        self._version = 0
        self._token_ids = [b"%d" % token for token in table]
        self._logprobs = [
            orjson.dumps(value) for value in (-draw.exponential(size=_NUM_TOKENS)).astype(np.float32).tolist()
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        if scope["path"] == "/rollout/generate":
            await self._generate(orjson.loads(body), send)
            return
        if scope["path"] == "/finish_weight_update":
            self._version = int(orjson.loads(body)["weight_version"])
        await send({"type": "http.response.body", "body": b"null"})

    async def _generate(self, request: dict[str, Any], send: Any) -> None:
        """Send lines, each with the next tokens of the table."""
        answer, rate = self._settings.answer, self._settings.rate
        start, left = 0, len(answer)
        if not answer:
            chance, tokens = random.Random(request["seed"]), self._settings.tokens
            left = min(request["max_tokens"], max(1, chance.randint(tokens // 2, tokens + tokens // 2)))
            start = chance.randrange(_NUM_TOKENS - left)
        per_chunk = max(1, round(rate * request["flush_interval_s"])) if rate else left
        while left:
            count = min(left, per_chunk)
            if rate:
                await asyncio.sleep(count / rate)
            start, left = start + count, left - count
            line = self._line(start - count, count, ends=left == 0)
            await send({"type": "http.response.body", "body": line, "more_body": left > 0})

    def _line(self, start: int, count: int, *, ends: bool) -> bytes:
        ids = self._token_ids[start : start + count]
        if ends:
            ids[-1] = b"%d" % self._settings.end_id
        return b'{"token_ids":[%b],"logprobs":[%b],"policy_version":%d,"finish_reason":%b,"error":null}\n' % (
            b",".join(ids),
            b",".join(self._logprobs[start : start + count]),
            self._version,
            b'"stop"' if ends else b"null",
        )


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    app = Server(ServerSettings(**json.loads(sys.argv[2])))
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listener])
