"""Puts the report together: one HTML page with its scripts, styles and data inside, which may not load anything "
"from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from grpo_async.viewer.report import headline, sections
from grpo_async.viewer.report.advice import advice_section
from grpo_async.viewer.report.chapters import CHAPTERS
from grpo_async.viewer.report.markup import Markup, data_script, element, inlined, joined
from grpo_async.viewer.report.plots import Drawing, draw
from grpo_async.viewer.report.rollout_section import histogram_id, rollouts
from grpo_async.viewer.report.run_data import RunData
from grpo_async.viewer.report.special_plots import held_out_plots, histograms, staleness_histograms
from grpo_async.viewer.report.timeline_section import TimelinePart, timeline_part

_STYLES = ("uplot.min.css", "theme.css", "report/report.css")
_SCRIPTS = ("uplot.iife.min.js", "charts.js")
_WHY_NOT = {
    "rewards": "No step has a reward: no optimizer step was finished, or every reward was None.",
    "completions": "No step has figures of its completions.",
    "update": "No optimizer step was finished.",
    "async": "No optimizer step was finished.",
    "pipeline": "No optimizer step was finished.",
    "held-out": "There was no evaluation: set evaluation.data, and evaluation.every_steps for a curve.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One section, and the charts that its places are filled with."""

    name: str
    title: str
    content: Markup
    charts: Sequence[tuple[str, dict[str, Any]]] = ()


def render(runs: Sequence[RunData], *, made_at: str, version: str) -> str:
    """The whole page.

    Args:
        runs: at least one; the first gives the order of settings and figures.
        made_at: when, for the foot of the page.
        version: of this package.
    """
    timeline = timeline_part(runs)
    parts = _parts(runs, timeline)
    charts = [{"place": place, **options} for part in parts for place, options in part.charts]
    names = _SCRIPTS + (("timeline.js",) if timeline.data is not None else ())
    scripts = [_asset(name) for name in (*names, "report/report.js")]
    styles = [_asset(name) for name in _STYLES]
    data = {"charts": charts, "timeline": timeline.data}
    title = " and ".join(run.label for run in runs)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(styles, scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{title}: report of grpo-async"),
        [inlined("style", style) for style in styles],
    )
    foot = element(
        "footer", f"Made by grpo-async {version} at {made_at}, from {', '.join(str(run.run_dir.root) for run in runs)}."
    )
    body = element(
        "body",
        element(
            "div",
            _navigation(parts),
            element("main", _top(runs), [part.content for part in parts], foot),
            class_="page",
        ),
        data_script("report-data", data),
        [inlined("script", script) for script in scripts],
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _top(runs: Sequence[RunData]) -> Markup:
    if len(runs) == 1:
        run = runs[0]
        return element(
            "header",
            element("h1", run.label, " ", headline.pill(run)),
            element("p", headline.story(run), class_="subtitle"),
            headline.tiles(run),
            sections.what_ended_it(run),
            sections.problems(runs),
        )
    return element(
        "header",
        element("h1", " against ".join(run.label for run in runs) if len(runs) == 2 else f"{len(runs)} runs"),
        [element("p", element("strong", run.label), ": ", headline.story(run), class_="subtitle") for run in runs],
        headline.side_by_side(runs),
        sections.what_differs(runs),
        [sections.what_ended_it(run) for run in runs],
        sections.problems(runs),
    )


def _parts(runs: Sequence[RunData], timeline: TimelinePart) -> list[_Part]:
    chapters = {chapter.name: [each for plot in chapter.plots for each in draw(plot, runs)] for chapter in CHAPTERS}
    chapters["async"].extend(staleness_histograms(runs))
    held_out = held_out_plots(runs)
    drawn = {each.name for drawings in (*chapters.values(), held_out) for each in drawings}
    parts = [
        _Part(name="learning", title="Is it learning?", content=sections.is_it_learning(runs, drawn)),
        _Part(name="advice", title="Advice", content=advice_section(runs)),
        _chapter("rewards", "Rewards", chapters["rewards"]),
        _held_out(runs, held_out),
        _Part(name="rollouts", title="Rollouts", content=rollouts(runs), charts=_histogram_charts(runs)),
    ]
    parts.extend(_chapter(each.name, each.title, chapters[each.name]) for each in CHAPTERS if each.name != "rewards")
    parts.append(_Part(name="timeline", title="Timeline", content=timeline.content))
    parts.append(_Part(name="config", title="Configuration", content=sections.configuration(runs)))
    return parts


def _chapter(name: str, title: str, drawings: Sequence[Drawing]) -> _Part:
    content = sections.plots(name, title, drawings, why_not=_WHY_NOT[name])
    return _Part(name=name, title=title, content=content, charts=_places(drawings))


def _held_out(runs: Sequence[RunData], drawings: Sequence[Drawing]) -> _Part:
    title = "Held-out prompts"
    plots = sections.plots("held-out", title, drawings, why_not=_WHY_NOT["held-out"])
    tables = sections.evaluation_tables(runs)
    return _Part(name="held-out", title=title, content=joined(plots, tables), charts=_places(drawings))


def _places(drawings: Sequence[Drawing]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"chart-{each.name}", each.data) for each in drawings]


def _histogram_charts(runs: Sequence[RunData]) -> list[tuple[str, dict[str, Any]]]:
    return [(histogram_id(kind, run.label), data) for run in runs for kind, data in histograms(run)]


def _navigation(parts: Sequence[_Part]) -> Markup:
    links = [element("li", element("a", part.title, href=f"#{part.name}")) for part in parts]
    return element("nav", element("ul", links), aria_label="Sections")


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Nothing is loaded from anywhere; of scripts and styles only those that stand in the page run, known by their "
    "hashes."""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    folder = resources.files("grpo_async.viewer") / "static"
    return folder.joinpath(*name.split("/")).read_text(encoding="utf-8").replace("\r\n", "\n")
