"""Synchronous control of one inference server: readiness, pause and resume, weight updates.

Used from the trainer's main thread, on connections of its own, so that no load of the rollout thread delays a weight push.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import httpx

from grpo_async.errors import DeadlineError, ServerUnavailableError
from grpo_async.inference.retry import error_for_status, is_retriable
from grpo_async.inference.surface import INFO_PATH, GlooInitInfo, GlooUpdateInfo, ServerInfo
from grpo_async.retry import RetryPolicy


class ServerControl:
    """Control calls. Each raises RequestRejectedError on 4xx and ServerUnavailableError when the retries are spent."""

    def __init__(self, url: str, *, token: str | None, timeout_s: float, retry: RetryPolicy | None = None) -> None:
        self.url = url
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._never = threading.Event()
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def wait_until_ready(self, *, deadline_s: float, setting: str, stop: threading.Event) -> ServerInfo | None:
        """Ask /health until it answers 200, then return the server's description; None when `stop` is set meanwhile.

        Raises:
            DeadlineError: not ready within `deadline_s` seconds.
        """
        began = time.monotonic()
        while not stop.is_set():
            try:
                if self._http.get("/health", timeout=5.0).status_code == 200:
                    break
            except httpx.TransportError:
                pass  # not listening yet: the deadline below bounds the wait
            if time.monotonic() - began > deadline_s:
                raise DeadlineError(
                    f"the inference server at {self.url} to become healthy",
                    waited_s=time.monotonic() - began,
                    setting=setting,
                    hint="Look into server.log of this attempt.",
                )
            stop.wait(0.1)  # HTTP offers nothing to await for "not listening yet"
        else:
            return None
        return self.info()

    def info(self) -> ServerInfo:
        return ServerInfo.model_validate(self._request("GET", INFO_PATH))

    def pause(self) -> None:
        """Freeze generation between two tokens; in-flight requests stay and go on after `resume`."""
        self._request("POST", "/pause?mode=keep")

    def resume(self) -> None:
        self._request("POST", "/resume")

    def init_weight_transfer(self, fields: dict[str, Any]) -> None:
        """Make the server's workers join the weight group; `fields` are those of GlooInitInfo."""
        info = GlooInitInfo.model_validate(fields)
        self._request("POST", "/init_weight_transfer_engine", {"init_info": info.model_dump()}, retries=0)

    def start_weight_update(self) -> None:
        self._request("POST", "/start_weight_update", {})

    def update_weights(self, fields: dict[str, Any], *, timeout_s: float) -> None:
        """Announce parameters; answers when all are received and applied. `fields` are those of GlooUpdateInfo."""
        info = GlooUpdateInfo.model_validate(fields)
        # never retried: the broadcast that goes with it cannot be repeated
        self._request("POST", "/update_weights", {"update_info": info.model_dump()}, retries=0, timeout_s=timeout_s)

    def finish_weight_update(self, version: int) -> None:
        self._request("POST", "/finish_weight_update", {"weight_version": str(version)})

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        retries: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        limit = self._retry.max_retries if retries is None else retries
        attempt = 0
        while True:
            try:
                response = self._http.request(method, path, json=body, timeout=timeout_s or self._timeout_s)
                if response.status_code >= 400:
                    raise error_for_status(response.status_code, response.content)
                return response.json() if response.content else None
            except (httpx.TransportError, ServerUnavailableError) as error:
                # silence for the whole time-out is not asked again: a hung server would be waited for many times over
                is_silent = isinstance(error, httpx.ReadTimeout)
                if is_silent or not is_retriable(error) or attempt >= limit:
                    raise ServerUnavailableError(
                        f"{method} {self.url}{path} failed {attempt + 1} times; the last error was "
                        f"{type(error).__name__}: {error}"
                    ) from error
                self._never.wait(self._retry.delay_s(attempt))
                attempt += 1
