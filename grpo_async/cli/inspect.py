"""`inspect`: all runs in the browser, and one run in full."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_async.cli.options import EvaluationOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpo_async.run_directory import RunDir


def inspect(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...] [QUERY]",
            help="Names of runs below runs/, or run directories; or a folder of runs. Default: all below runs/. QUERY: the filter "
            "the page opens with, as for inspect-rollouts.",
            show_default=False,
        ),
    ] = None,
    evaluation: EvaluationOption = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="FIELD", help="The order of the groups when the page opens.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="0 = any free port. Default: 8642, or a free one if that is taken."
        ),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Look at runs in the browser: which ones learn, and a run's verdict, curves, rollouts, logs and settings.

    The page is served on this machine only, is read-only, and follows active runs.

    \b
    Examples:
      grpo-async inspect
      grpo-async inspect quickstart
      grpo-async inspect quickstart higher-lr
      grpo-async inspect quickstart "reward<0.2 and truncated"
      grpo-async inspect /data/experiments --no-browser
    """
    from grpo_async.viewer.runs import RUNS_FOLDER, is_run, runs_below
    from grpo_async.viewer.web.serve import serve

    given = [Path(each) for each in arguments or [str(RUNS_FOLDER)]]
    folder = given[0] if len(given) == 1 and not is_run(given[0]) else None
    if folder is not None and folder != RUNS_FOLDER and not runs_below(folder):
        folder = None  # the name of a run, perhaps
    runs, query = ([], "") if folder is not None else runs_and_query(arguments or [], evaluation)
    serve(
        runs,
        folder=folder,
        host=host,
        port=port,
        open_browser=not no_browser,
        query=query,
        sort=sort_order(sort) or None,
    )


def runs_and_query(arguments: list[str], evaluation: str | None, *, several: bool = True) -> tuple[list[RunDir], str]:
    """RUN [QUERY], or with `several` RUN... [QUERY]: an argument that names a run is a run.

    Raises:
        ConfigError: there is no such run, or the query is wrong.
    """
    from grpo_async.errors import ConfigError
    from grpo_async.store.query import parse_query
    from grpo_async.viewer.runs import find_evaluation, find_run

    runs, rest = [find_run(arguments[0])], arguments[1:]
    if not several and rest and _problem_of(parse_query, rest[0]) and not _problem_of(find_run, rest[0]):
        raise ConfigError(
            f"several runs: `grpo-async inspect` shows {arguments[0]} and {rest[0]} side by side in the browser"
        )
    while several and rest:
        if no_run := _problem_of(find_run, rest[0]):
            if no_query := _problem_of(parse_query, rest[0]):
                raise ConfigError(f"{rest[0]!r} is neither a run nor a query. {no_run}\n{no_query}")
            break
        runs.append(find_run(rest.pop(0)))
    if len(rest) > 1:
        raise ConfigError(f"one QUERY is expected, got {len(rest)}: put it into quotes, '{' '.join(rest)}'")
    query = rest[0] if rest else ""
    parse_query(query)
    if evaluation is not None:
        runs = [find_evaluation(run, evaluation) for run in runs]
    return runs, query


def _problem_of(read: Callable[[str], object], text: str) -> str:
    """Why `text` cannot be read; empty where it can."""
    from grpo_async.errors import ConfigError

    try:
        read(text)
    except ConfigError as error:
        return str(error)
    return ""


def sort_order(text: str | None) -> str:
    """As the store has it: 'reward' -> '-reward', highest first; 'reward:asc' -> 'reward'; None -> ''.

    Raises:
        ConfigError: groups have no such order.
    """
    from grpo_async.errors import ConfigError
    from grpo_async.store.query import QueryError
    from grpo_async.store.table import group_order

    if not text:
        return ""
    fields = []
    for part in text.split(","):
        name, _, order = part.strip().partition(":")
        if order not in ("", "asc", "desc") or not name:
            raise ConfigError(
                f"--sort {text}: write a field, highest first (reward), or FIELD:asc, with commas between several"
            )
        fields.append(name if order == "asc" or name.startswith("-") else f"-{name}")
    try:
        group_order(",".join(fields))
    except QueryError as error:
        raise ConfigError(f"--sort {text}: {error.problem}") from error
    return ",".join(fields)
