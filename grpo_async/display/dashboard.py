"""The live picture of a run, made of rich's panel, layout, tables and bars. Pure: it takes the state and returns a renderable.

At 80 x 24 everything that matters has its place; a larger terminal gets larger charts, every server, and the latest
messages. A smaller one keeps the rows of the run, the most important first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_async.display.progress import (
    Progress,
    RunRow,
    ServerStatus,
    ago,
    join,
    left_text,
    recovery_text,
    run_rows,
    steps_text,
)
from grpo_async.utils.safe_text import one_line
from grpo_async.utils.text import count, duration, format_number

_BORDER = "bright_black"
_MIN_BOX = (20, 5)
"""Width and height below which there is no room for a frame."""
_CHARTS_FROM, _SERVERS_FROM, _WRAPS_FROM = 10, 16, 30
"""Rows inside the frame from which on there are charts, servers, and texts of several lines."""
_CHART_CELLS, _CHART_ROWS = 54, 8
_STATES = {"serving": "green", "ready": "yellow", "starting": "yellow"}
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row 0..3][column 0..1] of a braille cell
_BRAILLE = 0x2800
_NAME_CELLS = 15  # width of a row that is not its text: the name, spaces and the frame
_AXIS_CELLS = 10  # width of a label such as "-1.23e-05" and of the axis
_WRAPS = ("learning", "warning", "advice", "groups", "held out", "last push", "checkpoint", "note")
"""Rows of the run that may take several lines."""


def dashboard(
    progress: Progress,
    rows: Sequence[Mapping[str, float]],
    *,
    run_name: str,
    footer: str = "",
    width: int,
    height: int,
    now: float | None = None,
) -> RenderableType:
    """A picture of `width` cells and `height` rows.

    Args:
        rows: metrics of all steps, for the charts.
        footer: a few words for the lower edge: where the logs are.
        now: time.time() seconds.
    """
    now = time.time() if now is None else now
    steps = f"step {steps_text(progress)}"
    if width < _MIN_BOX[0] or height < _MIN_BOX[1]:
        return _line(f"{one_line(run_name)} {progress.phase} {steps}")
    room = height - 3  # upper edge, head, lower edge
    has_charts, has_servers = room >= _CHARTS_FROM, room >= _SERVERS_FROM
    wraps = _WRAPS if room >= _WRAPS_FROM else ("advice",)
    facts = [row for row in run_rows(progress, now, width=width - _NAME_CELLS) if row[1]]
    # each part has a rule above it; what the others leave over is the charts'
    num_servers = min(max(1, len(progress.servers)), max(2, room // 4 - 3)) if has_servers else 0
    left = room - 1 - (1 + num_servers if has_servers else 0) - (3 if has_charts else 0)
    num_rows = min(left, _num_lines(facts, wraps, width)) if has_charts else left
    left -= num_rows
    num_messages = min(left // 2 - 1, len(progress.messages)) if left >= _CHART_ROWS else 0
    num_chart_rows = 2 + left - (num_messages + 1 if num_messages else 0)

    drawn = [Layout(_head(progress, steps, width), size=1)]

    def add(title: Text, content: RenderableType, size: int) -> None:
        drawn.append(Layout(Group(Rule(title, align="left", style=_BORDER), content), size=size + 1))

    if has_charts:
        add(_reward(progress), _charts(progress, rows, width - 4, num_chart_rows), num_chart_rows)
    if has_servers:
        add(_servers_title(progress), _servers(progress, num_servers), num_servers)
    add(Text("run", style="bold"), _labeled(facts, wraps=wraps), num_rows)
    if num_messages:
        newest = list(progress.messages)[-num_messages:]
        lines = (_line(f"{ago(each.at, now):>12}  {each.text}", "yellow" if each.is_warning else "") for each in newest)
        add(Text("messages", style="bold"), Group(*lines), num_messages)
    layout = Layout()
    layout.split_column(*drawn)
    title = Text.assemble((one_line(run_name), "bold"), " · ", (one_line(progress.phase), "cyan"))
    if not has_charts and progress.reward is not None:
        title = Text.assemble((f"reward {progress.reward:.3f}", "bold"), " · ", title)
    return Panel(
        layout,
        title=title,
        title_align="left",
        subtitle=Text(one_line(footer), style="dim"),
        subtitle_align="left",
        border_style=_BORDER,
        height=height,
    )


def _line(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(progress: Progress, steps: str, width: int) -> RenderableType:
    """Step, bar, fraction, elapsed, left, speed."""
    fraction = progress.step / progress.max_steps if progress.max_steps else None
    clock = [
        None if fraction is None else f"{fraction:4.0%}",
        left_text(progress),
    ]
    if width >= 60:
        clock[1:1] = [f"{duration(round(progress.seconds_elapsed))} elapsed"]
        clock.append(progress.text("step_time", "{:.1f} s/step"))
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    bar = ProgressBar(total=1.0, completed=fraction or 0.0)
    table.add_row(steps, bar, join(clock))
    return table


# ---- charts ----


_CHARTS = (
    ("reward", "reward", "bold cyan"),
    ("generated tokens/s", "perf/generated_tokens_per_s", "green"),
    ("completion length", "completions/mean_length", "magenta"),
)
"""Title, metric and style: as many as fit beside each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A curve of braille dots in `height` rows: the title, if there is one, two labels of the axis on the left."""

    points: Sequence[float]
    style: str
    height: int
    title: Text | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = self.height - (self.title is not None)
        if self.title is not None:
            yield Text.assemble(self.title, no_wrap=True, overflow="ellipsis")
        room = max(1, options.max_width - _AXIS_CELLS)
        values = columns(self.points, 2 * room)
        if height < 1:
            return
        if not values:
            yield Text("no steps yet", style="dim", justify="center")
            return
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or max(abs(high) * 0.02, 1e-3)
        for row, cells in enumerate(_cells(values, low - margin, high + margin, height)):
            label = format_number(high) if row == 0 else format_number(low) if row == height - 1 else ""
            axis = label.rjust(_AXIS_CELLS - 1) + ("┤" if label else "│")
            line = Text(axis, style="dim", no_wrap=True)
            yield line.append("".join(chr(_BRAILLE + dots) if dots else " " for dots in cells), style=self.style)


def columns(points: Sequence[float], num: int) -> list[float]:
    """A curve at `num` places from its first point to its last: means where several points fall on one, straight lines between
    two points where they are further apart. [0, 1] over 3 columns -> 0, 0.5, 1; [0, 1, 2, 3] over 2 -> 0.5, 2.5."""
    count = len(points)
    if count >= num:
        return [fmean(points[index * count // num : (index + 1) * count // num]) for index in range(num)]
    found = []
    for index in range(num if count else 0):
        left, part = divmod(index * (count - 1) / (num - 1), 1)
        a, b = points[int(left)], points[min(int(left) + 1, count - 1)]
        found.append(a + (b - a) * part)
    return found


def _cells(values: Sequence[float], low: float, high: float, height: int) -> list[list[int]]:
    """Braille bits [height][len(values) / 2]; neighboring dots are joined."""
    cells = [[0] * (len(values) // 2) for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(values):
        y = round((high - value) / (high - low) * (4 * height - 1))
        for each in range(min(y, y if before is None else before + 1), max(y, y if before is None else before - 1) + 1):
            cells[each // 4][x // 2] |= _DOTS[each % 4][x % 2]
        before = y
    return cells


def _reward(progress: Progress) -> Text:
    title = Text("reward", style="bold")
    if progress.reward is not None:
        average, change = progress.reward_average, progress.reward_change
        words = [
            f"  {progress.reward:.3f} (all groups)",
            None if average is None else f"average {average:.3f}",
            progress.text("reward_std", "std {:.3f}"),
            None if change is None else f"change {change:+.3f}",
        ]
        title.append(join(words), style="not bold")
    return title


def _charts(progress: Progress, rows: Sequence[Mapping[str, float]], width: int, height: int) -> RenderableType:
    """The reward's curve; on wider terminals others beside it."""
    charts, cells = Table.grid(expand=True), list[RenderableType]()
    for name, metric, style in _CHARTS[: max(1, width // _CHART_CELLS)]:
        newest = progress.value(metric)
        value = "" if newest is None else f"  {format_number(newest)}"
        title = None if name == "reward" else Text.assemble((name, "bold"), value)
        points = [row[metric] for row in rows if metric in row]
        charts.add_column(ratio=1)
        chart = Chart(points=points, style=style, height=height, title=title)
        cells.append(Padding(chart, (0, 0, 0, 3 if cells else 0)))
    charts.add_row(*cells)
    return charts


# ---- servers ----


def _servers_title(progress: Progress) -> Text:
    title, known = Text("servers", style="bold"), progress.servers
    if not known:
        return title
    serving, restarts = sum(server.state == "serving" for server in known), sum(server.restarts for server in known)
    words = [
        f"  {serving} of {len(known)} serve",
        count(restarts, "restart") if restarts else None,
        recovery_text(progress),
    ]
    return title.append(join(words), style="not bold" if serving == len(known) else "not bold red")


def _servers(progress: Progress, num_rows: int) -> RenderableType:
    """One line each; where there is no room for all, those in trouble first, and a line that counts the others."""
    known = progress.servers
    if not known:
        return _line("no news of the servers yet", "dim")
    left: list[ServerStatus] = []
    if len(known) > num_rows:
        ordered = sorted(known, key=lambda server: server.state == "serving")
        known, left = ordered[: max(0, num_rows - 1)], ordered[max(0, num_rows - 1) :]
    has_hosts = len({server.url.rpartition(":")[0] for server in progress.servers}) > 1
    lines = [
        Text.assemble(
            (f"{server.index:>2} ", "bold"), server_text(server, has_host=has_hosts), no_wrap=True, overflow="ellipsis"
        )
        for server in known
    ]
    if not left:
        return Group(*lines)
    serving, busy = sum(server.state == "serving" for server in left), sum(server.running or 0 for server in left)
    waiting = sum(server.waiting or 0 for server in left)
    words = f"and {len(left)} more: {serving} serving, {count(busy, 'request')} running, {waiting} waiting"
    return Group(*lines, _line(words, "dim"))


def server_text(server: ServerStatus, *, has_host: bool) -> Text:
    """host:port  serving   v12  run 64/128  wait 3  KV 38%  restarts 1  and what is wrong"""
    line = Text(f"{server.url.partition('://')[2]}  " if has_host else "")
    line.append(f"{server.state:<8}", style=_STATES.get(server.state, "bold red"))
    if server.state in ("serving", "ready"):
        most = "" if server.max_running is None else f"/{server.max_running}"
        load = None if server.running is None else f"run {server.running}{most}  wait {server.waiting or 0}"
        line.append(join(["", None if server.version is None else f"  v{server.version}", load and f"  {load}"], ""))
        if server.kv_usage is not None:
            style = "green" if server.kv_usage < 0.8 else "yellow" if server.kv_usage < 0.95 else "red"
            line.append(f"  KV {server.kv_usage:.0%}", style=style)
    if server.restarts:
        line.append(f"  restarts {server.restarts}", style="yellow")
    return line.append(f"  {server.reason}" if server.reason else "", style="red")


def _num_lines(rows: Iterable[RunRow], wraps: Collection[str], width: int) -> int:
    """Those of `wraps` take as many lines as they need, the others one."""
    return sum(1 + (len(text) // max(1, width - _NAME_CELLS) if name in wraps else 0) for name, text, _ in rows)


def _labeled(rows: Iterable[RunRow], *, wraps: Collection[str]) -> Table:
    """Names on the left, texts on the right: those of `wraps` on as many lines as they need, the others cut to one."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim", min_width=10)
    table.add_column()
    for name, text, style in rows:
        cut = name not in wraps
        table.add_row(name, Text(one_line(text), style=style, no_wrap=cut, overflow="ellipsis" if cut else "fold"))
    return table
