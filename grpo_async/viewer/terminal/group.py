"""One group on the screen: its rollouts beside each other, what they were rewarded for, and where their texts differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from grpo_async.store import GroupRow
from grpo_async.viewer.figures import STATUS_STYLES, count, span, whole
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.base import InspectorScreen, Keys
from grpo_async.viewer.terminal.group_page import (
    DIFFERENT,
    DIFFERENT_LIGHT,
    SideBySide,
    best_rollout,
    columns_that_fit,
    side_by_side,
)

Walk = Callable[[int], Awaitable[int | None]]


class Columns(ScrollView, can_focus=True):
    """Lines below a head that does not scroll."""

    DEFAULT_CSS = "Columns { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up,k", "line(-1)", "up"),
        ("down,j", "line(1)", "down"),
        ("pageup,ctrl+u", "page(-1)", "page up"),
        ("pagedown,ctrl+d,space", "page(1)", "page down"),
        ("home,g", "line(-1000000)", "top"),
        ("end,G", "line(1000000)", "end"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._shown = SideBySide([], [])

    def show(self, shown: SideBySide) -> None:
        self._shown = shown
        self.virtual_size = Size(self.size.width, len(shown.head) + len(shown.body))
        self.refresh()

    def action_line(self, by: int) -> None:
        self.scroll_relative(y=by, animate=False, immediate=True)

    def action_page(self, by: int) -> None:
        self.action_line(by * max(1, self.size.height - len(self._shown.head) - 1))

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        head, body = self._shown.head, self._shown.body
        if y < len(head):
            line = head[y]
        else:
            at = int(self.scroll_offset.y) + y - len(head)
            if at >= len(body):
                return Strip.blank(width, base)
            line = body[at]
        segments = [Segment(each.text, base + Style.parse(each.style) if each.style else base) for each in line.spans]
        return Strip(segments).adjust_cell_length(width, base)


class GroupScreen(InspectorScreen):
    """The group of the line `seq` of the store (ids may come twice). `walk(by)`: the seq of the group after (1) or before (-1) this
    one, None where there is none."""

    CSS = """
    GroupScreen #head { height: 1; background: $primary-background; padding: 0 1; }
    GroupScreen #prompt { height: auto; max-height: 3; background: $surface; padding: 0 1; }
    GroupScreen Columns { padding: 0 0; }
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

    def __init__(self, seq: int, walk: Walk) -> None:
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
        yield Columns()
        yield Keys(("enter", "open"), ("n p", "next"), ("d", "differences"), ("=", "reference"), ("o", "steps"))

    def on_mount(self) -> None:
        self.query_one(Columns).focus()
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
        self.query_one(Columns).scroll_home(animate=False, immediate=True)
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
        self.query_one(Columns).show(shown)
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
        from grpo_async.viewer.terminal.rollout import RolloutScreen

        if self._group is not None and self._group.rollouts:
            self.app.push_screen(
                RolloutScreen(self.seq, self._group.rollouts[self.chosen].rollout_id, self.walk_rollouts)
            )

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
        from grpo_async.viewer.terminal.history import HistoryScreen

        if self._group is not None:
            self.app.push_screen(HistoryScreen(self._group.prompt_hash, self.seq))

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
