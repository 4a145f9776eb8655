"""A reward model behind HTTP: your own server with a small JSON protocol, or vLLM.

    rewards:
      - function: grpo_async.rewards.http:remote_reward
        timeout_s: 120
        arguments: {url: "http://judge:8000/classify", format: classify, token_env: JUDGE_TOKEN}

The completions of a call are divided into requests of `batch_size`:

    json       {"prompts": [...], "completions": [...], "columns": {...}}  ->  {"rewards": [0.5, null]}
    classify   {"input": [text, ...]} or {"messages": [...]}               ->  {"data": [{"index": 0, "probs": [0.9]}]}

The second format is that of vLLM for models served with `--runner pooling` that have one output. vLLM takes one conversation per
request, but plain text in batches.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import httpx
from pydantic import field_validator

from grpo_async.config.base import Count, StrictModel, read_arguments
from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.rewards.call import ENVIRONMENTS, shared_slots
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.retry import RetryPolicy, server_message
from grpo_async.utils.strict_json import arguments_text
from grpo_async.utils.text import clipped, finite

_RETRY = RetryPolicy(max_retries=3)
_MAX_WAIT_S = 60.0  # longest Retry-After of a server that is followed


class RemoteRewardError(GrpoAsyncError):
    """A reward model behind HTTP could not be reached, refused a request, or answered with something unusable."""


class RemoteSettings(StrictModel, strict=True):
    """`arguments` of a remote reward."""

    url: str
    """The whole address that is asked, such as http://judge:8000/score."""
    format: Literal["json", "classify"] = "json"
    """See the top of the module."""
    token_env: str | None = None
    """Name of the environment variable that holds a bearer token, which does not belong in the YAML."""
    model: str | None = None
    """vLLM's `model`, needed if it serves several."""
    use_activation: bool | None = None
    """false = raw logits instead of vLLM's sigmoid."""
    columns: list[str] | None = None
    """Names of the columns to send (format json); null = all."""
    batch_size: Count = 32
    """Completions in one request."""
    max_concurrency: Count = 8
    """Requests at once, over all calls; with `run_in: process` in each worker."""

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
            raise ValueError("it holds a password; put a token into an environment variable and name it in `token_env`")
        return url

    @field_validator("token_env")
    @classmethod
    def _is_set(cls, variable: str | None) -> str | None:
        if variable is not None and not os.environ.get(variable, "").strip():
            raise ValueError(f"the environment variable {variable} is not set, or empty")
        return variable


def _check(arguments: Mapping[str, Any]) -> None:
    read_arguments(RemoteSettings, {"url": "http://given-elsewhere", **arguments})


async def remote_reward(
    prompts: Sequence[Any], completions: Sequence[Any], *, url: str, **others: Any
) -> list[float | None]:
    """Get scores from a server. The section's `timeout_s` bounds the whole call, retries included.

    Connection errors, and answers >= 500 or 429 (too many requests), are retried 3 times, and not before the
    seconds of the server's Retry-After, or 60 s where it is longer; any other answer is final.

    Args:
        prompts: plain text or messages.
        completions: plain text or messages.
        url: see RemoteSettings.
        **others: the other settings, and the columns of the data.

    Raises:
        RemoteRewardError: the server cannot be reached, refuses, or sends an unusable answer.
    """
    others.pop(ENVIRONMENTS, None)
    given = {name: others.pop(name) for name in RemoteSettings.model_fields if name in others}
    try:
        settings = read_arguments(RemoteSettings, {"url": url, **given})
    except ValueError as error:
        raise ValueError(f"{error}; if the data has a column of that name, set it in `arguments`") from error
    columns = {name: values for name, values in others.items() if isinstance(values, list) and name != "completion_ids"}
    if settings.columns is not None:
        unknown = [name for name in settings.columns if name not in columns]
        if unknown:
            raise ValueError(f"columns: the data has no {unknown}; it has {sorted(columns)}")
        columns = {name: columns[name] for name in settings.columns}
    is_text = all(isinstance(completion, str) for completion in completions)
    size = settings.batch_size if is_text or settings.format == "json" else 1
    headers = (
        {} if settings.token_env is None else {"authorization": f"Bearer {os.environ[settings.token_env].strip()}"}
    )
    slot = shared_slots(url, settings.max_concurrency)

    async def scores(first: int) -> list[float | None]:
        part = slice(first, first + size)
        body = _body(settings, prompts[part], completions[part], {name: each[part] for name, each in columns.items()})
        async with slot:  # limited by the call's timeout_s
            answer = await _answer(client, url, body)
        try:
            return _read_scores(answer, settings.format, len(completions[part]))
        except ValueError as error:
            problem = f"{url}, completions {first} to {first + len(completions[part]) - 1}: {error}"
            raise RemoteRewardError(problem) from error

    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None, connect=10.0),  # limited by the call's timeout_s
        verify=_ssl_context(),
        trust_env=False,  # a proxy from the environment must not see prompts and tokens
    ) as client:
        parts = await all_of(scores(first) for first in range(0, len(completions), size))
    return [score for part in parts for score in part]


remote_reward.check_arguments = _check  # type: ignore[attr-defined]
_ssl_context = cache(ssl.create_default_context)


async def _answer(client: httpx.AsyncClient, url: str, body: bytes) -> Any:
    """The JSON of an answer with status 200 to 299."""
    for attempt in range(_RETRY.max_retries + 1):
        wait_s = _RETRY.delay_s(attempt)
        try:
            response = await client.post(url, content=body, headers={"content-type": "application/json"})
        except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout) as error:
            problem = message_of(error)
        else:
            problem = f"it answered {response.status_code}: {server_message(response.content)}"
            if response.is_success:
                try:
                    return response.json()
                except ValueError as error:
                    text = response.content[:200]
                    raise RemoteRewardError(f"{url} answered something that is not JSON: {text!r}") from error
            if response.status_code < 500 and response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                where = response.headers.get("location")
                raise RemoteRewardError(f"{url} refused: {problem}{f'; use {where} as `url`' if where else ''}")
            retry_after = response.headers.get("retry-after", "")
            wait_s = max(wait_s, min(float(retry_after), _MAX_WAIT_S) if retry_after.isdecimal() else 0.0)
        if attempt < _RETRY.max_retries:
            await asyncio.sleep(wait_s)
    raise RemoteRewardError(f"{url} failed {_RETRY.max_retries + 1} times; the last time: {problem}")


def _body(
    settings: RemoteSettings, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> bytes:
    body: dict[str, Any]
    if settings.format == "json":
        body = {"prompts": list(prompts), "completions": list(completions), "columns": columns}
    else:
        fields = {"model": settings.model, "use_activation": settings.use_activation}
        body = {name: value for name, value in fields.items() if value is not None}
        if all(isinstance(each, str) for each in (*prompts, *completions)):
            body["input"] = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        else:
            ((prompt, completion),) = zip(prompts, completions, strict=True)
            before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            body["messages"] = list(map(_openai, [*before, *completion]))
    try:
        # A model can sample a lone surrogate; it has no UTF-8 form, so it is sent as an escape.
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RemoteRewardError(
            f"a column cannot be sent as JSON ({error}); name those to send in `columns`"
        ) from error


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form of OpenAI's API, where the arguments of a tool call are JSON text."""
    given = message.get("tool_calls") or ()
    calls = [{**call, "function": {**call["function"], "arguments": arguments_text(call)}} for call in given]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _read_scores(answer: Any, kind: str, count: int) -> list[float | None]:
    """The scores in an answer (parsed JSON), [count]; ValueError if it has another shape."""
    name = "rewards" if kind == "json" else "data"
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(
            f"expected `{name}` with a list of {count}, got {clipped(repr(answer), 200)}; is `format` right?"
        )
    if kind == "classify":
        try:
            by_index = {item["index"]: item["probs"] for item in found}
            found = [by_index[index] for index in range(count)]
            found = [probs for (probs,) in found]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected one of `probs` for each `index`, got {clipped(repr(answer), 200)}") from error
    numbers = [finite(value) for value in found]
    for index, (value, number) in enumerate(zip(found, numbers, strict=True)):
        if number is None and not (value is None and kind == "json"):
            raise ValueError(f"score {index} is {clipped(repr(value), 120)}; it must be a finite number")
    return numbers
