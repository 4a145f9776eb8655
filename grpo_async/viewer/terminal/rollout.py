"""One rollout on the screen: turn by turn, tokens colored by one of their values, and all values of the token under the cursor.

Folds: "prompt" (its first lines, or all of it), "tools-N" (the calls of turn N in a line each, or with arguments, results and the
tokens of the answer). A folded token has no place on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Footer, Static

from grpo_async.records import Origin, root_id
from grpo_async.store import GroupRow, RolloutRow, TurnRow
from grpo_async.utils.safe_text import quoted, visible_line
from grpo_async.utils.text import count, duration
from grpo_async.viewer.format import (
    STATUS_STYLES,
    call_text,
    call_tree,
    number,
    or_dash,
    prompt_of,
    signed,
    versions,
)
from grpo_async.viewer.terminal.base import RowScreen, Session, Walk, key
from grpo_async.viewer.terminal.lines import Line, PageView, Span, flow_text, flow_tokens
from grpo_async.viewer.token_colors import (
    SWATCHES,
    UNKNOWN,
    UNTRAINED,
    ColorMode,
    at,
    flag_names,
    legend,
    log_ratio,
    token_classes,
)
from grpo_async.viewer.token_text import TokenTexts

_PROMPT_LINES = 6  # of a folded prompt's message
_INDENT = 2
PROMPT_FOLD = "prompt"


def tools_fold(turn: int) -> str:
    return f"tools-{turn}"


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Where a turn's tokens are in the completion: [first, answer) were sampled, [answer, end) are of tools or environments."""

    first: int
    answer: int
    end: int


def tokens_by_turn(rollout: RolloutRow) -> list[TurnTokens]:
    """Worked example: turns of 2 and 1 tokens, mask [1, 1, 0, 0, 1] -> (0, 2, 4), (4, 5, 5)."""
    found, first = [], 0
    for turn in rollout.turns:
        answer = end = first + turn.num_tokens
        while end < len(rollout.mask) and not rollout.mask[end]:
            end += 1
        found.append(TurnTokens(first, answer, end))
        first = end
    return found


def turn_of(rollout: RolloutRow, token: int) -> int | None:
    """The turn that a token belongs to, with the answers to its calls."""
    places = enumerate(tokens_by_turn(rollout))
    return next((turn for turn, place in places if place.first <= token < place.end), None)


def token_details(rollout: RolloutRow, index: int, texts: TokenTexts | str) -> list[list[tuple[str, str]]]:
    """Lines of (name, value) pairs about one token."""
    is_sampled, turn = bool(rollout.mask[index]), turn_of(rollout, index)
    token_id = rollout.completion_ids[index]
    first = [
        ("token", f"{index + 1} of {len(rollout.completion_ids)}"),
        ("id", str(token_id)),
        ("text", quoted(texts.of(token_id)) if isinstance(texts, TokenTexts) else "-"),
        ("turn", "-" if turn is None else str(turn + 1)),
        ("version", str(rollout.versions[index]) if is_sampled else "-"),
    ]
    if not is_sampled:
        return [first, [("mask", "0: not trained on (a tool's answer, an environment's text, or the chat template)")]]
    ratio = log_ratio(rollout, index)
    flags = ", ".join(flag_names(at(rollout.token_flags, index))) or "none: trained on"
    if rollout.token_flags is None:
        flags = "not recorded: no update used it, or record.rollouts.token_stats"
    return [
        first,
        [
            ("sampler", _likely(rollout.logprobs[index])),
            ("trainer", _likely(at(rollout.trainer_logprobs, index))),
            ("proximal", _likely(at(rollout.proximal_logprobs, index))),
        ],
        [
            ("log ratio", signed(ratio, 4)),
            ("ratio", "-" if ratio is None else f"{math.exp(min(ratio, 700.0)):.4f}"),
            ("weight", number(at(rollout.weights, index), 4)),
            ("entropy", number(at(rollout.entropies, index), 4)),
        ],
        [("advantage", signed(rollout.advantage)), ("flags", flags)],
    ]


def _likely(logprob: float | None) -> str:
    """-0.6931 -> '-0.6931 (50.0%)'."""
    return "-" if logprob is None else f"{logprob:.4f} ({math.exp(min(logprob, 0.0)):.1%})"


# -- the page


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """The lines about a rollout in a width (cells). `texts` that are a sentence: tokens are shown by their ids, and the messages as
    stored."""

    group: GroupRow
    rollout: RolloutRow
    texts: TokenTexts | str
    width: int
    unfolded: frozenset[str] = frozenset()

    def lines(self) -> Iterator[Line]:
        rollout, width = self.rollout, self.width
        limit = None if PROMPT_FOLD in self.unfolded else _PROMPT_LINES
        for message in prompt_of(self.group, rollout):
            yield self._heading(f"{message.role} ({message.origin.value})", PROMPT_FOLD)
            yield from flow_text(message.content, width, indent=_INDENT, limit=limit)
            for call in message.tool_calls:
                yield from flow_text(f"calls {visible_line(call_text(call), 460)}", width, indent=_INDENT, style="dim")
        if isinstance(self.texts, str):
            yield from flow_text(self.texts, width, style="dim italic")
        said = [message for message in rollout.messages if message.origin is Origin.POLICY]  # one for each turn
        end = 0
        for index, (turn, place) in enumerate(zip(rollout.turns, tokens_by_turn(rollout), strict=True)):
            yield self._heading(_turn_title(index, turn, rollout, place))
            if isinstance(self.texts, str) and index < len(said):
                yield from flow_text(said[index].content, width, indent=_INDENT)
            yield from self._tokens(place.first, place.answer)
            if turn.parse_error is not None:
                problem = f"not searched for tool calls: {turn.parse_error}"
                yield from flow_text(problem, width, indent=_INDENT, style="yellow", limit=4)
            yield from self._tools(index, turn, place)
            end = place.end
        yield from self._tokens(end, len(rollout.completion_ids))
        if not rollout.turns:
            yield Line()
            yield from flow_text("nothing was generated", width, style="dim italic")
        if rollout.branches:
            yield self._heading("calls in all branches; b shows the next one")
            for each in call_tree(self.group, rollout):
                style = "bold" if each.is_path else ""
                yield from flow_text(each.text, width, indent=_INDENT * (each.depth + 1), style=style)

    def _heading(self, text: str, fold: str = "") -> Line:
        shown = visible_line(text, self.width - 4)
        rule = Span("─" * max(0, self.width - len(shown) - 3), "dim cyan")
        return Line((Span(f"─ {shown} ", "bold cyan"), rule), fold)

    def _tokens(self, first: int, end: int) -> Iterator[Line]:
        def label(index: int) -> str:
            token_id = self.rollout.completion_ids[index]
            return self.texts.of(token_id) if isinstance(self.texts, TokenTexts) else f"{token_id} "

        return flow_tokens(((index, label(index)) for index in range(first, end)), self.width, indent=_INDENT)

    def _tools(self, index: int, turn: TurnRow, place: TurnTokens) -> Iterator[Line]:
        """The tool calls of a turn, and the tokens that followed it."""
        fold = tools_fold(index)
        is_open = fold in self.unfolded
        arrow = "▾" if is_open else "▸"
        for call in turn.tool_calls:
            style = "red" if call.failed else "cyan"
            name, outcome = (
                visible_line(call.name, 60),
                f"{'failed ' if call.failed else ''}{duration(call.duration_s)}",
            )
            if not is_open:
                arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
                said = f"{arrow} {name}({visible_line(arguments, 200)})  {outcome} → {visible_line(call.result, 200)}"
                yield Line((Span(visible_line(said, self.width), style),), fold)
                continue
            yield Line((Span(f"{arrow} {name}", f"bold {style}"), Span(f"  {outcome}", style)), fold)
            for argument, value in call.arguments.items():  # text stands as it is, so that code can be read
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield from flow_text(f"{argument} = {shown}", self.width, indent=4, style="dim")
            yield Line((Span("  → result", f"bold {style}"),), fold)
            yield from flow_text(call.result, self.width, indent=4)
        if place.end > place.answer:
            of = "of the answer" if turn.tool_calls else "of the environment or the template"
            yield Line((Span(f"{arrow} {place.end - place.answer} tokens {of}, not trained on", "dim"),), fold)
            if is_open:
                yield from self._tokens(place.answer, place.end)


def _turn_title(index: int, turn: TurnRow, rollout: RolloutRow, place: TurnTokens) -> str:
    sampled_by = sorted(set(rollout.versions[place.first : place.answer]))
    durations = duration(turn.generation_duration_s)
    if turn.tool_execution_duration_s:
        durations += f" + {duration(turn.tool_execution_duration_s)} tools"
    parts = [f"turn {index + 1}", count(turn.num_tokens, "token"), visible_line(turn.ended_by, 40), durations]
    if sampled_by:
        parts.append(f"v{sampled_by[0]}" + (f"-{sampled_by[-1]}" if len(sampled_by) > 1 else ""))
    return " · ".join(parts)


class RolloutScreen(RowScreen):
    """A rollout, turn by turn."""

    CSS = """
    RolloutScreen #head { height: auto; max-height: 5; background: $surface; padding: 0 1; }
    RolloutScreen #legend { height: auto; max-height: 2; background: $panel; padding: 0 1; }
    RolloutScreen #details { height: 4; background: $surface; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    RolloutScreen PageView { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        key("c", "color(1)", "colors: " + ", ".join(mode.label for mode in ColorMode), "colors"),
        key("C", "color(-1)", "the colors before"),
        key(
            "t,enter", "fold", "the tool calls of the turn under the cursor with arguments, result and tokens", "tools"
        ),
        key("T", "fold_all", "unfold everything, or fold it"),
        key("m", "prompt", "the whole prompt, or its first lines", "prompt"),
        key("b", "branch", "the next branch of an agent that changed its history, then the rollout again", "branch"),
    ]
    TITLE_OF_HELP = "A rollout"

    def __init__(self, session: Session, seq: int, rollout_id: str, walk: Walk) -> None:
        super().__init__(session, seq, rollout_id, walk)
        self._unfolded: frozenset[str] = frozenset()
        self._rollout: RolloutRow | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield PageView(self._toggle)
        yield Static("", id="legend", markup=False)
        yield Static("", id="details", markup=False)
        yield Footer(compact=True)

    @property
    def page(self) -> PageView:
        return self.query_one(PageView)

    def on_mount(self) -> None:
        self.watch(self.page, "cursor", self._show_details)

    def show_row(self, group: GroupRow) -> None:
        self._show(group, next(each for each in group.rollouts if each.rollout_id == self.rollout_id))

    def _show(self, group: GroupRow, rollout: RolloutRow) -> None:
        """The rollout, or one of its branches."""
        self._rollout, self._unfolded = rollout, frozenset()
        self._lay_out()
        self.page.action_end(-1)
        self._show_details(self.page.cursor)  # of another rollout, perhaps at the same place
        self._recolor()
        self.query_one("#head", Static).update(_head(group, rollout))

    def on_resize(self) -> None:
        self._lay_out()
        self._recolor()

    def _lay_out(self) -> None:
        if self.group is not None and self._rollout is not None:
            width = max(20, self.size.width - 3)  # the padding and the scroll bar
            page = RolloutPage(
                group=self.group,
                rollout=self._rollout,
                texts=self.session.texts,
                width=width,
                unfolded=self._unfolded,
            )
            self.page.show(list(page.lines()))

    # -- colors and the token under the cursor

    def _recolor(self) -> None:
        if self._rollout is None:
            return
        mode, is_dark = self.session.color_mode, self.app.current_theme.dark
        self.page.color([_style(name, is_dark) for name in token_classes(mode, self._rollout)])
        line = Text.assemble((mode.label, "bold"), " ", no_wrap=True)
        used = line.cell_len
        for entry in legend(mode, self._rollout):
            if used + len(entry.text) + 3 > self.size.width - 2:
                line.append("\n")
                used = 0
            line.append(" ").append(f" {entry.text} ", style=_style(entry.name, is_dark))
            used += len(entry.text) + 3
        self.query_one("#legend", Static).update(line)

    def action_color(self, by: int) -> None:
        modes = list(ColorMode)
        self.session.color_mode = modes[(modes.index(self.session.color_mode) + by) % len(modes)]
        self._recolor()

    def _show_details(self, token: int) -> None:
        if self._rollout is None or not 0 <= token < len(self._rollout.completion_ids):
            self.query_one("#details", Static).update("no token here; t shows those of tools")
            return
        shown = Text(no_wrap=True, overflow="ellipsis")
        for line in token_details(self._rollout, token, self.session.texts):
            for name, value in line:
                shown.append(f"{name} ", style="dim").append(f"{value}  ", style="bold")
            shown.append("\n")
        self.query_one("#details", Static).update(shown)

    # -- folds

    def action_prompt(self) -> None:
        self._toggle(PROMPT_FOLD)

    def action_fold(self) -> None:
        turn = None if self._rollout is None else turn_of(self._rollout, self.page.cursor)
        if turn is not None:
            self._toggle(tools_fold(turn))

    def action_fold_all(self) -> None:
        if self._rollout is not None:
            everything = frozenset([PROMPT_FOLD, *map(tools_fold, range(len(self._rollout.turns)))])
            self._unfolded = frozenset() if self._unfolded == everything else everything
            self._lay_out()

    def _toggle(self, fold: str) -> None:
        self._unfolded = self._unfolded ^ {fold}
        self._lay_out()

    # -- onwards

    def action_branch(self) -> None:
        if self.group is None or self._rollout is None:
            return
        paths = next(each for each in self.group.rollouts if each.rollout_id == self.rollout_id).paths
        if len(paths) == 1:
            self.notify("this rollout has no branches")
            return
        at = next(i for i, path in enumerate(paths) if path.rollout_id == self._rollout.rollout_id)
        self._show(self.group, paths[(at + 1) % len(paths)])

    def subject(self) -> tuple[str, list[str]] | None:
        shown = self.rollout_id if self._rollout is None else self._rollout.rollout_id
        return shown, ["--rollout", shown]


def _style(name: str, is_dark: bool) -> Style:
    """The style of a class of token_colors."""
    if name == UNTRAINED:
        return Style(dim=True)
    if name == UNKNOWN:
        return Style(italic=True)
    dark, light = SWATCHES.get(name, (None, None))
    return Style(bgcolor=dark if is_dark else light)


def _head(group: GroupRow, rollout: RolloutRow) -> Text:
    index = next(i for i, each in enumerate(group.rollouts) if each.rollout_id == root_id(rollout.rollout_id))
    text = Text.assemble(
        (f"rollout {visible_line(rollout.rollout_id, 40)}", "bold"),
        f" ({'' if rollout.parent is None else 'a branch, '}{index + 1} of {len(group.rollouts)})  group {group.group_id} ",
        (group.status.value, STATUS_STYLES.get(group.status, "")),
        f"  step {or_dash(group.step)}  ",
        (rollout.status.value, STATUS_STYLES.get(rollout.status, "")),
        "  done" if rollout.done else "",
        ("\nreward ", "dim"),
        (number(rollout.reward), "bold"),
        ("  advantage ", "dim"),
        (signed(rollout.advantage), "bold"),
    )
    if len(rollout.rewards) > 1 or set(rollout.rewards.values()) != {rollout.reward}:
        for name, value in rollout.rewards.items():
            text.append(f"  {visible_line(name, 24)} ", style="dim").append(number(value))
    staleness = ""
    if group.step is not None and rollout.sampled_versions:
        staleness = f"  staleness {group.step - 1 - min(rollout.sampled_versions)}"
    counts = f"{count(rollout.num_tokens, 'token')}  {count(len(rollout.turns), 'turn')}"
    line = f"\n{counts}  version {versions(rollout)}{staleness}  {duration(rollout.total_duration_s)}"
    text.append(line, style="dim")
    for name, noted in rollout.extra.items():
        text.append(f"  {visible_line(name, 24)}: {visible_line(str(noted), 60)}", style="dim")
    if rollout.error is not None:
        text.append(f"\n{visible_line(rollout.error, 300)}", style="red")
    return text
