"""What the launchers of several machines say to each other: one TCP connection from each to node 0, one JSON object per line.

    node 0 -> node K   {"kind": "challenge", "nonce": A}
    node K -> node 0   {"kind": "hello", "rank": K, "host": "b", "nonce": B, "proof": HMAC(token, "follow", A, B, K, host)}
    node 0 -> node K   {"kind": "welcome", "offer": "...", "proof": HMAC(token, "lead", A, B, offer)}, or {"kind": "refused", ...}
    node K -> node 0   {"kind": "ready"}, or {"kind": "refused", "reason": "..."}: its configuration is another
    node 0 -> node K   {"kind": "start"} when all are ready; {"kind": "end", "exit_code": 1, "error": "..."} when the run is over
    node K -> node 0   {"kind": "signal", "name": "SIGTERM"}; {"kind": "exited", "status": 0, "error": null} of its trainer
    both               {"kind": "beat"}, every few seconds

Both ends prove that they know the token, which never travels, before either believes the other. What comes afterwards is neither
encrypted nor signed: whoever can change packets between the machines can end a run, but neither read the token nor put code in.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

BEAT_S = 5.0
SILENCE_S = 60.0
"""A launcher that says nothing for so long is gone: dead, or cut off."""
HANDSHAKE_S = 20.0
"""For the whole handshake, whatever the other end says meanwhile."""

_LINE_LIMIT = 4 << 20  # bytes; the offer holds a whole configuration
_FIRST_LINE_LIMIT = 4096  # before the other end has proven anything
_CHUNK = 1 << 16


class LostError(Exception):
    """The other launcher is gone, or what it says is no message."""


class RefusedError(LostError):
    """Node 0 does not take this machine; the message says why."""


class NodeChannel:
    """One end of a connection. Any line that is no message counts as its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unread = bytearray()  # never more than the limit of a line and one chunk
        self._closed = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    @property
    def peer(self) -> str:
        """Address of the other end."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "?"

    def send(self, kind: str, **content: Any) -> None:
        """Queue one message; nothing happens when the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **content}).encode() + b"\n")

    async def receive(self, timeout_s: float | None = None, *, limit: int = _LINE_LIMIT) -> dict[str, Any]:
        """The next message that is no beat.

        Args:
            timeout_s: for this message; beats do not renew it. None: for as long as there are beats.
            limit: of a line, bytes; no more than that is read of a longer one (but for a part that comes with it).

        Raises:
            LostError: none within `timeout_s`, or not even a beat within SILENCE_S; the connection has ended; it is no message.
        """
        loop = asyncio.get_running_loop()
        ends_at = None if timeout_s is None else loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(loop.time() + SILENCE_S if ends_at is None else ends_at):
                    line = await self._read_line(limit)
            except TimeoutError as error:
                said = "not a word for" if timeout_s is None else "no message within"
                raise LostError(f"{said} {SILENCE_S if timeout_s is None else timeout_s:.0f} s") from error
            except OSError as error:
                raise LostError(str(error)) from error
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: lists in lists in lists
                raise LostError("it sent a line that is no message") from error
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise LostError("it sent a line that is no message")
            if message["kind"] != "beat":
                return message

    async def _read_line(self, limit: int) -> bytes:
        """Up to and with the next line feed. The reader's own `readline` has one limit for good, that of its longest line."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0 and len(self._unread) <= limit:
            searched = len(self._unread)
            chunk = await self._reader.read(_CHUNK)  # `receive` has a deadline, `close` ends it
            if not chunk:
                raise LostError("the connection has ended")
            self._unread += chunk
        if not 0 <= end < limit:
            raise LostError(f"it sent a line of more than {limit} bytes")
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line

    def beat(self) -> None:
        """Say from now on, every few seconds, that this end lives."""
        self._beating = asyncio.ensure_future(self._beat())

    async def flush(self, timeout_s: float) -> None:
        """Wait until what was sent has left, `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
        except (TimeoutError, OSError):
            return  # the other end is gone, or will be

    def close(self) -> None:
        """Hang up. May be called more than once."""
        self._closed.set()
        self._writer.close()

    async def _beat(self) -> None:
        while not self._closed.is_set():
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._closed.wait()  # `close` ends the loop
            except TimeoutError:
                self.send("beat")


def new_nonce() -> str:
    """A number that no other handshake has, so that a proof cannot be used twice."""
    return secrets.token_hex(32)


def proof(token: str, role: str, *parts: str) -> str:
    """HMAC-SHA256 of a role and texts under the token; unambiguous, because it is of a JSON list."""
    return hmac.new(token.encode(), json.dumps([role, *parts]).encode(), "sha256").hexdigest()


def _is_same(wanted: str, given: object) -> bool:
    return isinstance(given, str) and hmac.compare_digest(wanted.encode(), given.encode("utf-8", "surrogatepass"))


async def admit(
    channel: NodeChannel, token: str, offer: Mapping[str, Any], *, refuse: Callable[[object], str | None]
) -> tuple[int, str]:
    """Node 0's end of the handshake; returns the rank and host name of the other machine, which has the offer then.

    Args:
        refuse: why a machine with this rank cannot take part, or None; only asked about one that knows the token.

    Raises:
        LostError: it does not know the token, is refused, or hung up.
    """
    nonce = new_nonce()
    channel.send("challenge", nonce=nonce)
    hello = await channel.receive(HANDSHAKE_S, limit=_FIRST_LINE_LIMIT)
    rank, host, its_nonce = hello.get("rank"), str(hello.get("host")), str(hello.get("nonce"))
    wanted = proof(token, "follow", nonce, its_nonce, str(rank), host)
    if hello["kind"] != "hello" or not _is_same(wanted, hello.get("proof")):
        channel.send("refused", reason="the token is another one: $GRPO_ASYNC_TOKEN must be the same on all machines")
        raise LostError("it does not know the token")
    reason = refuse(rank)
    if reason is not None or not isinstance(rank, int):
        channel.send("refused", reason=reason)
        raise LostError(str(reason))
    text = json.dumps(offer)
    channel.send("welcome", offer=text, proof=proof(token, "lead", nonce, its_nonce, text))
    return rank, host


async def apply(channel: NodeChannel, token: str, *, rank: int, host: str) -> dict[str, Any]:
    """The other end of the handshake; returns the offer of node 0.

    Raises:
        LostError: node 0 refused, does not know the token either, or hung up.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + HANDSHAKE_S
    challenge = await channel.receive(HANDSHAKE_S, limit=_FIRST_LINE_LIMIT)
    nonce, its_nonce = new_nonce(), str(challenge.get("nonce"))
    channel.send(
        "hello", rank=rank, host=host, nonce=nonce, proof=proof(token, "follow", its_nonce, nonce, str(rank), host)
    )
    answer = await channel.receive(max(0.0, ends_at - loop.time()))
    if answer["kind"] == "refused":
        raise RefusedError(str(answer.get("reason")))
    text = str(answer.get("offer"))
    wanted = proof(token, "lead", its_nonce, nonce, text)
    if answer["kind"] != "welcome" or not _is_same(wanted, answer.get("proof")):
        raise LostError("what listens there does not know the token, so it is not node 0 of this run")
    return dict(json.loads(text))


async def open_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], address: str, port: int
) -> asyncio.Server:
    """Listen on one address.

    Raises:
        OSError: it is none of this machine, or the port is taken.
    """
    return await asyncio.start_server(serve, host=address, port=port, limit=_FIRST_LINE_LIMIT)


async def connect(address: str, port: int, timeout_s: float) -> NodeChannel:
    """One attempt to reach node 0.

    Raises:
        OSError: nobody listens there; TimeoutError, which is one, when nothing answers.
    """
    async with asyncio.timeout(timeout_s):
        return NodeChannel(*await asyncio.open_connection(address, port, limit=_FIRST_LINE_LIMIT))
