"""`status`: the state of a run, for people and scripts."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Name of a run below runs/, or a run directory; default: the newest run."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: the content of status.json, with the actual state.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Keep showing it until the run ends: on a terminal, as the dashboard of `train`."),
    ] = False,
) -> None:
    """Show the state of a run, while it is active or after it has ended. Starts and changes nothing.

    The run writes RUN/status.json on every event and every other second. State: running, finished, stopped (by a signal, after a
    checkpoint), failed; killed: the file says running, but the launcher is gone; silent: the launcher is on another machine and
    has written nothing for a minute. Exit code: 0 running or finished, 1 failed, 2 no such run, 3 stopped, 4 killed or
    silent.

    \b
    Examples:
      grpo-async status
      grpo-async status quickstart --watch
      grpo-async status quickstart --json | jq '{state, step, eta_s, reward}'
      until grpo-async status quickstart --json | jq -e '.state != "running"' > /dev/null; do sleep 60; done
    """
    if as_json and watch:
        raise typer.BadParameter("choose one of --json and --watch", param_hint="--watch")

    from grpo_async.display import status as reader
    from grpo_async.utils.console import stdout_console
    from grpo_async.viewer.runs import RUNS_FOLDER, find_run

    run_dir = reader.newest_run(RUNS_FOLDER) if run is None else find_run(run)
    console = stdout_console()
    found = reader.watch(run_dir, console) if watch else reader.read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        reader.print_status(console, found)
    raise typer.Exit(found.exit_code)
