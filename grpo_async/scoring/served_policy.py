"""The policy that the run serves, as reward functions may ask it: a judge without a server of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import InferenceClient
from grpo_async.records import Origin, TaggedMessage


class ServedPolicy:
    """Answers chats with the weights that are served at the time, on the event loop of `client`."""

    def __init__(self, client: InferenceClient, renderer: ChatRenderer, *, max_model_len: int) -> None:
        self._client, self._renderer, self._max_model_len = client, renderer, max_model_len
        self._numbers = itertools.count()

    def for_other_loops(self) -> Callable[..., Awaitable[str]]:
        """`ask`, to be awaited on any loop. Call this on the client's."""
        loop = asyncio.get_running_loop()

        def ask(messages: Sequence[Mapping[str, Any]], **settings: Any) -> Awaitable[str]:
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.ask(messages, **settings), loop))

        return ask

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        json_schema: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of the policy's answer to a chat, in which the text of a control token stays text. Without `max_tokens`
        it may fill `inference.max_model_len`. `json_schema` constrains it to JSON of this schema (vLLM only)."""
        chat = [
            TaggedMessage.from_dict(message, Origin.ENVIRONMENT) for message in messages
        ]  # may quote what was sampled
        ids = self._renderer.prompt_ids(chat, max_tokens=self._max_model_len)
        room = self._max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"a chat of {len(ids)} tokens leaves no room for an answer in inference.max_model_len: {self._max_model_len}; "
                "raise that, or ask for less at a time"
            )
        request = GenerateRequest(
            request_id=f"reward-{next(self._numbers)}",
            token_ids=ids,
            max_tokens=min(max_tokens or room, room),
            temperature=temperature,
            structured_outputs=None if json_schema is None else self._renderer.constraint(json_schema, ()),
            stop_token_ids=self._renderer.end_of_turn_ids,
        )
        generation = await self._client.generate(request)
        return self._renderer.completion_text(generation.token_ids)
