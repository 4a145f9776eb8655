"""Histograms of what the filter lets through: reward, staleness, length and others, as bars."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Footer, Static

from grpo_async.store.query import Query
from grpo_async.store.summaries import Histogram
from grpo_async.viewer.format import count
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.base import InspectorScreen, Pager, Session, key
from grpo_async.viewer.terminal.table import bar

_FIELDS = (
    "reward",
    "staleness",
    "length",
    "advantage",
    "group_std",
    "entropy",
    "turns",
    "tool_calls",
    "ratio_max",
    "duration",
)
_MOST = 4  # at a time
_WHOLE = {"staleness", "length", "turns", "tool_calls"}  # fields of whole numbers


class HistogramScreen(InspectorScreen):
    """Two histograms at a time, below each other; four where the screen is large enough. `text` is the filter that `query` says."""

    CSS = """
    HistogramScreen #head { height: 1; background: $primary-background; padding: 0 1; }
    HistogramScreen Pager { layout: grid; grid-size: 2; grid-rows: auto; grid-gutter: 0 2; padding: 0 1; }
    HistogramScreen.narrow Pager { grid-size: 1; }
    HistogramScreen .bars { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        key("right,l,n,tab", "turn(1)", "others: length, advantage, std of the group, entropy, turns, ...", "others"),
        key("left,h,p", "turn(-1)", "those before"),
    ]
    TITLE_OF_HELP = "Histograms"

    def __init__(self, session: Session, text: str, query: Query) -> None:
        super().__init__(session)
        self._text, self._query = text, query
        self._first = 0
        self.shown: list[Histogram] = []

    def compose(self) -> ComposeResult:
        what = one_line(self._text, 80) or "all rollouts"
        yield Static(Text.assemble(("histograms", "bold"), f"  {what}", no_wrap=True), id="head", markup=False)
        with Pager():
            for _ in range(_MOST):
                yield Static("", classes="bars", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.action_turn(0)

    @property
    def _is_narrow(self) -> bool:
        return self.size.width < 100 or self.size.height < 36

    @property
    def _num_shown(self) -> int:
        return 2 if self._is_narrow else _MOST

    def action_turn(self, by: int) -> None:
        self._first = (self._first + by * self._num_shown) % len(_FIELDS)
        self.run_worker(self._load(), exclusive=True, group="load")

    async def _load(self) -> None:
        fields = [_FIELDS[(self._first + place) % len(_FIELDS)] for place in range(self._num_shown)]
        superseded, bins = self.session.with_superseded, 8 if self._is_narrow else 16
        found = await self.ask(
            lambda table: [table.histogram(f, self._query, bins=bins, with_superseded=superseded) for f in fields]
        )
        if found is not None:
            self.shown = found
            self._draw()

    def on_resize(self) -> None:
        self.set_class(self._is_narrow, "narrow")
        if self.shown and len(self.shown) != self._num_shown:
            self.action_turn(0)
        self._draw()

    def _draw(self) -> None:
        width = self.size.width - 4 if self._is_narrow else (self.size.width - 8) // 2
        for place, widget in enumerate(self.query(".bars").results(Static)):
            widget.display = place < len(self.shown)
            if widget.display:
                widget.update(histogram_text(self.shown[place], width).append("\n"))

    def subject(self) -> tuple[str, list[str]] | None:
        return self._text, [self._text] if self._text else []


def histogram_text(histogram: Histogram, width: int) -> Text:
    """One line a bin: its range, its bar, its count; the first line names the field."""
    text = Text.assemble((histogram.field, "bold"), f"  {count(sum(histogram.counts), 'rollout')}", no_wrap=True)
    if histogram.num_null:
        text.append(f", {histogram.num_null:,} without a value", style="dim")
    if not histogram.counts:
        return text.append("\n  no values", style="dim")
    is_whole = histogram.field in _WHOLE
    labels = [_range(low, high, is_whole) for low, high in zip(histogram.edges[:-1], histogram.edges[1:], strict=True)]
    left, right = max(map(len, labels)), max(len(f"{each:,}") for each in histogram.counts)
    room = max(4, width - left - right - 3)
    most = max(histogram.counts)
    for label, number_of in zip(labels, histogram.counts, strict=True):
        text.append(f"\n{label:>{left}} ")
        text.append(bar(number_of, 0, most, room), style="green")
        text.append(f" {number_of:>{right},}", style="" if number_of else "dim")
    return text


def _range(low: float, high: float, is_whole: bool) -> str:
    """'0.25..0.5'; a bin of one integer is that integer: [1.5, 2.5) and [2, 3) -> '2'."""
    middle = round((low + high) / 2)
    if high - low == 1 and (low + high) / 2 == middle:
        return str(middle)
    if is_whole:
        first, last = -int(-low // 1), -int(-high // 1) - 1  # the integers from the first >= low to the last < high
        return str(first) if last <= first else f"{first}..{last}"
    return f"{low:.4g}..{high:.4g}"
