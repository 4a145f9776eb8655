"""A reward model behind HTTP: your own server with a small JSON protocol, or one that vLLM serves.

    rewards:
      - function: grpo_async.rewards.http:remote_reward
        timeout_s: 120
        arguments: {url: "http://judge:8000/classify", format: classify, token_env: JUDGE_TOKEN}

The completions of a call are cut into requests, which know whom they are about, so that an error names an index of the call:

    json       {"prompts": [...], "completions": [...], "columns": {...}, "completion_ids": [[...]]}  ->  {"rewards": [0.5, null]}
    classify   {"input": [text, ...]} or {"messages": [...]}    ->  {"data": [{"index": 0, "probs": [0.1, 0.9]}]}
    pooling    the same                                         ->  {"data": [{"index": 0, "data": [0.1, 0.9]}]}
    score      {"queries": [prompt...], "documents": [completion...]}  ->  {"data": [{"index": 0, "score": 0.9}]}

The last three are those of vLLM (0.27) for models served with `--runner pooling`. vLLM takes one conversation in a request;
plain text goes in batches.

Connections are kept per event loop and stay open between calls. A task of the loop holds them: it ends, and closes them, when
the loop's tasks are cancelled (the end of `asyncio.run`, of a run, of the reward), so they never outlive their loop.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from grpo_async.config.base import read_arguments
from grpo_async.errors import GrpoAsyncError
from grpo_async.rewards.call import ENVIRONMENTS, checked_by
from grpo_async.rewards.text import final_text
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.retry import RetryPolicy, server_message
from grpo_async.utils.text import clipped

_CONNECT_TIMEOUT_S = 10.0
_MAX_WAIT_S = 60.0  # that a server can ask for with Retry-After
# Silence is not a connection error: a hung server would be waited for many times over.
_RETRIABLE = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


class RemoteRewardError(GrpoAsyncError):
    """A reward model behind HTTP could not be reached, refused a request, or answered with something unusable."""


class RemoteSettings(BaseModel):
    """`arguments` of a remote reward. Sections that agree share connections."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: str
    """The whole address that is asked, such as http://judge:8000/score."""
    format: Literal["json", "classify", "pooling", "score"] = "json"
    """See the top of the module."""
    token_env: str | None = None
    """Name of the environment variable that holds a bearer token; the token itself never stands in the YAML."""
    model: str | None = None
    """vLLM's `model`, needed if it serves several."""
    score_index: int = 0
    """Which of the classes is the reward (classify, pooling). vLLM sends the label of the likeliest class only, so a class is named
    by its position: 0 for a reward model with one output."""
    use_activation: bool | None = None
    """false = raw logits instead of vLLM's sigmoid or softmax."""
    columns: list[str] | None = None
    """Names of the columns to send (format json); null = all."""
    send_completion_ids: bool = False
    """Send token ids too (format json)."""
    batch_size: int = Field(default=32, ge=1)
    """Completions in one request."""
    max_concurrency: int = Field(default=8, ge=1)
    """Requests at once, over all calls."""
    request_timeout_s: float = Field(default=30.0, gt=0.0)
    """Longest silence of the server within one request; not retried."""
    max_retries: int = Field(default=3, ge=0)
    """Retries of one request after connection errors, answers >= 500 and 429 (too many requests), after which the server's
    Retry-After is waited for, up to a minute; any other 4xx is never retried."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url!r} is not an address: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"{url!r} must begin with http:// or https:// and name a host")
        if parsed.userinfo:
            raise ValueError(
                "it holds a password; put a token into an environment variable and name that in `token_env`"
            )
        return url

    @field_validator("token_env")
    @classmethod
    def _is_set(cls, variable: str | None) -> str | None:
        if variable is not None and not os.environ.get(variable, "").strip():
            raise ValueError(f"the environment variable {variable} is not set, or empty")
        return variable

    @property
    def token(self) -> str | None:
        return None if self.token_env is None else os.environ[self.token_env].strip()


def _check(arguments: Mapping[str, Any]) -> None:
    read_arguments(RemoteSettings, {"url": "http://given-elsewhere", **arguments})


@checked_by(_check)
async def remote_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    url: str,
    **others: Any,
) -> list[float | None]:
    """Scores from a server; the section's `timeout_s` still bounds the whole call, retries included.

    Args:
        prompts: plain text or messages.
        completions: plain text or messages.
        completion_ids: sent with `send_completion_ids`.
        url: see RemoteSettings.
        **others: the other settings, and the columns of the data.

    Raises:
        RemoteRewardError: the server cannot be reached, refuses, or answers with something unusable.
    """
    others.pop(ENVIRONMENTS, None)
    given = {name: others.pop(name) for name in RemoteSettings.model_fields if name in others}
    try:
        settings = read_arguments(RemoteSettings, {"url": url, **given})
    except ValueError as error:
        raise ValueError(f"{error}; if the data has a column of that name, set it in `arguments`") from error
    columns = {name: values for name, values in others.items() if isinstance(values, list)}
    if settings.columns is not None:
        unknown = [name for name in settings.columns if name not in columns]
        if unknown:
            raise ValueError(f"columns: the data has no {unknown}; it has {sorted(columns)}")
        columns = {name: columns[name] for name in settings.columns}
    requests = _requests(settings, prompts, completions, completion_ids, columns)
    return [score for scores in await all_of(_scores(settings, request) for request in requests) for score in scores]


# ------------------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True, slots=True, kw_only=True)
class _TryAgain:
    problem: str
    wait_s: float = 0.0  # at least


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    keeper: asyncio.Task[None]


_Key = tuple[str, str | None, int, float]
_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, _Connection]] = WeakKeyDictionary()


async def _scores(settings: RemoteSettings, request: _Request) -> list[float | None]:
    connection = _connection(settings)
    policy = RetryPolicy(max_retries=settings.max_retries)
    async with connection.slots:  # for requests that have limits
        attempt = 0
        while not isinstance(response := await _attempt(connection.client, settings, request.body), httpx.Response):
            if attempt >= policy.max_retries:
                raise RemoteRewardError(f"{settings.url} failed {attempt + 1} times; the last time: {response.problem}")
            await asyncio.sleep(max(policy.delay_s(attempt), response.wait_s))
            attempt += 1
    try:
        answer = response.json()
    except ValueError as error:
        raise RemoteRewardError(
            f"{settings.url} answered something that is no JSON: {response.content[:200]!r}"
        ) from error
    try:
        return _read_scores(settings, request, answer)
    except RemoteRewardError as error:
        raise RemoteRewardError(f"{settings.url}: {error}") from error


async def _attempt(client: httpx.AsyncClient, settings: RemoteSettings, body: bytes) -> httpx.Response | _TryAgain:
    """An answer of 200 to 299, or what went wrong if it may go away by itself."""
    url = settings.url
    try:
        response = await client.post(url, content=body)  # within the client's request_timeout_s
    except _RETRIABLE as error:
        return _TryAgain(problem=f"{type(error).__name__}: {error}")
    except httpx.TimeoutException as error:
        raise RemoteRewardError(
            f"{url} was silent for {settings.request_timeout_s:g} s; raise `request_timeout_s` if this is expected"
        ) from error
    except httpx.HTTPError as error:
        raise RemoteRewardError(f"{url} cannot be asked: {type(error).__name__}: {error}") from error
    if response.is_success:
        return response
    message = f"it answered {response.status_code}: {server_message(response.content)}"
    if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return _TryAgain(problem=message, wait_s=_seconds(response.headers.get("retry-after", "")))
    if response.has_redirect_location:
        message = f"it answered {response.status_code} and points to {response.headers['location']}; use that as `url`"
    raise RemoteRewardError(f"{url} refused the request: {message}")


def _seconds(retry_after: str) -> float:
    """Of a Retry-After, which is a number of seconds or a date: "3" -> 3.0; 0.0 where it says nothing."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(seconds, _MAX_WAIT_S) if seconds > 0 else 0.0  # NaN is not


def _connection(settings: RemoteSettings) -> _Connection:
    """That of the running loop, made if there is none."""
    loop = asyncio.get_running_loop()
    mine = _connections.setdefault(loop, {})
    timeout_s = settings.request_timeout_s
    key = (settings.url, settings.token, settings.max_concurrency, timeout_s)
    connection = mine.get(key)
    if connection is None or connection.keeper.done() or connection.keeper.cancelling():
        headers = {"content-type": "application/json"}
        if settings.token is not None:
            headers["authorization"] = f"Bearer {settings.token}"
        client = httpx.AsyncClient(
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.max_concurrency),
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
            trust_env=False,  # a proxy variable must not see prompts and tokens
        )
        connection = mine[key] = _Connection(
            client=client,
            slots=asyncio.Semaphore(settings.max_concurrency),
            keeper=loop.create_task(_keep(client), name="remote-reward-connections"),
        )
    return connection


async def _keep(client: httpx.AsyncClient) -> None:
    try:
        await asyncio.get_running_loop().create_future()  # cancelled with the loop
    finally:
        await client.aclose()


# ------------------------------------------------------------------------------------------------ what is sent and read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One HTTP request: the completions `first` to `first + count - 1` of the call."""

    first: int
    count: int
    body: bytes


def _requests(
    settings: RemoteSettings,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> list[_Request]:
    """The requests of one call, in order; every list has one entry per completion.

    Raises:
        RemoteRewardError: a column cannot be sent as JSON.
    """
    kind = settings.format
    has_messages = kind in ("classify", "pooling") and any(not isinstance(c, str) for c in completions)
    size = 1 if has_messages else settings.batch_size
    requests = []
    for first in range(0, len(completions), size):
        part = slice(first, first + size)
        given, made = prompts[part], completions[part]
        body: dict[str, Any]
        if kind == "json":
            body = {"prompts": list(given), "completions": list(made)}
            if settings.send_completion_ids:
                body["completion_ids"] = [list(ids) for ids in completion_ids[part]]
            body["columns"] = {name: list(values[part]) for name, values in columns.items()}
        else:
            body = _pairs(given, made) if kind == "score" else _text_or_messages(given, made)
            fields = {"model": settings.model, "use_activation": settings.use_activation}
            body |= {name: value for name, value in fields.items() if value is not None}
        requests.append(_Request(first=first, count=len(made), body=_encoded(body)))
    return requests


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        # A model can sample an unpaired surrogate; it has no UTF-8, so it travels as an escape.
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        for name, values in body.get("columns", {}).items():
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError):
                raise RemoteRewardError(
                    f"the column `{name}` cannot be sent as JSON ({error}); name the columns to send in `columns`"
                ) from error
        raise RemoteRewardError(f"the request cannot be sent as JSON: {error}") from error


def _text_or_messages(prompts: Sequence[Any], completions: Sequence[Any]) -> dict[str, Any]:
    pairs = list(zip(prompts, completions, strict=True))
    if all(isinstance(completion, str) for _, completion in pairs):
        return {"input": [_prompt_text(prompt) + completion for prompt, completion in pairs]}
    ((prompt, completion),) = pairs
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return {"messages": [_openai(message) for message in [*before, *after]]}


def _pairs(prompts: Sequence[Any], completions: Sequence[Any]) -> dict[str, Any]:
    return {"queries": list(map(_prompt_text, prompts)), "documents": list(map(final_text, completions))}


def _prompt_text(prompt: Any) -> str:
    """A plain prompt as it is; of messages the contents, a blank line between them."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(final_text([{**message, "role": "assistant"}]) for message in prompt)


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's API takes it: there the arguments of a tool call are JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def _read_scores(settings: RemoteSettings, request: _Request, answer: Any) -> list[float | None]:
    """The scores in an answer (parsed JSON), [request.count].

    Raises:
        RemoteRewardError: too few or too many scores, one that is missing or not finite, or another shape of answer.
    """
    first, count = request.first, request.count
    found = _member(answer, "rewards" if settings.format == "json" else "data", "an answer")
    if not isinstance(found, list):
        raise RemoteRewardError(
            f"the answer holds {clipped(repr(found), 120)} where a list of {count} scores should stand"
        )
    if len(found) != count:
        raise RemoteRewardError(
            f"the answer has {len(found)} scores for {count} completions ({first} to {first + count - 1})"
        )
    if settings.format == "json":
        return [None if value is None else _finite(value, first + index) for index, value in enumerate(found)]
    by_index = {item.get("index"): item for item in found if isinstance(item, dict)}
    missing = [first + index for index in range(count) if index not in by_index]
    if missing:
        raise RemoteRewardError(f"the answer has no score for completion {missing[0]}")
    return [_read_score(settings, by_index[index], first + index) for index in range(count)]


def _read_score(settings: RemoteSettings, item: Mapping[str, Any], position: int) -> float:
    where = f"the answer for completion {position}"
    if settings.format == "score":
        return _finite(_member(item, "score", where), position)
    values = _member(item, "probs" if settings.format == "classify" else "data", where)
    if isinstance(values, list) and values and isinstance(values[-1], list):
        values = values[-1]  # a score for every token: that of the last one, as outcome reward models mean it
    index = settings.score_index
    if not isinstance(values, list) or not -len(values) <= index < len(values):
        raise RemoteRewardError(
            f"{where} has {clipped(repr(values), 120)}, which has no score_index {index}; choose one of its positions"
        )
    return _finite(values[index], position)


def _member(holder: Any, name: str, where: str) -> Any:
    if not isinstance(holder, dict) or name not in holder:
        raise RemoteRewardError(
            f"{where} has no `{name}`: {clipped(repr(holder), 120)}; is `format` right for this server?"
        )
    return holder[name]


def _finite(value: Any, position: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RemoteRewardError(
            f"the score of completion {position} is {clipped(repr(value), 120)}; it must be a finite number"
        )
    return float(value)
