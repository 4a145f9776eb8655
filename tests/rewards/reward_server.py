"""A real HTTP server that plays a reward model, right or wrong, by a script of answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], Any]
"""From the body of a request to: a value (sent as JSON), bytes (sent as they are), a status with bytes, or HANG."""
HANG = object()


def lengths(body: dict[str, Any]) -> Any:
    """vLLM's answer, in any order: the one output is the length of the text, or the number of messages."""
    texts = body["input"] if "input" in body else [body["messages"]]
    data = [{"index": index, "probs": [float(len(text))], "num_classes": 1} for index, text in enumerate(texts)]
    return {"data": data[::-1]}


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
    state, lock, is_over = RewardServer(url=""), threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with lock:
                state.running += 1
                state.most_running = max(state.most_running, state.running)
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                state.bodies.append(body)
                state.authorizations.append(self.headers["authorization"])
                answer = state.script.pop(0) if state.script else state.otherwise
            time.sleep(0.01)  # so that requests overlap
            result = answer(body)
            with lock:
                state.running -= 1
            if result is HANG:
                is_over.wait(60.0)
                return
            status, content, *headers = result if isinstance(result, tuple) else (200, result)
            self.send_response(status)
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, name="reward-server", daemon=True).start()
        try:
            yield state
        finally:
            is_over.set()
            server.shutdown()
