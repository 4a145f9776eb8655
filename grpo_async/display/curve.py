"""A figure over a whole run in bounded room, and its chart in braille dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_MOST_POINTS = 512
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row 0..3][column 0..1] of a braille cell
_BRAILLE = 0x2800
_LABEL_CELLS = 8


@dataclass(slots=True)
class Curve:
    """Values in the order in which they come. At most `most` points are kept: beyond that, neighbours are merged to their mean."""

    most: int = _MOST_POINTS
    points: list[float] = field(default_factory=list)
    steps_per_point: int = 1
    _partial: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """A value that is not finite is left out. 1 2 3 4 5 6 with most=4 -> 1.5, 3.5, and (5, 6) -> 5.5."""
        if not math.isfinite(value):
            return
        self._partial.append(value)
        if len(self._partial) < self.steps_per_point:
            return
        self.points.append(fmean(self._partial))
        self._partial = []
        if len(self.points) > self.most:
            whole = len(self.points) // 2 * 2
            self._partial = self.points[whole:]
            self.points = [fmean(self.points[index : index + 2]) for index in range(0, whole, 2)]
            self.steps_per_point *= 2

    def columns(self, num: int) -> list[float]:
        """The curve at `num` places from its first point to its last: means where several points fall on one, straight lines
        between two points where they are further apart. [0, 1] over 3 columns -> 0, 0.5, 1; [0, 1, 2, 3] over 2 -> 0.5, 2.5."""
        points, count = self.points, len(self.points)
        if not count or num < 1:
            return []
        if count >= num:
            return [fmean(points[index * count // num : (index + 1) * count // num]) for index in range(num)]
        if count == 1:
            return points * num
        columns = []
        for index in range(num):
            left, part = divmod(index * (count - 1) / (num - 1), 1)
            a, b = points[int(left)], points[min(int(left) + 1, count - 1)]
            columns.append(a + (b - a) * part)
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Fills the room it is given: a title with the newest value, two labels of the axis on the left, the curve."""

    curve: Curve
    style: str
    title: Text | None = None
    percent: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = (options.height or 8) - (self.title is not None)
        if self.title is not None:
            yield Text.assemble(self.title, no_wrap=True, overflow="ellipsis")
        room = max(1, options.max_width - _LABEL_CELLS)
        columns = self.curve.columns(2 * room)
        if height < 1:
            return
        if not columns:
            yield Text("no steps yet", style="dim", justify="center")
            return
        low, high = min(columns), max(columns)
        margin = (high - low) * 0.05 or max(abs(high) * 0.02, 1e-3)
        for row, cells in enumerate(_cells(columns, low - margin, high + margin, height)):
            label = high if row == 0 else low if row == height - 1 else None
            line = Text(self._label(label), style="dim", no_wrap=True)
            yield line.append("".join(chr(_BRAILLE + dots) if dots else " " for dots in cells), style=self.style)

    def _label(self, value: float | None) -> str:
        if value is None:
            return " " * (_LABEL_CELLS - 1) + "│"
        return (f"{value:.0%}" if self.percent else short(value)).rjust(_LABEL_CELLS - 1) + "┤"


def short(value: float) -> str:
    """At most 7 characters: 0.5312 -> "0.531", 1234.5 -> "1.23k", 123456 -> "123k", 1e-05 -> "1e-05"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= abs(value) < 1e15:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"


def _cells(values: Sequence[float], low: float, high: float, height: int) -> list[list[int]]:
    """Braille bits [height][len(values) / 2]; neighbouring dots are joined."""
    cells = [[0] * (len(values) // 2) for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(values):
        y = round((high - value) / (high - low) * (4 * height - 1))
        for each in range(min(y, y if before is None else before + 1), max(y, y if before is None else before - 1) + 1):
            cells[each // 4][x // 2] |= _DOTS[each % 4][x % 2]
        before = y
    return cells
