"""One rollout as lines: the prompt, then turn by turn the sampled tokens and the tool calls with their answers. Pure.

Folds: "prompt" (its first lines, or all of it), "tools-N" (the calls of turn N in a line each, or with arguments, results and the
tokens of the answer). A folded token has no place on the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_async.records import Origin, TaggedMessage, ToolCallRecord
from grpo_async.store import GroupRow, RolloutRow, TurnRow
from grpo_async.viewer.safe_text import one_line, visible
from grpo_async.viewer.terminal.layout import Line, Span, flow_text, flow_tokens
from grpo_async.viewer.token_text import TokenTexts

_PROMPT_LINES = 6  # of a folded prompt's message
_INDENT = 2
PROMPT_FOLD = "prompt"


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Where a turn's tokens are in the completion: [first, answer) were sampled, [answer, end) are of tools or environments."""

    first: int
    answer: int
    end: int


def tokens_by_turn(rollout: RolloutRow) -> list[TurnTokens]:
    """Worked example: turns of 2 and 1 tokens, mask [1, 1, 0, 0, 1] -> (0, 2, 4), (4, 5, 5)."""
    found, at = [], 0
    for turn in rollout.turns:
        answer = end = at + turn.num_tokens
        while end < len(rollout.mask) and not rollout.mask[end]:
            end += 1
        found.append(TurnTokens(at, answer, end))
        at = end
    return found


def turn_of(places: Sequence[TurnTokens], token: int) -> int | None:
    """The turn that a token belongs to, with the answers to its calls."""
    return next((number for number, place in enumerate(places) if place.first <= token < place.end), None)


def tools_fold(turn: int) -> str:
    return f"tools-{turn}"


def rollout_lines(
    group: GroupRow, rollout: RolloutRow, texts: TokenTexts | str, width: int, unfolded: frozenset[str]
) -> list[Line]:
    """The page in a width (cells). `texts` that are a sentence: tokens are shown by their ids, and the messages as stored."""
    return list(_lines(group, rollout, texts, width, unfolded))


def _lines(
    group: GroupRow, rollout: RolloutRow, texts: TokenTexts | str, width: int, unfolded: frozenset[str]
) -> Iterator[Line]:
    open_prompt = PROMPT_FOLD in unfolded
    prompt = group.messages if rollout.reset_messages is None else rollout.reset_messages
    for message in prompt:
        yield _heading(f"{message.role} ({message.origin.value})", width, PROMPT_FOLD)
        yield from flow_text(message.content, width, indent=_INDENT, limit=None if open_prompt else _PROMPT_LINES)
        for call in message.tool_calls:
            yield from flow_text(_asked(call), width, indent=_INDENT, style="dim")
    if isinstance(texts, str):
        yield from flow_text(texts, width, style="dim italic")
    places = tokens_by_turn(rollout)
    messages = _messages_by_turn(rollout.messages, len(rollout.turns)) if isinstance(texts, str) else []
    for number, (turn, place) in enumerate(zip(rollout.turns, places, strict=True)):
        yield _heading(_turn_title(number, turn, rollout, place), width)
        for message in messages[number] if messages else ():
            yield from flow_text(message.content, width, indent=_INDENT)
        yield from flow_tokens(_labels(rollout, texts, place.first, place.answer), width, indent=_INDENT)
        if turn.parse_error is not None:
            said = f"not searched for tool calls: {visible(turn.parse_error)}"
            yield from flow_text(said, width, indent=_INDENT, style="yellow", limit=4)
        if turn.tool_calls or place.end > place.answer:
            yield from _tools(number, turn, rollout, texts, place, width, unfolded)
    rest = places[-1].end if places else 0
    if rest < len(rollout.completion_ids):
        yield from flow_tokens(_labels(rollout, texts, rest, len(rollout.completion_ids)), width, indent=_INDENT)
    if not rollout.turns:
        yield Line()
        yield from flow_text("nothing was generated", width, style="dim italic")


def _tools(
    number: int,
    turn: TurnRow,
    rollout: RolloutRow,
    texts: TokenTexts | str,
    place: TurnTokens,
    width: int,
    unfolded: frozenset[str],
) -> Iterator[Line]:
    fold = tools_fold(number)
    is_open = fold in unfolded
    mark = "▾" if is_open else "▸"
    for call in turn.tool_calls:
        style = "red" if call.failed else "cyan"
        outcome = f"{'failed ' if call.failed else ''}{call.duration_s:.2f} s"
        if is_open:
            yield Line((Span(f"{mark} {one_line(call.name, 60)}", f"bold {style}"), Span(f"  {outcome}", style)), fold)
            yield from flow_text(_arguments(call), width, indent=4, style="dim")
            yield Line((Span("  → result", f"bold {style}"),), fold)
            yield from flow_text(call.result, width, indent=4)
        else:
            asked = f"{one_line(call.name, 60)}({one_line(json.dumps(dict(call.arguments), ensure_ascii=False), 200)})"
            said = f"{mark} {asked}  {outcome} → {one_line(call.result, 200)}"
            yield Line((Span(_fit(said, width), style),), fold)
    count = place.end - place.answer
    if not count:
        return
    what = "of the answer, not trained on" if turn.tool_calls else "of the environment or the template, not trained on"
    yield Line((Span(f"{mark} {count} tokens {what}", "dim"),), fold)
    if is_open:
        yield from flow_tokens(_labels(rollout, texts, place.answer, place.end), width, indent=_INDENT)


def _arguments(call: ToolCallRecord) -> str:
    """A line for each argument; text stands as it is, so that code can be read."""
    return "\n".join(
        f"{name} = {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in call.arguments.items()
    )


def _asked(call: object) -> str:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    return f"calls {one_line(str(function.get('name')), 60)}({one_line(str(function.get('arguments')), 400)})"


def _turn_title(number: int, turn: TurnRow, rollout: RolloutRow, place: TurnTokens) -> str:
    versions = sorted(set(rollout.versions[place.first : place.answer]))
    sampled_by = f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}-{versions[-1]}" if versions else ""
    durations = f"{turn.generation_duration_s:.2f} s"
    if turn.tool_execution_duration_s:
        durations += f" + {turn.tool_execution_duration_s:.2f} s tools"
    tokens = f"{turn.num_tokens} token{'' if turn.num_tokens == 1 else 's'}"
    return " · ".join(
        part for part in (f"turn {number + 1}", tokens, f"{turn.finish_reason}", durations, sampled_by) if part
    )


def _heading(text: str, width: int, fold: str = "") -> Line:
    shown = _fit(visible(text).replace("\n", " "), width - 4)
    return Line((Span(f"─ {shown} ", "bold cyan"), Span("─" * max(0, width - len(shown) - 3), "dim cyan")), fold)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _labels(rollout: RolloutRow, texts: TokenTexts | str, first: int, end: int) -> Iterator[tuple[int, str]]:
    for index in range(first, end):
        token_id = rollout.completion_ids[index]
        yield index, texts.of(token_id) if isinstance(texts, TokenTexts) else f"{token_id} "


def _messages_by_turn(messages: Sequence[TaggedMessage], num_turns: int) -> list[list[TaggedMessage]]:
    """The policy's messages of each turn, for pages without token texts: the n-th message of the policy is that of turn n."""
    found: list[list[TaggedMessage]] = [[] for _ in range(num_turns)]
    number = -1
    for message in messages:
        number += message.origin is Origin.POLICY
        if 0 <= number < num_turns and message.origin is Origin.POLICY:
            found[number].append(message)
    return found
