"""The rollouts of a group beside each other, as lines: a head that stays (rewards, lengths) and the texts below. Pure.

Differences: the words of a text that its reference (the best rollout, at first) does not have at that place are marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from rich.cells import cell_len, set_cell_size

from grpo_async.records import Origin, TaggedMessage
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.viewer.figures import STATUS_STYLES, number, signed, span
from grpo_async.viewer.safe_text import one_line, visible
from grpo_async.viewer.terminal.layout import Line, Span, flow_text, flow_words

DIFFERENT = "on #5c4a14"
DIFFERENT_LIGHT = "on #ffe79a"
_WORD = re.compile(r"\n|[^\S\n]+|\S+[^\S\n]*")
_MOST_COMPARED = 3000  # words: comparing takes time with the square of them
_SEPARATOR = " │ "


@dataclass(frozen=True, slots=True)
class SideBySide:
    """`head` stays above the text while it scrolls; both have whole lines over all columns."""

    head: Sequence[Line]
    body: Sequence[Line]


def best_rollout(rollouts: Sequence[RolloutRow]) -> int:
    """Index of the highest reward, the first of equals; 0 where nothing was scored."""
    return max(range(len(rollouts)), key=lambda index: (_reward(rollouts[index]), -index), default=0)


def completion_text(rollout: RolloutRow) -> str:
    """What was said, with tool calls and answers in brackets; the error of a rollout that has one comes first."""
    error = [f"[error] {rollout.error}"] if rollout.error is not None else []
    return visible("\n".join([*error, *(_message(message) for message in rollout.messages)]))


def columns_that_fit(width: int, num_rollouts: int, wanted: int | None, narrowest: int = 34) -> int:
    """How many rollouts stand side by side: as many as `wanted`, or as fit with `narrowest` cells each."""
    most = max(1, (width + len(_SEPARATOR)) // ((12 if wanted else narrowest) + len(_SEPARATOR)))
    return max(1, min(num_rollouts, wanted or most, most))


def side_by_side(
    group: GroupRow,
    first: int,
    num_columns: int,
    width: int,
    *,
    chosen: int,
    reference: int | None,
    marked: str = DIFFERENT,
) -> SideBySide:
    """Rollouts first, first + 1, ... in `num_columns` columns.

    Args:
        chosen: the rollout under the cursor.
        reference: the rollout that texts are compared to; None: differences are not shown.
        marked: style of a word that differs.
    """
    shown = list(range(first, min(first + num_columns, len(group.rollouts))))
    if not shown:
        return SideBySide([], [Line((Span("the group has no rollout", "dim italic"),))])
    room = (width - len(_SEPARATOR) * (len(shown) - 1)) // len(shown)
    heads = [_head(group, index, room, index == chosen, index == reference) for index in shown]
    original = None if reference is None else _words(completion_text(group.rollouts[reference]))
    bodies = [_body(group.rollouts[i], room, None if i == reference else original, marked) for i in shown]
    head = _beside(heads, room)
    rule = Line((Span("─" * width, "dim"),))
    return SideBySide([*head, rule], _beside(bodies, room))


def differing(words: Sequence[str], original: Sequence[str]) -> list[bool]:
    """Which words stand in no run that the original has too: ['a', 'x', 'c'] against ['a', 'b', 'c'] -> [False, True, False].
    Only the first 3000 words are compared; the others are not marked."""
    mine, theirs = [[word.strip() for word in each[:_MOST_COMPARED]] for each in (words, original)]
    marks = [True] * len(mine) + [False] * (len(words) - len(mine))
    for block in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
        marks[block.a : block.a + block.size] = [False] * block.size
    return marks


def _head(group: GroupRow, index: int, room: int, is_chosen: bool, is_reference: bool) -> list[Line]:
    rollout = group.rollouts[index]
    title = f"{'▶' if is_chosen else ' '}{index} {one_line(rollout.rollout_id, max(4, room - 8))}{' =' if is_reference else ''}"
    ended = Span(rollout.status.value, STATUS_STYLES.get(rollout.status, ""))
    facts = f" · {rollout.num_tokens} tokens · {len(rollout.turns)} turn{'' if len(rollout.turns) == 1 else 's'}"
    calls = [call for turn in rollout.turns for call in turn.tool_calls]
    failed = sum(call.failed for call in calls)
    used = f"tools {len(calls)}{f', {failed} failed' if failed else ''}" if calls else ""
    versions = rollout.sampled_versions
    sampled = f"version {span(min(versions), max(versions))}" if versions else ""
    lines = [
        Line((Span(title, "bold reverse" if is_chosen else "bold"),)),
        Line((ended, Span(f"{facts}{' · done' if rollout.done else ''}"))),
        Line((Span("reward "), _rated(group, rollout), Span(f"  advantage {signed(rollout.advantage)}"))),
    ]
    for name in dict.fromkeys(name for each in group.rollouts for name in each.rewards):
        lines.append(Line((Span(f"  {one_line(name, max(4, room - 12))} {number(rollout.rewards.get(name))}", "dim"),)))
    rest = " · ".join(part for part in (sampled, used) if part)
    return [*lines, Line((Span(rest, "red" if failed else "dim"),))]


def _rated(group: GroupRow, rollout: RolloutRow) -> Span:
    """The reward: green where it is the best of the group, red where the worst, plain where all are equal."""
    rewards = [each.reward for each in group.rollouts if each.reward is not None]
    style = "bold"
    if rollout.reward is not None and max(rewards) > min(rewards):
        style += " green" if rollout.reward == max(rewards) else " red" if rollout.reward == min(rewards) else ""
    return Span(number(rollout.reward), style)


def _body(rollout: RolloutRow, room: int, original: Sequence[str] | None, marked: str) -> list[Line]:
    text = completion_text(rollout)
    if original is None:
        return flow_text(text, room)
    words = _words(text)
    styles = (
        marked if differs and word.strip() else ""
        for word, differs in zip(words, differing(words, original), strict=True)
    )
    return list(flow_words(zip(words, styles, strict=True), room))


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _beside(columns: Sequence[Sequence[Line]], room: int) -> list[Line]:
    lines = []
    for number_of in range(max((len(column) for column in columns), default=0)):
        spans: list[Span] = []
        for index, column in enumerate(columns):
            if index:
                spans.append(Span(_SEPARATOR, "dim"))
            spans.extend(_exactly(column[number_of] if number_of < len(column) else Line(), room))
        lines.append(Line(tuple(spans)))
    return lines


def _exactly(line: Line, room: int) -> Iterator[Span]:
    """The line in exactly `room` cells."""
    used = 0
    for each in line.spans:
        length = cell_len(each.text)
        if used + length > room:
            yield Span(set_cell_size(each.text, room - used), each.style)
            return
        yield each
        used += length
    yield Span(" " * (room - used))


def _message(message: TaggedMessage) -> str:
    said = message.content if message.origin is Origin.POLICY else f"[{message.name or message.role}] {message.content}"
    calls = (call.get("function", {}) for call in message.tool_calls)
    called = [f"[calls {call.get('name')}] {json.dumps(call.get('arguments'), ensure_ascii=False)}" for call in calls]
    return "\n".join(part for part in (said, *called) if part)


def _reward(rollout: RolloutRow) -> float:
    return float("-inf") if rollout.reward is None else rollout.reward
