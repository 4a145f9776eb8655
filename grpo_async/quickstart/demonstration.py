r"""What the base model is shown: a conversation, token by token as the rollouts of a run will build it.

Prompt ids from the chat template, then for every turn the policy's text with the end of the turn (learned), then the suffix
ids of the results (not learned). Each piece is tokenized alone, as in a rollout, where no text ever joins two pieces.

    prompt   <|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n              not learned
    turn     <tool_call>\n{"name": "calc", ...}\n</tool_call><|im_end|>                 learned
    suffix   \n<|im_start|>user\n<tool_response>\n19\n</tool_response><|im_end|>\n...   not learned
    turn     19<|im_end|>                                                               learned
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_async.records import Origin, TaggedMessage, ToolCall

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_async.chat import ChatRenderer

NOT_LEARNED = -100  # the label that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy writes in one turn, and what its calls are answered with; a call without a result ends the rollout."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation: what the user says and the turns that follow; `before` are messages in front of that. Not conversational:
    plain text that the policy continues, without a chat template."""

    prompt: str
    turns: tuple[Turn, ...]
    before: tuple[TaggedMessage, ...] = ()
    is_conversational: bool = True

    @classmethod
    def of(cls, prompt: str, text: str, *, is_conversational: bool = True) -> Demonstration:
        """A single turn without calls."""
        return cls(prompt=prompt, turns=(Turn(text=text),), is_conversational=is_conversational)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ids of one piece; `learned` when the policy writes it."""

    token_ids: list[int] = field(default_factory=list)
    learned: bool


def calling_turn(name: str, arguments: Mapping[str, Any], result: str | None) -> Turn:
    r"""A turn that is one call: `<tool_call>\n{"name": "calc", "arguments": {"expression": "1 + 2"}}\n</tool_call>`."""
    call = ToolCall(tool_call_id="call00000", name=name, arguments=arguments)
    text = "<tool_call>\n" + json.dumps({"name": name, "arguments": dict(arguments)}) + "\n</tool_call>"
    return Turn(text=text, calls=(call,), results=() if result is None else (result,))


def segments(
    renderer: ChatRenderer, demonstration: Demonstration, *, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Segment]:
    """The pieces of a demonstration, in order."""
    asked = TaggedMessage(role="user", content=demonstration.prompt, origin=Origin.PROMPT)
    prompt = [*demonstration.before, asked]
    prompt_ids = renderer.prompt_ids(prompt, is_conversational=demonstration.is_conversational, tools=tools)
    found = [Segment(token_ids=prompt_ids, learned=False)]
    tokenizer = renderer.tokenizer
    for turn in demonstration.turns:
        text_ids = tokenizer(turn.text + str(tokenizer.eos_token), add_special_tokens=False)["input_ids"]
        found.append(Segment(token_ids=text_ids, learned=True))
        if turn.results:
            results = [call.result_message(result) for call, result in zip(turn.calls, turn.results, strict=True)]
            found.append(Segment(token_ids=renderer.suffix_ids(turn.calls, results), learned=False))
    return found


def pad_batch(batch: Sequence[Sequence[Segment]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Segments of each demonstration -> input ids, labels, each (B, T), padded on the right.

    Labels are -100 on everything that is not learned, padding included. An attention mask is not needed: attention is
    causal, and nothing that is learned stands behind the padding.
    """
    import torch

    rows = [[token for segment in row for token in segment.token_ids] for row in batch]
    width = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    labels = torch.full((len(rows), width), NOT_LEARNED)
    for index, row in enumerate(batch):
        start = 0
        for segment in row:
            end = start + len(segment.token_ids)
            ids = torch.tensor(segment.token_ids)
            input_ids[index, start:end] = ids
            if segment.learned:
                labels[index, start:end] = ids
            start = end
    return input_ids, labels
