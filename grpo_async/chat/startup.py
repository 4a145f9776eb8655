"""The startup check: can tools work with this chat template, and how?

Every step really renders. What cannot work is a ConfigError that says what to do; what is worth knowing becomes a note of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.chat.encoding import Encoder
from grpo_async.chat.parsers import ChosenParser
from grpo_async.chat.reading import TurnReader
from grpo_async.chat.suffix import SuffixRule
from grpo_async.chat.template import NO_TEMPLATE, ChatTemplate
from grpo_async.chat.turn import ChatError
from grpo_async.errors import ConfigError
from grpo_async.records import ToolCall
from grpo_async.utils.text import clipped

_RESULTS = ("kqresultonezq", "kqresulttwozq")
_OWN_TEMPLATE = "set model.chat_template to a template that renders tools, their calls and their results"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCheck:
    """One startup check, with what the rollouts use. `end_of_turn_ids`: tokens at which the policy's turn ends."""

    template: ChatTemplate
    encoder: Encoder
    suffix: SuffixRule
    reader: TurnReader
    parser: ChosenParser
    end_of_turn_ids: Sequence[int]

    def run(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Notes for the plan.

        Raises:
            ConfigError: tools cannot work with this template, tokenizer and parser.
        """
        if not tools:
            return []
        if not self.template.exists:
            raise ConfigError(NO_TEMPLATE)
        functions = [dict(tool.get("function", tool)) for tool in tools]
        names = [str(function["name"]) for function in functions]
        self._check_prompt(tools, functions)
        if self.parser.format is None:
            raise ConfigError(self.parser.reason)
        notes = [f"tool calls are read by the parser `{self.parser.name}`: {self.parser.reason}"]
        notes += self._check_turn_end(names[0])
        notes += self._check_results(names)
        notes += self._check_parser(names[0])
        return notes

    def _check_prompt(self, tools: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> None:
        question = [{"role": "user", "content": "question"}]
        try:
            prompt = self.template.render(question, tools=tools, add_generation_prompt=True)
        except ChatError as error:
            raise ConfigError(f"the tools cannot be rendered: {error}; {_OWN_TEMPLATE}") from error
        without = self.template.render(question, add_generation_prompt=True)
        for function in functions:
            parameters = (function.get("parameters") or {}).get("properties") or {}
            for name in (function["name"], *parameters):
                if prompt.count(name) <= without.count(name):
                    raise ConfigError(
                        f"the chat template does not tell the model about the tools: `{name}` of the tool "
                        f"`{function['name']}` is not in the prompt; {_OWN_TEMPLATE}"
                    )

    def _check_turn_end(self, name: str) -> list[str]:
        if not self.end_of_turn_ids:
            raise ConfigError(
                "neither the tokenizer nor generation_config.json names a token that ends a turn, so generation would not stop "
                "at a tool call; set model.end_of_turn_tokens"
            )
        last = self.suffix.last_token_of_turn([_call(name, 0)])
        if last is not None and last not in self.end_of_turn_ids:
            raise ConfigError(
                f"the chat template ends a turn that calls a tool with {self.encoder.text([last])}, but generation stops at "
                f"{self.encoder.text(self.end_of_turn_ids)} only; set model.end_of_turn_tokens: "
                f'["{self.encoder.text([last])}"]'
            )
        if last is None:
            return [
                "the chat template ends a turn with text, not with a token: results follow whatever the policy sampled"
            ]
        return []

    def _check_results(self, names: Sequence[str]) -> list[str]:
        try:
            text = self.encoder.text(self._suffix_of([names[0]]))
        except ChatError as error:
            raise ConfigError(f"tool results cannot be rendered: {error}; {_OWN_TEMPLATE}") from error
        if _RESULTS[0] not in text:
            raise ConfigError(f"the chat template leaves out messages of the role `tool`; {_OWN_TEMPLATE}")
        notes = []
        prompt = self.template.generation_prompt
        if prompt.strip() and not text.endswith(prompt.rstrip()) and not text.rstrip().endswith(prompt.rstrip()):
            notes.append(
                f"after tool results the chat template does not add {prompt!r}: the policy continues right after the results"
            )
        try:
            both = self.encoder.text(self._suffix_of([names[0], names[-1]]))
            problem = None if all(result in both for result in _RESULTS) else "it leaves out one of the results"
        except ChatError as error:
            problem = str(error)
        if problem:
            notes.append(
                f"several calls in one turn fail their rollout, for this chat template cannot render them: {problem}"
            )
        return notes

    def _suffix_of(self, names: Sequence[str]) -> list[int]:
        calls = [_call(name, number) for number, name in enumerate(names)]
        return self.suffix.ids(calls, [call.result_message(text) for call, text in zip(calls, _RESULTS, strict=False)])

    def _check_parser(self, name: str) -> list[str]:
        """Does the parser read a call as the template writes it?"""
        call = _call(name, 0)
        question = {"role": "user", "content": "question"}
        for arguments in ({"kqkey": 1}, '{"kqkey": 1}'):
            function = {"name": name, "arguments": arguments}
            answer = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call.tool_call_id, "type": "function", "function": function}],
            }
            try:
                before = self.template.render([question], add_generation_prompt=True)
                after = self.template.render([question, answer], add_generation_prompt=False)
            except ChatError:
                continue
            if not after.startswith(before):
                continue
            found = self.reader.read(self.encoder.plain(after[len(before) :]), 0).tool_calls
            if [(one.name, dict(one.arguments)) for one in found] != [(name, {"kqkey": 1})]:
                return [
                    f"the parser `{self.parser.name}` does not read a call as this chat template writes it "
                    f"({clipped(after[len(before) :].strip(), 80)!r}); check tool_calling.parser"
                ]
            break
        return []


def _call(name: str, number: int) -> ToolCall:
    return ToolCall(tool_call_id=f"kqcall00{number}", name=name)
