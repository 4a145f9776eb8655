"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ConfigArgument: TypeAlias = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment.")]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override one value, e.g. optimizer.lr=1e-6 or rewards.0.weight=2; repeatable.",
    ),
]
PortOption: TypeAlias = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
QuietOption: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only warnings, errors, and the summary at the end.")
]
JsonLogsOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--json-logs", help="Every event as one JSON object per line on stdout, and nothing else there; see below."
    ),
]
JSON_LOGS_HELP = """\
--json-logs writes one object per line, with `time` (seconds since 1970) and `event`; the rest by event:

\b
  start       run, directory, pid, plan
  phase       name: what is going on
  preflight   checks: [{name, status: pass|warn|fail, detail}]
  step        step, max_steps, eta_s, metrics: {name: number or null}
  evaluation  when: before|after|"step N", metrics
  server      name, trouble: a text, or null when it serves again
  servers     servers: [{index, url, state, version, running, waiting,
              kv_usage, restarts, ...}], when a state changes
  advice      step, bound_by, text, setting, current, suggested
  learning    is_learning: true|false|null, key, text, numbers
  note        text
  warning     text
  error       error, exit_code (people get it on stderr, too)
  end         exit_code, summary: as in summary.json, or null
"""
"""Part of the help of the commands that have it."""
