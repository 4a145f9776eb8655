"""Renders prompts and tool results to token ids, and reads what the policy sampled.

Invariant: sampled tokens are decoded for tools, reward functions and people only; the ids that are trained on, and that the next
turn continues, are the ids that were sampled, never a re-tokenization of this text.

    prompt_ids(messages, tools) | sampled ids | suffix_ids(calls, results) | sampled ids | ...
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_async.chat.encoding import Encoder
from grpo_async.chat.formats import choose_parser
from grpo_async.chat.suffix import SuffixRule, dummy_call
from grpo_async.chat.template import NO_TEMPLATE, ChatTemplate
from grpo_async.chat.turn import ChatError, PolicyTurn, SampledTurn, TooLongError
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError, message_of
from grpo_async.records import TEMPLATE_COLUMN, THINKING, Origin, TaggedMessage, ToolCall, answer_start, is_call_id
from grpo_async.utils.processes import importing_much
from grpo_async.utils.text import clipped, did_you_mean

_RESULTS = ("kqresultonezq", "kqresulttwozq")  # of the dummy calls of `check_tools`
_MAX_VARIANTS = 64  # kept for the column `chat_template_kwargs`, which may differ in every row
_OWN_TEMPLATE = "set model.chat_template to a template that renders tools, their calls and their results"


class ChatRenderer:
    """Wraps a Hugging Face tokenizer; the arguments are settings of the section `model`, and `tool_calling.parser`."""

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
        self._template_arguments = dict(template_arguments or {})
        self._template = ChatTemplate(tokenizer, self._template_arguments)
        self._variants: dict[str, ChatRenderer] = {}
        eos = tokenizer.eos_token_id
        ends = [*([] if eos is None else [int(eos)]), *end_of_turn_ids]
        ends += [_token_id(tokenizer, token) for token in end_of_turn_tokens]
        self._end_of_turn_ids = list(dict.fromkeys(ends))
        source = self._template.source(with_tools=True) if self._template.exists else ""
        self._encoder = Encoder(tokenizer, source)
        end_tokens = tokenizer.convert_ids_to_tokens(self._end_of_turn_ids)
        self._parser = choose_parser(parser, template_source=source, tokenizer=tokenizer, end_tokens=end_tokens)
        # the generation prompt leaves the policy inside its thinking
        self.thinking_is_open = self._template.exists and self._template.thinking_is_open
        wanted = self._parser.format.special_tokens if self._parser.format else ()
        control = self._encoder.control_tokens
        self._kept_ids = frozenset(control[token] for token in wanted if token in control)

    @classmethod
    def load(cls, model: ModelSection, *, parser: str = "auto") -> ChatRenderer:
        """Load the tokenizer of a model and the end-of-turn tokens of its configuration; ConfigError if something cannot be
        read."""
        with importing_much():
            from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        except Exception as error:  # whatever transformers makes of a broken file
            raise ConfigError(
                f"model.path: cannot load a tokenizer from {model.path!r}: {message_of(error)}"
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
            end_of_turn_ids=_configured_ends(model.path, model.revision),
            parser=parser,
        )

    def for_row(self, columns: Mapping[str, Any]) -> ChatRenderer:
        """The renderer of a row of the data, whose column `chat_template_kwargs` is added to the setting.

        Raises:
            ConfigError: the column is no object, names what grpo-async sets itself, or changes whether answers begin inside
                thinking, which rewards are told once.
        """
        own = columns.get(TEMPLATE_COLUMN)
        if not own or not self._template.exists:
            return self
        if not isinstance(own, dict):
            raise ConfigError(
                f"the column `{TEMPLATE_COLUMN}` holds an object of variables of the chat template, not {clipped(repr(own), 80)}"
            )
        own = {name: value for name, value in own.items() if value is not None}  # Parquet fills up what a row lacks
        key = json.dumps(own, sort_keys=True, default=str)
        if key not in self._variants:
            variant = copy.copy(self)
            vars(variant).pop("_suffix", None)  # rendered with the other arguments
            variant._template = ChatTemplate(self._tokenizer, {**self._template_arguments, **own})
            if variant._template.thinking_is_open != self.thinking_is_open:
                raise ConfigError(
                    f"the column `{TEMPLATE_COLUMN}` is {clipped(key, 80)}: with it answers begin inside thinking and without it "
                    "they do not, or the other way round, so rewards could not tell where an answer begins"
                )
            if len(self._variants) == _MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = variant
        return self._variants[key]

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
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a prompt. Plain text alone does not go through the chat template. A last message of the assistant that came
        with the data is continued (`opening_of`), as with TRL's `apply_chat_template`. In messages from tools and environments the
        text of a control token stays text; those of the data are the user's own.

        Raises:
            ConfigError: the tokenizer has no chat template.
            ChatError: the template refuses the messages. TooLongError: they surely have more than `max_tokens` tokens.
        """
        untrusted = [message.origin is not Origin.PROMPT for message in messages]
        guarded = self._encoder.guard([message.as_dict() for message in messages], untrusted)
        if not is_conversational and len(messages) == 1 and not tools:
            text = guarded.messages[0]["content"]
            return self._encoder.encode(text, guarded.placeholders, as_document=True)
        opening = opening_of(messages)
        if opening is not None and messages[-1].tool_calls:
            raise ChatError(
                "the last message has tool calls without results, and so nothing that the policy can continue"
            )
        rendered = self._template.render(
            guarded.messages, tools=tools, add_generation_prompt=True, is_open=opening is not None
        )
        if max_tokens is not None:
            self.check_length(rendered, max_tokens)
        return self._encoder.encode(rendered, guarded.placeholders)

    @property
    def unread_calls(self) -> str | None:
        """Why tool calls are not read; None if they are."""
        return self._parser.reason if self._parser.format is None else None

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise TooLongError for a text that surely has more than `max_tokens` tokens, without tokenizing it."""
        if self._encoder.is_longer(text, max_tokens):
            raise TooLongError(f"{len(text)} characters are more than the {max_tokens} tokens of a context can hold")

    def suffix_ids(
        self, calls: Sequence[ToolCall], results: Sequence[TaggedMessage], *, is_ended: bool = True
    ) -> list[int]:
        """Ids that follow the policy's turn: the results of `calls`, in their order, and the next generation prompt. Independent of
        the conversation so far. Where a stop string or a limit ended the turn (`is_ended` False), the template's token closes it.

        Raises:
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

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        turn: int,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str | None = None,
    ) -> PolicyTurn:
        """Read what the policy sampled in its turn number `turn` (0, 1, ...; the ids of the calls are made of it). Never raises
        for what a model wrote: calls that cannot be read carry an `error`. `opening`, the beginning of a message that the policy
        continued, is part of the calls that are read, not of the content."""
        text = self.completion_text(token_ids)
        if self._parser.format is None:
            return PolicyTurn(text=text, content=text)
        marked = text
        if not self._kept_ids.isdisjoint(token_ids):
            hidden = self._encoder.special_ids - self._kept_ids
            marked = self._encoder.text([token for token in token_ids if token not in hidden])
        try:
            reading = self._parser.format.read(
                SampledTurn(
                    text=(opening or "") + text,
                    marked_text=(opening or "") + marked,
                    thinking_is_open=self.thinking_is_open and opening is None,
                    tools=tools,
                )
            )
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own parser may raise anything
            return PolicyTurn(text=text, content=text, parse_error=message_of(error))
        content = reading.content
        if opening:  # a format strips the text around calls
            content = content.removeprefix(opening if content.startswith(opening) else opening.strip())
        return PolicyTurn(text=text, content=content, tool_calls=_with_ids(reading.calls, turn))

    def constraint(self, schema: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The `structured_outputs` with which a turn is JSON of `schema`, or calls of `tools`; ChatError if those have no
        description. The policy may think first where the generation prompt opens its thinking."""
        if schema is not None and not tools and not self.thinking_is_open:
            return {"json": dict(schema)}
        forms: list[dict[str, Any]] = (
            [{"type": "json_schema", "json_schema": dict(schema)}] if schema is not None else []
        )
        if tools:
            form = self._parser.format.call_form(tools) if self._parser.format else None
            if form is None:
                raise ChatError(f"the parser `{self._parser.name}` cannot force tool calls, or mix them with a format")
            forms.append(form)
        whole: dict[str, Any] = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
        if self.thinking_is_open:
            thinking = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{THINKING[0][1]}\n\n"}
            whole = {"type": "sequence", "elements": [thinking, whole]}
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": whole})}

    def completion_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        return self._encoder.text([token_id])

    def turn_end_id(self, calls: Sequence[ToolCall]) -> int | None:
        """The end-of-turn token with which the template closes a turn that makes `calls`; None where it has none."""
        token = self._suffix.last_token_of_turn(calls)
        return token if token in self._end_of_turn_ids else None

    def split_thinking(self, text: str, *, is_sampled: bool = True) -> tuple[str, str]:
        """(thinking, answer) of what the policy wrote: "<think>\\na\\n</think>\\n\\nb" -> ("a", "b").

        Thinking that is not closed has no answer. Text that was not sampled (what a client sends back) need not have the thinking
        that the generation prompt opened.
        """
        start = answer_start(text, is_open=self.thinking_is_open and (is_sampled or None))
        if not start:
            return "", text
        thinking = text[:start].strip()
        for opening, closing in THINKING:
            thinking = thinking.removeprefix(opening).removesuffix(closing)
        return thinking.strip(), text[start:].lstrip()

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render every step of a conversation with these tools: ConfigError if they cannot work with this template, tokenizer and
        parser. Returns notes for the plan."""
        if not tools:
            return []
        if not self._template.exists:
            raise ConfigError(NO_TEMPLATE)
        functions = [dict(tool.get("function", tool)) for tool in tools]
        names = [str(function["name"]) for function in functions]
        self._check_prompt(tools, functions)
        if self._parser.format is None:
            raise ConfigError(self._parser.reason)
        notes = [f"tool calls are read by the parser `{self._parser.name}`: {self._parser.reason}"]
        self._check_turn_end(names[0])
        return [*notes, *self._check_results(names), *self._check_parser(names[0])]

    def _check_prompt(self, tools: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> None:
        question = [{"role": "user", "content": "question"}]
        try:
            prompt = self._template.render(question, tools=tools, add_generation_prompt=True)
        except ChatError as error:
            raise ConfigError(f"the tools cannot be rendered: {error}; {_OWN_TEMPLATE}") from error
        without = self._template.render(question, add_generation_prompt=True)
        for function in functions:
            parameters = (function.get("parameters") or {}).get("properties") or {}
            for name in (function["name"], *parameters):
                if prompt.count(name) <= without.count(name):
                    raise ConfigError(
                        f"the chat template does not tell the model about the tools: `{name}` of the tool "
                        f"`{function['name']}` is not in the prompt; {_OWN_TEMPLATE}"
                    )

    def _check_turn_end(self, name: str) -> None:
        if not self._end_of_turn_ids:
            raise ConfigError(
                "neither the tokenizer nor generation_config.json names a token that ends a turn, so generation would not stop "
                "at a tool call; set model.end_of_turn_tokens"
            )
        last = self._suffix.last_token_of_turn([dummy_call(name, 0)])
        if last is not None and last not in self._end_of_turn_ids:
            raise ConfigError(
                f"the chat template ends a turn that calls a tool with {self._encoder.text([last])}, but generation stops at "
                f"{self._encoder.text(self._end_of_turn_ids)} only; set model.end_of_turn_tokens: "
                f'["{self._encoder.text([last])}"]'
            )

    def _check_results(self, names: Sequence[str]) -> list[str]:
        """ConfigError where a result is not rendered; a note where two results of one turn are not."""
        for count in (1, 2):
            calls = [dummy_call(names[-number], number) for number in range(count)]
            results = [call.result_message(text) for call, text in zip(calls, _RESULTS, strict=False)]
            try:
                text = self._encoder.text(self._suffix.ids(calls, results))
                problem = (
                    "" if all(result in text for result in _RESULTS[:count]) else "it leaves out a message of a tool"
                )
            except ChatError as error:
                problem = str(error)
            if problem and count == 1:
                raise ConfigError(f"tool results cannot be rendered: {problem}; {_OWN_TEMPLATE}")
            if problem:
                return [f"a rollout fails, or lacks a result, when a turn makes several calls: {problem}"]
        return []

    def _check_parser(self, name: str) -> list[str]:
        call = dummy_call(name, 0)
        question = {"role": "user", "content": "question"}
        parameters = {"type": "object", "properties": {"kqkey": {"type": "integer"}}}
        tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
        for arguments in ({"kqkey": 1}, '{"kqkey": 1}'):
            function = {"name": name, "arguments": arguments}
            answer = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call.tool_call_id, "type": "function", "function": function}],
            }
            try:
                before = self._template.render([question], add_generation_prompt=True)
                after = self._template.render([question, answer], add_generation_prompt=False)
            except ChatError:
                continue
            if not after.startswith(before):
                continue
            found = self.parse(self._encoder.plain(after[len(before) :]), turn=0, tools=tools).tool_calls
            if [(one.name, dict(one.arguments)) for one in found] != [(name, {"kqkey": 1})]:
                return [
                    f"the parser `{self._parser.name}` does not read a call as this chat template writes it "
                    f"({clipped(after[len(before) :].strip(), 80)!r}); check tool_calling.parser"
                ]
            break
        return []

    @cached_property
    def _suffix(self) -> SuffixRule:
        return SuffixRule(self._template, self._encoder, self._end_of_turn_ids)


def opening_of(messages: Sequence[TaggedMessage]) -> str | None:
    """The beginning of the policy's first turn, where the data gives it: the text of a last message of the assistant."""
    last = messages[-1] if messages else None
    return last.content if last is not None and (last.role, last.origin) == ("assistant", Origin.PROMPT) else None


def _with_ids(calls: Sequence[ToolCall], turn: int) -> list[ToolCall]:
    """Give each call its id: the one the policy wrote, once in a turn, else one made of turn and position. Call 2 of turn 11:
    "c000b0002"."""
    taken: set[str] = set()
    named = []
    for position, call in enumerate(calls):
        written = call.tool_call_id
        usable = is_call_id(written) and written not in taken
        call_id = written if usable else f"c{turn:04x}{position:04x}"
        taken.add(call_id)
        named.append(replace(call, tool_call_id=call_id))
    return named


def _token_id(tokenizer: Any, token: str) -> int:
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        hint = did_you_mean(token, tokenizer.get_added_vocab())
        raise ConfigError(f"model.end_of_turn_tokens: {token!r} is not a token of the model's tokenizer{hint}")
    return int(vocabulary[token])


def _configured_ends(model_path: str, revision: str | None) -> list[int]:
    """The end-of-turn tokens of generation_config.json, or where a model has no such file of config.json, as servers read them."""
    from transformers.utils import cached_file

    for name in ("generation_config.json", "config.json"):
        try:
            file = cached_file(model_path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        except OSError:  # the hub has none for this model
            continue
        if file is not None:
            try:
                return eos_ids(json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id"))
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                raise ConfigError(f"model.path: cannot read {file}: {error}") from error
    return []


def eos_ids(eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        return []
    return [int(end) for end in eos_token_id] if isinstance(eos_token_id, Sequence) else [int(eos_token_id)]


def load_renderer(config: ExperimentConfig) -> ChatRenderer:
    """The chat renderer of a run, the same in the startup check, the rollout thread and the exported model."""
    return ChatRenderer.load(config.model, parser=config.tool_calling.parser)
