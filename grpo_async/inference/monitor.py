"""Watches servers, each from its own thread: finds those that start, sends heartbeats to those that serve, judges both.

    STARTING, DOWN    asked /health, then the engine, then what it is     Fleet.found or not_found
    READY, SERVING    heartbeat through the engine, then what it is       Fleet.note, restarted or failed

A heartbeat that fails:

    refused or reset, twice in a row           failed at once: nobody listens anymore
    no answer within heartbeat_timeout_s       failed, unless weights were loaded meanwhile: an engine that loads them is silent,
                                               and a push has its own deadlines
    answers >= 400, /health says dead          failed at once
    answers >= 400 for heartbeat_timeout_s     failed, unless weights were loaded

Asking is a loop over time, because HTTP offers nothing to wait for that says "is still there"; `ask_now` cuts a pause short.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

import httpx

from grpo_async.config.server_sections import InferenceSection
from grpo_async.errors import BadResponseError, InferenceError, RequestRejectedError
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.connect import is_answer
from grpo_async.inference.server import Server, ServerState
from grpo_async.utils.concurrency import in_thread

if TYPE_CHECKING:
    from grpo_async.inference.fleet import Fleet

logger = logging.getLogger(__name__)

_STARTING_INTERVAL_S = 0.1
_MAX_QUESTION_S = 10.0
"""To a server that serves nothing."""
_END_TIMEOUT_S = 1.0


class Monitor:
    """One daemon thread for each server. Its findings go to `fleet`."""

    def __init__(self, fleet: Fleet, num_servers: int, inference: InferenceSection) -> None:
        self._fleet = fleet
        self._inference = inference
        self._wanted = [threading.Event() for _ in range(num_servers)]
        self._errors_since: dict[int, float] = {}
        self._silent: set[int] = set()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch."""
        for index in range(len(self._wanted)):
            thread = threading.Thread(target=self._watch, args=(index,), name="server-monitor", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads; nothing is found anymore. A server that does not answer is waited for for a second."""
        self._is_closed = True
        for wanted in self._wanted:
            wanted.set()
        until = time.monotonic() + _END_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def ask_now(self, index: int) -> None:
        """Ask a server at once."""
        self._wanted[index].set()

    def infos(self, servers: Sequence[Server], *, timeout_s: float) -> dict[int, ServerInfo]:
        """What these servers say of themselves. One that does not answer in time is left out, and not asked again before its next
        heartbeat."""
        asked = {
            server.index: in_thread(partial(server.control.info, timeout_s=timeout_s, retries=0), name="server-info")
            for server in servers
            if server.index not in self._silent
        }
        answered = wait(asked.values(), timeout=2 * timeout_s).done
        infos = {}
        for index, question in asked.items():
            try:
                if question in answered:
                    infos[index] = question.result()
                    continue
            except InferenceError:
                pass  # the next heartbeat finds out
            self._silent.add(index)
        return infos

    def _watch(self, index: int) -> None:
        while True:  # `close` ends it, or the process
            self._wanted[index].clear()
            server = self._fleet.server(index)
            if self._is_closed or server.state is ServerState.GONE:
                return
            try:
                if server.state.is_member:
                    self._heartbeat(server)
                else:
                    self._search(server)
            except Exception:  # a watch that ends would leave a dead server unnoticed
                if not self._is_closed:
                    logger.exception("checking %s failed; it will be checked again", server.name)
            interval_s = self._inference.heartbeat_interval_s
            if self._fleet.server(index).state is ServerState.STARTING:
                interval_s = min(interval_s, _STARTING_INTERVAL_S)
            self._wanted[index].wait(interval_s)

    def _search(self, server: Server) -> None:
        """Ask a server that does not serve."""
        is_healthy = False
        try:
            server.control.health(timeout_s=_MAX_QUESTION_S)
            is_healthy = True
            info = server.control.heartbeat(timeout_s=_MAX_QUESTION_S)
        except InferenceError as error:
            if self._is_closed:
                return
            if hopeless := why_hopeless(error, is_healthy=is_healthy):
                self._fleet.give_up(server, hopeless)
            else:
                self._fleet.not_found(server, str(error))
        else:
            self._forget_errors(server)
            self._fleet.found(server, info)

    def _heartbeat(self, server: Server) -> None:
        asked_at = time.monotonic()
        try:
            info = server.control.heartbeat(timeout_s=self._inference.heartbeat_timeout_s)
        except InferenceError as error:
            if not self._is_closed:
                self._judge(server, error, asked_at)
            return
        self._forget_errors(server)
        if info.instance_id != server.instance_id:
            self._fleet.restarted(server, info)
        elif not self._is_closed:
            self._fleet.note(server, info)

    def _judge(self, server: Server, error: InferenceError, asked_at: float) -> None:
        """A heartbeat failed."""
        timeout_s = self._inference.heartbeat_timeout_s
        if isinstance(error.__cause__, httpx.TimeoutException):
            self._silent.add(server.index)
            if not self._fleet.has_loaded_since(asked_at):
                self._fleet.failed(
                    server, f"its engine did not answer for {timeout_s:g} s (inference.heartbeat_timeout_s)"
                )
            return
        if not is_answer(error):
            self._fleet.failed(server, f"its connection was lost: {error}")
            return
        try:
            server.control.health(timeout_s=_MAX_QUESTION_S)
        except InferenceError as death:
            if is_answer(death):
                self._fleet.failed(server, str(death))
                return  # else the next heartbeat finds out
        now = time.monotonic()
        since = self._errors_since.setdefault(server.index, now)
        if now - since > timeout_s and not self._fleet.has_loaded_since(asked_at):
            self._fleet.failed(server, f"its engine has answered with errors for {now - since:.0f} s: {error}")

    def _forget_errors(self, server: Server) -> None:
        self._silent.discard(server.index)
        self._errors_since.pop(server.index, None)


def why_hopeless(error: InferenceError, *, is_healthy: bool) -> str:
    """What to change when it is useless to ask again; "" otherwise. `is_healthy`: it says that it can generate."""
    if isinstance(error, RequestRejectedError) and error.status in (401, 403):
        return f"{error}: set the variable GRPO_ASYNC_TOKEN to the token that this server was started with"
    is_unknown = isinstance(error, RequestRejectedError) and error.status in (404, 405)
    if is_healthy and (is_unknown or isinstance(error, BadResponseError)):
        return f"it is not a server of grpo-async ({error}); start it with `grpo-async serve-vllm CONFIG`, not with `vllm serve`"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"its certificate was rejected ({error}); inference.tls.ca_certs names the PEM file of trusted certificates, and the "
            "certificate has to include the address in the URL"
        )
    return ""
