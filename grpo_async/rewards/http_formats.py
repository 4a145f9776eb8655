"""What is sent to a reward model behind HTTP and how its answer is read, without any network.

`requests_for` cuts the completions of one call into requests; `Request.scores(answer)` reads one answer. A request knows
which completions it is about, so that an error names their index in the call.

    json       {"prompts": [...], "completions": [...], "columns": {...}, "completion_ids": [[...]]}  ->  {"rewards": [0.5, null]}
    classify   {"input": [text, ...]} or {"messages": [...]}    ->  {"data": [{"index": 0, "probs": [0.1, 0.9]}]}
    pooling    the same                                         ->  {"data": [{"index": 0, "data": [0.1, 0.9]}]}
    score      {"queries": [prompt...], "documents": [completion...]}  ->  {"data": [{"index": 0, "score": 0.9}]}

The last three are those of vLLM (0.27) for models served with `--runner pooling`. vLLM takes one conversation in a request;
plain text goes in batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from grpo_async.rewards.completion import final_text
from grpo_async.rewards.errors import RemoteRewardError

Format = Literal["json", "classify", "pooling", "score"]
FORMATS: tuple[str, ...] = get_args(Format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the reward function; every list has one entry per completion."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]] | None  # None: not sent
    columns: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request: the completions `first` to `first + count - 1` of the call."""

    format: Format
    first: int
    count: int
    body: bytes
    score_index: int = 0

    def scores(self, answer: Any) -> list[float | None]:
        """The scores in an answer (parsed JSON), [count].

        Raises:
            RemoteRewardError: too few or too many scores, one that is missing or not finite, or another shape of answer.
        """
        if self.format == "json":
            found = _member(answer, "rewards", "an answer")
            self._check_count(found)
            return [None if value is None else _finite(value, self.first + index) for index, value in enumerate(found)]
        items = _member(answer, "data", "an answer")
        self._check_count(items)
        by_index = {item.get("index"): item for item in items if isinstance(item, dict)}
        missing = [self.first + index for index in range(self.count) if index not in by_index]
        if missing:
            raise RemoteRewardError(f"the answer has no score for completion {missing[0]}")
        return [self._score(by_index[index], self.first + index) for index in range(self.count)]

    def _check_count(self, found: Any) -> None:
        if not isinstance(found, list):
            raise RemoteRewardError(
                f"the answer holds {_short(found)} where a list of {self.count} scores should stand"
            )
        if len(found) != self.count:
            last = self.first + self.count - 1
            raise RemoteRewardError(
                f"the answer has {len(found)} scores for {self.count} completions ({self.first} to {last})"
            )

    def _score(self, item: Mapping[str, Any], position: int) -> float:
        where = f"the answer for completion {position}"
        if self.format == "score":
            return _finite(_member(item, "score", where), position)
        values = _member(item, "probs" if self.format == "classify" else "data", where)
        if isinstance(values, list) and values and isinstance(values[-1], list):
            values = values[-1]  # a score for every token: that of the last one, as outcome reward models mean it
        if not isinstance(values, list) or not -len(values) <= self.score_index < len(values):
            raise RemoteRewardError(
                f"{where} has {_short(values)}, which has no score_index {self.score_index}; choose one of its positions"
            )
        return _finite(values[self.score_index], position)


def requests_for(
    call: Call,
    format: Format,
    *,
    batch_size: int,
    score_index: int = 0,
    fields: Mapping[str, Any] | None = None,
) -> list[Request]:
    """The requests of one call, in order; `fields` are added to every body.

    Raises:
        RemoteRewardError: a column cannot be sent as JSON.
    """
    requests = []
    for first, count in _slices(call, format, batch_size):
        body = {**_BODIES[format](call, slice(first, first + count)), **(fields or {})}
        requests.append(Request(format=format, first=first, count=count, body=_encoded(body), score_index=score_index))
    return requests


def _slices(call: Call, format: Format, batch_size: int) -> list[tuple[int, int]]:
    total = len(call.completions)
    takes_messages = format in ("classify", "pooling") and any(not isinstance(c, str) for c in call.completions)
    size = 1 if takes_messages else batch_size
    return [(first, min(size, total - first)) for first in range(0, total, size)]


def _json_body(call: Call, part: slice) -> dict[str, Any]:
    body: dict[str, Any] = {"prompts": list(call.prompts[part]), "completions": list(call.completions[part])}
    if call.completion_ids is not None:
        body["completion_ids"] = [list(ids) for ids in call.completion_ids[part]]
    body["columns"] = {name: list(values[part]) for name, values in call.columns.items()}
    for name, values in body["columns"].items():
        try:
            json.dumps(values)
        except (TypeError, ValueError) as error:
            raise RemoteRewardError(
                f"the column `{name}` cannot be sent as JSON ({error}); name the columns to send in `columns`"
            ) from error
    return body


def _text_or_messages(call: Call, part: slice) -> dict[str, Any]:
    pairs = list(zip(call.prompts[part], call.completions[part], strict=True))
    if all(isinstance(completion, str) for _, completion in pairs):
        return {"input": [_prompt_text(prompt) + completion for prompt, completion in pairs]}
    ((prompt, completion),) = pairs
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return {"messages": [_openai(message) for message in [*before, *after]]}


def _pairs(call: Call, part: slice) -> dict[str, Any]:
    return {
        "queries": [_prompt_text(prompt) for prompt in call.prompts[part]],
        "documents": [final_text(completion) for completion in call.completions[part]],
    }


_BODIES = {"json": _json_body, "classify": _text_or_messages, "pooling": _text_or_messages, "score": _pairs}


def _prompt_text(prompt: Any) -> str:
    """A plain prompt as it is; of messages the contents, a blank line between them."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(final_text([{**message, "role": "assistant"}]) for message in prompt)


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's API takes it: there the arguments of a tool call are JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_openai_call(call) for call in calls]}


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {})
    return {**call, "function": function}


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        # A model can sample half a surrogate pair; it has no UTF-8, so it travels as an escape.
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RemoteRewardError(f"the request cannot be sent as JSON: {error}") from error


def _member(holder: Any, name: str, where: str) -> Any:
    if not isinstance(holder, dict) or name not in holder:
        raise RemoteRewardError(f"{where} has no `{name}`: {_short(holder)}; is `format` right for this server?")
    return holder[name]


def _finite(value: Any, position: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RemoteRewardError(f"the score of completion {position} is {_short(value)}; it must be a finite number")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
