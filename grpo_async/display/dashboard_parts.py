"""The parts of the dashboard: each says how many rows it would like, and makes as many as it is given. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from grpo_async.display.charts import bar, chart, short
from grpo_async.display.progress import Progress, ServerLine, duration, evaluations_text, join
from grpo_async.processes.wording import one_line

_LABEL = 11
_STATES = {"serving": "green", "ready": "yellow", "starting": "yellow", "down": "bold red", "gone": "bold red"}
_WIDTH_OF_A_CHART = 56
_HEIGHT_OF_A_CHART = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`lines(width, rows)` makes exactly `rows` lines; `wanted` rows show everything, `least` what matters."""

    title: Text
    wanted: int
    lines: Callable[[int, int], list[Text]]
    least: int = 1


def fit(line: Text, width: int) -> Text:
    """`line` cut or filled up to exactly `width` cells."""
    fitted = line.copy()
    fitted.truncate(width, overflow="ellipsis", pad=True)
    return fitted


# ---- charts ----


def charts_part(progress: Progress, width: int) -> Part:
    """The reward's curve, on wider terminals others beside it, on higher ones below."""
    title = Text("reward", style="bold")
    if progress.reward is not None:
        average, std, change = progress.reward_average, progress.value("reward_std"), progress.reward_change
        words = join(
            [
                f"{progress.reward:.3f} (all groups)",
                None if average is None else f"average {average:.3f}",
                None if std is None else f"std {std:.3f}",
                None if change is None else f"change {change:+.3f}",
            ]
        )
        title.append(f"  {words}", style="not bold")
    steps = max((curve.steps_per_point for curve in progress.curves.values()), default=1)
    if steps > 1:
        title.append(f"  (points of {steps} steps)", style="dim not bold")
    return Part(title=title, wanted=60, lines=lambda width, rows: _charts(progress, width, rows), least=3)


_CHARTS = (
    ("reward", "reward", "bold cyan", False),
    ("generated tokens/s", "generated", "green", False),
    ("completion length", "length", "magenta", False),
    ("trainer idle", "trainer idle", "yellow", True),
    ("servers idle", "servers idle", "yellow", True),
    ("entropy", "entropy", "blue", False),
    ("gradient norm", "gradient norm", "red", False),
    ("trained tokens/s", "trained", "green", False),
)


def _charts(progress: Progress, width: int, rows: int) -> list[Text]:
    num_columns = max(1, min(3, (width + 3) // (_WIDTH_OF_A_CHART - 2)))
    num_bands = max(1, min(rows // _HEIGHT_OF_A_CHART, math.ceil(len(_CHARTS) / num_columns))) if num_columns > 1 else 1
    if num_columns == 1 and rows >= 2 * _HEIGHT_OF_A_CHART:
        num_bands = min(len(_CHARTS), rows // _HEIGHT_OF_A_CHART)
    heights = [rows // num_bands + (index < rows % num_bands) for index in range(num_bands)]
    cell = (width - 3 * (num_columns - 1)) // num_columns
    lines: list[Text] = []
    chosen = iter(_CHARTS)
    for band, height in enumerate(heights):
        row: list[list[Text]] = []
        for column in range(num_columns):
            room = cell if column < num_columns - 1 else width - (cell + 3) * (num_columns - 1)
            entry = next(chosen, None)
            is_first = band == column == 0
            row.append(
                [Text(" " * room)] * height if entry is None else _chart(progress, entry, room, height, is_first)
            )
        for number in range(height):
            lines.append(Text("   ").join([column_lines[number] for column_lines in row]))
    return lines


def _chart(
    progress: Progress, entry: tuple[str, str, str, bool], width: int, height: int, is_first: bool
) -> list[Text]:
    """The first has its figures in the rule above; the others begin with a line of their own."""
    title, name, style, percent = entry
    curve = progress.curves[name]
    if is_first:
        return chart(curve, width, height, style=style, percent=percent)
    head = Text(title, style="bold")
    if curve.points:
        newest = curve.points[-1].value
        head.append(f"  {newest:.0%}" if percent else f"  {short(newest)}", style="not bold")
    return [fit(head, width), *chart(curve, width, height - 1, style=style, percent=percent)]


# ---- pipeline and staleness ----


def pipeline_part(progress: Progress, width: int) -> Part:
    """Left who works and who waits, right how old the trained tokens are."""
    rows = _pipeline_rows(progress)
    shares = progress.staleness_shares()
    title = Text("pipeline", style="bold")
    return Part(
        title=title,
        wanted=max(len(rows), min(len(shares) + 1, 10)),
        lines=lambda width, rows: _pipeline(progress, width, rows),
        least=4,
    )


def _pipeline(progress: Progress, width: int, num_rows: int) -> list[Text]:
    right = max(24, min(48, width // 3 + 2)) if width >= 60 else 0
    left = width - right - (3 if right else 0)
    rows = _pipeline_rows(progress)[:num_rows]
    lines = [_labelled(name, text, left) for name, text in rows]
    lines += [Text(" " * left)] * (num_rows - len(lines))
    if not right:
        return lines
    divider = Text(" │ ", style="bright_black")
    return [
        Text.assemble(line, divider, beside)
        for line, beside in zip(lines, _staleness(progress, right, num_rows), strict=True)
    ]


def _pipeline_rows(progress: Progress) -> list[tuple[str, Text]]:
    shares = progress.trainer_shares()
    trainer = join((f"{name} {share:.0%}" for name, share in shares.items()), "  " if len(shares) < 4 else " ")
    idle = progress.value("pipeline/generator_idle_ratio")
    tokens = join(
        [
            progress.text("perf/generated_tokens_per_s", "generated {:.0f}"),
            progress.text("perf/trained_tokens_per_s", "trained {:.0f}"),
        ]
    )
    queue = join(
        [
            progress.text("buffer/queued_groups", "{:.0f} groups"),
            progress.text("ledger/groups/in_flight", "{:.0f} in flight"),
        ]
    )
    rows = [
        ("tokens/s", Text(tokens)),
        ("trainer", _warm(trainer, shares.get("idle"))),
        ("servers", _warm("" if idle is None else f"idle {idle:.0%}  generate {1 - idle:.0%}", idle)),
        ("queue", Text(queue)),
    ]
    if overlap := progress.text("pipeline/overlap_efficiency", "{:.0f}% efficiency", scale=100):
        rows.append(("overlap", Text(overlap)))
    if length := progress.text("completions/mean_length", "{:.0f} tokens in the mean"):
        truncated = progress.text("rollout/truncated", "{:.0f}% truncated", scale=100)
        rows.append(("lengths", Text(join([length, truncated]))))
    if equal := progress.text("frac_reward_zero_std", "{:.0f}% of the groups", scale=100):
        rows.append(("all equal", Text(equal)))
    return rows


def _warm(text: str, idle: float | None) -> Text:
    """Coloured where much is idle."""
    return Text(text, style="" if idle is None or idle < 0.3 else "yellow" if idle < 0.6 else "red")


def _staleness(progress: Progress, width: int, num_rows: int) -> list[Text]:
    """A histogram: one line for each age, the last one for all older ones."""
    mean, most = progress.value("async/staleness_mean"), progress.value("async/staleness_max")
    head = Text("staleness", style="bold")
    if mean is not None and most is not None:
        head.append(f"  mean {mean:.2f}  max {most:.0f}", style="not bold")
    lines = [fit(head, width)]
    shares = list(progress.staleness_shares().items())
    room = num_rows - 1
    if len(shares) > room > 0:
        older = sum(share for _, share in shares[room - 1 :])
        entries = [(str(age), share) for age, share in shares[: room - 1]]
        entries.append((f"{shares[room - 1][0]}+", older))
    else:
        entries = [(str(age), share) for age, share in shares]
    for age, share in entries[:room]:
        line = Text(f"{age:>3} ")
        line.append(bar(share, max(1, width - 9)), style="cyan").append(f"{share:5.0%}")
        lines.append(fit(line, width))
    lines += [Text(" " * width)] * (num_rows - len(lines))
    return lines[:num_rows]


# ---- servers ----


def servers_part(progress: Progress) -> Part:
    """One line each; where there is no room for all, those in trouble first, and a line that counts the others."""
    title = Text("servers", style="bold")
    known = progress.servers
    serving = sum(server.state == "serving" for server in known)
    if known:
        restarts = sum(server.restarts for server in known)
        words = f"  {serving} of {len(known)} serve" + (
            f"  {restarts} restart{'' if restarts == 1 else 's'}" if restarts else ""
        )
        if progress.value("servers/recovery_s"):
            words += progress.text("servers/recovery_s", "  last recovery {:.1f} s") or ""
        title.append(words, style="not bold" if serving == len(known) else "not bold red")
    wanted = max(1, len(known), len(progress.servers_down))
    return Part(title=title, wanted=wanted, lines=lambda width, rows: _servers(progress, width, rows), least=1)


def _servers(progress: Progress, width: int, num_rows: int) -> list[Text]:
    down = dict(progress.servers_down)
    lines: list[Text] = []
    hosts = {server.url.partition("://")[2].rpartition(":")[0] for server in progress.servers}
    trouble = [server for server in progress.servers if server.state != "serving"]
    ordered = [*trouble, *(server for server in progress.servers if server.state == "serving")]
    shown = ordered if len(ordered) <= num_rows else ordered[: max(0, num_rows - 1)]
    for server in shown if len(ordered) > num_rows else progress.servers:
        words = next((text for name, text in down.items() if _is_about(name, server, len(progress.servers))), "")
        lines.append(fit(_server(server, words, with_host=len(hosts) > 1), width))
    if left := ordered[len(shown) :]:
        serving = sum(server.state == "serving" for server in left)
        busy = sum(server.running or 0 for server in left)
        waiting = sum(server.waiting or 0 for server in left)
        words = f"and {len(left)} more: {serving} serve, {busy} requests run, {waiting} wait"
        lines.append(fit(Text(words, style="dim"), width))
    if not progress.servers:  # nothing was heard of any yet
        lines = [fit(Text(f"DOWN: the {name} {words}", style="bold red"), width) for name, words in down.items()]
        if not lines:
            lines = [fit(Text("no news of the servers yet", style="dim"), width)]
    lines += [Text(" " * width)] * (num_rows - len(lines))
    return lines[:num_rows]


def _is_about(name: str, server: ServerLine, num_servers: int) -> bool:
    """The launcher calls them "inference server" (of one) and "inference server 3"."""
    return num_servers == 1 or name.split()[-1] == str(server.index)


def _server(server: ServerLine, words: str, *, with_host: bool) -> Text:
    """0 serving  v12  run 64/128  wait 3  KV ███░ 38%  restarts 1"""
    line = Text(f"{server.index:>2} ", style="bold")
    if with_host:
        line.append(f"{server.url.partition('://')[2]}  ")
    line.append(f"{server.state:<8}", style=_STATES.get(server.state, "") + " not bold")
    is_up = server.state in ("serving", "ready")
    if server.version is not None and is_up:
        line.append(f"  v{server.version:<4}", style="not bold")
    if server.running is not None and is_up:
        most = "" if server.max_running is None else f"/{server.max_running}"
        line.append(f"  run {server.running}{most}  wait {server.waiting or 0}", style="not bold")
    if server.kv_usage is not None and is_up:
        style = "green" if server.kv_usage < 0.8 else "yellow" if server.kv_usage < 0.95 else "red"
        line.append("  KV ", style="not bold").append(f"▕{bar(server.kv_usage, 8)}▏", style=style)
        line.append(f"{server.kv_usage:.0%}", style="not bold")
    if server.restarts:
        line.append(f"  restarts {server.restarts}", style="yellow not bold")
    if trouble := words or ("" if server.state == "serving" else server.words):
        line.append(f"  {trouble}", style="red not bold")
    return line


# ---- the run ----


def run_part(progress: Progress, width: int, now: float) -> Part:
    """Ledger, push, checkpoint, evaluation, verdict, advice, warning, note: in this order, long texts on several lines."""
    advice = "" if progress.advice is None else one_line(progress.advice.text)
    warning, note = progress.last_warning, progress.last_note
    texts = [
        ("advice", advice or "none yet", "bold" if advice else "dim", 3),
        ("warning", "none" if warning is None else f"{_ago(warning.at, now)}: {warning.text}", "yellow", 3),
        ("note", "none" if note is None else f"{_ago(note.at, now)}: {note.text}", "", 2),
    ]
    room = max(10, width - _LABEL)
    folded = [
        (name, textwrap.wrap(text, room) or [""], "dim" if text == "none" else style, most)
        for name, text, style, most in texts
    ]
    fixed = [
        ("groups", _ledger(progress, width - _LABEL)),
        ("last push", _push(progress, now)),
        ("checkpoint", _checkpoint(progress, now)),
        ("held out", one_line(evaluations_text(progress) or "") or "no evaluation yet"),
        ("learning", "not judged yet" if progress.verdict is None else one_line(progress.verdict.text)),
    ]
    wanted = len(fixed) + sum(min(len(lines), most) for _, lines, _, most in folded)
    least = len(fixed) + len(folded) - 1 + (len(folded[0][1]) > 1)  # the note may go

    def lines(width: int, rows: int) -> list[Text]:
        return _run(fixed, folded, width, rows)

    return Part(title=Text("run", style="bold"), wanted=max(wanted, least), lines=lines, least=least)


def _run(
    fixed: Sequence[tuple[str, str]],
    folded: Sequence[tuple[str, list[str], str, int]],
    width: int,
    num_rows: int,
) -> list[Text]:
    if num_rows < len(fixed) + sum(min(2, len(lines)) for _, lines, _, _ in folded[:2]) + 1:
        folded = folded[:-1]  # without the note, so that advice and warning are whole
    rows = [1 for _ in folded]
    left = num_rows - len(fixed) - len(folded)
    for index, (_, lines, _, most) in enumerate(folded):
        more = max(0, min(left, min(len(lines), most) - 1))
        rows[index] += more
        left -= more
    result = [_labelled(name, Text(text), width) for name, text in fixed]
    if num_rows < len(fixed) + len(folded):  # advice and warning say more than where the checkpoint is
        result = result[: max(0, num_rows - len(folded))]
    for (name, lines, style, _), count in zip(folded, rows, strict=True):
        shown = lines[:count]
        if len(lines) > count:
            shown[-1] = shown[-1] + "…" if len(shown[-1]) < width - _LABEL else shown[-1][:-1] + "…"
        for number, text in enumerate(shown):
            result.append(_labelled(name if number == 0 else "", Text(text, style=style), width))
    result += [Text(" " * width)] * (num_rows - len(result))
    return result[:num_rows]


def _ledger(progress: Progress, room: int) -> str:
    """Groups by what became of them; those that are queued or in flight stand with the queue."""
    states = ("trained", "filtered", "stale", "failed", "cancelled")
    parts = [progress.text(f"ledger/groups/{state}", f"{state} {{:.0f}}") for state in states]
    text = join(parts)
    return (text if len(text) <= room else join(parts, " ")) or "none yet"


def _push(progress: Progress, now: float) -> str:
    push = progress.push
    if push is None:
        return "none yet"
    speed = None if push.bytes_per_s is None else f"{_bytes(push.bytes_per_s)}/s"
    size = None if push.num_bytes is None else _bytes(push.num_bytes)
    return join([_ago(push.at, now), f"took {push.seconds:.2f} s", size, speed, f"step {push.step}"])


def _checkpoint(progress: Progress, now: float) -> str:
    saved = progress.checkpoints
    when = "" if saved.at is None else f", {_ago(saved.at, now)}"
    newest = "none yet" if saved.step is None else f"step {saved.step}{when}"
    return join([newest, None if saved.writing is None else f"writing step {saved.writing}"])


# ---- messages ----


def messages_part(progress: Progress, now: float) -> Part:
    """The latest notes and warnings, newest at the bottom."""

    def lines(width: int, rows: int) -> list[Text]:
        shown = list(progress.messages)[-rows:]
        made = [
            fit(
                Text.assemble(
                    (f"{_ago(message.at, now):>11}  ", "dim"), (message.text, "yellow" if message.is_warning else "")
                ),
                width,
            )
            for message in shown
        ]
        return [*made, *([Text(" " * width)] * (rows - len(made)))]

    wanted = min(40, max(4, len(progress.messages)))
    return Part(title=Text("messages", style="bold"), wanted=wanted, lines=lines, least=4)


def _labelled(name: str, text: Text, width: int) -> Text:
    line = Text(name.ljust(_LABEL), style="dim")
    rest = text.copy()
    rest.style = f"not dim {text.style}".strip()
    return fit(line.append_text(rest), width)


def _ago(at: float, now: float) -> str:
    return f"{duration(max(0.0, now - at))} ago"


def _bytes(value: float) -> str:
    """1441152 -> "1.4 MB"."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f} B"
