"""500 random conversations: whatever a client does to its history, every token is trained at most once, after the ids that the
engine saw, with the logprob that it was sampled with."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.agents.apis import ChatCompletion
from grpo_async.agents.calls import ApiError
from grpo_async.agents.history import Answer
from grpo_async.agents.session import AgentSession
from grpo_async.buffer.group_table import GroupTable
from grpo_async.buffer.ledger import is_balanced
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.api import GenerateRequest
from grpo_async.records import GroupStatus, RolloutCompletion, RolloutStatus
from tests.agents.support import ADD, FakePolicy, check_exact, make_session, renderer, text_ids, tool
from tests.support.records import start_group

NUM_CONVERSATIONS = 500
FAMILIES = ("qwen2_5", "qwen2_5", "qwen3", "llama3")
"""qwen2_5 twice: there every history that only grows has to be one path."""
OTHER = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_WORDS = ("hello", "tool", "weather", "Paris", "42", "1.0", "grüße", "\n", "  ", "<|im_end|>", "{", "🙂")


def test_500_random_conversations_train_every_answer_once_with_the_tokens_that_were_sampled() -> None:
    asyncio.run(_check_all())  # one run: asyncio formats the result of each, for a third of the time


async def _check_all() -> None:
    made = {name: renderer(name) for name in set(FAMILIES)}
    counts = {"calls": 0, "branches": 0, "hang-ups": 0, "grown": 0}
    table = GroupTable(groups_per_step=1, max_staleness=0, version=0, last_version=1)
    trained = 0
    for number in range(NUM_CONVERSATIONS):
        name = FAMILIES[number % len(FAMILIES)]
        conversation = Conversation(made[name], name, random.Random(number))
        completion = await conversation.run()
        check_exact(conversation.policy, completion)
        sampled = sum(len(served.ids) for served in conversation.policy.served)
        assert conversation.received == sampled
        start_group(table, number)
        table.generated(number, conversation.received)
        table.drop_tokens(number, conversation.received - completion.num_sampled_tokens)  # what is in no path
        table.close(number, GroupStatus.TRAINED)
        assert completion.num_sampled_tokens <= sampled
        trained += completion.num_sampled_tokens
        counts["calls"] += len(conversation.policy.served)
        counts["branches"] += len(completion.branches)
        counts["hang-ups"] += conversation.num_lost
        counts["grown"] += conversation.num_grown
    assert all(count > NUM_CONVERSATIONS / 4 for count in counts.values()), counts
    books = table.ledger()
    assert is_balanced(books)
    assert books["tokens"]["trained"] == trained < books["tokens"]["started"]


@dataclass
class _Held:
    """A history as a client holds it. `grows`: its last answer was recorded, and all that follows it are results of its calls and
    messages of users."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    grows: bool = False


class Conversation:
    """A client that does to its histories what clients do. `histories` are lists of messages of Chat Completions, each of which may
    be continued. The other APIs: test_endpoint.py.

    Args:
        policy: what answers, with what it has `served`; default one without a model.
        limits: of the session.
    """

    def __init__(
        self, chat: ChatRenderer, family: str, chance: random.Random, *, policy: Any = None, **limits: Any
    ) -> None:
        self.family = family
        self.chance = chance
        self.limits = limits
        self.policy = policy or FakePolicy(chat, self._say, per_chunk=chance.choice([1, 3, 50]), odd_tokens=0.4)
        self.received = 0
        self.num_lost = self.num_grown = 0
        self.histories: list[_Held] = []
        self.answered: list[list[int]] = []

    async def run(self) -> RolloutCompletion:
        budget = self.chance.choice([400, 100_000, 100_000])
        session = make_session(self.policy, on_tokens=self._count, **{"max_completion_tokens": budget, **self.limits})
        while len(self.policy.served) < 8:
            held = self._next()
            copies = self.chance.choice([1, 1, 1, 2, 3])  # parallel calls and retries
            try:
                await asyncio.gather(*(self._call(session, held) for _ in range(copies)))
            except ApiError as refusal:
                if refusal.code == "rollout_budget_exhausted":
                    break
                if refusal.param != "messages":  # the template refuses the roles
                    raise
                self.histories = []
        return session.completion(RolloutStatus.FINISHED)

    def _count(self, count: int, _: int) -> None:
        self.received += count

    def _say(self, request: GenerateRequest) -> str:
        chance = random.Random(request.seed)
        text = " ".join(chance.choices(_WORDS[:9], k=chance.randint(0, 6)))
        if self.family == "llama3":
            return json.dumps({"name": "add", "parameters": {"a": 1, "b": "x"}}) if chance.random() < 0.4 else text
        if chance.random() < 0.4:
            calls = [{"name": "add", "arguments": {"a": 1.0, "b": chance.choice(_WORDS[:7])}}] * chance.randint(1, 2)
            text += "".join(f"<tool_call>\n{json.dumps(call, indent=1)}\n</tool_call>" for call in calls)
        return f"<think>\n{chance.choice(_WORDS[:4])}\n</think>\n\n{text}" if chance.random() < 0.3 else text

    def _text(self) -> str:
        return " ".join(self.chance.choices(_WORDS, k=self.chance.randint(1, 5)))

    def _next(self) -> _Held:
        """What the next call sends."""
        chance = self.chance
        if not self.histories or chance.random() < 0.1:  # the first, or a sub-agent
            messages = [{"role": "system", "content": self._text()}, {"role": "user", "content": self._text()}]
            return _Held(messages, chance.choice([[ADD], [ADD, OTHER], []]))
        chosen = chance.choice(self.histories)
        messages = json.loads(json.dumps(chosen.messages))
        held = replace(chosen, messages=messages)
        kind = chance.random()
        if kind < 0.6:  # as clients should
            results = [tool(call, self._text()) for call in messages[-1].get("tool_calls") or []]
            chance.shuffle(results)
            others = [{"role": "user", "content": self._text()}] if not results or chance.random() < 0.2 else []
            return replace(held, messages=[*messages, *results, *others])
        held.grows = False
        if kind < 0.7:  # the same call again
            return replace(held, messages=messages[:-1])
        if kind < 0.8:  # an edit in the middle
            place = chance.randrange(len(messages))
            messages[place]["content"] = self._text()
            return replace(held, messages=[*messages[: place + 1], {"role": "user", "content": "x"}])
        if kind < 0.87:  # compaction
            return replace(held, messages=[messages[0], {"role": "user", "content": f"Summary: {self._text()}"}])
        if kind < 0.94:  # other tools
            return replace(held, tools=[OTHER], messages=[*messages, {"role": "user", "content": self._text()}])
        return replace(held, messages=[*messages, {"role": "user", "content": self._text()}])  # results are missing

    async def _call(self, session: AgentSession, held: _Held) -> None:
        chance = self.chance
        body = json.loads(
            json.dumps({"messages": held.messages, "tools": held.tools})
        )  # a client sends text, not our objects
        if chance.random() < 0.1:
            body["max_completion_tokens"] = chance.choice([4, 30])
        if chance.random() < 0.1:
            body["stop"] = ["Paris"]
        made = ChatCompletion(body, "tiny", session.api_state)
        asking = asyncio.create_task(session.complete(made.call, made.id))
        if chance.random() < 0.15:
            for _ in range(chance.randint(1, 4)):
                await asyncio.sleep(0)
            asking.cancel()  # the client hangs up
            if isinstance((await asyncio.gather(asking, return_exceptions=True))[0], asyncio.CancelledError):
                self.num_lost += 1
                return
        reply = await asking
        if held.grows and self.family == "qwen2_5" and reply.ids:
            self._check_growth(reply)
            self.num_grown += 1
        self.answered.append([*reply.request.context, *reply.ids])
        assert reply.request.num_tokens + len(reply.ids) == len(self.answered[-1])
        kept = self._as_clients_keep_it(made.answer(reply)["choices"][0]["message"])
        self.histories.append(replace(held, messages=[*held.messages, kept], grows=bool(reply.ids)))

    def _check_growth(self, reply: Answer) -> None:
        """The context begins with all ids of an earlier answer, and has one more assistant's turn, the one to be written."""
        ids = list(reply.request.context)
        whole = [[*served.request.token_ids, *served.ids] for served in self.policy.served if served.is_whole]
        known = max(len(each) for each in [*whole, *self.answered] if ids[: len(each)] == each)
        header = text_ids(self.policy.chat, "<|im_start|>assistant")
        rest = ids[known:]
        found = [place for place in range(len(rest)) if rest[place : place + len(header)] == header]
        assert len(found) == 1, self.policy.chat.completion_text(rest)

    def _as_clients_keep_it(self, message: dict[str, Any]) -> dict[str, Any]:
        """Without thinking, with rewritten JSON, changed ids and stripped whitespace."""
        kept: dict[str, Any] = json.loads(json.dumps(message))
        kept.pop("reasoning_content", None)
        for call in kept.get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            arguments = {name: int(value) if value == 1 else value for name, value in arguments.items()}
            call["function"]["arguments"] = json.dumps(arguments, indent=2, sort_keys=True)
            call["id"] = call["id"] if self.chance.random() < 0.8 else f"call_{call['id']}"
        if self.chance.random() < 0.3:
            kept["content"] = (kept["content"] or "").strip()
        return kept
