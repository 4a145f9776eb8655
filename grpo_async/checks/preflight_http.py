"""What the preflight asks of a server beyond ServerControl: a completion, vLLM's tokenizer, an answer without the token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from pydantic import ValidationError

from grpo_async.errors import BadResponseError, ServerUnavailableError
from grpo_async.inference.connect import authorization, error_for_status, trusted_certificates
from grpo_async.inference.surface import GENERATE_PATH, INFO_PATH, GenerateChunk, GenerateRequest


@dataclass(kw_only=True)
class Completion:
    """What a server sampled. Three lists of equal length."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class ProbeClient:
    """HTTP to one server, each call asked once.

    Args:
        url: of the server.
        token: bearer token, or None.
        timeout_s: longest silence.
        authority: PEM file of trusted certificates; None: those of the system.

    Every call raises RequestRejectedError for 4xx and ServerUnavailableError for what keeps the server from answering.
    """

    def __init__(self, url: str, *, token: str | None, timeout_s: float, authority: Path | None = None) -> None:
        self.url = url
        self._headers = authorization(token)
        self._http = httpx.Client(
            base_url=url, timeout=timeout_s, trust_env=False, verify=trusted_certificates(authority)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def generate_greedy(self, token_ids: Sequence[int], *, max_tokens: int, instance_id: str = "") -> Completion:
        """A greedy completion of `max_tokens` tokens; stops at nothing."""
        request = GenerateRequest(
            request_id="preflight",
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            instance_id=instance_id,
        )
        completion = Completion()
        for line in self._post(GENERATE_PATH, request.model_dump_json()).splitlines():
            try:
                chunk = GenerateChunk.model_validate_json(line)
            except ValidationError as error:
                raise BadResponseError(f"{self.url}{GENERATE_PATH} answered with {line[:80]!r}") from error
            if chunk.error is not None:
                raise ServerUnavailableError(f"{self.url}{GENERATE_PATH}: {chunk.error}")
            completion.token_ids += chunk.token_ids
            completion.logprobs += chunk.logprobs
            completion.policy_versions += [chunk.policy_version] * len(chunk.token_ids)
            completion.finish_reason = chunk.finish_reason
        return completion

    def tokenize(self, text: str) -> list[int]:
        """Ids that vLLM's own tokenizer gives to `text`, without tokens around it."""
        body = json.dumps({"prompt": text, "add_special_tokens": False})
        answer = self._post("/tokenize", body)
        try:
            return [int(token) for token in json.loads(answer)["tokens"]]
        except (ValueError, KeyError, TypeError) as error:
            raise BadResponseError(f"{self.url}/tokenize answered with {answer[:80]!r}") from error

    def status_without_token(self) -> int:
        """HTTP status of a request that carries no token."""
        try:
            return self._http.get(INFO_PATH).status_code
        except httpx.TransportError as error:
            raise ServerUnavailableError(f"GET {self.url}{INFO_PATH}: {type(error).__name__}: {error}") from error

    def _post(self, path: str, body: str) -> bytes:
        try:
            response = self._http.post(
                path, content=body, headers={**self._headers, "content-type": "application/json"}
            )
        except httpx.TransportError as error:
            raise ServerUnavailableError(f"POST {self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code >= 400:
            raise error_for_status(response.status_code, response.content)
        return response.content
