"""The live picture of a run, made of rich's panel, layout, tables and bars. Pure: state in, something to draw out.

At 80 x 24 everything that matters has its place; a larger terminal gets taller and more charts, every server, and the latest
messages. In a smaller one the parts go in the order of `_FIRST_TO_GO`, so that what is left stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.layout import Layout
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_async.display.progress import (
    CURVES,
    Progress,
    ServerStatus,
    ago,
    evaluations_text,
    join,
)
from grpo_async.findings import Verdict
from grpo_async.records import LEDGER_STATUSES
from grpo_async.utils.safe_text import one_line
from grpo_async.utils.text import both_ends, count, duration, format_number

_BORDER = "bright_black"
_MIN_BOX = (20, 5)
"""Width and height below which there is no room for a frame."""
_FIRST_TO_GO = ("messages", "charts", "servers", "pipeline")
_TAKE_TURNS = ("charts", "servers", "charts", "run", "pipeline", "messages")
"""Who gets the rows that are left over, one each; the charts draw at any height."""
_CHART_CELLS, _CHART_ROWS = 54, 8
_CHART_STYLES = ("bold cyan", "green", "magenta", "yellow", "yellow", "blue", "red", "green")
_STATES = {"serving": "green", "ready": "yellow", "starting": "yellow"}
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row 0..3][column 0..1] of a braille cell
_BRAILLE = 0x2800
_LABELS = 15  # cells of a line of names and texts that are no text
_LABEL_CELLS = 10  # of "-1.23e-05" and the axis
_WRAPS = ("learning", "warning", "advice", "groups", "held out", "last push", "checkpoint", "note")
"""Rows of the run that may take several lines."""
Row = tuple[str, str, str]
"""Name, style, text."""


def dashboard(
    progress: Progress, *, run_name: str, footer: str = "", width: int, height: int, now: float | None = None
) -> RenderableType:
    """A picture of `width` cells and `height` rows.

    Args:
        footer: a few words for the lower edge: where the logs are.
        now: time.time() seconds.
    """
    now = time.time() if now is None else now
    steps = f"step {progress.step}/{progress.max_steps}"
    if width < _MIN_BOX[0] or height < _MIN_BOX[1]:
        return _line(f"{one_line(run_name)} {progress.phase} {steps}")
    run, pipeline = _run(progress, now, width), list(_pipeline(progress))
    num_servers = max(1, len(progress.servers))
    rows = _divide(
        {
            "charts": (2, 60),
            "pipeline": (3, max(3, len(pipeline))),
            "servers": (min(2, num_servers), num_servers),
            "run": (min(10, len(run)), _num_lines(run, _WRAPS, width)),
            "messages": (4, min(40, max(4, len(progress.messages)))),
        },
        height - 3,  # upper edge, head, lower edge
    )

    def part(name: str, num_rows: int) -> tuple[Text, RenderableType]:
        """Title and content."""
        match name:
            case "charts":
                return _reward(progress), _charts(progress, width - 4, num_rows)
            case "servers":
                return _servers_title(progress), _servers(progress, num_rows)
            case "pipeline":
                return Text("pipeline", style="bold"), _labeled(pipeline, wraps=())
            case "run":
                shown, wraps = _that_fit(run, num_rows, width)
                return Text("run", style="bold"), _labeled(shown, wraps=wraps)
        newest = list(progress.messages)[-num_rows:]
        lines = (_line(f"{ago(each.at, now):>12}  {each.text}", "yellow" if each.is_warning else "") for each in newest)
        return Text("messages", style="bold"), Group(*lines)

    layout, drawn = Layout(), [Layout(_head(progress, steps, width), size=1)]
    for name, num_rows in rows.items():
        title, content = part(name, num_rows)
        drawn.append(Layout(Group(Rule(title, align="left", style=_BORDER), content), size=num_rows + 1))
    if sum(rows.values()) + len(rows) < height - 3:
        drawn.append(Layout(Text()))
    layout.split_column(*drawn)
    title = Text.assemble((one_line(run_name), "bold"), " · ", (one_line(progress.phase), "cyan"))
    if "charts" not in rows and progress.reward is not None:
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


def _divide(parts: Mapping[str, tuple[int, int]], room: int) -> dict[str, int]:
    """Rows of each part that has its place, without its rule. `parts`: how many rows show what matters, and how many everything.
    Worked example: least 3, 4, 2, 8, 4 in 22 rows -> the messages go, and the one row that is left is the charts'."""
    rows = {name: least for name, (least, _) in parts.items()}
    for name in _FIRST_TO_GO:
        if sum(rows.values()) + len(rows) > room:
            del rows[name]
    left = room - sum(rows.values()) - len(rows)
    if left < 0:  # of the run only what has room
        return {name: max(0, number + left) for name, number in rows.items()}
    while left > 0 and any(rows[name] < parts[name][1] for name in rows):
        for name in _TAKE_TURNS:
            if name in rows and rows[name] < parts[name][1] and left > 0:
                rows[name], left = rows[name] + 1, left - 1
    return rows


def _line(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(progress: Progress, steps: str, width: int) -> RenderableType:
    """Step, bar, fraction, elapsed, left, speed."""
    fraction = progress.step / progress.max_steps if progress.max_steps else 0.0
    clock = [
        f"{fraction:4.0%}",
        None if progress.seconds_left is None else f"{duration(round(progress.seconds_left))} left",
    ]
    if width >= 60:
        clock[1:1] = [f"{duration(round(progress.seconds_elapsed))} elapsed"]
        clock.append(progress.text("step_time", "{:.1f} s/step"))
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, progress.max_steps), completed=progress.step)
    table.add_row(steps, bar, join(clock))
    return table


# ---- charts ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A curve of braille dots in `height` rows: the title, if there is one, two labels of the axis on the left."""

    points: Sequence[float]
    style: str
    height: int
    title: Text | None = None
    percent: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = self.height - (self.title is not None)
        if self.title is not None:
            yield Text.assemble(self.title, no_wrap=True, overflow="ellipsis")
        room = max(1, options.max_width - _LABEL_CELLS)
        values = columns(self.points, 2 * room)
        if height < 1:
            return
        if not values:
            yield Text("no steps yet", style="dim", justify="center")
            return
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or max(abs(high) * 0.02, 1e-3)
        for row, cells in enumerate(_cells(values, low - margin, high + margin, height)):
            label = high if row == 0 else low if row == height - 1 else None
            line = Text(self._label(label), style="dim", no_wrap=True)
            yield line.append("".join(chr(_BRAILLE + dots) if dots else " " for dots in cells), style=self.style)

    def _label(self, value: float | None) -> str:
        if value is None:
            return " " * (_LABEL_CELLS - 1) + "│"
        return (f"{value:.0%}" if self.percent else format_number(value)).rjust(_LABEL_CELLS - 1) + "┤"


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


def _charts(progress: Progress, width: int, num_rows: int) -> RenderableType:
    """The reward's curve; on wider terminals others beside it, on higher ones below."""
    num_columns = max(1, min(3, width // _CHART_CELLS))
    num_bands = max(1, min(num_rows // _CHART_ROWS, -(-len(CURVES) // num_columns)))
    heights = [num_rows // num_bands + (band < num_rows % num_bands) for band in range(num_bands)]
    charts = Table.grid(expand=True)
    for _ in range(num_columns):
        charts.add_column(ratio=1)
    curves = zip(CURVES.items(), _CHART_STYLES, strict=True)
    for height in heights:
        cells: list[RenderableType] = []
        for (name, metric), style in islice(curves, num_columns):
            percent, newest = name.endswith("idle"), progress.value(metric)
            value = "" if newest is None else f"{newest:.0%}" if percent else format_number(newest)
            title = None if name == "reward" else Text.assemble((name, "bold"), f"  {value}")
            chart = Chart(points=progress.curves[name].points, style=style, height=height, title=title, percent=percent)
            cells.append(Padding(chart, (0, 0, 0, 3 if cells else 0)))
        charts.add_row(*cells)
    return charts


# ---- tables ----


def _pipeline(progress: Progress) -> Iterator[Row]:
    """Who works and who waits."""
    fractions, idle = progress.trainer_fractions(), progress.value("pipeline/generator_idle_ratio")
    generated = progress.text("perf/generated_tokens_per_s", "generated {:.0f}")
    yield "tokens/s", "", join([generated, progress.text("perf/trained_tokens_per_s", "trained {:.0f}")])
    trainer = join(["trainer", *(f"{name} {part:.0%}" for name, part in fractions.items())], " ") if fractions else None
    servers = None if idle is None else f"servers idle {idle:.0%}"
    yield "time", _warm(max(fractions.get("idle", 0.0), idle or 0.0)), join([trainer, servers])
    ages = [f"{age}: {part:.0%}" for age, part in progress.staleness_fractions().items()]
    queue = [
        progress.text("ledger/groups/queued", "{:.0f} groups"),
        progress.text("ledger/groups/in_flight", "{:.0f} in flight"),
        progress.text("async/staleness_mean", "staleness mean {:.2f}"),
        progress.text("async/staleness_max", "max {:.0f}"),
        *ages,
    ]
    length = progress.text("completions/mean_length", "mean {:.0f} tokens")
    truncated = progress.text("completions/clipped_ratio", "{:.0%} truncated")
    others = [
        ("queue", "", join(queue)),
        ("overlap", "", progress.text("pipeline/overlap_efficiency", "{:.0%} efficiency")),
        ("lengths", "", join([length, truncated])),
        ("all equal", "", progress.text("frac_reward_zero_std", "{:.0%} of the groups")),
    ]
    yield from ((name, style, text) for name, style, text in others if text)


def _warm(idle: float) -> str:
    """Colored where much is idle."""
    return "" if idle < 0.3 else "yellow" if idle < 0.6 else "red"


def _servers_title(progress: Progress) -> Text:
    title, known = Text("servers", style="bold"), progress.servers
    if not known:
        return title
    serving, restarts = sum(server.state == "serving" for server in known), sum(server.restarts for server in known)
    words = [
        f"  {serving} of {len(known)} serve",
        count(restarts, "restart") if restarts else None,
        progress.text("servers/recovery_s", "last recovery {:.1f} s") if progress.value("servers/recovery_s") else None,
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
    words = f"and {len(left)} more: {serving} serve, {busy} requests run, {waiting} wait"
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


def _run(progress: Progress, now: float, width: int) -> list[Row]:
    """What is needed most first: what has no room is not shown."""
    warning, note = progress.last_message(is_warning=True), progress.last_message(is_warning=False)
    advice = "" if progress.advice is None else progress.advice.text
    groups = join((progress.text(f"ledger/groups/{state}", f"{state} {{:.0f}}") for state in LEDGER_STATUSES[:5]), " ")
    push, saved = progress.push, progress.checkpoints
    pushed = push and join(
        [
            ago(push.at, now),
            f"took {push.seconds:.2f} s",
            None if push.num_bytes is None else decimal(int(push.num_bytes)),
            None if push.bytes_per_s is None else f"{decimal(int(push.bytes_per_s))}/s",
            f"step {push.step}",
        ]
    )
    when = "" if saved.at is None else f", {ago(saved.at, now)}"
    newest = "none yet" if saved.step is None else f"step {saved.step}{when}"
    return [
        ("learning", "", _learning(progress.verdict)),
        ("warning", "yellow" if warning else "dim", f"{ago(warning.at, now)}: {warning.text}" if warning else "none"),
        ("advice", "bold" if advice else "dim", advice or "none yet"),
        *_example(progress, width - _LABELS),
        ("groups", "", groups or "none yet"),
        ("held out", "", evaluations_text(progress) or "no evaluation yet"),
        ("last push", "", pushed or "none yet"),
        ("checkpoint", "", join([newest, None if saved.writing is None else f"writing step {saved.writing}"])),
        ("note", "", f"{ago(note.at, now)}: {note.text}" if note else "none"),
    ]


def _learning(verdict: Verdict | None) -> str:
    """By how much comes first: of a line that is cut the beginning stays."""
    if verdict is None:
        return "not judged yet"
    change = verdict.numbers.get("change")
    return join([None if change is None else f"{change:+.3f}", verdict.text])


def _example(progress: Progress, room: int) -> Iterator[Row]:
    """What the policy writes: a prompt, a good completion and a bad one, the middle of longer ones left out."""
    if (example := progress.example) is None:
        return
    (best, *others), room = example.completions, max(room, 3)
    yield "prompt", "dim", both_ends(f"{example.prompt} (step {example.step})", room)
    for name, style, (reward, text) in (
        ("best" if others else "completion", "green", best),
        *(("worst", "red", other) for other in others),
    ):
        yield name, style, both_ends(f"{reward:.3f}  {text}", room)


def _num_lines(rows: Iterable[Row], wraps: Collection[str], width: int) -> int:
    """Those of `wraps` take as many lines as they need, the others one."""
    return sum(1 + (len(text) // max(1, width - _LABELS) if name in wraps else 0) for name, _, text in rows)


def _that_fit(rows: Sequence[Row], num_lines: int, width: int) -> tuple[Sequence[Row], Collection[str]]:
    """The rows to show, and the names of those that may take several lines. Where not all have room, a note and the prompt go
    first."""
    if _num_lines(rows, _WRAPS, width) <= num_lines:
        return rows, _WRAPS
    wraps = ("advice",)
    for name in ("note", "prompt"):
        if _num_lines(rows, wraps, width) > num_lines:
            rows = [row for row in rows if row[0] != name]
    return rows, wraps


def _labeled(rows: Iterable[Row], *, wraps: Collection[str]) -> Table:
    """Names on the left, texts on the right: those of `wraps` on as many lines as they need, the others cut to one."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim", min_width=10)
    table.add_column()
    for name, style, text in rows:
        cut = name not in wraps
        table.add_row(name, Text(one_line(text), style=style, no_wrap=cut, overflow="ellipsis" if cut else "fold"))
    return table
