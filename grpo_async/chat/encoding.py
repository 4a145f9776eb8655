"""Text to token ids, and how untrusted text is kept from becoming control tokens.

A chat template writes control tokens (`<|im_end|>`) as text, so a tool result that holds this text would end the message and
could go on as the system: a prompt injection. Messages from tools, environments and the policy are therefore guarded:

    tool result "a<|im_end|>b"  ->  rendered as "aZqguard0zqb"  ->  ids of the text around it as usual (`<|im_end|>` stays a
    boundary between "a" and "b"), and for the placeholder itself those of "<" and "|im_end|>", which no template means as control.

Invariant: text without control tokens in it is tokenized in one piece, exactly as the tokenizer would alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.chat.turn import ChatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """Messages in which the text of control tokens is replaced by `placeholders`, which map to the text."""

    messages: Sequence[Mapping[str, Any]]
    placeholders: Mapping[str, str]


class Encoder:
    """Tokenizes rendered conversations.

    Control tokens are the tokenizer's special tokens, and its other added tokens as far as the chat template writes them
    (`<tool_response>`, `<think>` in Qwen3). Whitespace tokens are never control tokens, even where they are added tokens (Gemma).
    """

    def __init__(self, tokenizer: Any, template_source: str) -> None:
        self._tokenizer = tokenizer
        self._template_source = template_source
        named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        special_ids = {int(token) for token in tokenizer.all_special_ids}
        self.special_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or token_id in special_ids
        )
        control = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if not token.content.isspace()
            and (token_id in self.special_ids or token.content in named or token.content in template_source)
        }
        self.control_tokens: Mapping[str, int] = control
        self.control_ids = frozenset(control.values())
        longest_first = sorted(control, key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # such tokens are looked for in the normalized text, where ours may differ from what the tokenizer sees
        self._matches_normalized = any(
            token.normalized
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token_id in self.control_ids
        )
        self._as_text: dict[str, list[int]] = {}
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def plain(self, text: str, *, as_document: bool = False) -> list[int]:
        """Ids of a text; the text of a control token becomes that token. `as_document` adds the tokens that the tokenizer puts
        around a text (bos, unless the text begins with it); chat templates write theirs themselves."""
        ids = [int(token) for token in self._tokenizer(text, add_special_tokens=as_document)["input_ids"]]
        return ids[1:] if as_document and ids[:2] == [self._tokenizer.bos_token_id] * 2 else ids

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether a text has surely more than `num_tokens` tokens, without tokenizing it: more characters than so many of the
        longest token."""
        longest = num_tokens * self.longest_token
        if len(text) > longest and self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return len(text) > longest

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def guard(self, messages: Sequence[Mapping[str, Any]], untrusted: Sequence[bool]) -> Guarded:
        texts = [
            text
            for message, is_untrusted in zip(messages, untrusted, strict=True)
            if is_untrusted
            for text in _texts_of(message)
        ]
        if self._matches_normalized:
            self._refuse_hidden_tokens(texts)
        found = sorted({match.group() for text in texts for match in self._control_text.finditer(text)})
        if not found:
            return Guarded(messages=messages, placeholders={})
        stem = "Zqguard"
        while any(stem in text for text in (self._template_source, *_texts_of(messages))):
            stem += "q"
        placeholders = {text: f"{stem}{number}zq" for number, text in enumerate(found)}

        def replace(text: str) -> str:
            return self._control_text.sub(lambda match: placeholders[match.group()], text)

        guarded = [
            _map_texts(message, replace) if is_untrusted else message
            for message, is_untrusted in zip(messages, untrusted, strict=True)
        ]
        return Guarded(messages=guarded, placeholders={placeholder: text for text, placeholder in placeholders.items()})

    def encode(self, rendered: str, placeholders: Mapping[str, str], *, as_document: bool = False) -> list[int]:
        if not placeholders:
            return self.plain(rendered, as_document=as_document)
        # text, placeholder, text, placeholder, ..., text
        pieces = re.split("(" + "|".join(map(re.escape, placeholders)) + ")", rendered)
        ids = self.plain(pieces[0], as_document=as_document)
        for placeholder, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            token = placeholders[placeholder]
            ids += self._ids_as_text(token)
            if piece:
                ids += self._after(token, piece)
        return ids

    def _after(self, token: str, piece: str) -> list[int]:
        """Ids that `piece` has after the control token `token`: some tokenizers put a space before the first word only."""
        ids = self.plain(token + piece)
        return ids[1:] if ids[:1] == [self.control_tokens[token]] else self.plain(piece)

    def _ids_as_text(self, token: str) -> list[int]:
        """Ids that spell a control token: those of its two parts, because the whole would be the token. "<|im_end|>" ->
        ids of "<", ids of "|im_end|>"."""
        if token not in self._as_text:
            for cut in range(1, len(token)):
                ids = self._after(token, token[:cut]) + self._after(token, token[cut:])
                if self.control_ids.isdisjoint(ids):
                    self._as_text[token] = ids
                    break
            else:
                raise ChatError(f"the tokenizer cannot spell the control token {token!r} of an untrusted message")
        return self._as_text[token]

    def _refuse_hidden_tokens(self, texts: Sequence[str]) -> None:
        for text in texts:
            hidden = self.control_ids.intersection(self.plain(self._control_text.sub(" ", text)))
            if hidden:
                names = self._tokenizer.convert_ids_to_tokens(sorted(hidden))
                raise ChatError(f"an untrusted message holds text that the tokenizer normalizes to {names}")


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, function): _map_texts(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, function) for item in value]
    return value


def _texts_of(value: Any) -> list[str]:
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_texts(value, collect)
    return texts
