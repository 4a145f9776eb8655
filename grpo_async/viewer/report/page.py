"""Renders the report: `report.html` with its scripts, styles and data inline; it loads nothing from elsewhere.

Every text goes through the template, which escapes it and makes control characters visible: text of models, data and tools stays
text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo_async.config.diff import flat
from grpo_async.findings.finding import sentence
from grpo_async.tracking.catalog import describe
from grpo_async.utils.safe_text import visible
from grpo_async.utils.text import both_ends, count, format_number
from grpo_async.viewer.report import sections
from grpo_async.viewer.report.headline import headline
from grpo_async.viewer.report.layout import CHAPTERS
from grpo_async.viewer.report.plots import Drawing, draw_all
from grpo_async.viewer.report.run_data import RunData, changed_settings

_STYLES = ("uplot.min.css", "theme.css", "report/report.css")
_SCRIPTS = ("uplot.iife.min.js", "charts.js", "report/report.js")
_COLUMN_WIDTH = 200  # characters


@dataclass(frozen=True, slots=True)
class _Plots:
    """A section of plots, which charts.js draws; `why_not` is shown where there are none."""

    name: str
    title: str
    drawings: Sequence[Drawing]
    why_not: str


def render(runs: Sequence[RunData], *, made_at: str, version: str) -> str:
    """The whole page.

    Args:
        runs: at least one; the first gives the order of settings and statistics.
        made_at: when, for the foot of the page.
        version: of this package.
    """
    chapters = []
    for chapter in CHAPTERS:
        chapters.append(_Plots(chapter.name, chapter.title, draw_all(chapter.plots, runs), chapter.why_not))
    rewards, held_out, *others = chapters
    drawings = [drawing for chapter in chapters for drawing in chapter.drawings]
    charts = [{"id": f"chart-{each.name}", **each.data} for each in drawings]
    configured = [run for run in runs if run.config]
    return _environment().get_template("report.html").render(
        runs=runs,
        several=len(runs) > 1,
        headlines=[headline(run) for run in runs],
        difference_rows=[[each.path, *each.values] for each in changed_settings([run.config for run in configured])],
        configs=[(run, flat(run.config)) for run in configured],
        learning=[(run, sections.learning(run)) for run in runs],
        advice=[(run, sections.advice(run)) for run in runs],
        rewards=rewards,
        held_out=held_out,
        evaluations=list(sections.evaluation_tables(runs)),
        chapters=others,
        drawn={each.name for each in drawings},
        waits=[(run, sections.waits(run)) for run in runs],
        data=charts,
        styles=[_asset(name) for name in _STYLES],
        scripts=[_asset(name) for name in _SCRIPTS],
        made_at=made_at,
        version=version,
    )  # fmt: skip


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("grpo_async.viewer.report", "."),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters.update(
        number=lambda value: "none" if value is None else format_number(value),
        plural=count,
        hash=_hash,
        shell=shlex.quote,
        shortened=_shortened,
    )
    environment.globals.update(
        describe=describe,
        inspect_command=sections.inspect_command,
        levels=sections.LEVELS,
        sentence=sentence,
    )
    return environment


def _finalize(value: Any) -> Any:
    """Applied to everything that the template writes: None becomes "", control characters of a text become visible."""
    if value is None:
        return ""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _shortened(value: Any) -> str:
    """A column of the data, as JSON where it is not text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return both_ends(text, _COLUMN_WIDTH)


def _hash(source: str) -> str:
    """The source expression of the Content-Security-Policy that allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    """The text of one of our scripts or style sheets."""
    folder = resources.files("grpo_async.viewer") / "static"
    return folder.joinpath(*name.split("/")).read_text(encoding="utf-8").replace("\r\n", "\n")
