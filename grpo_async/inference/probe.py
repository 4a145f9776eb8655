"""Asks one server how it is. Every answer is awaited without a limit of its own: the caller sets one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from pydantic import ValidationError

from grpo_async.errors import BadResponseError
from grpo_async.inference.connect import authorization, trusted_certificates
from grpo_async.inference.retry import error_for_status
from grpo_async.inference.surface import INFO_PATH, ServerInfo


class Probe:
    """Questions to the server at `url`; each raises httpx.TransportError when the connection is refused or breaks twice (one that
    was kept open may have been closed meanwhile), and InferenceError for an answer that says no."""

    def __init__(self, url: str, *, token: str | None, authority: Path | None) -> None:
        self._http = httpx.AsyncClient(  # the caller limits every question
            base_url=url,
            headers=authorization(token),
            verify=trusted_certificates(authority),
            limits=httpx.Limits(max_connections=None),
            timeout=None,  # the caller limits every question
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def health(self) -> None:
        """Returns when the server says that it can generate."""
        await self._get("/health")

    async def engine(self) -> None:
        """Returns when the engine core answers; /health stays 200 on a server whose engine hangs."""
        await self._get("/is_paused")

    async def info(self) -> ServerInfo:
        """What the server says of itself."""
        response = await self._get(INFO_PATH)
        try:
            return ServerInfo.model_validate_json(response.content)
        except ValidationError as error:
            raise BadResponseError(f"{INFO_PATH} does not answer with a ServerInfo: {error}") from error

    async def _get(self, path: str) -> httpx.Response:
        try:
            response = await self._http.get(path)  # the caller limits every question
        except httpx.TransportError:
            response = await self._http.get(path)  # the caller limits every question
        if response.status_code >= 400:
            raise error_for_status(response.status_code, response.content)
        return response
