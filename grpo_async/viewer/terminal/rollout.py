"""One rollout on the screen: turn by turn, tokens coloured by one figure, and every figure of the token under the cursor.

Folds: "prompt" (its first lines, or all of it), "tools-N" (the calls of turn N in a line each, or with arguments, results and the
tokens of the answer). A folded token has no place on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from grpo_async.records import Origin, TaggedMessage, ToolCallRecord
from grpo_async.store import GroupRow, RolloutRow, TurnRow
from grpo_async.viewer.figures import STATUS_STYLES, count, number, seconds, signed, span, whole
from grpo_async.viewer.safe_text import one_line, quoted, visible
from grpo_async.viewer.terminal.base import InspectorScreen, Keys, WalkRollouts
from grpo_async.viewer.terminal.lines import Line, PageView, Span, flow_text, flow_tokens
from grpo_async.viewer.token_colours import (
    SWATCHES,
    UNKNOWN,
    UNTRAINED,
    ColourMode,
    legend,
    log_ratio,
    mark_words,
    token_classes,
)
from grpo_async.viewer.token_text import TokenTexts


def token_details(rollout: RolloutRow, index: int, text: str | None, turn: int | None) -> list[list[tuple[str, str]]]:
    """Lines of (name, value) pairs. `text` None: token texts are not known; `turn` None: it is in none."""
    kept = bool(rollout.mask[index])
    first = [
        ("token", f"{index + 1} of {len(rollout.completion_ids)}"),
        ("id", str(rollout.completion_ids[index])),
        ("text", "-" if text is None else quoted(text)),
        ("turn", "-" if turn is None else str(turn + 1)),
        ("version", str(rollout.versions[index]) if kept else "-"),
    ]
    if not kept:
        return [first, [("mask", "0: not trained on (a tool's answer, an environment's text, or the chat template)")]]
    sampler = _at(rollout.logprobs, index)
    trainer = _at(rollout.trainer_logprobs, index)
    proximal = _at(rollout.proximal_logprobs, index)
    difference = log_ratio(trainer, sampler)
    marks = mark_words(_whole_at(rollout.marks, index))
    return [
        first,
        [("sampler", _likely(sampler)), ("trainer", _likely(trainer)), ("proximal", _likely(proximal))],
        [
            ("log ratio", signed(difference, 4)),
            ("ratio", "-" if difference is None else f"{math.exp(min(difference, 700.0)):.4f}"),
            ("weight", number(_at(rollout.weights, index), 4)),
            ("entropy", number(_at(rollout.entropies, index), 4)),
        ],
        [("advantage", signed(rollout.advantage)), ("marks", _words(rollout, marks))],
    ]


def _words(rollout: RolloutRow, marks: list[str]) -> str:
    if rollout.marks is None:
        return "not recorded: no update used it, or record.rollouts.token_figures"
    return ", ".join(marks) or "none: trained on"


def _likely(logprob: float | None) -> str:
    """-0.6931 -> '-0.6931 (50.0%)'."""
    return "-" if logprob is None else f"{logprob:.4f} ({math.exp(min(logprob, 0.0)):.1%})"


def _at(values: Sequence[float | None] | None, index: int) -> float | None:
    return None if values is None else values[index]


def _whole_at(values: Sequence[int | None] | None, index: int) -> int | None:
    return None if values is None else values[index]


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
    for index, (turn, place) in enumerate(zip(rollout.turns, places, strict=True)):
        yield _heading(_turn_title(index, turn, rollout, place), width)
        for message in messages[index] if messages else ():
            yield from flow_text(message.content, width, indent=_INDENT)
        yield from flow_tokens(_labels(rollout, texts, place.first, place.answer), width, indent=_INDENT)
        if turn.parse_error is not None:
            said = f"not searched for tool calls: {visible(turn.parse_error)}"
            yield from flow_text(said, width, indent=_INDENT, style="yellow", limit=4)
        if turn.tool_calls or place.end > place.answer:
            yield from _tools(index, turn, rollout, texts, place, width, unfolded)
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

    def __init__(self, seq: int, rollout_id: str, walk: WalkRollouts) -> None:
        super().__init__()
        self.seq = seq
        self.rollout_id = rollout_id
        self.unfolded: frozenset[str] = frozenset()
        self._walk = walk
        self._group: GroupRow | None = None
        self._rollout: RolloutRow | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        yield PageView()
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
        if self._group is not None:
            self.inspector.open_history(self._group.prompt_hash, self.seq)

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
