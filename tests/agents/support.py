"""A policy without a model, and the session and endpoint over it.

Its answers are text of a few kinds in tokens that no tokenizer would choose (one for each byte, here and there), and the logprob of
a token is a function of all ids before it: a sample whose ids are not exactly those that the engine saw has other logprobs.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpo_async.agents.calls import Call
from grpo_async.agents.endpoint import AgentEndpoint
from grpo_async.agents.history import Answer, HistoryRenderer
from grpo_async.agents.session import AgentSession, Sessions
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, OnTokens
from grpo_async.inference.sampling import SamplingSettings, find_stop
from grpo_async.records import FinishReason, RolloutCompletion
from tests.support.chat_families import FAMILIES, family

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def renderer(name: str = "qwen2_5") -> ChatRenderer:
    return ChatRenderer(family(name), end_of_turn_tokens=FAMILIES[name].end_tokens)


def text_ids(chat: ChatRenderer, text: str) -> list[int]:
    """Ids of text that continues other text; the text of a control token becomes that token."""
    return chat._encoder.plain(text)


def logprobs_after(context: Sequence[int], output: Sequence[int]) -> list[float]:
    """Of each token of `output`: a number that all ids up to it make, exact in float32."""
    logprobs, known = [], 0
    for place, token in enumerate([*context, *output]):
        known = (known * 1_000_003 + int(token) + 1) % (2**61 - 1)
        if place >= len(context):
            logprobs.append(-(known % 2**16) / 2**14)
    return logprobs


@dataclass
class Served:
    """One generation of the fake engine; `is_whole`: it came to its end."""

    request: GenerateRequest
    ids: list[int]
    affinity: str = ""
    is_whole: bool = False


@dataclass
class FakePolicy:
    """Stands for `InferenceClient`. `say` gives the text of an answer; tokens come `per_chunk` at once, with a turn of the loop
    between two chunks."""

    chat: ChatRenderer
    say: Callable[[GenerateRequest], str]
    per_chunk: int = 1_000_000
    version: int = 0
    odd_tokens: float = 0.5
    """Fraction of characters that are separate tokens."""
    gate: asyncio.Event | None = None
    served: list[Served] = field(default_factory=list)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        partial: Generation | None = None,
    ) -> Generation:
        generation = partial if partial is not None else Generation()
        generation.started_at = 1.0
        chance = random.Random(request.seed)
        ids = [*self._ids(self.say(request), chance), self.chat.end_of_turn_ids[0]]
        ids = ids[: request.max_tokens]
        stop_reason = None
        for length in range(1, len(ids) + 1 if request.stop else 0):
            text = self.chat.completion_text(ids[:length])
            if found := find_stop(text, request.stop):
                ids, stop_reason = ids[:length], text[slice(*found)]
                break
        ended = ids[-1] in self.chat.end_of_turn_ids or stop_reason is not None
        logprobs = logprobs_after(request.token_ids, ids)
        served = Served(request, [], affinity)
        self.served.append(served)
        for start in range(0, len(ids), self.per_chunk):
            await asyncio.sleep(0)
            if start and self.gate is not None:
                await self.gate.wait()
            chunk = ids[start : start + self.per_chunk]
            generation.logprobs.extend(logprobs[start : start + self.per_chunk])
            generation.token_ids.extend(chunk)
            generation.policy_versions.extend([self.version] * len(chunk))
            served.ids += chunk
            if on_tokens is not None:
                on_tokens(len(chunk), self.version)
        generation.finish_reason = FinishReason.STOP if ended else FinishReason.LENGTH
        generation.stop_reason = stop_reason
        served.is_whole = True
        return generation

    def _ids(self, text: str, chance: random.Random) -> list[int]:
        ids: list[int] = []
        piece = ""
        for letter in text:
            piece += letter
            if chance.random() < self.odd_tokens and not _inside_a_tag(piece):
                ids += text_ids(self.chat, piece)
                piece = ""
        return ids + (text_ids(self.chat, piece) if piece else [])


def policy_saying(*answers: str, family: str = "qwen2_5", **fields: Any) -> FakePolicy:
    """The n-th request gets the n-th answer."""
    said = iter(answers)
    return FakePolicy(renderer(family), lambda _: next(said), **fields)


def _inside_a_tag(piece: str) -> bool:
    """The policy writes `<tool_call>` as the token that it is."""
    return piece.rfind("<") > piece.rfind(">")


def settings(**changes: Any) -> SamplingSettings:
    given = {"temperature": 1.0, "max_completion_tokens": 1_000_000, "max_model_len": 1_000_000, "max_turns": 10_000}
    return SamplingSettings(**{**given, **changes})


def make_session(policy: Any, on_tokens: OnTokens | None = None, **limits: Any) -> AgentSession:
    return AgentSession(
        Sessions(policy, HistoryRenderer(policy.chat), base_url="http://127.0.0.1:1/v1"),
        "g7-r0",
        settings=settings(**{"stop_token_ids": policy.chat.end_of_turn_ids, **limits}),
        seed=5,
        on_tokens=on_tokens,
    )


@asynccontextmanager
async def serving(policy: FakePolicy, **limits: Any) -> AsyncIterator[tuple[AgentEndpoint, AgentSession]]:
    """The endpoint on a free port, and a session of it."""
    client: Any = policy
    async with AgentEndpoint(client, policy.chat, model="tiny") as endpoint:
        given = settings(stop_token_ids=policy.chat.end_of_turn_ids, **limits)
        yield endpoint, AgentSession(endpoint.sessions, "g7-r0", settings=given, seed=5)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def calls(name: str, **arguments: Any) -> str:
    """The text of a policy that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def ask(session: AgentSession, *messages: dict[str, Any], tools: Sequence[Any] = (), **fields: Any) -> Answer:
    return await session.complete(Call(messages=messages, tools=tools, **fields), secrets.token_hex(4))


def check_exact(
    policy: Any,
    completion: RolloutCompletion,
    replay: Callable[[Sequence[int], Sequence[int]], Sequence[float]] = logprobs_after,
    tolerance: float = 0.0,
) -> None:
    """Every turn is, with all ids before it, what the engine saw and sampled; every whole generation is trained in exactly one
    place, and no other; logprobs are those of the ids before each token."""
    unused = [served for served in policy.served if served.is_whole]
    cut = [served for served in policy.served if not served.is_whole]  # its client ended it
    for path in completion.paths:
        ids = [int(token) for token in path.prompt_ids]
        for turn in path.turns:
            output = [int(token) for token in turn.output_ids]
            mine = [
                each for each in unused if list(each.request.token_ids) == ids and each.ids[: len(output)] == output
            ]
            mine += [each for each in cut if list(each.request.token_ids) == ids and each.ids[: len(output)] == output]
            assert mine, f"the engine never sampled {output} after these {len(ids)} tokens"
            nearest = min(mine, key=lambda each: len(each.ids))  # two answers may begin alike
            (unused if nearest in unused else cut).remove(nearest)
            expected = zip(turn.output_logprobs, replay(ids, output), strict=True)
            assert all(abs(float(one) - float(other)) <= tolerance for one, other in expected)
            ids += [*output, *map(int, turn.tool_response_ids)]
        assert ids == [*path.prompt_ids, *path.completion_ids]
    assert not unused, f"{len(unused)} whole answers are trained nowhere"
