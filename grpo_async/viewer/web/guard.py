"""ASGI middleware that decides who may read, and what a browser may do with the answer.

- The Host header must name this machine, or a page of another site could reach us through a name of its own (DNS rebinding).
- Paths below /api need the token of this start: as `Authorization: Bearer TOKEN`, or as the cookie that POST /api/session gives
  for it. The page itself and its static files hold no data and need none, so a link that is followed from another program or site
  opens, and its own requests then carry the cookie (SameSite=Strict would keep it from the first one).
- A request that the browser marks as coming from another site or port is refused even with the cookie.
- Every answer carries a Content-Security-Policy that lets nothing run or load but files of ours.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_async.utils.loopback import is_loopback

SESSION_PATH = "/api/session"
_OPEN_PATHS = ("/", "/favicon.ico")
_OPEN_FOLDERS = ("/static/",)
_MAX_COOKIE_BYTES = 16_384

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # assigning markup from text is an error, wherever it is tried
        "trusted-types 'none'",
    )
)
_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=(), interest-cohort=()"),
]


class Guard:
    """Wraps the app. `token` is the secret of this start.

    Args:
        host: the address that is listened on. Beside it, loopback names are accepted in the Host header; where it is not loopback,
            also any numeric address and this machine's own name.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        self._app = app
        self._token = token
        self._cookie = secrets.token_urlsafe(32)  # another secret than the one that stood in an address bar
        self._names = {"localhost", host.lower()}
        self._any_address = not is_loopback(host)
        if self._any_address:
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        send = _with_headers(send, scope["path"])
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or not self._names_us(hosts[0]):
            return await _refuse(send, 403, f"the Host header must be one of {', '.join(sorted(self._names))}")
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
            return await self._app(scope, receive, send)
        if any(site not in ("same-origin", "none") for site in _values(scope, b"sec-fetch-site")):
            return await _refuse(send, 403, "requests from pages of other sites are refused")
        port = _port(hosts[0])
        if path == SESSION_PATH and scope["method"] == "POST":
            return await self._open_session(scope, send, port)
        if self._has_token(scope) or self._has_cookie(scope, port):
            return await self._app(scope, receive, send)
        return await _refuse(
            send, 401, "the token is missing or wrong: open the address that inspect-rollouts printed, which ends in it"
        )

    async def _open_session(self, scope: Scope, send: Send, port: str) -> None:
        """The token for a cookie, which scripts cannot read and other sites' requests do not carry."""
        if not self._has_token(scope):
            return await _refuse(send, 401, "the token is wrong; it changes with every start of inspect-rollouts")
        cookie = f"{_cookie_name(port)}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
        await send({"type": "http.response.start", "status": 204, "headers": [(b"set-cookie", cookie.encode())]})
        return await send({"type": "http.response.body", "body": b""})

    def _has_token(self, scope: Scope) -> bool:
        given = _values(scope, b"authorization")
        # exactly one: of several, a proxy before us may have looked at another than we would
        return len(given) == 1 and _same(given[0], f"Bearer {self._token}")

    def _has_cookie(self, scope: Scope, port: str) -> bool:
        wanted = _cookie_name(port)
        header = "; ".join(_values(scope, b"cookie"))[:_MAX_COOKIE_BYTES]
        given = [
            value for name, _, value in (part.strip().partition("=") for part in header.split(";")) if name == wanted
        ]
        return len(given) == 1 and _same(given[0], self._cookie)

    def _names_us(self, host: str) -> bool:
        name = _name(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback  # an address cannot be rebound


def _cookie_name(port: str) -> str:
    """Cookies are shared by all ports of a host: each inspector has its own, also behind a forwarded port."""
    return f"grpo_async_{port}"


def _name(host: str) -> str:
    """'LOCALHOST:80' -> 'localhost', '[::1]:80' -> '::1'."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _port(host: str) -> str:
    port = host.rpartition("]")[2].rpartition(":")[2]
    return port if port.isascii() and port.isdecimal() else "80"


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _same(given: str, expected: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _with_headers(send: Send, path: str) -> Send:
    """Data stays in no cache; files of ours are asked for again each time, which an unchanged one answers with 304."""
    caching = (b"cache-control", b"no-cache" if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS) else b"no-store")

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [*_without(message.get("headers", ()), {b"cache-control"}), *_HEADERS, caching],
            }
        await send(message)

    return send_with_headers


def _without(headers: Iterable[tuple[bytes, bytes]], names: set[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in names]


async def _refuse(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
