"""`status`, `report`, `trace` and `replay`: a run's state, a page about it, its timeline, and a step of it computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_async.cli.options import RunArgument, SetOption

if TYPE_CHECKING:
    from grpo_async.run_directory import RunDir


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


_TOKENS = 10


def replay(
    run: RunArgument,
    step: Annotated[
        int, typer.Option("--step", min=1, help="The step; the checkpoint of the step before it is needed.")
    ],
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Replay a stored step: its loss, gradient and tokens, as they were and under other settings. Generates nothing.

    The step is computed from the checkpoint before it and from its rollouts in the run's store, first with the run's own settings
    (to be compared with what was recorded), then with those of --set: loss, advantage, optimizer, rewards,
    rollout.overlong, training.minibatches and training.num_iterations. Shows the metrics of both, the cosine of the angle
    between their gradients, and the tokens whose slope differs most: the derivative of the loss by the token's
    log-probability (below 0: the token is made likelier). A comparison is also kept for the run's page in the inspector. Step 1
    needs no checkpoint. Exit code: 0 replayed, 2 it cannot be.

    \b
    Examples:
      grpo-async replay quickstart --step 26
      grpo-async replay quickstart --step 26 --set 'loss={type: gspo, epsilon: 3e-4, epsilon_high: 4e-4}'
      grpo-async replay quickstart --step 26 --set advantage.type=none
      grpo-async replay quickstart --step 26 --set 'rewards=[{function: mine:stricter}]'
    """
    from grpo_async.chat.renderer import load_renderer
    from grpo_async.trainer.replay import replay as replay_step
    from grpo_async.viewer.runs import find_run

    directory = find_run(run)
    found = replay_step(directory, step, overrides or ())
    tokens = found.tokens(_TOKENS)
    text_of = load_renderer(found.config).token_text if tokens else str
    content = {
        "step": step,
        "changes": list(found.changes),
        "recorded": {name: found.recorded.get(name) for name in found.own.metrics},
        "own": dict(found.own.metrics),
        "other": None if found.other is None else dict(found.other.metrics),
        "cosine": found.cosine,
        "tokens": [(rollout, at, repr(text_of(number)), own, other) for rollout, at, number, own, other in tokens],
    }
    if found.other is not None:
        _keep(content, directory)
    typer.echo(json.dumps(content)) if as_json else _show(content)


def _keep(content: Mapping[str, Any], run: RunDir) -> None:
    from grpo_async.utils.files import write_atomically

    run.replays.mkdir(exist_ok=True)
    paths = (run.replays / f"step_{content['step']}.{number}.json" for number in count(1))
    write_atomically(next(path for path in paths if not path.exists()), json.dumps(content))


def _show(content: Mapping[str, Any]) -> None:
    """The tables that the run's page has."""
    from rich.text import Text

    from grpo_async.utils.console import print_rows, stdout_console
    from grpo_async.utils.safe_text import plain
    from grpo_async.viewer.web.overview import replay_tables

    console = stdout_console()
    for table in replay_tables(content):
        console.print(Text(f"{plain(table['caption'])}\n"))
        heads = tuple(head.removeprefix("#") for head in table["head"])
        print_rows(console, [heads, *(tuple(Text(plain(cell)) for cell in row) for row in table["rows"])])
        typer.echo("")
