"""What the page shows of whole runs: a line in the list of runs, a run's own page, its curves and settings."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_async.config.diff import MISSING, Difference, differences, flat
from grpo_async.config.loader import read_values
from grpo_async.config.public import shown_config
from grpo_async.errors import RunError
from grpo_async.findings import RunHistory, Severity, find
from grpo_async.findings.study import Study
from grpo_async.run_directory import RunDir
from grpo_async.tracking.catalog import describe
from grpo_async.utils.files import file_stamp, numbers, read_object
from grpo_async.utils.run_state import (
    EVALUATED,
    FAILED,
    FINISHED,
    KILLED,
    LEVELS,
    RUNNING,
    SILENT,
    STOPPED,
    UNFINISHED,
)
from grpo_async.utils.text import clipped, count, duration, format_number
from grpo_async.viewer.facts import facts_of, trained_s
from grpo_async.viewer.runs import modified_at
from grpo_async.viewer.web.plots import CHAPTERS, Line, Plot, curve, draw, draw_all
from grpo_async.viewer.web.sources import Source

_CARD_POINTS = 80  # of the small curve
_MAIN_PLOTS = ("held-out", "reward", "lengths", "entropy", "zero-variance", "ratio")
_MAX_MAIN_PLOTS = 4  # the first of them that there are
_LEVELS = {Severity.ERROR: "bad", Severity.WARNING: "warning", Severity.NOTE: "info"}
_LESS_IMPORTANT = ("version_min", "version_max", "mixed", "reward_std", "num_turns", "duration_s")
_FORMATS = {"fraction": "percent", "s": "seconds", "bytes": "bytes"}  # of units, as charts.js names them


# -- a run


def card(source: Source) -> dict[str, Any]:
    """A run in a line: its state, its verdict, and the points of a small curve."""
    run, diagnosis = source.run_and_verdict()
    results = run.evaluated()
    return {
        "name": source.name,
        **_headline(run),
        "step": run.last_step,
        "max_steps": run.max_steps,
        "model": run.setting("model.path"),
        "updated_at": modified_at(source.run),
        "verdict": {
            "level": {True: "good", False: "bad", None: "info"}[diagnosis.is_learning],
            "key": diagnosis.key,
            "text": "\n".join(diagnosis.lines),
        },
        "curve": curve(run.metrics, "reward", max_points=_CARD_POINTS),
        "changes": _changes(source),
        "held_out": [results[0].metrics["reward"], results[-1].metrics["reward"]] if len(results) > 1 else None,
        "num_evaluations": len(source.run.evaluation_steps()),
        "metrics": len(run.metrics),
    }


def page(source: Source) -> dict[str, Any]:
    """The run page: what happened, whether it learns and why not, and the main plots."""
    run, _ = source.run_and_verdict()
    problems = [*run.problems]
    try:
        problems += source.table().notes
    except RunError as error:  # all else is there
        problems.append(str(error))
    plots = {plot.name: plot for chapter in CHAPTERS.values() for plot in chapter}
    found = find(run)
    wanted = {*_MAIN_PLOTS, *(each.plot for each in found)}
    drawn = {name: draw(plot, {source.name: run}) for name, plot in plots.items() if name in wanted}
    findings = [
        {
            **asdict(each),
            "sort": "-step",
            "level": _LEVELS[each.severity],
            "plot": plots[each.plot].title if each.plot and drawn[each.plot] else None,
            "command": None if each.query is None else _inspect_command(source.run, each.query),
        }
        for each in found
    ]
    return {
        **card(source),
        "statistics": facts_of(run),
        "plots": [drawing for name in _MAIN_PLOTS if (drawing := drawn[name])][:_MAX_MAIN_PLOTS],
        "findings": findings,
        "tables": [*_evaluation_tables(run), *_replay_tables(source.run, problems)],
        "error": run.error,
        "problems": problems,
    }


def _inspect_command(run: RunDir, query: str) -> str:
    """The line to paste into a shell, from the folder of this process."""
    return shlex.join(["grpo-async", "inspect-rollouts", str(run.root), query, "--sort", "step"])


# -- a study


def study_table(folder: Path) -> dict[str, Any] | None:
    """The table and the advice of the study whose runs are in `folder`; None: they are of none."""
    study = Study.read(folder)
    if study is None:
        return None
    head, rows = study.table()
    num_axes = len(study.plan.axes)
    return {
        "head": [*head[:num_axes], *(f"#{name}" for name in head[num_axes:])],
        "rows": rows,
        "advice": study.advice(),
    }


# -- evaluations


def _evaluation_tables(run: RunHistory) -> Iterator[dict[str, Any]]:
    """Every evaluation of a run, and the newest one by value of `evaluation.group_by`; the first cell names the row."""
    if not run.evaluations:
        return
    names = _evaluation_names(run)
    head = ["", *(name.replace("_", " ") for name in names)]
    rows = []
    for each in run.evaluations:
        when = "" if each.when == "during" else f", {each.when} training"
        values = _values(each.metrics, names)
        if each.why_not:
            values = [f"none: {each.why_not}", *[""] * (len(names) - 1)]
        rows.append([f"step {each.step}{when}", *values])
    yield {"caption": "Evaluations", "head": head, "rows": rows}
    newest = next((each for each in reversed(run.evaluations) if each.by_group), None)
    if newest is not None:
        parts = [*newest.by_group.items(), ("all prompts", newest.metrics)]
        rows = [[part, *_values(values, names)] for part, values in parts]
        yield {"caption": f"By value of evaluation.group_by, at step {newest.step}", "head": head, "rows": rows}


def _evaluation_names(run: RunHistory) -> list[str]:
    names = list(dict.fromkeys(name for each in run.evaluations for name in each.metrics))
    first = [name for name in ("reward", "reward_stderr", "num_prompts") if name in names]
    return [*first, *(name for name in names if name not in first and name not in _LESS_IMPORTANT)] or ["reward"]


def _values(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """The value of each name; "" where there is none."""
    return [format_number(metrics[name]) if name in metrics else "" for name in names]


# -- replays


def _replay_tables(run: RunDir, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Of each comparison that `grpo-async replay` made, the newest first; one that was repeated is there once."""
    shown: list[dict[str, Any]] = []  # what their metrics came to
    for path in sorted(run.replays.glob("step_*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        if (found := read_object(path, problems)) and (tables := list(replay_tables(found)))[0] not in shown:
            shown.append(tables[0])
            yield from tables


def replay_tables(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of what `grpo-async replay --json` prints: the metrics that differ side by side, and the tokens that differ most
    (`of_rollouts`: the first cell names a rollout). Captioned "Step 3 with loss.type: dapo → gspo", without the settings that
    the other type lacks."""
    changes = [each for each in found["changes"] if not each.endswith(f" -> {MISSING}")] or found["changes"]
    what = f"with {'; '.join(each.replace(' -> ', ' → ') for each in changes)}" if changes else "as it was"
    caption = f"Step {found['step']} {what}"
    columns = [numbers(found[name]) for name in ("recorded", "own", "other") if found[name] is not None]
    names = dict.fromkeys(name for column in columns[1:] for name in column)
    rows = [[name, *(_values(each, [name])[0] for each in columns)] for name in names]
    if found["other"] is not None:
        different = [row for row in rows if len(set(row[1:])) > 1]
        same = len(rows) - len(different)
        rows = [*different, *([[f"{count(same, 'more metric')}: the same in all columns", "", "", ""]] if same else [])]
    if found["cosine"] is not None:
        rows.append(["cosine of the angle between the gradients", "", "", f"{found['cosine']:.4f}"])
    yield {"caption": caption, "head": ["", "#recorded", "#replayed", "#with --set"][: len(columns) + 1], "rows": rows}
    if found["tokens"]:
        rows = [
            [rollout, str(at), text, *(f"{slope:+.2e}" if slope else "0" for slope in slopes)]
            for rollout, at, text, *slopes in found["tokens"]
        ]
        head = ["rollout", "#token", "text", "#slope as it was", "#with --set"]
        yield {"caption": f"{caption}: the tokens that differ most", "head": head, "rows": rows, "of_rollouts": True}


# -- a fork


def _changes(source: Source) -> str | None:
    """What a fork changed, "loss.type dapo → gspo"; None: it is none, or its parent is not beside it."""
    parent = Path(str(read_object(source.run.fork, []).get("parent", ""))).name
    if not parent:
        return None
    try:
        theirs, own = (file_stamp(RunDir(root).config) for root in (source.run.root.with_name(parent), source.run.root))
    except OSError:
        return None
    return None if theirs is None or own is None else _changes_between(theirs, own)


@functools.lru_cache(maxsize=256)
def _changes_between(*stamps: tuple[Path, int, int]) -> str | None:
    """Of two configurations, as they were at these stamps: reading them takes 20 ms, and a page asks every few seconds."""
    configs = [shown_config(read_values(file, [])) for file, *_ in stamps]
    different = _different(configs)
    changes = [each for each in different if each.values[-1] != MISSING] or different
    said = [f"{each.path} {' → '.join(clipped(value, 80) for value in each.values)}" for each in changes]
    return (", ".join(said) or "the same settings") if configs[0] else None


# -- the top of its page


def _headline(run: RunHistory) -> dict[str, Any]:
    """The top of a run's page: status (a level for the color, and a word), and one sentence."""
    return {
        "level": LEVELS.get(run.status, "warning"),
        "status": "not finished" if run.status == UNFINISHED else run.status,
        "outcome": _outcome(run, trained_s(run)),
    }


def _outcome(run: RunHistory, wall_s: float) -> str:
    """One sentence: what happened."""
    if run.status == EVALUATED or run.purpose == "evaluation":
        return f"The evaluation {'finished' if run.status in (EVALUATED, FINISHED) else f'is {run.status}'}."
    steps = f"{run.last_step} of {run.max_steps} steps" if run.max_steps else count(run.last_step, "step")
    steps += f", {duration(round(wall_s))} of training" if wall_s else ""
    how = {
        FINISHED: f"The run finished after {steps}.",
        STOPPED: f"The run was stopped after {steps}; --resume continues it.",
        FAILED: f"The run failed after {steps}.",
        RUNNING: f"The run is in progress: {steps} so far.",
        KILLED: f"The run was killed after {steps}; --resume continues it.",
        SILENT: f"The run has {steps}; its launcher, on another machine, has written nothing for a while.",
        UNFINISHED: f"The run has {steps}. It is still running, or it was killed.",
    }
    return how.get(run.status, f"{run.status}: {steps}.")


# -- curves


def curves(sources: Sequence[Source]) -> dict[str, Any]:
    """All plots, chapter by chapter, and one of each metric that none of them shows."""
    runs = {source.name: source.run_and_verdict()[0] for source in sources}
    chapters: list[dict[str, Any]] = [
        {"title": title, "plots": draw_all(plots, runs)} for title, plots in CHAPTERS.items()
    ]
    drawn = {name for chapter in chapters for plot in chapter["plots"] for name in plot["metrics"]}
    names = {name for run in runs.values() for name in run.names("")} - drawn - {"step"}
    others = draw_all(map(_plain, sorted(names)), runs)
    return {
        "metrics": len(runs[sources[0].name].metrics),
        "chapters": [chapter for chapter in chapters if chapter["plots"]],
        "others": others,
    }


def _plain(name: str) -> Plot:
    info = describe(name)
    unit = f"{info.help} ({info.unit})" if info.unit and info.unit not in _FORMATS else info.help
    form = _FORMATS.get(info.unit, "number")
    return Plot(name, name, unit, (Line(name, name),), format=form, include=())


# -- settings


def settings(sources: Sequence[Source]) -> dict[str, Any]:
    """What may be shown of the first run's configuration, and in what those of the others differ from it."""
    configs = [source.run_and_verdict()[0].config for source in sources]
    return {
        "settings": list(flat(configs[0]).items()),
        "runs": [source.name for source in sources],
        "different": [[each.path, *each.values] for each in _different(configs)],
        "path": str(sources[0].run.config),
    }


def _different(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Without those settings in which any two runs differ."""
    return [each for each in differences(configs) if each.path not in ("run.name", "run.dir")]
