"""Reads status.json: what a run said last, and whether its launcher still lives to say more."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from grpo_async.display.charts import meter
from grpo_async.display.progress import (
    LEDGER_STATES,
    Checkpoints,
    LastPush,
    Progress,
    RunMessage,
    ServerLine,
    duration,
    evaluations_text,
    join,
)
from grpo_async.display.status_file import VERSION
from grpo_async.errors import ConfigError, RunError
from grpo_async.findings import Evidence, Finding, Severity, Verdict
from grpo_async.findings import judge as is_it_learning
from grpo_async.processes.wording import one_line
from grpo_async.rundir import RunDir
from grpo_async.utils.run_state import FAILED, FINISHED, KILLED, RUNNING, SILENT, STOPPED, judge

EXIT_CODES: Mapping[str, int] = {RUNNING: 0, FINISHED: 0, FAILED: 1, STOPPED: 3, KILLED: 4, SILENT: 4}
"""Of `grpo-async status`; 2 is a run that does not exist."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of status.json (`metric`) and of summary.json (`mean`), and how it is written."""

    metric: str
    mean: str
    form: str
    scale: float = 1.0


_TOKENS = (
    _Figure("perf/generated_tokens_per_s", "generated_tokens_per_s", "{:.0f} generated"),
    _Figure("perf/trained_tokens_per_s", "trained_tokens_per_s", "{:.0f} trained"),
)
_IDLE = (
    _Figure("pipeline/trainer_idle_ratio", "trainer_idle_ratio", "trainer {:.0f}%", 100.0),
    _Figure("pipeline/generator_idle_ratio", "generator_idle_ratio", "servers {:.0f}%", 100.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`content` is what status.json holds. `state` is that of the file, or where it says running and that cannot be: killed or
    silent (see `run_state`)."""

    state: str
    content: Mapping[str, Any]
    why: str = ""
    """What speaks against the file."""

    means: Mapping[str, Any] = field(default_factory=dict)
    """summary.json of a run that came to its end: figures of the whole attempt. Empty where there is none."""

    run_dir: RunDir | None = None
    """None: status.json is all there is."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]

    def learning(self) -> Mapping[str, Any]:
        """Whether it learns (the fields of `Verdict`), by the run's files as they are now; empty where there are none."""
        if self.run_dir is None:
            return self.content.get("learning") or {}
        return is_it_learning(Evidence.read(self.run_dir)).as_dict()

    def as_json(self) -> dict[str, Any]:
        """The file's content, with `state` as it is, `why`, and `learning` as of now."""
        return {**self.content, "state": self.state, "why": self.why or None, "learning": self.learning() or None}


def newest_run(runs: Path) -> RunDir:
    """The run directory below `runs` that said something last.

    Raises:
        ConfigError: there is none.
    """
    written = []
    for path in runs.glob("*/status.json"):
        try:
            written.append((path.stat().st_mtime, path.parent))
        except OSError:
            continue  # removed meanwhile
    if not written:
        raise ConfigError(
            f"{runs} holds no run with a status; name a run directory, or start one: grpo-async train CONFIG"
        )
    return RunDir(max(written)[1])


def read_status(run_dir: RunDir, *, now: float | None = None) -> RunStatus:
    """Raises ConfigError where there is no status.json, RunError where it is something else."""
    try:
        content = json.loads(run_dir.status.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{run_dir.root} has no status.json: nothing was trained there, or by an earlier version"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{run_dir.status} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION or content.get("state") not in EXIT_CODES:
        raise RunError(f"{run_dir.status} is no status of this version (layout {VERSION})")
    found = judge(content, now=now)
    means = (
        _summary(run_dir) if found.state in (FINISHED, STOPPED) else {}
    )  # after a failure it is of an earlier attempt
    return RunStatus(state=found.state, content=content, why=found.why, means=means, run_dir=run_dir)


def _summary(run_dir: RunDir) -> Mapping[str, Any]:
    """summary.json; empty where it is not there, or torn: the table then shows the last step, and says so."""
    try:
        summary = json.loads(run_dir.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def describe(status: RunStatus, *, now: float | None = None) -> Table:
    """A table for people; everything in it is text that no terminal obeys."""
    now = time.time() if now is None else now
    content = status.content
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    colour = {RUNNING: "green", FINISHED: "green", STOPPED: "yellow"}.get(status.state, "bold red")
    for name, text in _rows(status, content, now):
        if text:
            table.add_row(name, Text(one_line(text), style=colour if name == "state" else ""))
    return table


def _rows(status: RunStatus, content: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    progress = progress_of(content)
    step, max_steps = int(content.get("step", 0)), int(content.get("max_steps", 0))
    eta, started = content.get("eta_s"), float(content.get("started_at", now))
    is_running = status.state == RUNNING
    ended = now if is_running else float(content.get("updated_at", now))
    share = step / max_steps if max_steps else 0.0
    saved = progress.checkpoints
    return [
        ("run", f"{content.get('run')}  ({content.get('directory')})"),
        ("state", join([status.state, status.why, f"{content.get('phase')}" if is_running else None])),
        ("error", str(content.get("error") or "")),
        ("step", f"{step}/{max_steps} {meter(share, 20)} {share:.0%}"),
        (
            "time",
            join(
                [
                    f"{duration(ended - started)} since the start"
                    if is_running
                    else f"took {duration(ended - started)}",
                    f"{duration(eta)} left" if isinstance(eta, int | float) and is_running else None,
                    progress.text("step_time", "{:.1f} s/step" if is_running else "the last step {:.1f} s"),
                ]
            ),
        ),
        ("reward", _reward(content)),
        ("tokens/s", _figures(status, progress, _TOKENS)),
        ("idle", _figures(status, progress, _IDLE)),
        ("groups", _groups(content)),
        *((f"server {server.index}", _server(server)) for server in progress.servers if is_running),
        ("checkpoint", "none" if saved.step is None else f"step {saved.step}"),
        ("held out", evaluations_text(progress) or ""),
        ("learning", _text_of(status.learning())),
        ("advice", _text_of(content.get("advice"))),
        ("warning", _text_of(content.get("last_warning"))),
        ("launcher", f"pid {content.get('pid')} on {content.get('host')}, {_last_word(status, now)}"),
    ]


def progress_of(content: Mapping[str, Any], *, now: float | None = None) -> Progress:
    """What the displays go by, from status.json; without the curves and without older messages."""
    now = time.time() if now is None else now
    progress = Progress(max_steps=int(content.get("max_steps", 0)), step=int(content.get("step", 0)))
    progress.phase = one_line(str(content.get("phase", "")))
    progress.metrics = dict(content.get("metrics") or {})
    progress.set_servers(content.get("servers") or [])
    progress.evaluations = {str(when): dict(values) for when, values in (content.get("evaluations") or {}).items()}
    progress.started = time.monotonic() - max(0.0, now - float(content.get("started_at", now)))
    left = progress.max_steps - progress.step
    if isinstance(eta := content.get("eta_s"), int | float) and left > 0:
        progress.set_speed(eta / left)
    if push := content.get("last_push"):
        progress.push = LastPush(**push)
    progress.checkpoints = Checkpoints(**(content.get("checkpoint") or {}))
    if advice := content.get("advice"):
        progress.advice_step = int(advice.get("step", 0))
        changed = {name: advice.get(name) for name in ("text", "setting", "current", "suggested")}
        progress.advice = Finding(key=advice["bound_by"], severity=Severity.NOTE, what="", **changed)
    if learning := content.get("learning"):
        progress.verdict = Verdict(**learning)
    if warning := content.get("last_warning"):
        message = RunMessage(at=float(warning["at"]), text=one_line(str(warning["text"])), is_warning=True)
        progress.messages.append(message)
    return progress


def _figures(status: RunStatus, progress: Progress, figures: Sequence[_Figure]) -> str:
    """Of the newest step while the run goes on; after it the means of the whole run, or else those of the last step, named so."""
    if status.state == RUNNING:
        return join(progress.text(each.metric, each.form, scale=each.scale) for each in figures)
    means = [status.means.get(each.mean) for each in figures]
    whole = [
        each.form.format(value * each.scale)
        for each, value in zip(figures, means, strict=True)
        if isinstance(value, int | float)
    ]
    if whole:
        return join([*whole, "(mean of the run)"])
    last = join(progress.text(each.metric, each.form, scale=each.scale) for each in figures)
    return join([last, "(in the last step)"]) if last else ""


def _last_word(status: RunStatus, now: float) -> str:
    ago = f"{duration(max(0, now - _at(status.content)))} ago"
    return f"ended {ago}" if status.state in (FINISHED, STOPPED, FAILED) else f"last word {ago}"


def _reward(content: Mapping[str, Any]) -> str:
    reward = content.get("reward") or {}
    known = [(name, reward.get(name)) for name in ("last", "average")]
    text = join(f"{name} {value:.3f}" for name, value in known if isinstance(value, int | float))
    return f"{text}  (all groups of a step)" if text else ""


def _groups(content: Mapping[str, Any]) -> str:
    groups = (content.get("ledger") or {}).get("groups") or {}
    return join(f"{state.replace('_', ' ')} {groups[state]}" for state in LEDGER_STATES if state in groups)


def _server(server: ServerLine) -> str:
    load = None if server.running is None else f"run {server.running}  wait {server.waiting or 0}"
    usage = None if server.kv_usage is None else f"KV {server.kv_usage:.0%}"
    restarts = f"restarts {server.restarts}" if server.restarts else None
    version = None if server.version is None else f"version {server.version}"
    return join([server.state, version, load, usage, restarts, server.words, server.url])


def _text_of(content: Any) -> str:
    return str(content.get("text", "")) if isinstance(content, Mapping) else ""


def _at(content: Mapping[str, Any]) -> float:
    return float(content.get("updated_at", 0.0))
