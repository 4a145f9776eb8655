"""A reward model at an address: vLLM's `/classify`, of a model with one output (`vllm serve MODEL --runner pooling`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
from pydantic import AfterValidator, Field

from grpo_async.config.base import Count, StrictModel, read_arguments
from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.inference.connect import authorization, trusted_certificates
from grpo_async.rewards.call import shared_slots
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.retry import RetryPolicy, server_message
from grpo_async.utils.strict_json import arguments_text
from grpo_async.utils.text import clipped, finite

_RETRY = RetryPolicy(max_retries=3)
_MAX_WAIT_S = 60.0  # longest Retry-After of a server that is followed


class ServedModelError(GrpoAsyncError):
    """A reward model or a teacher could not be reached, refused a request, or answered with something unusable."""


def token_of(variable: str | None) -> str | None:
    """The bearer token in an environment variable; None if there is no variable. Raises ValueError if it is not set."""
    if variable is None:
        return None
    if not (token := os.environ.get(variable, "").strip()):
        raise ValueError(f"the environment variable {variable} is not set, or empty")
    return token


def _is_set(variable: str) -> str:
    token_of(variable)
    return variable


TokenVariable = Annotated[str, AfterValidator(_is_set)]
"""Name of an environment variable that has to be set."""


class ServedModelSettings(StrictModel, strict=True):
    """`model` and `arguments` of the section."""

    model: str = Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$")
    """Address of the server, without a password."""
    served_model_name: str | None = None
    """vLLM's name of the model, needed if the server has several."""
    token_env: TokenVariable | None = None
    """Name of the environment variable that holds a bearer token, which does not belong in the YAML."""
    use_activation: bool | None = None
    """false = raw logits instead of vLLM's sigmoid."""
    batch_size: Count = 32
    """Texts in one request; of conversations vLLM takes one."""
    max_concurrency: Count = 8
    """Requests at once, over all calls."""


def _check(arguments: Mapping[str, Any]) -> None:
    read_arguments(ServedModelSettings, arguments["settings"])


async def served_model_reward(
    prompts: Sequence[Any], completions: Sequence[Any], *, settings: Mapping[str, Any]
) -> list[float]:
    """Get scores of completions (text or messages) from a server. The section's `timeout_s` bounds the call, retries included.

    Connection errors, and answers >= 500 or 429 (too many requests), are retried 3 times, and not before the
    seconds of the server's Retry-After, or 60 s where it is longer; any other answer is final (ServedModelError).
    """
    chosen = read_arguments(ServedModelSettings, settings)
    url = f"{chosen.model.rstrip('/').removesuffix('/classify')}/classify"
    is_text = all(isinstance(part, str) for part in (*prompts, *completions))
    size = chosen.batch_size if is_text else 1
    slot = shared_slots(url, chosen.max_concurrency)

    async def scores(first: int) -> list[float]:
        part = slice(first, first + size)
        async with slot:  # limited by the call's timeout_s
            answer = await post_json(client, url, _body(chosen, prompts[part], completions[part]))
        return _read_scores(answer, url, len(completions[part]))

    async with open_client(chosen.token_env) as client:
        parts = await all_of(scores(first) for first in range(0, len(completions), size))
    return [score for part in parts for score in part]


served_model_reward.check_arguments = _check  # type: ignore[attr-defined]


def open_client(token_env: str | None, *, timeout_s: float | None = None) -> httpx.AsyncClient:
    """A client for a model's API. `timeout_s`: of an answer; None: the call of the reward has a limit."""
    return httpx.AsyncClient(
        headers=authorization(token_of(token_env)),
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        verify=trusted_certificates(),
        trust_env=False,  # a proxy from the environment must not see prompts and tokens
    )


async def post_json(client: httpx.AsyncClient, url: str, body: bytes) -> Any:
    """Return the JSON of an answer with status 200 to 299, retrying what `served_model_reward` says. Raises ServedModelError."""
    for attempt in range(_RETRY.max_retries + 1):
        wait_s = _RETRY.delay_s(attempt)
        try:
            response = await client.post(url, content=body, headers={"content-type": "application/json"})
        except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout) as error:
            problem = message_of(error)
        except httpx.TimeoutException as error:
            raise ServedModelError(f"{url} did not answer in time: {message_of(error)}") from error
        else:
            if response.is_success:
                try:
                    return response.json()
                except ValueError as error:
                    text = response.content[:200]
                    raise ServedModelError(f"{url} answered something that is not JSON: {text!r}") from error
            problem = f"it answered {response.status_code}: {server_message(response.content)}"
            if response.status_code < 500 and response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                raise ServedModelError(f"{url} refused: {problem}")
            retry_after = response.headers.get("retry-after", "")
            wait_s = max(wait_s, min(float(retry_after), _MAX_WAIT_S) if retry_after.isdecimal() else 0.0)
        if attempt < _RETRY.max_retries:
            await asyncio.sleep(wait_s)
    raise ServedModelError(f"{url} failed {_RETRY.max_retries + 1} times; the last time: {problem}")


def _body(settings: ServedModelSettings, prompts: Sequence[Any], completions: Sequence[Any]) -> bytes:
    fields = {"model": settings.served_model_name, "use_activation": settings.use_activation}
    body: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if all(isinstance(part, str) for part in (*prompts, *completions)):
        body["input"] = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    else:
        ((prompt, completion),) = zip(prompts, completions, strict=True)
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body["messages"] = list(map(_openai_message, [*before, *completion]))
    # A model can sample a lone surrogate; it has no UTF-8 form, so it is sent as an escape.
    return json.dumps(body, allow_nan=False).encode()


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API, where the arguments of a tool call are JSON text."""
    given = message.get("tool_calls") or ()
    calls = [{**call, "function": {**call["function"], "arguments": arguments_text(call)}} for call in given]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _read_scores(answer: Any, url: str, count: int) -> list[float]:
    """Return the scores in {"data": [{"index": 0, "probs": [0.9]}]}. [count]"""
    try:
        by_index = {item["index"]: item["probs"] for item in answer["data"]}
        (*scores,) = (finite(score) for index in range(count) for (score,) in [by_index[index]])
        if len(by_index) != count or None in scores:
            raise ValueError("a score is missing, or is no finite number")
    except (KeyError, TypeError, ValueError) as error:
        problem = f"expected one finite number in `probs` for each of {count} texts, got {clipped(repr(answer), 200)}"
        raise ServedModelError(f"{url}: {problem}") from error
    return [score for score in scores if score is not None]
