"""Synchronous control of one inference server: pause and resume, weight updates, scores.

It uses its own connections, so that the rollout thread's load never delays a weight push. Thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from grpo_async.errors import BadResponseError, ServerUnavailableError, message_of
from grpo_async.inference.api import (
    Paused,
    PauseMode,
    ScoreAnswer,
    ScoreRequest,
    ServedParameters,
    ServerInfo,
    WeightInitInfo,
    WeightUpdateInfo,
)
from grpo_async.inference.connect import authorization, error_for_status, trusted_certificates
from grpo_async.utils.retry import RetryPolicy
from grpo_async.utils.text import count
from grpo_async.utils.validation import problems_of

Answer = TypeVar("Answer", bound=BaseModel)


class _Tokens(BaseModel):
    tokens: list[int]


class ServerControl:
    """Control calls to one server. A call's `timeout_s` covers all of its retries; the default is that of the constructor.

    Every call raises RequestRejectedError on 4xx, ServerUnavailableError when retries are exhausted (`answered` says whether the
    server answered at all), BadResponseError when the answer is unusable.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float,
        name: str | None = None,
    ) -> None:
        self.url = url
        self.name = name or url
        self.num_workers = 1  # as the server last reported
        self._retry = RetryPolicy()
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=url,
            headers=authorization(token),
            verify=trusted_certificates(),
            timeout=timeout_s,
            # a new connection for each call: a kept one may be broken, and an update cannot be requested twice
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def info(self, *, timeout_s: float | None = None, retries: int | None = None) -> ServerInfo:
        """The server's report about itself; its number of workers is remembered."""
        info = _read(ServerInfo, self._request("GET", "/rollout/info", timeout_s=timeout_s, retries=retries))
        self.num_workers = info.num_workers
        return info

    def parameters(self, *, timeout_s: float | None = None) -> ServedParameters:
        """The parameters that a weight update has to contain."""
        return _read(ServedParameters, self._request("GET", "/rollout/parameters", timeout_s=timeout_s))

    def score(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> ScoreAnswer:
        """Log-probabilities of the tokens after the first, under the served weights."""
        body = ScoreRequest(token_ids=list(token_ids)).model_dump()
        answer = _read(ScoreAnswer, self._request("POST", "/rollout/score", body, timeout_s=timeout_s))
        if len(answer.logprobs) != len(token_ids) - 1:
            raise BadResponseError(
                f"{self.name} gave {len(answer.logprobs)} log-probabilities for the {len(token_ids) - 1} tokens after the first"
            )
        return answer

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text with the server's own tokenizer, without special tokens around it. Only vLLM has one."""
        body = {"prompt": text, "add_special_tokens": False}
        return _read(_Tokens, self._request("POST", "/tokenize", body)).tokens

    def health(self, *, timeout_s: float) -> None:
        """Return when the server says that it can generate. A connection that breaks is tried once again."""
        self._request("GET", "/health", retries=1, timeout_s=timeout_s)

    def heartbeat(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The server's report, after its engine core has answered: /health stays 200 on a server whose engine hangs. A
        connection that breaks is tried once again."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        ends_at = time.monotonic() + timeout_s
        _read(Paused, self._request("GET", "/is_paused", retries=1, timeout_s=timeout_s))
        return self.info(timeout_s=ends_at - time.monotonic(), retries=1)

    def pause(self, *, mode: PauseMode = "keep", keep_cache: bool = False, timeout_s: float | None = None) -> Paused:
        """Freeze generation between two tokens; `api` says what happens to requests in flight."""
        query = {"mode": mode, "keep_cache": "true" if keep_cache else "false"}
        return self._set_paused(True, self._request("POST", "/pause", query=query, timeout_s=timeout_s))

    def resume(self, *, timeout_s: float | None = None) -> None:
        """Continue generating; allowed when not paused. RequestRejectedError with the status OUT_OF_ORDER: a part of an update is
        loaded, and the server stays paused until it has a complete one."""
        self._set_paused(False, self._request("POST", "/resume", timeout_s=timeout_s))

    def _set_paused(self, wanted: bool, body: bytes) -> Paused:
        """Weights are only sent to a server that says that it is paused: not a proxy, which answers 200 to everything."""
        paused = _read(Paused, body)
        if paused.is_paused is not wanted:
            raise BadResponseError(
                f"{self.name} was told to {'pause' if wanted else 'resume'}, and says that it did not"
            )
        return paused

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float | None = None) -> None:
        """Make the server's workers join the weight group. Never retried."""
        self._request("POST", "/init_weight_transfer_engine", info.model_dump(), retries=0, timeout_s=timeout_s)

    def start_weight_update(self, info: WeightUpdateInfo, *, timeout_s: float | None = None) -> None:
        """Announce an update; RequestRejectedError if it does not fit the served model."""
        self._request("POST", "/start_weight_update", info.model_dump(), timeout_s=timeout_s)

    def update_weights(self, *, timeout_s: float | None = None) -> None:
        """Returns when all parameters are received and loaded. Never retried: the broadcast that belongs to it cannot be
        repeated."""
        self._request("POST", "/update_weights", {}, retries=0, timeout_s=timeout_s)

    def finish_weight_update(self, version: int, *, timeout_s: float | None = None) -> None:
        """Make `version` the policy version of every token from now on."""
        self._request("POST", "/finish_weight_update", {"weight_version": str(version)}, timeout_s=timeout_s)

    def sleep(self, *, timeout_s: float | None = None) -> None:
        """Free the memory of weights and cache until `wake_up`; the server must not be generating."""
        self._request("POST", "/sleep", timeout_s=timeout_s)

    def wake_up(self, *, timeout_s: float | None = None) -> None:
        """Allocate the memory again, with the weights from before."""
        self._request("POST", "/wake_up", timeout_s=timeout_s)

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        retries: int | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        ends_at = time.monotonic() + timeout_s
        max_retries = self._retry.max_retries if retries is None else retries
        attempt = 0
        while True:
            answered = False
            try:
                left_s = max(0.001, ends_at - time.monotonic())
                timeout = httpx.Timeout(left_s, connect=min(10.0, left_s))
                with self._http.stream(method, path, params=query, json=body, timeout=timeout) as response:
                    content = _content(response, ends_at)
                if response.status_code != 200:
                    answered = True
                    raise error_for_status(response.status_code, content)
                return content
            except (httpx.TransportError, ServerUnavailableError) as error:
                delay_s = self._retry.delay_s(attempt)
                # retries share the time of the call, and a silent attempt uses all of it: a hung server is waited for once
                if attempt >= max_retries or time.monotonic() + delay_s >= ends_at:
                    raise ServerUnavailableError(
                        f"{method} {self.url}{path} failed {count(attempt + 1, 'time')} within {timeout_s:g} s; the last error: "
                        f"{message_of(error)}",
                        answered=answered,
                    ) from error
                time.sleep(delay_s)  # backoff, within the time of the call
                attempt += 1


def _content(response: httpx.Response, ends_at: float) -> bytes:
    """The body, within the time of the call: a timeout of httpx begins anew with each byte."""
    content = bytearray()
    for part in response.iter_bytes():
        content += part
        if time.monotonic() > ends_at:
            raise httpx.ReadTimeout("the answer did not end in time")
    return bytes(content)


def _read(kind: type[Answer], body: bytes) -> Answer:
    try:
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise BadResponseError(
            f"the server sent something that is not a {kind.__name__}: {problems_of(error)}"
        ) from error
