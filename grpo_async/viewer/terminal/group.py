"""One group on the screen: its rollouts side by side, what they were rewarded for, and where their texts differ.

Differences: the words of a text that its reference (the best rollout, at first) does not have at that place are marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich import box
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Footer, Static

from grpo_async.records import Origin, TaggedMessage
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.utils.safe_text import visible, visible_line
from grpo_async.utils.text import count
from grpo_async.viewer.format import STATUS_STYLES, call_text, number, or_dash, prompt_of, signed, span, versions
from grpo_async.viewer.terminal.base import Pager, RowScreen, Session, Walk, key
from grpo_async.viewer.terminal.rollout import RolloutScreen
from grpo_async.viewer.text_diff import differences

DIFFERENT, DIFFERENT_LIGHT = "on #5c4a14", "on #ffe79a"
_SEPARATOR = 3  # cells: " │ "


def best_rollout(rollouts: Sequence[RolloutRow]) -> int:
    """Index of the highest reward, the first of equals; 0 where nothing was scored."""
    rewards = [float("-inf") if rollout.reward is None else rollout.reward for rollout in rollouts]
    return rewards.index(max(rewards)) if rewards else 0


def completion_text(rollout: RolloutRow) -> str:
    """What was said, with tool calls and answers in brackets; the error of a rollout that has one comes first."""
    error = [f"[error] {rollout.error}"] if rollout.error is not None else []
    return visible("\n".join([*error, *(_message(message) for message in rollout.messages)]))


def _message(message: TaggedMessage) -> str:
    said = message.content if message.origin is Origin.POLICY else f"[{message.name or message.role}] {message.content}"
    return "\n".join(part for part in (said, *(f"[calls] {call_text(call)}" for call in message.tool_calls)) if part)


def columns_that_fit(width: int, num_rollouts: int, wanted: int | None) -> int:
    """How many rollouts stand side by side: as many as `wanted`, or as fit with 34 cells each."""
    most = max(1, (width + _SEPARATOR) // ((12 if wanted else 34) + _SEPARATOR))
    return max(1, min(num_rollouts, wanted or most, most))


def marked_text(rollout: RolloutRow, original: str | None, style: str) -> Text:
    """The completion; what `original` does not have there has the style. None: nothing is marked."""
    text = completion_text(rollout)
    pieces = [("same", text)] if original is None else differences(original, text)
    return Text.assemble(*((said, style if kind == "right" else "") for kind, said in pieces if kind != "left"))


def _side_by_side(cells: Sequence[Text], *, no_wrap: bool) -> Table:
    """Columns of equal width, with a line between them."""
    table = Table(box=box.MINIMAL, show_header=False, show_edge=False, pad_edge=False, expand=True, border_style="dim")
    for _ in cells:
        table.add_column(ratio=1, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    table.add_row(*cells)
    return table


def _rollout_head(group: GroupRow, index: int, *, is_chosen: bool, is_reference: bool) -> Text:
    rollout = group.rollouts[index]
    calls = [call for turn in rollout.turns for call in turn.tool_calls]
    failed = sum(bool(call.failed) for call in calls)
    used = f"tools {len(calls)}{f', {failed} failed' if failed else ''}" if calls else ""
    sampled_by = f"version {versions(rollout)}" if rollout.sampled_versions else ""
    counts = f" · {count(rollout.num_tokens, 'token')} · {count(len(rollout.turns), 'turn')}"
    title = f"{'▶' if is_chosen else ' '}{index} {visible_line(rollout.rollout_id, 60)}{' =' if is_reference else ''}"
    text = Text.assemble(
        (title, "bold reverse" if is_chosen else "bold"),
        "\n",
        (rollout.status.value, STATUS_STYLES.get(rollout.status, "")),
        f"{counts}{' · done' if rollout.done else ''}\nreward ",
        (number(rollout.reward), _reward_style(group, rollout)),
        f"  advantage {signed(rollout.advantage)}\n",
    )
    for name in dict.fromkeys(name for each in group.rollouts for name in each.rewards):
        text.append(f"  {visible_line(name, 40)} {number(rollout.rewards.get(name))}\n", style="dim")
    return text.append(" · ".join(part for part in (sampled_by, used) if part), style="red" if failed else "dim")


def _reward_style(group: GroupRow, rollout: RolloutRow) -> str:
    """Green where it is the best of the group, red where the worst, plain where all are equal."""
    rewards = [each.reward for each in group.rollouts if each.reward is not None]
    if rollout.reward is None or max(rewards) == min(rewards):
        return "bold"
    return {max(rewards): "bold green", min(rewards): "bold red"}.get(rollout.reward, "bold")


class GroupScreen(RowScreen):
    """A group side by side; `chosen` is the rollout under the cursor, `reference` the one that texts are compared with."""

    CSS = """
    GroupScreen #head { height: 1; background: $primary-background; padding: 0 1; }
    GroupScreen #prompt { height: auto; max-height: 3; background: $surface; padding: 0 1; }
    GroupScreen #rollouts { height: auto; padding-right: 1; border-bottom: solid $foreground 20%; }
    GroupScreen Pager { scrollbar-gutter: stable; }
    GroupScreen #texts { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter", "open", "open the chosen rollout", "open"),
        key("left,h", "choose(-1)", "choose the rollout before"),
        key("right,l,tab", "choose(1)", "choose the next rollout"),
        key("d", "differences", "mark the words that differ from the reference, or not", "differences"),
        key("equals_sign", "reference", "the chosen rollout is the reference; at first it is the best", "reference"),
        key("plus", "more(1)", "more rollouts side by side"),
        key("minus", "more(-1)", "fewer rollouts side by side"),
    ]
    TITLE_OF_HELP = "A group, side by side"

    def __init__(self, session: Session, seq: int, rollout_id: str, walk: Walk) -> None:
        super().__init__(session, seq, rollout_id, walk)
        self.chosen = 0
        self.reference = 0
        self._shows_differences = True
        self._first = 0
        self._wanted: int | None = None  # columns, as the user asked for

    def compose(self) -> ComposeResult:
        for name in ("head", "prompt", "rollouts"):
            yield Static("", id=name, markup=False)
        with Pager():
            yield Static("", id="texts", markup=False)
        yield Footer(compact=True)

    def show_row(self, group: GroupRow) -> None:
        self.chosen = self._first = 0
        self.reference = best_rollout(group.rollouts)
        self.query_one("#prompt", Static).update(_prompt(group))
        self.query_one(Pager).scroll_home(animate=False)
        self._lay_out()

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        group = self.group
        if group is None:
            return
        fit = columns_that_fit(self.size.width - 1, len(group.rollouts), self._wanted)
        self._first = max(0, min(self._first, self.chosen, len(group.rollouts) - fit), self.chosen - fit + 1)
        shown = range(self._first, min(self._first + fit, len(group.rollouts)))
        is_compared = self._shows_differences and len(group.rollouts) > 1
        original = completion_text(group.rollouts[self.reference]) if is_compared else None
        style = DIFFERENT if self.app.current_theme.dark else DIFFERENT_LIGHT
        heads = [
            _rollout_head(group, i, is_chosen=i == self.chosen, is_reference=is_compared and i == self.reference)
            for i in shown
        ]
        texts = [marked_text(group.rollouts[i], None if i == self.reference else original, style) for i in shown]
        self.query_one("#head", Static).update(_head(group, shown, self.reference if is_compared else None))
        self.query_one("#rollouts", Static).update(_side_by_side(heads, no_wrap=True))
        nothing = Text("the group has no rollout", style="dim italic")
        self.query_one("#texts", Static).update(_side_by_side(texts, no_wrap=False) if texts else nothing)

    def action_choose(self, by: int) -> None:
        if self.group is not None and self.group.rollouts:
            self.chosen = max(0, min(self.chosen + by, len(self.group.rollouts) - 1))
            self._lay_out()

    def action_differences(self) -> None:
        self._shows_differences = not self._shows_differences
        self._lay_out()

    def action_reference(self) -> None:
        self.reference, self._shows_differences = self.chosen, True
        self._lay_out()

    def action_more(self, by: int) -> None:
        if self.group is not None:
            now = columns_that_fit(self.size.width - 1, len(self.group.rollouts), self._wanted)
            self._wanted = max(1, now + by)
            self._lay_out()

    def action_open(self) -> None:
        if self.group is not None and self.group.rollouts:
            rollout_id = self.group.rollouts[self.chosen].rollout_id
            self.app.push_screen(RolloutScreen(self.session, self.seq, rollout_id, self.walk))

    async def walk(self, by: int) -> tuple[int, str] | None:
        """Choose another rollout of the group; None where there is none."""
        if self.group is None or not 0 <= self.chosen + by < len(self.group.rollouts):
            return None
        self.action_choose(by)
        return self.seq, self.group.rollouts[self.chosen].rollout_id

    def subject(self) -> tuple[str, list[str]] | None:
        if self.group is None:
            return None
        group_id = str(self.group.group_id)
        chosen = self.group.rollouts[self.chosen].rollout_id if self.group.rollouts else group_id
        return chosen, ["--group", group_id]


def _head(group: GroupRow, shown: range, reference: int | None) -> Text:
    return Text.assemble(
        (f"group {group.group_id}", "bold"),
        f"  step {or_dash(group.step)}  prompt {group.prompt_id}  ",
        (group.status.value, STATUS_STYLES.get(group.status, "")),
        f"  {span(shown.start, shown.stop - 1) if shown else 0} of {count(len(group.rollouts), 'rollout')}",
        ("" if reference is None else f"  marked: not in {reference}", "dim"),
        no_wrap=True,
    )


def _prompt(group: GroupRow) -> Text:
    """The last message of the prompt, and what else the dataset has."""
    text = Text()
    if said := prompt_of(group):
        text.append(f"{visible_line(said[-1].role, 20)}: ", style="bold cyan")
        text.append(visible_line(said[-1].content, 400))
    for name, value in group.columns.items():
        text.append(f"  {visible_line(name, 24)} = ", style="dim")
        text.append(visible_line(str(value), 80))
    return text
