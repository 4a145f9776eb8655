"""Histograms of what the filter lets through: reward, staleness, length and others, as bars."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from grpo_async.store.query import Query
from grpo_async.store.summaries import Histogram
from grpo_async.viewer.figures import count
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.base import InspectorScreen, Keys
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


class BarsScreen(InspectorScreen):
    """Two histograms at a time, below each other; four where the screen is large enough."""

    CSS = """
    BarsScreen #head { height: 1; background: $primary-background; padding: 0 1; }
    BarsScreen #both { height: 1fr; layout: grid; grid-size: 2; grid-rows: auto; grid-gutter: 0 2; padding: 0 1; }
    BarsScreen.narrow #both { grid-size: 1; grid-rows: auto; }
    BarsScreen .bars { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l,n,tab", "turn(1)", "next"),
        Binding("left,h,p", "turn(-1)", "previous"),
    ]
    AUTO_FOCUS = "#both"
    TITLE_OF_HELP = "Histograms"
    KEYS = (
        ("← → n p", "other figures: reward, staleness, length, advantage, std of the group, entropy, turns, ..."),
        ("y Y", "copy the filter; copy the command line that opens it again"),
    )

    def __init__(self, text: str, query: Query) -> None:
        super().__init__()
        self._text, self._query = text, query
        self._first = 0
        self._shown: list[Histogram] = []

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        with VerticalScroll(id="both"):
            for _ in range(_MOST):
                yield Static("", classes="bars", markup=False)
        yield Keys(("← →", "other figures"))

    @property
    def fields(self) -> tuple[str, ...]:
        """Those that are shown."""
        return tuple(_FIELDS[(self._first + offset) % len(_FIELDS)] for offset in range(2 if self._narrow else _MOST))

    def on_mount(self) -> None:
        self.run_worker(self._load(), exclusive=True, group="load")

    def action_turn(self, by: int) -> None:
        self._first = (self._first + by * len(self.fields)) % len(_FIELDS)
        self.run_worker(self._load(), exclusive=True, group="load")

    async def _load(self) -> None:
        superseded, fields, bins = self.session.with_superseded, self.fields, 8 if self._narrow else 16
        found = await self.ask(
            lambda table: [table.histogram(f, self._query, bins=bins, with_superseded=superseded) for f in fields]
        )
        if found is not None:
            self._shown = found
            what = one_line(self._text, 80) or "all rollouts"
            self.query_one("#head", Static).update(Text.assemble(("histograms", "bold"), f"  {what}", no_wrap=True))
            self._draw()

    @property
    def _narrow(self) -> bool:
        return self.size.width < 100 or self.size.height < 36

    def on_resize(self) -> None:
        self.set_class(self._narrow, "narrow")
        if self._shown and len(self._shown) != len(self.fields):
            self.run_worker(self._load(), exclusive=True, group="load")
        self._draw()

    def _draw(self) -> None:
        width = self.size.width - 4 if self._narrow else (self.size.width - 8) // 2
        for number, place in enumerate(self.query(".bars").results(Static)):
            place.display = number < len(self._shown)
            if place.display:
                place.update(histogram_text(self._shown[number], width).append("\n"))

    def subject(self) -> tuple[str, list[str]] | None:
        return self._text, [self._text] if self._text else []


def histogram_text(histogram: Histogram, width: int) -> Text:
    """One line a bin: its range, its bar, its count; the first line names the field."""
    text = Text.assemble((histogram.field, "bold"), f"  {count(sum(histogram.counts), 'rollout')}", no_wrap=True)
    if histogram.num_null:
        text.append(f", {histogram.num_null:,} without a value", style="dim")
    if not histogram.counts:
        text.append("\n  no values", style="dim")
        return text
    whole = histogram.field in _WHOLE
    labels = [_range(low, high, whole) for low, high in zip(histogram.edges[:-1], histogram.edges[1:], strict=True)]
    left, right = max(map(len, labels)), max(len(f"{each:,}") for each in histogram.counts)
    room = max(4, width - left - right - 3)
    most = max(histogram.counts)
    for label, number_of in zip(labels, histogram.counts, strict=True):
        text.append(f"\n{label:>{left}} ")
        text.append(bar(number_of, 0, most, room) if number_of else " " * room, style="green")
        text.append(f" {number_of:>{right},}", style="" if number_of else "dim")
    return text


def _range(low: float, high: float, whole: bool) -> str:
    """'0.25..0.5'; a bin of one integer is that integer: [2, 3) -> '2'."""
    if high - low == 1 and (low + high) / 2 == (middle := round((low + high) / 2)):
        return str(middle)  # whole numbers have a bin each, around them
    if whole:
        first, last = -int(-low // 1), -int(-high // 1) - 1
        if last <= first:
            return str(first)
        return f"{first}..{last}"
    return f"{low:.4g}..{high:.4g}"
