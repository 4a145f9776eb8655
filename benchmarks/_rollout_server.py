"""A server that generates nothing: answers the client's requests at once, or streams as the real ones do; for a process of its own.

    python -m benchmarks._rollout_server '{"rate": 30, "tokens": 256, ...}'       prints its address, serves until its input ends

Speaks inference.api as far as requests and policy versions go. Of every request it takes `flush_interval_s`, as the real
servers do: a chunk holds the tokens of that time. Lengths are drawn between tokens / 2 and tokens * 3 / 2, by the request's seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import uvicorn

_NUM_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """`rate`: tokens per second of each request; 0: all at once. `tokens`: of an answer, in the mean. `ids`: they are sampled from
    this range; `answer`: every answer is this one instead."""

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
        """Lines, each with the tokens from one place of the table on."""
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


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    app = Server(ServerSettings(**json.loads(sys.argv[1])))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listener])
