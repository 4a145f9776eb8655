"""One rollout on the screen: turn by turn, tokens coloured by one figure, and every figure of the token under the cursor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from grpo_async.store import GroupRow, RolloutRow
from grpo_async.viewer.figures import STATUS_STYLES, count, number, seconds, signed, span, whole
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.base import InspectorScreen, Keys
from grpo_async.viewer.terminal.page_view import PageView
from grpo_async.viewer.terminal.rollout_page import PROMPT_FOLD, rollout_lines, tokens_by_turn, tools_fold, turn_of
from grpo_async.viewer.terminal.token_details import token_details
from grpo_async.viewer.token_colours import SWATCHES, UNKNOWN, UNTRAINED, ColourMode, legend, token_classes
from grpo_async.viewer.token_text import TokenTexts

Walk = Callable[[int], Awaitable[tuple[int, str] | None]]


class RolloutScreen(InspectorScreen):
    """A rollout of the group in the line `seq` of the store (ids may come twice). `walk(by)`: seq and id of the rollout after (1)
    or before (-1) this one, None where there is none."""

    CSS = """
    RolloutScreen #head { height: auto; max-height: 5; background: $surface; padding: 0 1; }
    RolloutScreen #legend { height: auto; max-height: 2; background: $panel; padding: 0 1; }
    RolloutScreen #details { height: 4; background: $surface; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    RolloutScreen PageView { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "colour(1)", "colours"),
        Binding("C", "colour(-1)", "colours back"),
        Binding("t,enter", "fold", "tools"),
        Binding("T", "fold_all", "fold all"),
        Binding("m", "prompt", "prompt"),
        Binding("n", "go(1)", "next"),
        Binding("p", "go(-1)", "previous"),
        Binding("o", "other_steps", "the prompt at other steps"),
    ]
    TITLE_OF_HELP = "A rollout"
    KEYS = (
        ("← → h l", "token before and after; ↑ ↓ j k: line above and below; g G: first and last"),
        ("c C", "colours: advantage, log ratio, sampler's probability, entropy, policy version, mask and marks"),
        ("t enter", "fold or unfold the tool calls of the turn under the cursor, with arguments, result and tokens"),
        ("T", "unfold everything, or fold it"),
        ("m", "the whole prompt, or its first lines"),
        ("n p", "next and previous rollout"),
        ("o", "the prompt at other steps"),
        ("y Y", "copy the id; copy the command line that shows the rollout again"),
    )

    def __init__(self, seq: int, rollout_id: str, walk: Walk) -> None:
        super().__init__()
        self.seq = seq
        self.rollout_id = rollout_id
        self.unfolded: frozenset[str] = frozenset()
        self._walk = walk
        self._group: GroupRow | None = None
        self._rollout: RolloutRow | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield PageView(id="page")
        yield Static("", id="legend", markup=False)
        yield Static("", id="details", markup=False)
        yield Keys(("c", "colours"), ("t", "tools"), ("m", "prompt"), ("n p", "next"), ("o", "steps"), ("y", "copy"))

    @property
    def page(self) -> PageView:
        return self.query_one(PageView)

    def on_mount(self) -> None:
        self.page.focus()
        self.run_worker(self._load(), exclusive=True, group="load")

    async def _load(self) -> None:
        seq = self.seq
        group = await self.ask(lambda table: table.group_at(seq))
        if group is None:
            return
        self._group = group
        self._rollout = next(each for each in group.rollouts if each.rollout_id == self.rollout_id)
        self.page.cursor = -1
        self._lay_out()
        self.page.action_first()
        self._recolour()
        self.query_one("#head", Static).update(_head(self._group, self._rollout))

    def on_resize(self) -> None:
        self._lay_out()
        self._recolour()

    def _lay_out(self) -> None:
        if self._group is not None and self._rollout is not None:
            width = max(20, self.size.width - 3)  # the padding and the scroll bar
            self.page.show(rollout_lines(self._group, self._rollout, self.session.texts, width, self.unfolded))

    # -- colours and the token under the cursor

    def _recolour(self) -> None:
        if self._rollout is None:
            return
        mode, is_dark = self.inspector.colour_mode, self.inspector.current_theme.dark
        self.page.colour([_style(name, is_dark) for name in token_classes(mode, self._rollout)])
        line = Text.assemble((mode.label, "bold"), " ", no_wrap=True)
        used = line.cell_len
        for entry in legend(mode, self._rollout):
            if used + len(entry.text) + 3 > self.size.width - 2:
                line.append("\n")
                used = 0
            line.append(" ").append(f" {entry.text} ", style=_style(entry.name, is_dark))
            used += len(entry.text) + 3
        self.query_one("#legend", Static).update(line)

    def action_colour(self, by: int) -> None:
        modes = list(ColourMode)
        self.inspector.colour_mode = modes[(modes.index(self.inspector.colour_mode) + by) % len(modes)]
        self._recolour()

    def on_page_view_cursor_moved(self, event: PageView.CursorMoved) -> None:
        rollout, details = self._rollout, self.query_one("#details", Static)
        if rollout is None or not 0 <= event.token < len(rollout.completion_ids):
            details.update("no token here; t shows those of tools")
            return
        texts = self.session.texts
        text = texts.of(rollout.completion_ids[event.token]) if isinstance(texts, TokenTexts) else None
        shown = Text(no_wrap=True, overflow="ellipsis")
        for line in token_details(rollout, event.token, text, turn_of(tokens_by_turn(rollout), event.token)):
            for name, value in line:
                shown.append(f"{name} ", style="dim")
                shown.append(f"{value}  ", style="bold")
            shown.append("\n")
        details.update(shown)

    # -- folds

    def on_page_view_fold_clicked(self, event: PageView.FoldClicked) -> None:
        self._toggle(event.fold)

    def action_prompt(self) -> None:
        self._toggle(PROMPT_FOLD)

    def action_fold(self) -> None:
        if self._rollout is None:
            return
        turn = turn_of(tokens_by_turn(self._rollout), self.page.cursor)
        if turn is not None:
            self._toggle(tools_fold(turn))

    def action_fold_all(self) -> None:
        if self._rollout is None:
            return
        everything = frozenset([PROMPT_FOLD, *(tools_fold(turn) for turn in range(len(self._rollout.turns)))])
        self.unfolded = frozenset() if self.unfolded == everything else everything
        self._lay_out()

    def _toggle(self, fold: str) -> None:
        self.unfolded = self.unfolded ^ {fold}
        self._lay_out()

    # -- onwards

    def action_go(self, by: int) -> None:
        self.run_worker(self._go(by), exclusive=True, group="load")

    async def _go(self, by: int) -> None:
        following = await self._walk(by)
        if following is None:
            self.notify("that was the last one" if by > 0 else "that was the first one")
            return
        self.seq, self.rollout_id = following
        self.unfolded = frozenset()
        await self._load()

    def action_other_steps(self) -> None:
        from grpo_async.viewer.terminal.history import HistoryScreen

        if self._group is not None:
            self.app.push_screen(HistoryScreen(self._group.prompt_hash, self.seq))

    def subject(self) -> tuple[str, list[str]] | None:
        return self.rollout_id, ["--rollout", self.rollout_id]


def _style(name: str, is_dark: bool) -> Style:
    """The style of a class of token_colours."""
    if name == UNTRAINED:
        return Style(dim=True)
    if name == UNKNOWN:
        return Style(italic=True)
    swatch = SWATCHES[name]
    return Style(bgcolor=swatch.dark if is_dark else swatch.light)


def _head(group: GroupRow, rollout: RolloutRow) -> Text:
    index = next((i for i, each in enumerate(group.rollouts) if each.rollout_id == rollout.rollout_id), 0)
    versions = rollout.sampled_versions
    text = Text.assemble(
        (f"rollout {one_line(rollout.rollout_id, 40)}", "bold"),
        f" ({index + 1} of {len(group.rollouts)})  group {group.group_id} ",
        (group.status.value, STATUS_STYLES.get(group.status, "")),
        f"  step {whole(group.step)}  ",
        (rollout.status.value, STATUS_STYLES.get(rollout.status, "")),
        "  done" if rollout.done else "",
    )
    text.append("\nreward ", style="dim")
    text.append(number(rollout.reward), style="bold")
    text.append("  advantage ", style="dim")
    text.append(signed(rollout.advantage), style="bold")
    if len(rollout.rewards) > 1 or set(rollout.rewards.values()) != {rollout.reward}:
        for name, value in rollout.rewards.items():
            text.append(f"  {one_line(name, 24)} ", style="dim")
            text.append(number(value))
    oldest, newest = (min(versions), max(versions)) if versions else (None, None)
    stale = "" if group.step is None or oldest is None else f"  staleness {group.step - 1 - oldest}"
    text.append(
        f"\n{count(rollout.num_tokens, 'token')}  {count(len(rollout.turns), 'turn')}  version {span(oldest, newest)}{stale}"
        f"  {seconds(rollout.total_duration_s)}",
        style="dim",
    )
    for name, noted in rollout.extra.items():
        text.append(f"  {one_line(name, 24)}: {one_line(str(noted), 60)}", style="dim")
    if rollout.error is not None:
        text.append(f"\n{one_line(rollout.error, 300)}", style="red")
    return text
