"""Which plots the page has, chapter by chapter, and which metrics each shows: layout.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a plot. `around`: a metric that is drawn as a band of its width around this one (a standard deviation);
    `between`: two metrics that bound the band. `single_run`: shown where there is one run only, so that several
    stay readable."""

    metric: str
    label: str
    around: str | None = None
    between: tuple[str, str] | None = None
    single_run: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot. `pattern`: a prefix and a suffix; every metric that has both is a line, too. `include`: values that the axis
    always shows."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...] = ()
    pattern: tuple[str, str] | None = None
    format: str = "number"
    include: tuple[float, ...] = (0.0,)
    log: bool = False
    leave_out: tuple[str, ...] = ()
    least_found: int = 1  # with fewer metrics of the pattern the plot would only repeat another
    of_evaluations: bool = False  # points of the evaluations instead of the steps
    single_run: bool = False  # as for a line


_LAYOUT = Path(__file__).with_suffix(".json")
CHAPTERS = TypeAdapter(dict[str, tuple[Plot, ...]]).validate_json(_LAYOUT.read_text(encoding="utf-8"))
"""Plots by the title of their chapter."""
