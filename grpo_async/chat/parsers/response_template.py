"""A tokenizer may carry a description of its own format (`response_template`), which transformers reads."""

from __future__ import annotations

from typing import Any

from grpo_async.chat.parsers.formats import explained
from grpo_async.chat.parsers.json_calls import calls_of
from grpo_async.chat.turn import ReadCall, Reading, SampledTurn


class ResponseTemplate:
    """Reads turns with `tokenizer.parse_response`. One call that cannot be read makes it refuse the whole turn; the policy
    then gets one error for all its calls.

    Args:
        tokenizer: has a `response_template`.
        generation_prompt: text before the policy's turn.
    """

    marks: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, generation_prompt: str) -> None:
        self._tokenizer = tokenizer
        self._generation_prompt = generation_prompt

    def read(self, turn: SampledTurn) -> Reading:
        try:
            message = self._tokenizer.parse_response(list(turn.token_ids), prefix=self._generation_prompt)
        except ValueError as error:
            problem = f"this tool call cannot be read: {str(error).splitlines()[0]}."
            return Reading(content=turn.text, calls=[ReadCall(error=problem)])
        calls = calls_of(list(message.get("tool_calls") or []))
        if not calls:
            return Reading(content=turn.text)
        said = message.get("content")
        content = said if isinstance(said, str) else ""
        thinking = next(
            (message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key)), None
        )
        if isinstance(thinking, str):
            content = f"<think>\n{thinking}\n</think>\n\n{content}".rstrip()
        return Reading(content=content, calls=explained(calls, "write it as the instructions say"))
