"""The tree of the calls of one rollout: which recorded tokens a request continues.

The longest prefix of a request that ends with a recorded answer is continued with the recorded ids; only what follows
is rendered and tokenized. Messages are compared by value, because clients strip thinking, reformat JSON and change
ids.

Invariant: a sampled token that is trained is never tokenized again: a call's context is prompt ids + recorded ids +
suffix ids, and each answer belongs to exactly one path. If the suffix cannot be rendered by itself, the whole history
is rendered as a new root.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from grpo_async.agents.calls import TOO_LONG, Call, bad_request
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.chat.template import Message
from grpo_async.chat.turn import ChatError, TooLongError
from grpo_async.inference.client import Generation
from grpo_async.records import (
    Branch,
    Origin,
    TaggedMessage,
    ToolCall,
    ToolCallRecord,
    TurnRecord,
    is_call_id,
    origin_of,
)
from grpo_async.utils.strict_json import UnreadableError, arguments_of
from grpo_async.utils.text import common_prefix_length

_NUM_HISTORIES = 4
"""Number of histories remembered per rollout: an agent and its sub-agents take turns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A call whose tokens are known. `ids` and `messages` follow those of the answer `parent`; without one they are the whole
    call."""

    key: bytes
    parent: Answer | None
    ids: array[int]  # int32
    num_tokens: int  # length of `context`
    messages: Sequence[TaggedMessage]

    @property
    def path(self) -> list[Answer]:
        """The answers that it follows, starting at the root."""
        answers = []
        answer = self.parent
        while answer is not None:
            answers.append(answer)
            answer = answer.request.parent
        return answers[::-1]

    @property
    def context(self) -> list[int]:
        """All token ids that the engine gets."""
        ids = array("i")
        for answer in self.path:
            ids += answer.request.ids + answer.generation.token_ids
        return (ids + self.ids).tolist()

    @property
    def all_messages(self) -> list[TaggedMessage]:
        """All messages, starting at the root."""
        before = [message for answer in self.path for message in (*answer.request.messages, answer.sampled)]
        return [*before, *self.messages]


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """An answered call: what the policy sampled, and what the client gets."""

    id: str
    request: Request
    generation: Generation
    sampled: TaggedMessage
    """The policy's message, with its thinking, as the rollout stores it."""
    content: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    parse_error: str | None = None  # why tool calls, if any, are left in the text
    is_trained: bool = True  # False: context only; see TurnRecord
    finish_reason: str = "stop"  # or "length", "tool_calls"
    reward: float | None = None  # the agent's reward for this answer
    has_children: bool = False

    @property
    def ids(self) -> array[int]:
        return self.generation.token_ids

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls in OpenAI's form, with `arguments` as an object."""
        return [call.as_dict() for call in self.calls]

    @property
    def message(self) -> dict[str, Any]:
        """The message as it comes back in the history of the next call."""
        calls = {"tool_calls": self.tool_calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class HistoryRenderer:
    """Renders the agents' messages; one for all rollouts of a process."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.chat = renderer
        self._ends = frozenset(renderer.end_of_turn_ids)

    def prompt_ids(
        self, messages: Sequence[TaggedMessage], tools: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[int]:
        """Render and tokenize a whole prompt."""
        try:
            return self.chat.prompt_ids(messages, tools=tools, max_tokens=max_tokens)
        except TooLongError as error:
            raise bad_request(str(error), param="messages", code=TOO_LONG) from error
        except ChatError as error:
            raise bad_request(str(error), param="messages") from error

    def suffix_ids(self, answer: Answer, messages: Sequence[TaggedMessage], max_tokens: int) -> list[int] | None:
        """Ids of `messages` and the next generation prompt, which follow those of `answer`; None if they depend on more."""
        try:
            self.chat.check_length("".join(message.content.strip() for message in messages), max_tokens)
        except TooLongError as error:
            raise bad_request(str(error), param="messages", code=TOO_LONG) from error
        is_ended = bool(answer.ids) and answer.ids[-1] in self._ends
        try:
            return self.chat.suffix_ids(answer.calls, messages, is_ended=is_ended)
        except ChatError:
            return None


class History:
    """The calls of one rollout."""

    def __init__(self, renderer: HistoryRenderer, max_tokens: int) -> None:
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._by_key: dict[bytes, list[Answer]] = {}
        self._newest: list[tuple[list[Any], list[bytes]]] = []
        self.answers: list[Answer] = []

    def prepare(self, call: Call) -> Request:
        """Find the tokens of a call."""
        if not call.messages:
            raise bad_request("there are no messages", param="messages")
        keys = self._keys([call.tools, *call.messages])
        length = next((length for length in range(len(call.messages), 0, -1) if keys[length] in self._by_key), 0)
        if length:
            answer = _choose(self._by_key[keys[length]], call.messages[length - 1])
            rest = _rest(answer, call.messages, length)
            ids = None if rest is None else self._renderer.suffix_ids(answer, rest, self._max_tokens)
            if rest is not None and ids is not None:
                num_tokens = answer.request.num_tokens + len(answer.ids) + len(ids)
                return Request(key=keys[-1], parent=answer, ids=array("i", ids), num_tokens=num_tokens, messages=rest)
        messages = _tagged(call.messages)
        prompt_ids = array("i", self._renderer.prompt_ids(messages, call.tools, self._max_tokens))
        return Request(key=keys[-1], parent=None, ids=prompt_ids, num_tokens=len(prompt_ids), messages=messages)

    def _keys(self, items: list[Any]) -> list[bytes]:
        """Keys of all prefixes of `items` (the tools and the messages of a call). [1 + num_messages]

        An agent sends its whole history with every call, so all but the last items equal those of an earlier one. They are compared
        in C, and only the others cost Python time. Of equal items the older ones are kept, in `items` too, so only one copy of a
        history is alive, however often it was sent.
        """
        keys: list[bytes] = []
        others = []
        for given, found in self._newest:
            length = common_prefix_length(items, given)
            if length > len(keys):
                items[:length], keys = given[:length], found[:length]
            if length < len(given):  # otherwise the new list replaces it
                others.append((given, found))
        while len(keys) < len(items):
            keys.append(_next_key(self._renderer.chat, items, keys))
        self._newest = [(items, keys), *others[: _NUM_HISTORIES - 1]]
        return keys

    def record(self, answer: Answer) -> None:
        """Add a complete answer to the tree."""
        self.answers.append(answer)
        request = answer.request
        if request.parent is not None:
            request.parent.has_children = True
        value = _answer_value(answer.content, [(call.name, call.arguments) for call in answer.calls])
        self._by_key.setdefault(_digest(request.key, value), []).append(answer)

    def paths(self) -> list[Branch]:
        """The path to the newest answer, which is the rollout's own, then the branches; every answer is in exactly one. A branch's
        parent is the path that it left; a branch that starts at a new root has the rollout's own path as its parent.

        Worked example: answers 1 -> 2 -> 3, then 2' again after 1, then 4 after 3, then 5 at another root, 6 after 2':
        the path to 6 is [1, 2', 6]; branch 1 is [2, 3, 4] with the prompt up to answer 1 and parent 0, branch 2 is [5].
        """
        if not self.answers:
            return []
        own = [*self.answers[-1].request.path, self.answers[-1]]
        paths, parents = [own], [0]
        place = dict.fromkeys((answer.id for answer in own), 0)
        for answer in self.answers:
            if answer.id in place:
                continue
            parent = answer.request.parent
            at = 0 if parent is None else place[parent.id]
            if paths[at][-1] is parent:
                paths[at].append(answer)
                place[answer.id] = at
                continue
            place[answer.id] = len(paths)
            paths.append([answer])
            parents.append(at)
        return [
            Branch(
                name=f"b{number}",
                parent=parent,
                prompt_ids=np.array(path[0].request.context, np.int32),
                turns=_turns(path),
                prompt_messages=path[0].request.all_messages,
                reward=next((answer.reward for answer in reversed(path) if answer.reward is not None), None),
            )
            for number, (path, parent) in enumerate(zip(paths, parents, strict=True))
        ]


def _choose(answers: Sequence[Answer], message: Message) -> Answer:
    """Of several equal answers, the one that a client continues: one whose calls have the ids it sends; among those, the newest
    that nothing continues yet."""
    sent = [call.get("id") for call in message.get("tool_calls") or ()]
    same = [answer for answer in answers if [call.tool_call_id for call in answer.calls] == sent] or answers
    return next((answer for answer in reversed(same) if not answer.has_children), same[-1])


def _rest(answer: Answer, messages: Sequence[Message], length: int) -> list[TaggedMessage] | None:
    """The messages after `answer`, which is the message before `length`: results of its calls in their order, then others. None if
    an assistant's message is among them, or if a call does not have exactly one result."""
    calls = answer.calls
    sent = [call.get("id") for call in messages[length - 1].get("tool_calls") or ()]
    own = dict(zip(sent, calls, strict=False))
    results: dict[str, TaggedMessage] = {}
    others: list[TaggedMessage] = []
    for message in messages[length:]:
        role = str(message["role"])
        if role == "tool":
            call = own.pop(message.get("tool_call_id"), None)
            if call is None or others:
                return None
            results[call.tool_call_id] = call.result_message(message["content"])
        elif role == "assistant":
            return None
        else:
            others.append(_tag(message))
    if len(results) != len(calls):
        return None
    return [*(results[call.tool_call_id] for call in calls), *others]


def _tagged(messages: Sequence[Message]) -> list[TaggedMessage]:
    """Prepare messages for the template: every call has an id that the template accepts, and its result has its name."""
    called: dict[str, tuple[str, str]] = {}  # by the client's id: (id, name)
    tagged = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            given, name = str(call.get("id")), call["function"]["name"]
            called[given] = given if is_call_id(given) else f"x{len(called):08d}", name
            function = {"name": name, "arguments": _object(call["function"].get("arguments"))}
            calls.append({"id": called[given][0], "type": "function", "function": function})
        plain = _tag(message)
        if message["role"] == "tool":
            given = str(message.get("tool_call_id"))
            own, name = called.get(given, (given, message.get("name")))
            plain = replace(plain, name=name, tool_call_id=own)
        tagged.append(replace(plain, tool_calls=calls) if calls else plain)
    return tagged


def _tag(message: Message) -> TaggedMessage:
    role = str(message["role"])
    # a client may put anything into a user's message: control tokens must stay text
    origin = origin_of(role, Origin.ENVIRONMENT)
    return TaggedMessage(role=role, content=message["content"], origin=origin, name=message.get("name"))


def _next_key(renderer: ChatRenderer, items: Sequence[Any], keys: Sequence[bytes]) -> bytes:
    """The key of the prefix of `items` (the tools, then the messages) that is one item longer than those with `keys`."""
    if not keys:
        return _digest(b"", [_comparable(tool) for tool in items[0]])
    place = len(keys)
    message = items[place]
    if message["role"] == "assistant":
        _, said = renderer.split_thinking(message["content"], is_sampled=False)
        called = [each["function"] for each in message.get("tool_calls") or ()]
        value = _answer_value(said, [(each["name"], each.get("arguments")) for each in called])
    elif message["role"] == "tool":
        before = (items[n] for n in range(place - 1, 0, -1) if items[n]["role"] == "assistant")
        calls = next((each.get("tool_calls") or () for each in before), ())
        places = {each.get("id"): number for number, each in enumerate(calls)}
        answered = message.get("tool_call_id")
        value = ["tool", places.get(answered, answered), message["content"]]
    else:
        value = [message["role"], message["content"], message.get("name")]
    return _digest(keys[-1], value)


def _answer_value(said: str, calls: Sequence[tuple[str, Any]]) -> list[Any]:
    return ["assistant", said.strip(), [[name, _comparable(_object(arguments))] for name, arguments in calls]]


def _digest(key: bytes, value: Any) -> bytes:
    return blake2b(key + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _object(arguments: Any) -> Any:
    """Arguments as an object if possible, because clients send them back as JSON text; otherwise unchanged."""
    try:
        return arguments_of(arguments)
    except UnreadableError:
        return arguments


def _comparable(value: Any) -> Any:
    """Numbers compare by value: JavaScript writes 1.0 as 1."""
    if isinstance(value, Mapping):
        return {str(name): _comparable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _turns(answers: Sequence[Answer]) -> list[TurnRecord]:
    turns = []
    for answer, following in zip(answers, [*answers[1:], None], strict=True):
        messages = [] if following is None else following.request.messages
        results = {message.tool_call_id: message.content for message in messages}
        calls = [
            ToolCallRecord(
                tool_call_id=call.tool_call_id,
                name=call.name,
                arguments=call.arguments,
                result=results.get(call.tool_call_id, ""),
                failed=None,
                duration_s=0.0,
            )
            for call in answer.calls
        ]
        turn = answer.generation.turn(
            [answer.sampled, *messages],
            tool_calls=calls,
            tool_response_ids=np.array([] if following is None else following.request.ids, np.int32),
            parse_error=answer.parse_error,
            is_trained=answer.is_trained,
        )
        turns.append(turn)
    return turns
