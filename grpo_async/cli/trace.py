"""`trace`: the timeline of a run for Perfetto, and what waited for what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import RunArgument


def trace(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the trace there; .gz compresses. Default: trace.json.gz in the run."
        ),
    ] = None,
    first_step: Annotated[
        int | None, typer.Option("--from", metavar="STEP", min=1, help="Leave out everything before this step.")
    ] = None,
    last_step: Annotated[
        int | None, typer.Option("--to", metavar="STEP", min=1, help="Leave out everything after this step.")
    ] = None,
) -> None:
    """Write a timeline trace that https://ui.perfetto.dev opens, and say what waited for what.

    Works during the run. The page reads the file locally in your browser and uploads nothing.

    \b
    Examples:
      grpo-async trace quickstart
      grpo-async trace quickstart --from 10 --to 12 --out /tmp/steps_10_to_12.json
    """
    if first_step is not None and last_step is not None and first_step > last_step:
        raise typer.BadParameter(f"{first_step} is after --to {last_step}", param_hint="--from")

    from grpo_async.viewer.runs import find_run
    from grpo_async.viewer.timeline import load_events
    from grpo_async.viewer.trace import PERFETTO, summary, write_trace

    run_dir = find_run(run)
    file = load_events(run_dir.events, first_step=first_step, last_step=last_step)
    path = run_dir.trace if out is None else out
    num_records = write_trace(file.events, path, title=run_dir.root.name)
    typer.echo(summary(file))
    typer.echo(f"\ntrace      {path} ({num_records} records): open it at {PERFETTO}")
