"""Charts of characters: a curve in braille dots with its spread, bars, a progress bar. Every line has exactly the asked width."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from grpo_async.display.curve import Curve

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row 0..3][column 0..1] of a braille cell
_BRAILLE = 0x2800
_BLOCKS = " ▏▎▍▌▋▊▉█"
_LABEL_CELLS = 7
_BAND = "░"


def chart(curve: Curve, width: int, height: int, *, style: str, percent: bool = False) -> list[Text]:
    """`height` lines of `width` cells: two labels of the axis on the left, the curve, and a shade of value +- spread around it."""
    room = width - _LABEL_CELLS
    if height < 1 or room < 2:
        return [Text(" " * max(0, width)) for _ in range(height)]
    columns = curve.columns(2 * room)
    if not columns:
        blank = [Text(" " * width) for _ in range(height)]
        blank[height // 2] = Text("no steps yet".center(width), style="dim")
        return blank
    low, high = _bounds(columns, height)
    cells = _line_cells([value for value, _ in columns], low, high, height)
    bands = _band_cells(columns, low, high, height)
    lines = []
    for row in range(height):
        label = high if row == 0 else low if row == height - 1 else None
        line = Text(_label(label, percent), style="dim")
        for column in range(room):
            if dots := cells[row][column]:
                line.append(chr(_BRAILLE + dots), style=style)
            elif bands[row][column]:
                line.append(_BAND, style="dim")
            else:
                line.append(" ")
        lines.append(line)
    return lines


def bar(share: float, width: int) -> str:
    """`share` of `width` cells in eighths: bar(0.5, 4) -> "██  "."""
    if not math.isfinite(share):
        return " " * width
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return (_BLOCKS[-1] * full + (_BLOCKS[rest] if rest else "")).ljust(width)


def meter(share: float, width: int) -> str:
    """A bar whose empty part is visible, too: meter(0.5, 4) -> "━━──"."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full + "─" * (width - full)


def short(value: float) -> str:
    """At most 6 characters: 0.5312 -> "0.531", 1234.5 -> "1234", 123456 -> "123k", 1e-05 -> "1e-05"."""
    size = abs(value)
    if size >= 1e15 or not math.isfinite(value):
        return f"{value:.0e}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.0f}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 100 or size == 0:
        return f"{value:.1f}" if size else "0"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.001 else f"{value:.0e}"


def _bounds(columns: Sequence[tuple[float, float]], height: int) -> tuple[float, float]:
    """The values, and of the spread as much as leaves them half of the height, or more where that is low: what is to be seen is
    how the mean moves."""
    values = [value for value, _ in columns]
    low, high = min(values), max(values)
    extra = (high - low) * min(0.5, max(0.0, height - 4) / 12) or max(abs(high) * 0.02, 1e-3)
    below, above = min(v - s for v, s in columns), max(v + s for v, s in columns)
    return max(below, low - extra), max(min(above, high + extra), low + 1e-9 * max(1.0, abs(low)))


def _line_cells(values: Sequence[float], low: float, high: float, height: int) -> list[list[int]]:
    """Braille bits [height][len(values) / 2]; neighbouring dots are joined."""
    cells = [[0] * (len(values) // 2) for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(values[: 2 * (len(values) // 2)]):
        y = _row(value, low, high, 4 * height)
        steps = range(min(y, before + 1), max(y, before - 1) + 1) if before is not None else range(y, y + 1)
        for each in steps:
            cells[each // 4][x // 2] |= _DOTS[each % 4][x % 2]
        before = y
    return cells


def _band_cells(columns: Sequence[tuple[float, float]], low: float, high: float, height: int) -> list[list[bool]]:
    cells = [[False] * (len(columns) // 2) for _ in range(height)]
    for column in range(len(columns) // 2):
        value, spread = columns[2 * column]
        if spread > 0:
            top, bottom = _row(value + spread, low, high, height), _row(value - spread, low, high, height)
            for row in range(top, bottom + 1):
                cells[row][column] = True
    return cells


def _row(value: float, low: float, high: float, num: int) -> int:
    """Row of `value` among `num`, 0 at the top."""
    share = (value - low) / ((high - low) or 1.0)
    return min(num - 1, max(0, round((1.0 - share) * (num - 1))))


def _label(value: float | None, percent: bool) -> str:
    if value is None:
        return " " * (_LABEL_CELLS - 1) + "│"
    text = f"{value:.0%}" if percent else short(value)
    return text[: _LABEL_CELLS - 1].rjust(_LABEL_CELLS - 1) + "┤"
