"""The live picture of a run, made of rich's panel, layout, tables and bars. Pure: state in, something to draw out.

At 80 x 24 everything that matters has its place; a larger terminal gets taller and more charts, every server, and the latest
messages. In a smaller one the parts go in the order of `_FIRST_TO_GO`, so that what is left stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.layout import Layout
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_async.display.curve import Chart, short
from grpo_async.display.progress import (
    CURVES,
    LEDGER_STATES,
    Progress,
    ServerStatus,
    ago,
    duration,
    evaluations_text,
    join,
)
from grpo_async.processes.wording import one_line

_BORDER = "bright_black"
_LEAST_BOX = (20, 5)
"""Width and height below which there is no room for a frame."""
_FIRST_TO_GO = ("messages", "charts", "servers", "pipeline")
_TAKE_TURNS = ("charts", "servers", "charts", "run", "pipeline", "messages")
"""Who gets the rows that are left over, one each; the charts draw at any height."""
_CHART_CELLS, _CHART_ROWS = 54, 8
_CHART_STYLES = ("bold cyan", "green", "magenta", "yellow", "yellow", "blue", "red", "green")
_STATES = {"serving": "green", "ready": "yellow", "starting": "yellow"}


@dataclass(frozen=True, slots=True)
class _Part:
    """`least` rows show what matters, `most` rows everything; the rule with the title is one more."""

    title: Text
    least: int
    most: int


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
    if width < _LEAST_BOX[0] or height < _LEAST_BOX[1]:
        return _line(f"{one_line(run_name)} {progress.phase} {steps}")
    run, pipeline = _run(progress, now), _pipeline(progress)
    num_lines = sum(1 + len(text) // max(1, width - 15) for _, _, text in run)
    parts = {
        "charts": _Part(_reward(progress), 3, 60),
        "pipeline": _Part(Text("pipeline", style="bold"), 4, max(4, len(pipeline))),
        "servers": _Part(_servers_title(progress), min(2, _num_servers(progress)), _num_servers(progress)),
        "run": _Part(Text("run", style="bold"), 8, num_lines),
        "messages": _Part(Text("messages", style="bold"), 4, min(40, max(4, len(progress.messages)))),
    }
    rows = _divide(parts, height - 3)  # upper edge, head, lower edge
    title = Text.assemble((one_line(run_name), "bold"), " · ", (one_line(progress.phase), "cyan"))
    if "charts" not in rows and progress.reward is not None:
        title = Text.assemble((f"reward {progress.reward:.3f}", "bold"), " · ", title)
    content: dict[str, RenderableType] = {
        "charts": _charts(progress, width - 4, rows.get("charts", 0)),
        "pipeline": _with_staleness(progress, _labelled(pipeline, wraps=()), width - 4, rows.get("pipeline", 0)),
        "servers": _servers(progress, rows.get("servers", 0)),
        "run": _labelled(run, wraps=[name for name, _, _ in run] if rows["run"] >= num_lines else ["advice"]),
        "messages": Group(
            *(
                _line(f"{ago(message.at, now):>12}  {message.text}", "yellow" if message.is_warning else "")
                for message in list(progress.messages)[-rows.get("messages", 1) :]
            )
        ),
    }
    layout = Layout()
    layout.split_column(
        Layout(_head(progress, steps, width), size=1),
        *(
            Layout(_titled(parts[name].title, content[name], num_rows), size=num_rows + 1)
            for name, num_rows in rows.items()
        ),
        Layout(Text(), name="rest"),
    )
    layout["rest"].visible = sum(rows.values()) + len(rows) < height - 3
    return Panel(
        layout,
        title=title,
        title_align="left",
        subtitle=Text(one_line(footer), style="dim"),
        subtitle_align="left",
        border_style=_BORDER,
        height=height,
    )


def _divide(parts: Mapping[str, _Part], room: int) -> dict[str, int]:
    """Rows of each part that has its place, without its rule. Worked example: least 3, 4, 2, 8, 4 in 22 rows -> the messages go,
    and the one row that is left is the charts'."""
    rows = {name: part.least for name, part in parts.items()}
    for name in _FIRST_TO_GO:
        if sum(rows.values()) + len(rows) > room:
            del rows[name]
    left = room - sum(rows.values()) - len(rows)
    if left < 0:  # of the run only what has room
        return {name: max(0, number + left) for name, number in rows.items()}
    while left > 0 and any(rows[name] < parts[name].most for name in rows):
        for name in _TAKE_TURNS:
            if name in rows and rows[name] < parts[name].most and left > 0:
                rows[name], left = rows[name] + 1, left - 1
    return rows


def _titled(title: Text, content: RenderableType, num_rows: int) -> RenderableType:
    part = Layout()
    part.split_column(Layout(Rule(title, align="left", style=_BORDER), size=1), Layout(content, size=max(1, num_rows)))
    return part


def _line(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(progress: Progress, steps: str, width: int) -> RenderableType:
    """Step, bar, fraction, elapsed, left, speed."""
    fraction = progress.step / progress.max_steps if progress.max_steps else 0.0
    clock = [f"{fraction:4.0%}", None if progress.seconds_left is None else f"{duration(progress.seconds_left)} left"]
    if width >= 60:
        clock[1:1] = [f"{duration(progress.seconds_elapsed)} elapsed"]
        clock.append(progress.text("step_time", "{:.1f} s/step"))
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, progress.max_steps), completed=progress.step)
    table.add_row(steps, bar, join(clock))
    return table


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
    steps = progress.curves["reward"].steps_per_point
    return title.append(f"  (points of {steps} steps)", style="dim not bold") if steps > 1 else title


def _charts(progress: Progress, width: int, num_rows: int) -> RenderableType:
    """The reward's curve; on wider terminals others beside it, on higher ones below."""
    num_columns = max(1, min(3, width // _CHART_CELLS))
    num_bands = max(1, min(num_rows // _CHART_ROWS, -(-len(CURVES) // num_columns)))
    names = iter(zip(CURVES.items(), _CHART_STYLES, strict=True))
    bands = []
    for _ in range(num_bands):
        cells = []
        for _ in range(num_columns):
            entry = next(names, None)
            if entry is None:
                cells.append(Layout(Text()))
                continue
            (name, metric), style = entry
            percent, newest = name.endswith("idle"), progress.value(metric)
            figure = "" if newest is None else f"{newest:.0%}" if percent else short(newest)
            title = None if name == "reward" else Text.assemble((name, "bold"), f"  {figure}")
            chart = Chart(curve=progress.curves[name], style=style, title=title, percent=percent)
            cells.append(Layout(Padding(chart, (0, 0, 0, 3 if cells else 0))))
        band = Layout()
        band.split_row(*cells)
        bands.append(band)
    charts = Layout()
    charts.split_column(*bands)
    return charts


def _pipeline(progress: Progress) -> list[tuple[str, str, str]]:
    """Who works and who waits: (name, style, text)."""
    fractions, idle = progress.trainer_fractions(), progress.value("pipeline/generator_idle_ratio")
    tokens = [("perf/generated_tokens_per_s", "generated {:.0f}"), ("perf/trained_tokens_per_s", "trained {:.0f}")]
    queue = [("buffer/queued_groups", "{:.0f} groups"), ("ledger/groups/in_flight", "{:.0f} in flight")]
    truncated = progress.text("rollout/truncated", "{:.0f}% truncated", scale=100)
    rows = [
        ("tokens/s", "", _texts(progress, tokens)),
        (
            "trainer",
            _warm(fractions.get("idle")),
            join((f"{name} {part:.0%}" for name, part in fractions.items()), " "),
        ),
        ("servers", _warm(idle), "" if idle is None else f"idle {idle:.0%}  generate {1 - idle:.0%}"),
        ("queue", "", _texts(progress, queue)),
        ("overlap", "", progress.text("pipeline/overlap_efficiency", "{:.0f}% efficiency", scale=100)),
        ("lengths", "", join([progress.text("completions/mean_length", "mean {:.0f} tokens"), truncated])),
        ("all equal", "", progress.text("frac_reward_zero_std", "{:.0f}% of the groups", scale=100)),
    ]
    return [(name, style, text or "") for name, style, text in rows if text or name in ("tokens/s", "trainer")]


def _with_staleness(progress: Progress, pipeline: RenderableType, width: int, num_rows: int) -> RenderableType:
    """`pipeline`, and beside it how old the trained tokens are."""
    if width < 60:
        return pipeline
    both = Layout()
    both.split_row(Layout(pipeline), Layout(_staleness(progress, num_rows), size=max(28, width // 3)))
    return both


def _texts(progress: Progress, figures: Iterable[tuple[str, str]]) -> str:
    return join(progress.text(name, pattern) for name, pattern in figures)


def _warm(idle: float | None) -> str:
    """Coloured where much is idle."""
    return "" if idle is None or idle < 0.3 else "yellow" if idle < 0.6 else "red"


def _staleness(progress: Progress, num_rows: int) -> RenderableType:
    """A histogram: one line for each age, the last one for all older ones."""
    mean, most = (
        progress.text("async/staleness_mean", "mean {:.2f}"),
        progress.text("async/staleness_max", "max {:.0f}"),
    )
    found = list(progress.staleness_fractions().items())
    room = max(1, num_rows - 1)
    shown = [(str(age), fraction) for age, fraction in found[:room]]
    if len(found) > room:
        shown[-1] = (f"{found[room - 1][0]}+", sum(fraction for _, fraction in found[room - 1 :]))
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right")
    table.add_column(ratio=1)
    table.add_column(justify="right")
    for age, fraction in shown:
        table.add_row(age, Bar(size=1.0, begin=0.0, end=fraction, color="cyan"), f"{fraction:.0%}")
    title = Text.assemble(("staleness", "bold"), f"  {join([mean, most])}", no_wrap=True)
    return Group(title, table)


def _num_servers(progress: Progress) -> int:
    return max(1, len(progress.servers), len(progress.servers_down))


def _servers_title(progress: Progress) -> Text:
    title, known = Text("servers", style="bold"), progress.servers
    if not known:
        return title
    serving, restarts = sum(server.state == "serving" for server in known), sum(server.restarts for server in known)
    words = [
        f"  {serving} of {len(known)} serve",
        f"{restarts} restart{'' if restarts == 1 else 's'}" if restarts else None,
        progress.text("servers/recovery_s", "last recovery {:.1f} s") if progress.value("servers/recovery_s") else None,
    ]
    return title.append(join(words), style="not bold" if serving == len(known) else "not bold red")


def _servers(progress: Progress, num_rows: int) -> RenderableType:
    """One line each; where there is no room for all, those in trouble first, and a line that counts the others."""
    down, known = progress.servers_down, progress.servers
    if not known:  # nothing was heard of any yet
        lost = [_line(f"DOWN: the {name} {words}", "bold red") for name, words in down.items()]
        return Group(*(lost or [_line("no news of the servers yet", "dim")]))
    left: list[ServerStatus] = []
    if len(known) > num_rows:
        ordered = sorted(known, key=lambda server: server.state == "serving")
        known, left = ordered[: max(0, num_rows - 1)], ordered[max(0, num_rows - 1) :]
    has_hosts = len({server.url.rpartition(":")[0] for server in progress.servers}) > 1
    lines = []
    for server in known:
        # the launcher calls them "inference server" (of one) and "inference server 3"
        about = (f"inference server {server.index}", *(["inference server"] if len(progress.servers) == 1 else []))
        words = next((down[name] for name in about if name in down), "" if server.state == "serving" else server.words)
        lines.append(_server(server, words, has_hosts=has_hosts))
    if not left:
        return Group(*lines)
    serving, busy = sum(server.state == "serving" for server in left), sum(server.running or 0 for server in left)
    waiting = sum(server.waiting or 0 for server in left)
    words = f"and {len(left)} more: {serving} serve, {busy} requests run, {waiting} wait"
    return Group(*lines, _line(words, "dim"))


def _server(server: ServerStatus, words: str, *, has_hosts: bool) -> Text:
    """0 host:port  serving   v12  run 64/128  wait 3  KV 38%  restarts 1  and what is wrong"""
    line = Text.assemble((f"{server.index:>2}", "bold"), no_wrap=True, overflow="ellipsis")
    if has_hosts:
        line.append(f" {server.url.partition('://')[2]} ")
    line.append(f" {server.state:<8}", style=_STATES.get(server.state, "bold red"))
    if server.state in ("serving", "ready"):
        most = "" if server.max_running is None else f"/{server.max_running}"
        load = None if server.running is None else f"run {server.running}{most}  wait {server.waiting or 0}"
        line.append(join(["", None if server.version is None else f"  v{server.version}", load and f"  {load}"], ""))
        if server.kv_usage is not None:
            style = "green" if server.kv_usage < 0.8 else "yellow" if server.kv_usage < 0.95 else "red"
            line.append(f"  KV {server.kv_usage:.0%}", style=style)
    if server.restarts:
        line.append(f"  restarts {server.restarts}", style="yellow")
    return line.append(f"  {words}" if words else "", style="red")


def _run(progress: Progress, now: float) -> list[tuple[str, str, str]]:
    """(name, style, text), what is needed most first: what has no room is not shown."""
    warning, note = progress.last_message(is_warning=True), progress.last_message(is_warning=False)
    advice = "" if progress.advice is None else progress.advice.text
    groups = join((progress.text(f"ledger/groups/{state}", f"{state} {{:.0f}}") for state in LEDGER_STATES[:5]), " ")
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
        ("learning", "", "not judged yet" if progress.verdict is None else progress.verdict.text),
        ("warning", "yellow" if warning else "dim", f"{ago(warning.at, now)}: {warning.text}" if warning else "none"),
        ("advice", "bold" if advice else "dim", advice or "none yet"),
        ("groups", "", groups or "none yet"),
        ("held out", "", evaluations_text(progress) or "no evaluation yet"),
        ("last push", "", pushed or "none yet"),
        ("checkpoint", "", join([newest, None if saved.writing is None else f"writing step {saved.writing}"])),
        ("note", "", f"{ago(note.at, now)}: {note.text}" if note else "none"),
    ]


def _labelled(rows: Iterable[tuple[str, str, str]], *, wraps: Collection[str]) -> Table:
    """Names on the left, texts on the right: those of `wraps` on as many lines as they need, the others cut to one."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim", min_width=10)
    table.add_column()
    for name, style, text in rows:
        cut = name not in wraps
        table.add_row(name, Text(one_line(text), style=style, no_wrap=cut, overflow="ellipsis" if cut else "fold"))
    return table
