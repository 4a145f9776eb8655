"""The live picture of a run: exactly as many lines and cells as the terminal has. Pure: state in, lines out.

At 80 x 24 everything that matters has its place; a larger terminal gets taller and more charts, every server, and the latest
messages. In a smaller one the parts go in the order of `_Part.rank`, so that what is left stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from grpo_async.display.charts import meter
from grpo_async.display.dashboard_parts import (
    charts_part,
    fit,
    messages_part,
    pipeline_part,
    run_part,
    servers_part,
)
from grpo_async.display.progress import Progress, duration
from grpo_async.processes.wording import one_line

BORDER = "bright_black"
_LEAST_BOX = (20, 5)
"""Width and height below which there is no room for a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One part between two rules.

    Args:
        title: of the rule above it.
        rank: the part with the highest rank goes first where there is no room.
        least, most: rows; of what is left over, parts take by `share`.
        lines: makes exactly as many lines, each exactly as wide, as it is asked for.
    """

    title: Text
    rank: int
    least: int
    most: int
    share: int
    lines: Callable[[int, int], list[Text]]


def dashboard(
    progress: Progress, *, run_name: str, footer: str = "", width: int, height: int, now: float | None = None
) -> list[Text]:
    """`height` lines of `width` cells.

    Args:
        footer: a few words for the lower edge: where the logs are.
        now: time.time() seconds.
    """
    width, height = max(1, width), max(1, height)
    now = time.time() if now is None else now
    if width < _LEAST_BOX[0] or height < _LEAST_BOX[1]:
        line = fit(Text(f"{one_line(run_name)} {progress.phase} {_steps(progress)}"), width)
        return [line, *(Text(" " * width) for _ in range(height - 1))]
    parts = _parts(progress, width=width - 4, now=now)
    rows = _divide(parts, height - 3)  # upper edge, head, lower edge
    edge = Text.assemble((one_line(run_name), "bold"), " · ", (one_line(progress.phase), "cyan"))
    if not rows[0] and progress.reward is not None:  # no room for the chart
        edge = Text.assemble((f"reward {progress.reward:.3f}", "bold"), " · ", edge)
    lines = [_rule(edge, width, "╭╮"), _framed(_head(progress, width - 4), width)]
    for part, num_rows in zip(parts, rows, strict=True):
        if num_rows:
            lines.append(_rule(part.title, width, "├┤"))
            lines += [_framed(line, width) for line in part.lines(width - 4, num_rows)]
    while len(lines) < height - 1:
        lines.append(_framed(Text(" " * (width - 4)), width))
    lines.append(_rule(Text(one_line(footer), style="dim"), width, "╰╯"))
    return lines


def _parts(progress: Progress, *, width: int, now: float) -> list[_Part]:
    charts = charts_part(progress, width)
    pipeline = pipeline_part(progress, width)
    servers = servers_part(progress)
    run = run_part(progress, width, now)
    messages = messages_part(progress, now)
    return [
        _Part(title=charts.title, rank=4, least=3, most=60, share=3, lines=charts.lines),
        _Part(title=pipeline.title, rank=2, least=4, most=pipeline.wanted, share=1, lines=pipeline.lines),
        _Part(
            title=servers.title, rank=3, least=min(2, servers.wanted), most=servers.wanted, share=4, lines=servers.lines
        ),
        _Part(title=run.title, rank=1, least=run.least, most=run.wanted, share=2, lines=run.lines),
        _Part(title=messages.title, rank=5, least=4, most=messages.wanted, share=2, lines=messages.lines),
    ]


def _divide(parts: Sequence[_Part], room: int) -> list[int]:
    """Rows of each part, without its rule: 0 where it is left out. What is over goes round by `share`.

    The last part that stays may get fewer rows than it wants.
    """
    kept = set(range(len(parts)))

    def needed() -> int:
        return sum(parts[index].least + 1 for index in kept)

    while len(kept) > 1 and needed() > room:
        kept.remove(max(kept, key=lambda index: parts[index].rank))
    rows = [parts[index].least if index in kept else 0 for index in range(len(parts))]
    if needed() > room:
        (last,) = kept
        rows[last] = max(0, room - 1)
        return rows
    left = room - needed()
    while left > 0:
        before = left
        for index in sorted(kept):
            given = min(parts[index].share, parts[index].most - rows[index], left)
            rows[index] += max(0, given)
            left -= max(0, given)
        if left == before:
            break
    return rows


def _steps(progress: Progress) -> str:
    return f"step {progress.step}/{progress.max_steps}"


def _head(progress: Progress, width: int) -> Text:
    """Step, bar, share, elapsed, left, speed."""
    share = progress.step / progress.max_steps if progress.max_steps else 0.0
    left = progress.seconds_left
    clock = [f"{share:4.0%}", f"{duration(progress.seconds_elapsed)} elapsed"]
    if left is not None:
        clock.append(f"{duration(left)} left")
    if speed := progress.text("step_time", "{:.1f} s/step"):
        clock.append(speed)
    name, words = _steps(progress), "  ".join(clock)
    room = width - len(name) - len(words) - 3
    while room < 6 and len(clock) > 1:
        clock.pop()
        words = "  ".join(clock)
        room = width - len(name) - len(words) - 3
    line = Text(f"{name} ", style="bold")
    line.append(meter(share, max(0, room)), style="green")
    return fit(line.append(f" {words}", style="not bold"), width)


def _rule(title: Text, width: int, corners: str) -> Text:
    """╭─ title ─────╮"""
    line = Text(corners[0] + "─", style=BORDER)
    if title.plain:
        words = title.copy()
        words.truncate(width - 6, overflow="ellipsis")
        line.append(" ").append_text(words).append(" ")
    line.append("─" * max(0, width - line.cell_len - 1), style=BORDER)
    return line.append(corners[1], style=BORDER)


def _framed(line: Text, width: int) -> Text:
    framed = Text("│ ", style=BORDER)
    framed.append_text(fit(line, width - 4))
    return framed.append(" │", style=BORDER)
