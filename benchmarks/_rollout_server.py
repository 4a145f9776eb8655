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
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
import uvloop

from grpo_async.inference.api import GENERATE_PATH

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST = b"0\r\n\r\n"
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


class _Server:
    def __init__(self, settings: ServerSettings) -> None:
        chance = random.Random(settings.seed)
        low, high = settings.ids
        self.settings = settings
        self.version = 0
        table = settings.answer or (chance.randrange(low, high) for _ in range(_NUM_TOKENS))
        self.token_ids = [b"%d" % token for token in table]
        logprobs = (struct.unpack("f", struct.pack("f", -chance.expovariate(1.0)))[0] for _ in range(_NUM_TOKENS))
        self.logprobs = [orjson.dumps(logprob) for logprob in logprobs]

    def line(self, start: int, count: int, *, ends: bool) -> bytes:
        """An HTTP chunk with one line: `count` tokens from place `start` of the table."""
        ids = self.token_ids[start : start + count]
        if ends:
            ids[-1] = b"%d" % self.settings.end_id
        line = b'{"token_ids":[%b],"logprobs":[%b],"policy_version":%d,"finish_reason":%b,"error":null}\n' % (
            b",".join(ids),
            b",".join(self.logprobs[start : start + count]),
            self.version,
            b'"stop"' if ends else b"null",
        )
        return b"%x\r\n%b\r\n" % (len(line), line)


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        server = self._server
        if self._url == GENERATE_PATH.encode():
            request = orjson.loads(self._body)
            if server.settings.rate <= 0.0:
                start, count = self._length(request)
                self._transport.write(_HEAD + server.line(start, count, ends=True) + _LAST)
            else:
                self._task = asyncio.get_running_loop().create_task(self._stream(request))
            return
        if self._url == b"/finish_weight_update":
            server.version = int(orjson.loads(self._body)["weight_version"])
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\nnull")

    def _length(self, request: dict[str, Any]) -> tuple[int, int]:
        """Place in the table and number of tokens of the answer."""
        if answer := self._server.settings.answer:
            return 0, len(answer)
        chance = random.Random(request["seed"])
        tokens = self._server.settings.tokens
        count = min(request["max_tokens"], max(1, chance.randint(tokens // 2, tokens + tokens // 2)))
        return chance.randrange(_NUM_TOKENS - count), count

    async def _stream(self, request: dict[str, Any]) -> None:
        server = self._server
        start, left = self._length(request)
        rate = server.settings.rate
        self._transport.write(_HEAD)
        per_chunk = max(1, round(rate * request["flush_interval_s"]))
        while left:
            count = min(left, per_chunk)
            await asyncio.sleep(count / rate)
            self._transport.write(server.line(start, count, ends=left == count) + (_LAST if left == count else b""))
            start, left = start + count, left - count


async def _serve(settings: ServerSettings) -> None:
    server = _Server(settings)
    loop = asyncio.get_running_loop()
    made = loop.create_server(lambda: _Connection(server), "127.0.0.1", 0, backlog=4096)
    listener = await made
    print(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
    async with listener:
        await listener.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    given = ServerSettings(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvloop.run(_serve(given))
