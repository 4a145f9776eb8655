"""`status`, `report` and `trace`: a run's state, a page about it, and its timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import RunArgument


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Name of a run below runs/, or a run directory; default: the newest run."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: the content of status.json, with the actual state.")
    ] = False,
) -> None:
    """Show the state of a run, while it is active or after it has ended. Starts and changes nothing.

    The run writes RUN/status.json on every event and every second. State: running, finished, stopped (by a signal, after a
    checkpoint), failed; killed: the file says running, but the launcher is gone; silent: the launcher is on another machine and
    has written nothing for a minute. Exit code: 0 running or finished, 1 failed, 2 no such run, 3 stopped, 4 killed or
    silent.

    \b
    Examples:
      grpo-async status
      watch grpo-async status quickstart
      grpo-async status quickstart --json | jq '{state, step, eta_s, reward}'
      until grpo-async status quickstart --json | jq -e '.state != "running"' > /dev/null; do sleep 60; done
    """
    from grpo_async.display import status as reader
    from grpo_async.utils.console import stdout_console
    from grpo_async.viewer.runs import RUNS_FOLDER, find_run

    run_dir = reader.newest_run(RUNS_FOLDER) if run is None else find_run(run)
    console = stdout_console()
    found = reader.read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        reader.print_status(console, found)
    raise typer.Exit(found.exit_code)


def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write. Default: report.html in the run directory."),
    ] = None,
) -> None:
    """Write a report: the inspector's page of a run in one HTML file: does it learn and if not, why, curves, rollouts.

    The file is self-contained and works offline. It has a sample of the rollouts, token by token: the best and the worst. It omits
    logs and what may be secret: arguments of your code, addresses, accounts.
    `train` writes one at the end of every run (record.report). This also works for a run that is active, failed or was killed.

    \b
    Examples:
      grpo-async report quickstart
      grpo-async report quickstart --out /tmp/quickstart.html
    """
    from grpo_async.viewer.runs import find_run
    from grpo_async.viewer.web.report import write_report

    typer.echo(str(write_report(find_run(run), out)))


def trace(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the trace there; .gz compresses. Default: trace.json.gz in the run."
        ),
    ] = None,
) -> None:
    """Write what happened when as a trace that https://ui.perfetto.dev opens.

    Works during the run. The page reads the file locally in your browser and uploads nothing.

    \b
    Examples:
      grpo-async trace quickstart
      grpo-async trace quickstart --out /tmp/trace.json
    """
    from grpo_async.viewer.runs import find_run
    from grpo_async.viewer.trace import PERFETTO, write_trace

    run_dir = find_run(run)
    path = run_dir.trace if out is None else out
    num_spans = write_trace(run_dir.events, path, title=run_dir.root.name)
    typer.echo(f"{path} ({num_spans} spans): open it at {PERFETTO}")
