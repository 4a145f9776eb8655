"""The suffix rule: token ids of what follows a turn of the policy, without rendering the conversation again.

The suffix is the difference of two renderings of a dummy conversation, which is independent of the real one:

    before:  user: dummy | assistant: calls search             ... <|call end|><|im_end|>\\n
    after:   user: dummy | assistant: calls search | tool: 42  ... <|call end|><|im_end|>\\n<|im_start|>tool...42...assistant\\n
    suffix:                                                                            \\n<|im_start|>tool...42...assistant\\n

The cut is at the last end-of-turn token of `before`, which the policy sampled itself. Names and ids of the calls are the real ones.
Invariant: `before` is, token by token, the beginning of `after`; where no form of the dummy gives that, an error says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from grpo_async.chat.encoding import Encoder
from grpo_async.chat.template import ChatTemplate, Message
from grpo_async.chat.turn import ChatError
from grpo_async.records import TaggedMessage, ToolCall

Thinking = Literal["none", "field", "text"]
Arguments = Literal["object", "text"]

DUMMY = "kqdummyzq"
_MAX_CACHED = 1024
_PROBES = ("kqfirstzq", "kqsecondzq")
_NAMELESS = "unknown"  # the name of a call in which none could be read


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyForm:
    """How the dummy's assistant message is written. Templates differ in what they take, and some write the last message
    in another way than earlier ones unless it has some thinking (Qwen3)."""

    thinking: Thinking = "none"
    arguments: Arguments = "object"  # DeepSeek's template wants JSON text
    with_tools: bool = False


FORMS = tuple(
    DummyForm(thinking=thinking, arguments=arguments, with_tools=with_tools)
    for with_tools, thinking, arguments in product((False, True), get_args(Thinking), get_args(Arguments))
)


def dummy_call(name: str, number: int) -> ToolCall:
    return ToolCall(tool_call_id=f"kqcall00{number}", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendering:
    """The rendering without results, and how many of its ids the cut leaves. `is_open`: what ends the turn is the first token
    of the next message, which the policy samples (GLM: <|observation|>)."""

    ids: Sequence[int]
    num_kept: int
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A form that works for some calls: one message for all of them, or one each where a template supports no more (Llama 3)."""

    form: DummyForm
    renderings: Sequence[_Rendering]


class SuffixRule:
    """Makes the ids that follow the policy's turn: tool results and the next generation prompt."""

    def __init__(self, template: ChatTemplate, encoder: Encoder, end_of_turn_ids: Sequence[int]) -> None:
        self._template = template
        self._encoder = encoder
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._plans: OrderedDict[tuple[tuple[str, str], ...], _Plan] = OrderedDict()
        self._takes_many: dict[DummyForm, bool] = {}

    def ids(self, calls: Sequence[ToolCall], results: Sequence[TaggedMessage]) -> list[int]:
        """Ids of `results` and of the next generation prompt. Further messages, of an environment, may follow the results."""
        answered = [result.tool_call_id for result in results if result.role == "tool"]
        if answered != [call.tool_call_id for call in calls]:
            raise ValueError(
                f"results answer the calls {answered}, but the calls are {[c.tool_call_id for c in calls]}"
            )
        key = tuple((call.name, call.tool_call_id) for call in calls)
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            try:
                return self._apply(plan, calls, results)
            except ChatError:
                del self._plans[key]  # a template that writes the date renders another text from midnight on
        plan, ids = self._search(calls, results)
        self._plans[key] = plan
        if len(self._plans) > _MAX_CACHED:
            self._plans.popitem(last=False)
        return ids

    def last_token_of_turn(self, calls: Sequence[ToolCall]) -> int | None:
        """The special token with which the template ends the policy's turn; None if it ends with other text, such as a closing
        tag (GLM's </tool_call>)."""
        for form in FORMS:
            try:
                ids = self._before_ids(form, calls)
            except ChatError:
                continue
            while ids and not self._text(ids[-1:]).strip() and ids[-1] not in self._encoder.control_ids:
                ids = ids[:-1]
            return ids[-1] if ids and ids[-1] in self._encoder.special_ids | self._end_of_turn_ids else None
        return None

    def _search(self, calls: Sequence[ToolCall], results: Sequence[TaggedMessage]) -> tuple[_Plan, list[int]]:
        problems: list[str] = []
        for form in FORMS:
            for groups in self._groupings(form, calls):
                try:
                    plan = _Plan(form=form, renderings=[self._rendering(form, group) for group in groups])
                    return plan, self._apply(plan, calls, results)
                except ChatError as error:
                    problems.append(str(error))
        raise ChatError(problems[0])

    def _groupings(self, form: DummyForm, calls: Sequence[ToolCall]) -> Iterator[Sequence[Sequence[ToolCall]]]:
        if len(calls) < 2:
            yield [calls]
            return
        if form not in self._takes_many:
            self._takes_many[form] = self._renders_both_of_two(form)
        if self._takes_many[form]:
            yield [calls]
        yield [[call] for call in calls]

    def _renders_both_of_two(self, form: DummyForm) -> bool:
        calls = [dummy_call(name, number) for number, name in enumerate(_PROBES)]
        try:
            rendered = self._template.render(
                _dummy(form, calls), tools=_dummy_tools(form, calls), add_generation_prompt=False
            )
        except ChatError:
            return False
        return _PROBES[1] in rendered or _PROBES[0] not in rendered  # no names at all: nothing can be left out

    def _before_ids(self, form: DummyForm, calls: Sequence[ToolCall]) -> list[int]:
        messages = self._encoder.guard(_dummy(form, calls), [False, True])
        rendered = self._template.render(
            messages.messages, tools=_dummy_tools(form, calls), add_generation_prompt=False
        )
        return self._encoder.encode(rendered, messages.placeholders)

    def _rendering(self, form: DummyForm, calls: Sequence[ToolCall]) -> _Rendering:
        ids = self._before_ids(form, calls)
        ends = [index for index, token in enumerate(ids) if token in self._end_of_turn_ids]
        if not ends:
            return _Rendering(ids=ids, num_kept=len(ids))
        if self._text(ids[ends[-1] + 1 :]).strip():  # the last end-of-turn token ends the question, not the answer
            return _Rendering(ids=ids, num_kept=len(ids), is_open=True)
        return _Rendering(ids=ids, num_kept=ends[-1] + 1)

    def _apply(self, plan: _Plan, calls: Sequence[ToolCall], results: Sequence[TaggedMessage]) -> list[int]:
        if len(plan.renderings) == 1:
            return self._difference(plan.form, plan.renderings[0], calls, results, is_first=True, is_last=True)
        ids: list[int] = []
        tool_results = [result for result in results if result.role == "tool"]
        further = [result for result in results if result.role != "tool"]
        for number, (before, call, result) in enumerate(zip(plan.renderings, calls, tool_results, strict=True)):
            is_last = number == len(calls) - 1
            messages = [result, *further] if is_last else [result]
            ids += self._difference(plan.form, before, [call], messages, is_first=number == 0, is_last=is_last)
        return ids

    def _difference(
        self,
        form: DummyForm,
        before: _Rendering,
        calls: Sequence[ToolCall],
        results: Sequence[TaggedMessage],
        *,
        is_first: bool,
        is_last: bool,
    ) -> list[int]:
        """Ids that `results` add to `before`. Only the first is cut, at the policy's own end-of-turn token."""
        dummy = _dummy(form, calls)
        messages = self._encoder.guard([*dummy, *(r.as_dict() for r in results)], [False] + [True] * (1 + len(results)))
        rendered = self._template.render(
            messages.messages, tools=_dummy_tools(form, calls), add_generation_prompt=is_last
        )
        ids = self._encoder.encode(rendered, messages.placeholders)
        num_kept = before.num_kept if is_first else len(before.ids)
        if ids[:num_kept] != before.ids[:num_kept]:
            at = next((n for n, pair in enumerate(zip(ids, before.ids, strict=False)) if pair[0] != pair[1]), len(ids))
            raise ChatError(
                "the chat template renders a turn in another way once tool results follow it: "
                f"{self._text(before.ids[at : at + 12])!r} becomes {self._text(ids[at : at + 12])!r}, so the tokens of the "
                "new messages cannot be found; set model.chat_template to a template that keeps earlier turns as they are"
            )
        if is_first and before.is_open:
            if ids[num_kept] not in self._end_of_turn_ids:
                raise ChatError(
                    f"the chat template ends the policy's turn with {self._text(before.ids)[-40:]!r} and goes on with "
                    f"{self._text(ids[num_kept : num_kept + 1])!r}; neither is an end-of-turn token "
                    f"({self._text(sorted(self._end_of_turn_ids))}); name the one that ends a turn in model.end_of_turn_tokens"
                )
            num_kept += 1
        return ids[num_kept:]

    def _text(self, ids: Sequence[int]) -> str:
        return self._encoder.text(ids)


def _dummy(form: DummyForm, calls: Sequence[ToolCall]) -> list[Message]:
    """A question, and an answer that makes `calls`."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else DUMMY}
    if form.thinking == "field":
        answer |= {"reasoning_content": DUMMY, "thinking": DUMMY}
    elif form.thinking == "text":
        answer["content"] = f"<think>\n{DUMMY}\n</think>\n\n{answer['content']}"
    if calls:
        answer["tool_calls"] = [_dummy_call(form, call) for call in calls]
    return [{"role": "user", "content": DUMMY}, answer]


def _dummy_call(form: DummyForm, call: ToolCall) -> dict[str, Any]:
    arguments: Mapping[str, Any] | str = "{}" if form.arguments == "text" else {}
    function = {"name": call.name or _NAMELESS, "arguments": arguments}
    return {"id": call.tool_call_id, "type": "function", "function": function}


def _dummy_tools(form: DummyForm, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    if not form.with_tools:
        return []
    parameters = {"type": "object", "properties": {}}
    return [
        {"type": "function", "function": {"name": name, "description": DUMMY, "parameters": parameters}}
        for name in sorted({call.name or _NAMELESS for call in calls})
    ]
