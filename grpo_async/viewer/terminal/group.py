"""One group on the screen: its rollouts beside each other, what they were rewarded for, and where their texts differ.

Differences: the words of a text that its reference (the best rollout, at first) does not have at that place are marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from grpo_async.records import Origin, TaggedMessage
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.viewer.figures import STATUS_STYLES, count, number, signed, span, whole
from grpo_async.viewer.safe_text import one_line, visible
from grpo_async.viewer.terminal.base import InspectorScreen, Keys, WalkGroups
from grpo_async.viewer.terminal.lines import Line, LinesView, Span, flow_text, flow_words

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
    heads = [_rollout_head(group, index, room, index == chosen, index == reference) for index in shown]
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


def _rollout_head(group: GroupRow, index: int, room: int, is_chosen: bool, is_reference: bool) -> list[Line]:
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


class GroupScreen(InspectorScreen):
    """The group of the line `seq` of the store (ids may come twice). `walk(by)`: the seq of the group after (1) or before (-1) this
    one, None where there is none."""

    CSS = """
    GroupScreen #head { height: 1; background: $primary-background; padding: 0 1; }
    GroupScreen #prompt { height: auto; max-height: 3; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "choose(-1)", "rollout before"),
        Binding("right,l,tab", "choose(1)", "next rollout"),
        Binding("enter", "open", "open"),
        Binding("n", "go(1)", "next group"),
        Binding("p", "go(-1)", "previous group"),
        Binding("d", "differences", "differences"),
        Binding("equals_sign", "reference", "compare with this one"),
        Binding("plus", "more(1)", "more columns"),
        Binding("minus", "more(-1)", "fewer columns"),
        Binding("o", "other_steps", "the prompt at other steps"),
    ]
    TITLE_OF_HELP = "A group, side by side"
    KEYS = (
        ("← → h l", "choose a rollout; ↑ ↓ j k and pages: scroll the texts; g G: top, end"),
        ("enter", "open the chosen rollout"),
        ("n p", "next and previous group of the table"),
        ("d", "mark the words that differ from the reference, or not"),
        ("=", "the chosen rollout is the reference; at first it is the one with the highest reward"),
        ("+ -", "more or fewer rollouts side by side"),
        ("o", "the prompt at other steps"),
        ("y Y", "copy the id of the chosen rollout; copy the command line that shows the group again"),
    )

    def __init__(self, seq: int, walk: WalkGroups) -> None:
        super().__init__()
        self.seq = seq
        self.chosen = 0
        self.reference = 0
        self.shows_differences = True
        self._first = 0
        self._wanted: int | None = None  # columns, as the user asked for
        self._walk = walk
        self._group: GroupRow | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield Static("", id="prompt", markup=False)
        yield LinesView()
        yield Keys(("enter", "open"), ("n p", "next"), ("d", "differences"), ("=", "reference"), ("o", "steps"))

    def on_mount(self) -> None:
        self.query_one(LinesView).focus()
        self.run_worker(self._load(), exclusive=True, group="load")

    async def _load(self) -> None:
        seq = self.seq
        found = await self.ask(lambda table: table.group_at(seq))
        if found is None:
            return
        self._group = found
        self.chosen = self._first = 0
        self.reference = best_rollout(found.rollouts)
        self.query_one("#prompt", Static).update(_prompt(found))
        self.query_one(LinesView).scroll_home(animate=False, immediate=True)
        self._lay_out()

    def on_resize(self, event: events.Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        group = self._group
        if group is None:
            return
        width = max(20, self.size.width - 1)  # the scroll bar
        fit = columns_that_fit(width, len(group.rollouts), self._wanted)
        self._first = max(0, min(self._first, self.chosen, len(group.rollouts) - fit))
        self._first = max(self._first, self.chosen - fit + 1)
        shown = side_by_side(
            group,
            self._first,
            fit,
            width,
            chosen=self.chosen,
            reference=self.reference if self.shows_differences else None,
            marked=DIFFERENT if self.inspector.current_theme.dark else DIFFERENT_LIGHT,
        )
        self.query_one(LinesView).show(shown.body, shown.head)
        reference = self.reference if self.shows_differences and len(group.rollouts) > 1 else None
        self.query_one("#head", Static).update(_head(group, self._first, fit, reference))

    def action_choose(self, by: int) -> None:
        if self._group is not None and self._group.rollouts:
            self.chosen = max(0, min(self.chosen + by, len(self._group.rollouts) - 1))
            self._lay_out()

    def action_differences(self) -> None:
        self.shows_differences = not self.shows_differences
        self._lay_out()

    def action_reference(self) -> None:
        self.reference, self.shows_differences = self.chosen, True
        self._lay_out()

    def action_more(self, by: int) -> None:
        if self._group is not None:
            now = columns_that_fit(self.size.width - 1, len(self._group.rollouts), self._wanted)
            self._wanted = max(1, now + by)
            self._lay_out()

    def action_open(self) -> None:
        if self._group is not None and self._group.rollouts:
            self.inspector.open_rollout(self.seq, self._group.rollouts[self.chosen].rollout_id, self.walk_rollouts)

    async def walk_rollouts(self, by: int) -> tuple[int, str] | None:
        """Choose the next rollout of the group; None where there is none."""
        if self._group is None or not 0 <= self.chosen + by < len(self._group.rollouts):
            return None
        self.action_choose(by)
        return self.seq, self._group.rollouts[self.chosen].rollout_id

    def action_go(self, by: int) -> None:
        self.run_worker(self._go(by), exclusive=True, group="load")

    async def _go(self, by: int) -> None:
        following = await self._walk(by)
        if following is None:
            self.notify("that was the last one" if by > 0 else "that was the first one")
            return
        self.seq = following
        await self._load()

    def action_other_steps(self) -> None:
        if self._group is not None:
            self.inspector.open_history(self._group.prompt_hash, self.seq)

    def subject(self) -> tuple[str, list[str]] | None:
        if self._group is None:
            return None
        group_id = str(self._group.group_id)
        chosen = self._group.rollouts[self.chosen].rollout_id if self._group.rollouts else group_id
        return chosen, ["--group", group_id]


def _head(group: GroupRow, first: int, fit: int, reference: int | None) -> Text:
    last = min(first + fit, len(group.rollouts)) - 1
    return Text.assemble(
        (f"group {group.group_id}", "bold"),
        f"  step {whole(group.step)}  prompt {group.prompt_id}  ",
        (group.status.value, STATUS_STYLES.get(group.status, "")),
        f"  {span(first, last)} of {count(len(group.rollouts), 'rollout')}",
        ("" if reference is None else f"  marked: not in {reference}", "dim"),
        no_wrap=True,
    )


def _prompt(group: GroupRow) -> Text:
    """The last message of the prompt, what the data set has beside it, and a reset's message where all rollouts heard the same."""
    own = [rollout.reset_messages for rollout in group.rollouts if rollout.reset_messages is not None]
    said = own[0] if own and all(messages == own[0] for messages in own) else group.messages
    text = Text()
    if said:
        text.append(f"{one_line(said[-1].role, 20)}: ", style="bold cyan")
        text.append(one_line(said[-1].content, 400))
    for name, value in group.columns.items():
        text.append(f"  {one_line(name, 24)} = ", style="dim")
        text.append(one_line(str(value), 80))
    return text
