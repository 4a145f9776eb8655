"""The chat template: messages to text.

Invariant: every rendering goes through `ChatTemplate.render`, so the configured template and its arguments are the ones used.
Which text becomes a control token is the business of `encoding`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from grpo_async.chat.turn import ChatError
from grpo_async.errors import ConfigError, message_of
from grpo_async.records import THINKING

Message = Mapping[str, Any]  # as templates know it: {"role", "content", ...}

NO_TEMPLATE = (
    "the model's tokenizer has no chat template, so conversations, system prompts and tools cannot be rendered; set "
    "model.chat_template to a Jinja file, or give the prompts as plain text"
)


class ChatTemplate:
    """A tokenizer's chat template with the configured arguments."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        clash = sorted(taken.intersection(self._arguments) - {"documents", "kwargs"})
        if clash:
            raise ConfigError(
                f"model.chat_template_kwargs: `{clash[0]}` is set by grpo-async itself; name variables of the template only"
            )

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def source(self, *, with_tools: bool = False) -> str:
        """The Jinja text; a tokenizer may carry a second template for conversations with tools."""
        if not self.exists:
            raise ConfigError(NO_TEMPLATE)
        try:
            return str(self._tokenizer.get_chat_template(None, [{}] if with_tools else None))
        except ValueError as error:  # several named templates, none of them "default"
            raise ConfigError(f"{error}; set model.chat_template to the Jinja file to use") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        is_open: bool = False,
    ) -> str:
        """The text of `messages`; `is_open`: it ends inside the last one, which the policy continues."""
        with_tools = bool(tools) or any("tool_calls" in message or message["role"] == "tool" for message in messages)
        source = self.source(with_tools=with_tools)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=source,
                    add_generation_prompt=add_generation_prompt and not is_open,
                    tokenize=False,
                    **({"continue_final_message": True} if is_open else {}),
                    **self._arguments,
                )
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ChatError(f"the chat template refuses messages of the roles {roles}: {message_of(error)}") from error

    @cached_property
    def generation_prompt(self) -> str:
        """What the template adds after a user's message to make the policy answer: `<|im_start|>assistant\\n`. May be empty."""
        question = [{"role": "user", "content": "question"}]
        try:
            without = self.render(question, add_generation_prompt=False)
            rendered = self.render(question, add_generation_prompt=True)
        except ChatError:  # a template with extra requirements, such as a system prompt; prompts will say so
            return ""
        return rendered[len(without) :] if rendered.startswith(without) else ""

    @cached_property
    def thinking_is_open(self) -> bool:
        """Whether the generation prompt leaves the policy inside its thinking: `...assistant\\n<think>\\n`."""
        opened, closed = (self.generation_prompt.rfind(mark) for mark in THINKING[0])
        return opened > closed
