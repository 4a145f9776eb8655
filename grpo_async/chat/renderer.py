"""Renders prompts to token ids and decodes what the policy sampled.

Invariant: sampled tokens are decoded for reward functions and for people only; the ids that are trained on are the ids that
were sampled, never a re-tokenisation of this text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.records import Prompt


class ChatRenderer:
    """Wraps a Hugging Face tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template, or None.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template

    @classmethod
    def load(cls, model_path: str, *, chat_template: Path | None = None) -> ChatRenderer:
        """Load the tokenizer of a model folder (or hub name).

        Raises:
            ConfigError: no tokenizer there, or the template file cannot be read.
        """
        from transformers import AutoTokenizer  # slow import, needed by the trainer only

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: cannot load a tokenizer from {model_path!r}: {error}") from error
        template = None
        if chat_template is not None:
            try:
                template = chat_template.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"model.chat_template: cannot read {chat_template}: {error}") from error
        return cls(tokenizer, chat_template=template)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a turn, as far as the tokenizer knows."""
        eos = self._tokenizer.eos_token_id
        return [] if eos is None else [int(eos)]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Conversations (and text with a system prompt) go through the chat template with a
        generation prompt; plain text does not.

        Raises:
            ConfigError: the prompt is a conversation and the tokenizer has no chat template.
        """
        if not prompt.is_conversational and len(prompt.messages) == 1:
            text = prompt.messages[0].content
            return [int(token) for token in self._tokenizer(text)["input_ids"]]
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "the prompts are conversations, but the model's tokenizer has no chat template; set model.chat_template "
                "to a Jinja file, or give the prompts as plain text"
            )
        messages = [message.as_dict() for message in prompt.messages]
        # rendered to text first: the template's own control tokens are then tokenised as the special tokens they are
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def completion_text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
