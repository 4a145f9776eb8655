"""What the launchers of several machines say to each other: one TCP connection from each to node 0, one JSON object per line.

    node 0 -> node K   {"kind": "challenge", "nonce": A}
    node K -> node 0   {"kind": "hello", "rank": K, "host": "b", "nonce": B, "proof": HMAC(token, "follow", A, B, K, host)}
    node 0 -> node K   {"kind": "welcome", "attempt": "attempt_3", "secret": S, "proof": HMAC(token, "lead", A, B, attempt, S)}, or
                       {"kind": "refused", "reason": "..."}
    node K -> node 0   {"kind": "ready"}, or {"kind": "refused", "reason": "..."}: its configuration is another
    node 0 -> node K   {"kind": "start"} when all are ready; {"kind": "end", "exit_code": 1, "error": "..."} when the run is over
    node K -> node 0   {"kind": "signal", "name": "SIGTERM"}; {"kind": "exited", "status": 0, "error": null} of its trainer

Both ends prove that they know the token, which never travels, before either believes the other. What comes afterwards is neither
encrypted nor signed: whoever can change packets between the machines can end a run, but neither read the token nor put code in.
A machine that dies without a word is noticed by TCP's keep-alive.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpo_async.processes.messages import decode, encode

HANDSHAKE_S = 20.0
"""For the whole handshake."""

_FLUSH_S = 5.0
_SILENCE_S = 60  # after which a machine that acknowledges nothing is gone: dead, or cut off
LINE_LIMIT = 1 << 18  # bytes
_MAX_TEXT = 20_000  # characters; JSON takes up to 12 bytes for one


class LostError(Exception):
    """The other launcher is gone, or what it says is no message."""


class NodeChannel:
    """One end of a connection. Any line that is no message counts as its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        _keep_alive(writer.get_extra_info("socket"))

    @property
    def peer(self) -> str:
        """Address of the other end."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "?"

    def send(self, kind: str, **content: Any) -> None:
        """Queue one message; nothing happens when the other end is gone. Long texts are cut off."""
        if not self._writer.is_closing():
            short = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in content.items()}
            self._writer.write(encode(kind, short))

    async def receive(self) -> dict[str, Any]:
        """The next message; whoever expects it soon sets a deadline.

        Raises:
            LostError: the connection has ended, or the line is no message.
        """
        try:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise LostError("the connection has ended")
            return decode(line)
        except OSError as error:
            raise LostError(str(error)) from error
        except ValueError as error:  # a NotAMessageError, or a line beyond the limit
            raise LostError("it sent a line that is no message") from error

    async def close(self) -> None:
        """Hang up when what was sent has left, or after some seconds. May be called more than once."""
        try:
            async with asyncio.timeout(_FLUSH_S):
                self._writer.close()
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()  # the other end is gone, or will be


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _SILENCE_S // 6,
        "TCP_KEEPALIVE": _SILENCE_S // 6,  # what macOS calls it
        "TCP_KEEPINTVL": _SILENCE_S // 6,
        "TCP_KEEPCNT": 5,
        "TCP_USER_TIMEOUT": _SILENCE_S * 1000,  # ms, for what was sent and is not acknowledged
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def new_secret() -> str:
    """Random; as a nonce it makes that a proof cannot be used twice."""
    return secrets.token_hex(32)


def proof(token: str, role: str, *parts: str) -> str:
    """HMAC-SHA256 of a role and texts under the token; unambiguous, because it is of a JSON list."""
    return hmac.new(token.encode(), json.dumps([role, *parts]).encode(), "sha256").hexdigest()


def _is_same(expected: str, given: object) -> bool:
    return isinstance(given, str) and hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogatepass"))


async def admit(
    channel: NodeChannel, token: str, *, attempt: str, secret: str, refuse: Callable[[object], str | None]
) -> tuple[int, str]:
    """Node 0's end of the handshake; returns the rank and host name of the other machine.

    Args:
        refuse: why a machine with this rank cannot take part, or None; only asked about one that knows the token.

    Raises:
        LostError: it does not know the token, is refused, hung up, or took too long.
    """
    async with _handshake():
        nonce = new_secret()
        channel.send("challenge", nonce=nonce)
        hello = await channel.receive()
        rank, host, its_nonce = hello.get("rank"), str(hello.get("host")), str(hello.get("nonce"))
        expected = proof(token, "follow", nonce, its_nonce, str(rank), host)
        reason: str | None = "the token is another one: $GRPO_ASYNC_TOKEN must be the same on all machines"
        if hello["kind"] == "hello" and _is_same(expected, hello.get("proof")):
            reason = refuse(rank)
        if reason is not None or not isinstance(rank, int):
            channel.send("refused", reason=reason)
            raise LostError(str(reason))
        its_proof = proof(token, "lead", nonce, its_nonce, attempt, secret)
        channel.send("welcome", attempt=attempt, secret=secret, proof=its_proof)
        return rank, host


async def request_admission(channel: NodeChannel, token: str, *, rank: int, host: str) -> tuple[str, str]:
    """The other end of the handshake; returns the attempt and its secret.

    Raises:
        LostError: node 0 refused, does not know the token either, hung up, or took too long.
    """
    async with _handshake():
        its_nonce, nonce = str((await channel.receive()).get("nonce")), new_secret()
        own_proof = proof(token, "follow", its_nonce, nonce, str(rank), host)
        channel.send("hello", rank=rank, host=host, nonce=nonce, proof=own_proof)
        answer = await channel.receive()
    if answer["kind"] == "refused":
        raise LostError(str(answer.get("reason")))
    attempt, secret = str(answer.get("attempt")), str(answer.get("secret"))
    expected = proof(token, "lead", its_nonce, nonce, attempt, secret)
    if answer["kind"] != "welcome" or not _is_same(expected, answer.get("proof")):
        raise LostError("what listens there does not know the token, so it is not node 0 of this run")
    return attempt, secret


@asynccontextmanager
async def _handshake() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            yield
    except TimeoutError as error:
        raise LostError(f"the handshake was not done within {HANDSHAKE_S:.0f} s") from error


async def connect(address: str, port: int, timeout_s: float) -> NodeChannel:
    """One attempt to reach node 0.

    Raises:
        OSError: nobody listens there; TimeoutError, which is one, when nothing answers.
    """
    async with asyncio.timeout(timeout_s):
        return NodeChannel(*await asyncio.open_connection(address, port, limit=LINE_LIMIT))
