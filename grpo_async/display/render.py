"""A run in words: rows of names and texts, and one line for each event. Pure.

Rows are made of the content of status.json, so the dashboard and `status` show the same. Texts of
others are made safe for a terminal here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_async.records import FINAL_STATUSES
from grpo_async.utils.run_state import RUNNING
from grpo_async.utils.safe_text import one_line, plain
from grpo_async.utils.text import both_ends, clipped, duration, finite, format_number

PASS_OR_MEAN_AT_K = re.compile(r"(pass|mean)@\d+")
_EVALUATION_SHOWN = ("reward", "mean_length", "truncated", "num_failed", "num_unscored", "duration_s")
_BARS = "▁▂▃▄▅▆▇█"
_NAME_CELLS = 15  # of a line that are not its text: name, spaces, frame
_TALL = 30  # rows of a terminal from which on every text may wrap

Row = tuple[str, str, str]
"""Name, text, style."""
Patterns = Sequence[tuple[str, str]]
"""Names of numbers, and how each is written."""

_STEP_ROWS: Mapping[str, Patterns] = {
    "reward": (("reward", "{:.3f} (all groups of the last step)"), ("reward_std", "std {:.3f}")),
    "tokens/s": (("perf/generated_tokens_per_s", "generated {:.0f}"), ("perf/trained_tokens_per_s", "trained {:.0f}")),
    "last step": (
        ("pipeline/trainer_idle_ratio", "trainer idle {:.0%}"),
        ("pipeline/training_fraction", "train {:.0%}"),
        ("pipeline/pushing_fraction", "push {:.0%}"),
        ("pipeline/checkpoint_fraction", "save {:.0%}"),
        ("pipeline/generator_idle_ratio", "servers idle {:.0%}"),
    ),
    "queue": (
        ("ledger/groups/queued", "{:.0f} queued"),
        ("ledger/groups/in_flight", "{:.0f} in flight"),
        ("async/staleness_mean", "staleness mean {:.2f}"),
        ("async/staleness_max", "max {:.0f}"),
    ),
    "groups": [(f"ledger/groups/{status}", f"{status} {{:.0f}}") for status in FINAL_STATUSES],
    "lengths": (("completions/mean_length", "mean {:.0f} tokens"), ("completions/clipped_ratio", "{:.0%} truncated")),
}
_STEP_LINE: Patterns = (
    ("loss", "loss {:.3g}"),
    ("entropy", "entropy {:.3g}"),
    ("kl", "kl {:.3g}"),
    ("completions/mean_length", "length {:.0f}"),
    ("completions/clipped_ratio", "truncated {:.0%}"),
    ("perf/generated_tokens_per_s", "{:.0f} tok/s generated"),
    ("perf/trained_tokens_per_s", "{:.0f} tok/s trained"),
    ("async/staleness_mean", "staleness {:.3g}"),
    ("ledger/groups/queued", "queued {:.0f}"),
    ("ledger/groups/in_flight", "in flight {:.0f}"),
    ("pipeline/trainer_idle_ratio", "trainer idle {:.0%}"),
    ("sync/push_s", "push {:.2f} s"),
    ("step_time", "{:.1f} s/step"),
)
_SERVER: Patterns = (
    ("version", "v{:.0f}"),
    ("running", "run {:.0f}"),
    ("waiting", "wait {:.0f}"),
    ("kv_usage", "KV {:.0%}"),
)


def join(parts: Iterable[str | None], separator: str = "  ") -> str:
    return separator.join(part for part in parts if part)


def write_numbers(values: Mapping[str, Any], patterns: Patterns) -> str:
    """Write those of the numbers that there are: "push 0.04 s  2.0 s/step"."""
    known = ((finite(values.get(name)), pattern) for name, pattern in patterns)
    return join(pattern.format(value) for value, pattern in known if value is not None)


def diagnosis_rows(learning: Mapping[str, Any] | None) -> Iterator[Row]:
    """Yield what every command shows of a run first: how it stands, and what to do."""
    learning = learning or {}
    style = "bold red" if learning.get("is_learning") is False else "bold"
    yield "learning", str(learning.get("text") or "not known yet"), style
    yield "to do", str(learning.get("fix") or ""), style


def run_rows(content: Mapping[str, Any], now: float, *, width: int = 160) -> Iterator[Row]:
    """Yield the rows of a run, the most important first.

    Args:
        content: of status.json.
        now: time.time() seconds.
        width: cells for a curve, a prompt or a completion, whose middle is left out where it is longer.
    """
    metrics, is_running = content.get("metrics") or {}, content.get("state") == RUNNING
    yield from diagnosis_rows(content.get("learning"))
    yield "step", _step_text(content, now), "bold"
    rewards = (content.get("reward") or {}).get("curve") or ()
    ends = f"{format_number(min(rewards))} to {format_number(max(rewards))}" if rewards else ""
    yield "curve", join([sparkline(rewards, max(1, width - 20)), ends]), "cyan"
    if is_running and (phase := content.get("phase")):
        took = duration(max(0, round(now - (finite(content.get("phase_since")) or now))))
        yield "now", join([f"{phase} ({took})", content.get("detail")]), ""
    if warning := content.get("last_warning"):
        yield "warning", f"{ago(float(warning['at']), now)}: {warning['text']}", "yellow"
    yield "held out", evaluations_text(content.get("evaluations") or {}), ""
    for server in content.get("servers") or () if is_running else ():
        yield f"server {server.get('index')}", server_text(server), "red" if server.get("reason") else ""
    for name, patterns in _STEP_ROWS.items():
        yield name, write_numbers(metrics, patterns), ""
    yield from _example_rows(content.get("example"), width)
    saved = content.get("checkpoint") or {}
    if saved.get("step") is not None:
        writing = f"writing step {saved['writing']}" if saved.get("writing") is not None else None
        yield "checkpoint", join([f"step {saved['step']}", ago(saved["at"], now), writing]), ""


def _step_text(content: Mapping[str, Any], now: float) -> str:
    """`12/60  20%  1:10 elapsed  1:36 left  2.0 s/step`."""
    step, most, is_running = int(content.get("step") or 0), content.get("max_steps"), content.get("state") == RUNNING
    until = now if is_running else float(content.get("updated_at") or now)
    took = duration(max(0, round(until - float(content.get("started_at") or until))))
    if not is_running:
        return join([steps_text(step, most), f"{took} in all, with start, evaluations and end"])
    return join(
        [
            steps_text(step, most),
            f"{step / most:.0%}" if most else None,
            f"{took} elapsed",
            left_text(content.get("eta_s")),
            write_numbers(content.get("metrics") or {}, (("step_time", "{:.1f} s/step"),)),
        ]
    )


def _example_rows(example: Mapping[str, Any] | None, width: int) -> Iterator[Row]:
    if not example:
        return
    yield "prompt", both_ends(f"{example['prompt']} (step {example['step']})", max(width, 3)), "dim"
    completions = example["completions"]
    names = (("best", "green"), ("worst", "red")) if len(completions) > 1 else (("answer", ""),)
    for (name, style), each in zip(names, completions, strict=False):
        yield name, both_ends(f"{each['reward']:.3f}  {each['text']}", max(width, 3)), style


def server_text(server: Mapping[str, Any]) -> str:
    """`10.0.0.1:8000  serving  v12  run 64  wait 3  KV 38%  restarts 1  and what is wrong`."""
    address = str(server.get("url", "")).partition("://")[2]
    restarts = f"restarts {server['restarts']}" if server.get("restarts") else None
    state, reason = str(server.get("state", "?")), server.get("reason")
    return join([address, state, write_numbers(server, _SERVER), restarts, reason])


def step_line(
    step: int,
    max_steps: int | None,
    metrics: Mapping[str, float],
    *,
    change: float | None = None,
    left_s: float | None = None,
) -> str:
    """`step 12/60  reward 0.530 (all groups, +0.020)  loss 0.0123  entropy 0.31  ...`."""
    changed = "" if change is None else f", {change:+.3f}"
    restarts = (("servers/serving", "servers {:.0f}"), ("servers/restarts", "restarts {:.0f}"))
    parts = [
        f"step {steps_text(step, max_steps)}",
        write_numbers(metrics, (("reward", f"reward {{:.3f}} (all groups{changed})"),)),
        write_numbers(metrics, _STEP_LINE),
        write_numbers(metrics, restarts) if finite(metrics.get("servers/restarts")) else None,
        left_text(left_s),
    ]
    return join(parts)


def steps_text(step: int, max_steps: int | None) -> str:
    """`12/60`; `12` while the most steps are not known."""
    return f"{step}/{max_steps}" if max_steps else str(step)


def left_text(seconds: float | None) -> str | None:
    return None if seconds is None else f"{duration(round(seconds))} left"


def example_lines(example: Mapping[str, Any]) -> list[str]:
    """`prompt of step 12: 3 + 4 =`, then a line for each completion: `  reward 1.000: 7`."""
    lines = [f"  reward {each['reward']:.3f}: {each['text']}" for each in example["completions"]]
    return [f"prompt of step {example['step']}: {example['prompt']}", *lines]


def failed_checks(checks: Sequence[Mapping[str, str]]) -> list[str]:
    """`preflight: warn: memory: ...` for each that did not pass."""
    return [
        f"preflight: {check['status']}: {check['name']}: {check['detail']}"
        for check in checks
        if check["status"] != "pass"
    ]


def evaluation_line(when: str, metrics: Mapping[str, float]) -> str:
    """`held-out at step 20: reward 0.540  pass@4 0.700  versions 20 to 22`; `when` is before, after
    or "step 20". The parts of `evaluation.group_by` are left to the table at the end."""
    where = f"at {when}" if when.startswith("step") else f"{when} training"
    shown = [
        f"{name} {value:.3f}"
        for name, value in metrics.items()
        if isinstance(value, int | float) and (name in _EVALUATION_SHOWN or PASS_OR_MEAN_AT_K.fullmatch(name))
    ]
    if metrics.get("mixed"):
        shown.append(f"versions {metrics['version_min']:.0f} to {metrics['version_max']:.0f}")
    return f"held-out {where}: {join(shown)}"


def evaluations_text(evaluations: Mapping[str, Mapping[str, float]]) -> str:
    """The rewards of the first evaluation and of the last three: `before 0.300  step 20 0.450`."""
    known = [(when, values["reward"]) for when, values in evaluations.items() if "reward" in values]
    return join(f"{plain(when)} {reward:.3f}" for when, reward in known[:1] + known[1:][-3:])


def ago(at: float, now: float) -> str:
    return f"{duration(max(0, round(now - at)))} ago"


def means(values: Sequence[float], most: int) -> list[float]:
    """At most so many values, the mean where several become one: [1, 3, 5, 7], 2 -> [2, 6]."""
    cells = min(most, len(values))
    bounds = [cell * len(values) // cells for cell in range(cells + 1)] if cells else []
    return [fmean(values[start:end]) for start, end in pairwise(bounds)]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve on one line: [0, 1] -> "▁█"."""
    cells = means(values, width)
    low, high = min(cells, default=0.0), max(cells, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in cells)


def screen(content: Mapping[str, Any], size: tuple[int, int], *, footer: str) -> RenderableType:
    """Draw a picture of exactly `size`, width x height."""
    width, height = size
    run, phase = one_line(str(content.get("run"))), one_line(str(content.get("phase")))
    if height < 5 or width < 20:
        return Text(
            clipped(f"{run} {phase} step {steps_text(content['step'], content.get('max_steps'))}", width), no_wrap=True
        )
    room = width - _NAME_CELLS
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim", min_width=10)
    table.add_column()
    for name, text, style in run_rows(content, time.time(), width=room):
        if text:
            wraps = height >= _TALL or name in ("learning", "to do")
            line = clipped(one_line(text), room * (3 if wraps else 1))
            table.add_row(name, Text(line, style=style, overflow="fold", no_wrap=not wraps))
    return Panel(
        table,
        title=Text.assemble((run, "bold"), " · ", (phase, "cyan")),
        title_align="left",
        subtitle=Text(one_line(footer), style="dim"),
        subtitle_align="left",
        border_style="bright_black",
        width=width,
        height=height,
    )
