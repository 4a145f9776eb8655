"""A reward model behind HTTP: your own server with a small JSON protocol, or one that vLLM serves.

    rewards:
      - function: grpo_async.rewards.http:remote_reward
        timeout_s: 120
        arguments: {url: "http://judge:8000/classify", format: classify, token_env: JUDGE_TOKEN}

Connections are kept per event loop and stay open between calls. A task of the loop holds them: it ends, and closes them, when
the loop's tasks are cancelled (the end of `asyncio.run`, of a run, of the reward), so they never outlive their loop.
"""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from grpo_async.rewards.arguments import checked_by, whole_number
from grpo_async.rewards.call import ENVIRONMENTS
from grpo_async.rewards.errors import RemoteRewardError
from grpo_async.rewards.http_formats import FORMATS, Call, Request, requests_for
from grpo_async.utils.retry import RetryPolicy, server_message

_CONNECT_TIMEOUT_S = 10.0
# Silence is no connection error: a hung server would be waited for many times over.
_LONGEST_WAIT_S = 60.0  # that a server can ask for with Retry-After
_RETRIABLE = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """What one section says about its server; sections that agree share connections."""

    url: str
    token: str | None
    max_concurrency: int
    request_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _TryAgain:
    problem: str
    wait_s: float = 0.0  # at least


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    keeper: asyncio.Task[None]


_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Endpoint, _Connection]] = WeakKeyDictionary()


def _check(arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(remote_reward).parameters
    known = sorted(name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY)
    unknown = sorted(set(arguments) - set(known))
    if unknown:  # **others would swallow it
        raise ValueError(f"{unknown[0]}: there is no such setting; there are {known}")
    for name in ("batch_size", "max_concurrency"):
        whole_number(arguments, name, 1)
    whole_number(arguments, "max_retries", 0, least=0)
    whole_number(arguments, "score_index", 0, least=-(10**6))
    _check_url(arguments.get("url", "http://given-elsewhere"))
    kind, seconds = arguments.get("format", "json"), arguments.get("request_timeout_s", 1.0)
    if kind not in FORMATS:
        raise ValueError(f"format: {kind!r} is not one of {FORMATS}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"request_timeout_s: {seconds!r} must be a number of seconds above 0")
    columns, activation = arguments.get("columns"), arguments.get("use_activation")
    if columns is not None and not (isinstance(columns, list) and all(isinstance(name, str) for name in columns)):
        raise ValueError(f"columns: {columns!r} must be a list of column names")
    if activation is not None and not isinstance(activation, bool):
        raise ValueError(f"use_activation: {activation!r} must be true, false or null")
    for name in ("model", "token_env"):
        if not isinstance(arguments.get(name), str | None):
            raise ValueError(f"{name}: {arguments[name]!r} must be text")
    _token(arguments.get("token_env"))


@checked_by(_check)
async def remote_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    url: str,
    format: str = "json",
    token_env: str | None = None,
    model: str | None = None,
    score_index: int = 0,
    use_activation: bool | None = None,
    columns: list[str] | None = None,
    send_completion_ids: bool = False,
    batch_size: int = 32,
    max_concurrency: int = 8,
    request_timeout_s: float = 30.0,
    max_retries: int = 3,
    **others: Any,
) -> list[float | None]:
    """Scores from a server; the section's `timeout_s` still bounds the whole call, retries included.

    Args:
        prompts: plain text or messages.
        completions: plain text or messages.
        completion_ids: sent with `send_completion_ids` (format `json` only).
        url: the whole address that is asked, such as http://judge:8000/score.
        format: `json` (see `http_formats`), or vLLM's `classify`, `pooling`, `score`.
        token_env: name of the environment variable that holds a bearer token; the token itself never stands in the YAML.
        model: vLLM's `model`, needed if it serves several.
        score_index: which of the classes is the reward (classify, pooling). vLLM sends the label of the likeliest class only,
            so a class is named by its position: 0 for a reward model with one output.
        use_activation: false = raw logits instead of vLLM's sigmoid or softmax.
        columns: names of the columns to send (format `json`); null = all.
        send_completion_ids: send token ids too.
        batch_size: completions in one request.
        max_concurrency: requests at once, over all calls.
        request_timeout_s: longest silence of the server within one request; not retried.
        max_retries: retries of one request after connection errors, answers >= 500 and 429 (too many requests), after which
            the server's Retry-After is waited for, up to a minute; any other 4xx is never retried.
        **others: the columns of the data.

    Raises:
        RemoteRewardError: the server cannot be reached, refuses, or answers with something unusable.
    """
    settings = {
        "url": url, "format": format, "token_env": token_env, "model": model, "score_index": score_index,
        "use_activation": use_activation, "columns": columns, "batch_size": batch_size,
        "max_concurrency": max_concurrency, "request_timeout_s": request_timeout_s, "max_retries": max_retries,
    }  # fmt: skip
    try:
        _check(settings)
    except ValueError as error:
        raise ValueError(f"{error}; if the data has a column of that name, set it in `arguments`") from error
    others.pop(ENVIRONMENTS, None)
    data = {name: values for name, values in others.items() if isinstance(values, list)}
    call = Call(
        prompts=prompts,
        completions=completions,
        completion_ids=completion_ids if send_completion_ids else None,
        columns=_chosen(data, columns),
    )
    fields = {} if format == "json" else {"model": model, "use_activation": use_activation}
    requests = requests_for(
        call,
        format,  # type: ignore[arg-type]  # checked above
        batch_size=batch_size,
        score_index=score_index,
        fields={name: value for name, value in fields.items() if value is not None},
    )
    endpoint = _Endpoint(
        url=url, token=_token(token_env), max_concurrency=max_concurrency, request_timeout_s=request_timeout_s
    )
    policy = RetryPolicy(max_retries=max_retries)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_scores(endpoint, request, policy)) for request in requests]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__  # without the group, and with what it came from
    return [score for task in running for score in task.result()]


async def _scores(endpoint: _Endpoint, request: Request, policy: RetryPolicy) -> list[float | None]:
    connection = _connection(endpoint)
    async with connection.slots:  # for requests that have limits
        attempt = 0
        while True:
            response = await _attempt(connection.client, endpoint, request)
            if isinstance(response, httpx.Response):
                break
            if attempt >= policy.max_retries:
                raise RemoteRewardError(f"{endpoint.url} failed {attempt + 1} times; the last time: {response.problem}")
            await asyncio.sleep(max(policy.delay_s(attempt), response.wait_s))
            attempt += 1
    try:
        answer = response.json()
    except ValueError as error:
        raise RemoteRewardError(
            f"{endpoint.url} answered something that is no JSON: {response.content[:200]!r}"
        ) from error
    try:
        return request.scores(answer)
    except RemoteRewardError as error:
        raise RemoteRewardError(f"{endpoint.url}: {error}") from error


def _seconds(retry_after: str) -> float:
    """Of a Retry-After, which is a number of seconds or a date: "3" -> 3.0; 0.0 where it says nothing."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(seconds, _LONGEST_WAIT_S) if seconds > 0 else 0.0  # NaN is not


async def _attempt(client: httpx.AsyncClient, endpoint: _Endpoint, request: Request) -> httpx.Response | _TryAgain:
    """An answer of 200 to 299, or what went wrong if it may go away by itself."""
    try:
        response = await client.post(endpoint.url, content=request.body)  # within the client's request_timeout_s
    except _RETRIABLE as error:
        return _TryAgain(problem=f"{type(error).__name__}: {error}")
    except httpx.TimeoutException as error:
        raise RemoteRewardError(
            f"{endpoint.url} was silent for {endpoint.request_timeout_s:g} s; raise `request_timeout_s` if this is expected"
        ) from error
    except httpx.HTTPError as error:
        raise RemoteRewardError(f"{endpoint.url} cannot be asked: {type(error).__name__}: {error}") from error
    if response.is_success:
        return response
    message = f"it answered {response.status_code}: {server_message(response.content)}"
    if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return _TryAgain(problem=message, wait_s=_seconds(response.headers.get("retry-after", "")))
    if response.has_redirect_location:
        message = f"it answered {response.status_code} and points to {response.headers['location']}; use that as `url`"
    raise RemoteRewardError(f"{endpoint.url} refused the request: {message}")


def _connection(endpoint: _Endpoint) -> _Connection:
    """That of the running loop, made if there is none."""
    loop = asyncio.get_running_loop()
    mine = _connections.setdefault(loop, {})
    connection = mine.get(endpoint)
    if connection is None or connection.keeper.done() or connection.keeper.cancelling():
        headers = {"content-type": "application/json"}
        if endpoint.token is not None:
            headers["authorization"] = f"Bearer {endpoint.token}"
        client = httpx.AsyncClient(
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=endpoint.max_concurrency),
            timeout=httpx.Timeout(
                endpoint.request_timeout_s, connect=min(_CONNECT_TIMEOUT_S, endpoint.request_timeout_s)
            ),
            trust_env=False,  # a proxy variable must not see prompts and tokens
        )
        connection = _Connection(
            client=client,
            slots=asyncio.Semaphore(endpoint.max_concurrency),
            keeper=loop.create_task(_keep(client), name="remote-reward-connections"),
        )
        mine[endpoint] = connection
    return connection


async def _keep(client: httpx.AsyncClient) -> None:
    try:
        await asyncio.get_running_loop().create_future()  # cancelled with the loop
    finally:
        await client.aclose()


def _chosen(data: dict[str, list[Any]], columns: list[str] | None) -> dict[str, list[Any]]:
    if columns is None:
        return data
    unknown = [name for name in columns if name not in data]
    if unknown:
        raise ValueError(f"columns: the data has no {unknown}; it has {sorted(data)}")
    return {name: data[name] for name in columns}


def _check_url(url: Any) -> None:
    try:
        parsed = httpx.URL(url)
    except (TypeError, httpx.InvalidURL) as error:
        raise ValueError(f"url: {url!r} is no address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url: {url!r} must begin with http:// or https:// and name a host")
    if parsed.userinfo:
        raise ValueError(
            "url: it holds a password; put a token into an environment variable and name that in `token_env`"
        )


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"token_env: the environment variable {variable} is not set, or empty")
    return token
