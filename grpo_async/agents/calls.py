"""What the APIs of the endpoint have in common: a call, its reply, a refusal, and what an API makes of them.

JSON -> Exchange (one for each API) -> Call -> session -> Reply -> Exchange -> JSON, or events
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from grpo_async.utils.text import num_equal

Made = TypeVar("Made")

_NUM_HISTORIES = 4
"""That are remembered of a rollout: an agent and its sub-agents take turns."""

OnText = Callable[[str], None]
"""Called with each further piece of the answer's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of an agent, whichever API it came by. `messages` and `tools` are in the form of Chat Completions, with every
    `content` as text."""

    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None
    """Instead of messages: text or token ids that go to the policy as they are."""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Settings of sampling that the request brings, by the names of GenerateRequest: {"temperature": 0.2}."""
    seed: int | None = None
    response_format: Mapping[str, Any] | None = None
    with_logprobs: bool = False
    ignored: Sequence[str] = ()
    """Further fields of the request that would change what is sampled, and do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a call.

    `ids` and `logprobs` have one entry per token that the policy sampled, and `tokens` the text of each where the call asked for
    logprobs. `finish_reason` is "stop", "length" or "tool_calls"; `stop_sequence` names the string of `Call.stop` that ended it.
    """

    id: str
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()  # OpenAI's form, `arguments` as an object
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    tokens: Sequence[str] = ()
    prompt_ids: Sequence[int] = ()
    finish_reason: str = "stop"
    stop_sequence: str | None = None
    created: float = 0.0  # seconds since the epoch

    @property
    def message(self) -> dict[str, Any]:
        """As it comes back in the history of the next call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        return message


class AgentRefusal(Exception):
    """A call that is answered with an error in the format of its API.

    Args:
        status: of HTTP.
        kind: OpenAI's `type`, such as "invalid_request_error".
        message: what is wrong and what to do.
        param: the field that is to blame.
        code: OpenAI's `code`.
    """

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


def refuse(message: str, *, param: str | None = None, code: str | None = None) -> AgentRefusal:
    """A refusal of a request that is wrong, or asks for what is not supported."""
    return AgentRefusal(400, "invalid_request_error", message, param=param, code=code)


class PrefixMemo(Generic[Made]):
    """Makes one thing of each item of a list, and remembers what it made of the newest lists.

    An agent sends its whole history with every call, so all but the last items of a list are those of an earlier one. They are
    compared in C, and only the others cost a line of Python. Of equal items the older ones are kept: one copy of a history is
    alive, however often it was sent, and the garbage collector has one to walk through.

    [a, b] -> make(a), make(b); then [a, b, c] -> make(c); then [a, x] -> make(x)

    Args:
        make: gets the items and what was made of those before its own, whose place is the number of these.
    """

    def __init__(self, make: Callable[[Sequence[Any], Sequence[Made]], Made]) -> None:
        self._make = make
        self._newest: list[tuple[list[Any], list[Made]]] = []

    def __call__(self, items: list[Any]) -> list[Made]:
        """What `make` makes of each item, or made of an equal one after equal ones. In `items` older ones take the places of
        those that equal them; neither list is to be changed anymore."""
        made: list[Made] = []
        others = []
        for given, found in self._newest:
            length = num_equal(items, given)
            if length > len(made):
                items[:length], made = given[:length], found[:length]
            if length < len(given):  # else the new list takes its place
                others.append((given, found))
        while len(made) < len(items):
            made.append(self._make(items, made))
        self._newest = [(items, made), *others[: _NUM_HISTORIES - 1]]
        return made


class Exchange(ABC):
    """A request of one API and its answer.

    Args:
        body: the request's JSON.
        model: the name that the answer carries.
        kept: what the APIs remember of the rollout.

    Raises:
        AgentRefusal: the request is wrong, or asks for what is not supported.
    """

    call: Call
    num_replies = 1
    """To the same call."""

    def __init__(self, body: Mapping[str, Any], model: str, kept: dict[Any, Any]) -> None:
        self.id = secrets.token_hex(12)
        self.model = model
        self.is_stream = bool(body.get("stream"))
        self._body = body
        self._kept = kept

    def _read(self, name: str, read: Callable[[Mapping[str, Any], str], Made]) -> list[Made]:
        """What `read` makes of each object of a list, and of its name for errors; empty where the field is not set."""
        found = self._body.get(name) or []
        if not isinstance(found, list):
            raise refuse(f"{name} is not a list of objects", param=name)
        memo = self._kept.setdefault((type(self), name), PrefixMemo(partial(_read_next, name, read)))
        made: list[Made] = memo(found)
        return made

    @abstractmethod
    def answer(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """Events before the first text."""

    @abstractmethod
    def text(self, piece: str) -> Iterator[bytes]:
        """Events of a further piece of the text."""

    @abstractmethod
    def end(self, reply: Reply, given: int) -> Iterator[bytes]:
        """Events of what is left; `given`: characters of the content that `text` had."""

    @staticmethod
    def error(refusal: AgentRefusal) -> dict[str, Any]:
        """The JSON of an error: OpenAI's, unless an API has its own."""
        content = {"message": str(refusal), "type": refusal.kind, "param": refusal.param, "code": refusal.code}
        return {"error": content}


def _read_next(
    name: str, read: Callable[[Mapping[str, Any], str], Made], items: Sequence[Any], made: Sequence[Made]
) -> Made:
    place = len(made)
    if not isinstance(items[place], Mapping):
        raise refuse(f"{name}[{place}] is not an object", param=name)
    return read(items[place], f"{name}[{place}]")


def event(content: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: text, null, or a list of text parts.

    Raises:
        AgentRefusal: there is another kind of part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refuse(f"{where} is neither text nor a list of parts", param=where)
    pieces = []
    for part in content:
        if isinstance(part, str):
            pieces.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise refuse(f"{where} has a part of type {kind!r}; the policy reads text only", param=where)
        pieces.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(pieces)


def stop_strings_of(value: Any, where: str) -> list[str]:
    """One, several, or none."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise refuse(f"{where} is neither text nor a list of texts", param=where)
    return [each for each in found if each]


def number_of(body: Mapping[str, Any], *names: str, kind: type[Any] = float) -> Any:
    """The first of the fields that is set, as a number; None where none is."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
                raise refuse(f"{name} is {value!r}, not {'an integer' if kind is int else 'a number'}", param=name)
            return kind(value)
    return None


def objects_of(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects; empty where the field is not set."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise refuse(f"{name} is not a list of objects", param=name)
    return found


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `Call.sampling` that a request sets. `top_k`: -1 means all, as 0 does."""
    kinds: dict[str, type[Any]] = {
        "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float
    }  # fmt: skip
    found = {name: number_of(body, name, kind=kind) for name, kind in kinds.items()}
    return {name: 0 if (name, value) == ("top_k", -1) else value for name, value in found.items() if value is not None}


def changed(body: Mapping[str, Any], **neutral: Any) -> list[str]:
    """Those of the fields that are set to something that is not neutral."""
    return [name for name, value in neutral.items() if body.get(name) not in (None, value)]
