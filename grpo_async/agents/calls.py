"""What the endpoint's APIs translate from and to: a call, its reply, a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from grpo_async.utils.text import num_equal

Made = TypeVar("Made")

_NUM_HISTORIES = 4
"""That are remembered of a rollout: an agent and its sub-agents take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of an agent, whichever API it came by. `messages` and `tools` are in the form of Chat Completions, with every
    `content` as text."""

    messages: Sequence[Mapping[str, Any]]
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
    """Further fields of the request that would change what is sampled and have no effect."""


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
