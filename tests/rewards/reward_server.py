"""A real HTTP server that plays a reward model, right or wrong, by a script of answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Answer = Callable[[dict[str, Any]], Any]
"""From the body of a request to: a value (sent as JSON), bytes (sent as they are), a status with bytes, or HANG."""
HANG = object()


def lengths(body: dict[str, Any]) -> Any:
    """The protocol `json`, done right: the reward is the length of the completion."""
    return {"rewards": [float(len(completion)) for completion in body["completions"]]}


@dataclass(kw_only=True)
class RewardServer:
    url: str
    script: list[Answer] = field(default_factory=list)  # one for each request; after the last one `otherwise`
    otherwise: Answer = lengths
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


@contextmanager
def reward_server() -> Iterator[RewardServer]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    state = RewardServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}/score")
    hung: set[asyncio.Event] = set()

    async def answer(request: Request) -> Response:
        state.running += 1
        state.most_running = max(state.most_running, state.running)
        try:
            body = json.loads(await request.body())
            state.bodies.append(body)
            state.authorizations.append(request.headers.get("authorization"))
            await asyncio.sleep(0.01)  # so that requests overlap
            result = (state.script.pop(0) if state.script else state.otherwise)(body)
        finally:
            state.running -= 1
        if result is HANG:
            hung.add(event := asyncio.Event())
            await event.wait()
        if isinstance(result, tuple):
            return Response(result[1], status_code=result[0], headers=result[2] if len(result) > 2 else None)
        return Response(result if isinstance(result, bytes) else json.dumps(result))

    app = Starlette(routes=[Route("/score", answer, methods=["POST"])])
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

        async def shutdown(self, sockets: Any = None) -> None:
            for event in hung:
                event.set()
            await super().shutdown(sockets)

    server = Server(
        uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="reward-server")
    thread.start()
    try:
        assert started.wait(30.0), "the server did not start"
        yield state
    finally:
        server.should_exit = True
        thread.join(30.0)
        assert not thread.is_alive(), "the server did not end"
