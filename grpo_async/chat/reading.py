"""Reads the policy's turns: text, content, tool calls. Reading never raises for what a model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_async.chat.encoding import Encoder
from grpo_async.chat.parsers.formats import Format, answer_start
from grpo_async.chat.turn import PolicyTurn, ReadCall, SampledTurn
from grpo_async.records import THINKING, ToolCall

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class TurnReader:
    """
    Args:
        tokenizer: decodes.
        encoder: knows the special tokens.
        format: reads the calls; None = there are none.
        thinking_is_open: the generation prompt ends inside <think>.
    """

    def __init__(
        self, tokenizer: Any, encoder: Encoder, format: Format | None, *, thinking_is_open: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._format = format
        self._thinking_is_open = thinking_is_open
        wanted = format.special_tokens if format else ()
        self._kept_ids = frozenset(encoder.control_tokens[token] for token in wanted if token in encoder.control_tokens)

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def split_thinking(self, text: str, *, is_sampled: bool) -> tuple[str, str]:
        """(thinking, answer); without thinking the answer is the text as it is."""
        is_open = self._thinking_is_open and (is_sampled or THINKING[0][1] in text)
        start = answer_start(SampledTurn(text=text, marked_text=text, token_ids=(), thinking_is_open=is_open))
        if not start:
            return "", text
        thinking = text[:start].strip()
        for opening, closing in THINKING:
            thinking = thinking.removeprefix(opening).removesuffix(closing)
        return thinking.strip(), text[start:].lstrip()

    def read(self, token_ids: Sequence[int], turn: int) -> PolicyTurn:
        text = self.text(token_ids)
        if self._format is None:
            return PolicyTurn(text=text, content=text)
        sampled = SampledTurn(
            text=text,
            marked_text=self._marked_text(token_ids, text),
            token_ids=list(token_ids),
            thinking_is_open=self._thinking_is_open,
        )
        try:
            reading = self._format.read(sampled)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own parser may raise anything
            return PolicyTurn(text=text, content=text, parse_error=f"{type(error).__name__}: {error}")
        return PolicyTurn(text=text, content=reading.content, tool_calls=_with_ids(reading.calls, turn))

    def _marked_text(self, token_ids: Sequence[int], text: str) -> str:
        hidden = self._encoder.special_ids - self._kept_ids
        if self._kept_ids.isdisjoint(token_ids):
            return text
        return str(self._tokenizer.decode([t for t in token_ids if t not in hidden], skip_special_tokens=False))


def _with_ids(calls: Sequence[ReadCall], turn: int) -> list[ToolCall]:
    """Give each call its id: the one the policy wrote if it can be used (nine letters and digits, once in the turn), else one
    made of the turn and the position, so that no two are alike in a rollout. Call 2 of turn 11: "c000b0002"."""
    taken: set[str] = set()
    named = []
    for position, call in enumerate(calls):
        written = call.call_id or ""
        usable = len(written) == 9 and written.isascii() and written.isalnum() and written not in taken
        call_id = written if usable else f"c{_base36(turn)}{_base36(position)}"
        taken.add(call_id)
        named.append(ToolCall(tool_call_id=call_id, name=call.name, arguments=call.arguments, error=call.error))
    return named


def _base36(number: int) -> str:
    """Four digits: 11 -> "000b"."""
    digits = ""
    for _ in range(4):
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits
