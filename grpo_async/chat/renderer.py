"""Renders prompts and tool results to token ids, and reads what the policy sampled.

Invariant: sampled tokens are decoded for tools, reward functions and people only; the ids that are trained on, and that the next
turn continues, are the ids that were sampled, never a re-tokenization of this text.

    prompt_ids(messages, tools) | sampled ids | suffix_ids(calls, results) | sampled ids | ...

Where things are: `template` (messages to text), `encoding` (text to ids, injection guard), `suffix` (the rule for tool results),
`reading` and `parsers` (sampled ids to tool calls), `startup` (the check before a run).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_async.chat.encoding import Encoder
from grpo_async.chat.parsers import choose_parser
from grpo_async.chat.reading import TurnReader
from grpo_async.chat.startup import ToolCheck
from grpo_async.chat.suffix import SuffixRule
from grpo_async.chat.template import ChatTemplate
from grpo_async.chat.turn import ChatError, PolicyTurn
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.records import Origin, TaggedMessage, ToolCall
from grpo_async.utils.text import did_you_mean


class ChatRenderer:
    """Wraps a Hugging Face tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template, or None.
        template_arguments: further variables of the template (`model.chat_template_kwargs`).
        end_of_turn_tokens: tokens that end a turn in addition to the tokenizer's eos (`model.end_of_turn_tokens`).
        end_of_turn_ids: the same as ids; `load` takes them from generation_config.json.
        parser: how tool calls are read (`tool_calling.parser`).

    Raises:
        ConfigError: an end-of-turn token is not one token, or there is no such parser.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        end_of_turn_tokens: Sequence[str] = (),
        end_of_turn_ids: Sequence[int] = (),
        parser: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self._template = ChatTemplate(tokenizer, template_arguments or {})
        eos = tokenizer.eos_token_id
        ends = [*([] if eos is None else [int(eos)]), *end_of_turn_ids]
        ends += [_token_id(tokenizer, token) for token in end_of_turn_tokens]
        self._end_of_turn_ids = list(dict.fromkeys(ends))
        source = self._template.source(with_tools=True) if self._template.exists else ""
        self._encoder = Encoder(tokenizer, source)
        self._parser = choose_parser(
            parser,
            tokenizer,
            template_source=source,
            vocabulary=tokenizer.get_added_vocab(),
            generation_prompt=self._generation_prompt,
        )

    @classmethod
    def load(cls, model: ModelSection, *, parser: str = "auto") -> ChatRenderer:
        """Load the tokenizer of a model folder (or hub name), and the end-of-turn tokens of its generation_config.json.

        Raises:
            ConfigError: no tokenizer there, or the template file cannot be read.
        """
        from transformers import AutoTokenizer  # slow import, needed by the trainer only

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        except Exception as error:  # whatever transformers makes of a broken file
            raise ConfigError(
                f"model.path: cannot load a tokenizer from {model.path!r}: {type(error).__name__}: {error}"
            ) from error
        try:
            template = None if model.chat_template is None else model.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: cannot read {model.chat_template}: {error}") from error
        return cls(
            tokenizer,
            chat_template=template,
            template_arguments=model.chat_template_kwargs,
            end_of_turn_tokens=model.end_of_turn_tokens,
            end_of_turn_ids=_generation_config_ends(model.path, model.revision),
            parser=parser,
        )

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def end_of_turn_ids(self) -> list[int]:
        """Ids at which generation of a turn stops."""
        return list(self._end_of_turn_ids)

    def prompt_ids(
        self,
        messages: Sequence[TaggedMessage],
        *,
        is_conversational: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids of a prompt. Conversations, and text with a system prompt or with tools, go through the chat template
        with a generation prompt; plain text alone does not.

        Messages from tools and environments are guarded: the text of a control token in them stays text. Messages of the data
        are not: they are the user's own, and a system prompt that names `<think>` means the token.

        Raises:
            ConfigError: the tokenizer has no chat template.
            ChatError: the template refuses the messages.
        """
        foreign = [message.origin is not Origin.PROMPT for message in messages]
        guarded = self._encoder.guard([message.as_dict() for message in messages], foreign)
        if not is_conversational and len(messages) == 1 and not tools:
            text = guarded.messages[0]["content"]
            return self._encoder.encode(text, guarded.placeholders, as_document=True)
        rendered = self._template.render(guarded.messages, tools=tools, add_generation_prompt=True)
        return self._encoder.encode(rendered, guarded.placeholders)

    def suffix_ids(
        self, calls: Sequence[ToolCall], results: Sequence[TaggedMessage], *, is_ended: bool = True
    ) -> list[int]:
        """Ids that follow the policy's turn: the results of `calls`, in their order, and the next generation prompt. Independent of
        the conversation so far.

        Args:
            is_ended: the policy sampled an end-of-turn token. False: a stop string ended the turn, and the template's own token
                closes it.

        Raises:
            ConfigError: the tokenizer has no chat template.
            ChatError: the template cannot render these messages, or its tokens do not line up; this rollout cannot go on.
        """
        if is_ended:
            return self._suffix.ids(calls, results)
        end = self.turn_end_id(calls)
        if end is None:
            raise ChatError(
                "a stop string (rollout.stop) ended a turn that calls a tool, and the chat template has no end-of-turn token to "
                "close it with; leave the string out, or set model.chat_template to one that ends turns with a token"
            )
        return [end, *self._suffix.ids(calls, results)]

    def parse(self, token_ids: Sequence[int], *, turn: int) -> PolicyTurn:
        """Read what the policy sampled in its turn number `turn` (0, 1, ...; the ids of the calls are made of it). Never raises
        for what a model wrote: calls that cannot be read carry an `error`."""
        return self._reader.read(token_ids, turn)

    def completion_text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens without special tokens."""
        return self._reader.text(token_ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token; of a special token its name."""
        return self._encoder.text([token_id])

    def text_ids(self, text: str) -> list[int]:
        """Ids of text that continues other text; the text of a control token becomes that token."""
        return self._encoder.plain(text)

    def turn_end_id(self, calls: Sequence[ToolCall]) -> int | None:
        """The end-of-turn token with which the template closes a turn that makes `calls`; None where it has none."""
        token = self._suffix.last_token_of_turn(calls)
        return token if token in self._end_of_turn_ids else None

    def split_thinking(self, text: str, *, is_sampled: bool = True) -> tuple[str, str]:
        """(thinking, answer) of what the policy wrote: "<think>\\na\\n</think>\\n\\nb" -> ("a", "b").

        Thinking that is not closed has no answer. Text that was not sampled (what a client sends back) need not have the thinking
        that the generation prompt opened.
        """
        return self._reader.split_thinking(text, is_sampled=is_sampled)

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render a conversation with `tools` (JSON schemas) and see whether everything arrives; returns notes for the plan.

        Raises:
            ConfigError: tools cannot work with this template, tokenizer and parser.
        """
        check = ToolCheck(
            template=self._template,
            encoder=self._encoder,
            suffix=self._suffix,
            reader=self._reader,
            parser=self._parser,
            end_of_turn_ids=self._end_of_turn_ids,
        )
        return check.run(tools)

    @property
    def _generation_prompt(self) -> str:
        return self._template.generation_prompt if self._template.exists else ""

    @cached_property
    def _suffix(self) -> SuffixRule:
        return SuffixRule(self._template, self._encoder, self._end_of_turn_ids)

    @cached_property
    def _reader(self) -> TurnReader:
        is_open = self._template.exists and self._template.thinking_is_open
        return TurnReader(self._tokenizer, self._encoder, self._parser.format, thinking_is_open=is_open)


def _token_id(tokenizer: Any, token: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        hint = did_you_mean(token, tokenizer.get_added_vocab())
        raise ConfigError(f"model.end_of_turn_tokens: {token!r} is not a token of the model's tokenizer{hint}")
    return int(vocabulary[token])


def _generation_config_ends(model_path: str, revision: str | None) -> list[int]:
    """Those of generation_config.json; a model need not have that file."""
    folder = Path(model_path)
    if folder.is_dir():
        file = folder / "generation_config.json"
        if not file.exists():
            return []
        try:
            return eos_ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"model.path: cannot read {file}: {error}") from error
    from transformers import GenerationConfig

    try:
        return eos_ids(GenerationConfig.from_pretrained(model_path, revision=revision).eos_token_id)
    except OSError:  # the hub has none for this model
        return []


def eos_ids(eos_token_id: int | Sequence[int] | None) -> list[int]:
    """`eos_token_id` as the configurations of transformers have it: a number, a list, or none."""
    if eos_token_id is None:
        return []
    return [int(end) for end in eos_token_id] if isinstance(eos_token_id, Sequence) else [int(eos_token_id)]


def load_renderer(config: ExperimentConfig) -> ChatRenderer:
    """The chat renderer of a run, the same in the startup check, the rollout thread and the exported model: tokenizer, template,
    end-of-turn tokens and tool-call parser as the configuration says.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    return ChatRenderer.load(config.model, parser=config.tool_calling.parser)
