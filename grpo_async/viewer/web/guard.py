"""ASGI middleware that decides who may read, and what a browser may do with the answer.

- The Host header must name this machine, or a page of another site could reach us through a name of its own (DNS rebinding).
- Paths below /api need the token of this start, as `Authorization: Bearer TOKEN`. The page keeps it where only its own origin can
  read it, not in a cookie, so a request that another site makes has no rights. The page and its static files hold no data and need
  none.
- Every answer carries a Content-Security-Policy that lets nothing run or load but files of ours.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_async.inference.token import has_bearer
from grpo_async.utils.network import is_loopback

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "require-trusted-types-for 'script'",  # assigning markup from text is an error, wherever it is tried
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
}


class Guard:
    """Wraps the app. `token` is the secret of this start.

    Args:
        host: the address that is listened on. Beside it, loopback names are accepted in the Host header; where it is not loopback,
            also any numeric address and this machine's own name.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        self._app = app
        self._token = token
        self._names = {"localhost", host.lower()}
        self._any_address = not is_loopback(host)
        if self._any_address:
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, _with_headers(send, scope["path"]))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, scope: Scope) -> ASGIApp:
        """What answers the request: the app, or a refusal."""
        headers, path = Headers(scope=scope), scope["path"]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._names_us(hosts[0]):
            return _refusal(403, f"the Host header must be one of {', '.join(sorted(self._names))}")
        if _is_open(path):
            return self._app
        if has_bearer(scope["headers"], self._token):
            return self._app
        return _refusal(
            401, "the token is missing or wrong: open the address that the command printed, which ends in it"
        )

    def _names_us(self, host: str) -> bool:
        name = _name(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback  # an address cannot be rebound


def _is_open(path: str) -> bool:
    """Whether the path needs no token, because it has no data."""
    return path in ("/", "/favicon.ico") or path.startswith("/static/")


def _name(host: str) -> str:
    """'LOCALHOST:80' -> 'localhost', '[::1]:80' -> '::1'."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _with_headers(send: Send, path: str) -> Send:
    """Data stays in no cache; files of ours are asked for again each time, which an unchanged one answers with 304."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers["cache-control"] = "no-cache" if _is_open(path) else "no-store"
        await send(message)

    return send_with_headers


def _refusal(status: int, message: str) -> Response:
    return JSONResponse(
        {"error": message}, status_code=status, headers={"www-authenticate": "Bearer"} if status == 401 else None
    )
