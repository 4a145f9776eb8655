"""`inspect`: runs in the browser. `inspect-rollouts`: what a run generated, printed. Both during a run or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from grpo_async.cli.options import EvaluationOption
from grpo_async.viewer.web import DEFAULT_HOST, DEFAULT_PORT

if TYPE_CHECKING:
    from grpo_async.run_directory import RunDir
    from grpo_async.store.query import Query

Found = TypeVar("Found")

_TABLE_LIMIT, _ALL = 40, 1_000_000_000
_WIDTH_OF_A_PIPE = 200  # tables cut texts to it


def inspect(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...] [QUERY]",
            help="Names of runs in runs/, or run directories; or a folder of runs. Default: all in runs/. QUERY: the filter "
            "the page opens with, as for inspect-rollouts.",
            show_default=False,
        ),
    ] = None,
    evaluation: EvaluationOption = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="FIELD", help="The order of the groups when the page opens.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help=f"0 = any free port. Default: {DEFAULT_PORT}, or a free one if that is taken.",
        ),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Look at runs in the browser: which ones learn and why not, and a run's curves, rollouts, logs and settings.

    The page is served on this machine only, is read-only, and follows active runs.

    \b
    Examples:
      grpo-async inspect
      grpo-async inspect quickstart
      grpo-async inspect quickstart higher-lr
      grpo-async inspect quickstart "reward<0.2 and truncated"
      grpo-async inspect /data/experiments --no-browser
    """
    from grpo_async.store.query import EVERYTHING
    from grpo_async.viewer.runs import RUNS_FOLDER, find_folder
    from grpo_async.viewer.web.serve import serve

    given = arguments or [str(RUNS_FOLDER)]
    folder = find_folder(given[0]) if len(given) == 1 else None
    if folder is not None and evaluation is not None:
        raise typer.BadParameter("name the run that was evaluated", param_hint="--evaluation")
    runs, query = ([], EVERYTHING) if folder is not None else runs_and_query(given, evaluation)
    serve(
        runs,
        folder=folder,
        host=host,
        port=port,
        open_browser=not no_browser,
        query=query,
        sort=sort_order(sort) or None,
    )


class InspectCommand(TyperCommand):
    """Its help page ends with what a query may say. With --web it is the command `inspect`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if "--web" in args:
            command = parent.command.get_command(parent, "inspect")
            return command.make_context("inspect", [each for each in args if each != "--web"], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from grpo_async.store.names import HELP

        for title, rows in HELP:
            with formatter.section(title):
                formatter.write_dl(rows)


def inspect_rollouts(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [QUERY]",
            help="Name of a run below runs/, or a run directory. QUERY: see below.",
        ),
    ],
    evaluation: EvaluationOption = None,
    group: Annotated[int | None, typer.Option("--group", metavar="ID", help="All rollouts of one group.")] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="One rollout: messages, rewards, turns.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="FIELD", help="Highest first; FIELD:asc lowest first; default: newest first."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=0,
            help=f"Maximum number of groups to print; 0 = all. Default: {_TABLE_LIMIT}, with --json all.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, with every field.")] = False,
    _web: Annotated[
        bool,
        typer.Option("--web", help="Alias of `grpo-async inspect`, with its arguments and options."),
    ] = False,
) -> None:
    """Print the rollouts of a run: a table of groups, one group with its rollouts, or one rollout.

    `grpo-async inspect` shows the same in the browser, and every token with its log-probabilities; --json has them, too.

    \b
    Examples:
      grpo-async inspect-rollouts quickstart
      grpo-async inspect-rollouts quickstart "reward<0.2 and truncated"
      grpo-async inspect-rollouts quickstart "trained and step between 10 and 20" --sort reward --limit 5
      grpo-async inspect-rollouts quickstart "reward<=0 and text ilike '%what is%'"
      grpo-async inspect-rollouts quickstart --group 17
      grpo-async inspect-rollouts quickstart --rollout g17-r3
      grpo-async inspect-rollouts quickstart "reward<=0.5" --evaluation latest
      grpo-async inspect-rollouts quickstart "'python' IN tools and failed" --json | jq .summary.reward_mean
      grpo-async inspect-rollouts quickstart --web
    """
    given = {"--group": group, "--rollout": rollout, "--sort": sort, "--limit": limit, "QUERY": arguments[1:] or None}
    for one in ("--group", "--rollout"):
        others = [name for name, value in given.items() if value is not None and name != one]
        if given[one] is not None and others:
            raise typer.BadParameter(f"{one} shows only one; leave out {others[0]}", param_hint=others[0])

    from rich.text import Text

    from grpo_async.errors import RunError
    from grpo_async.store.query import Query
    from grpo_async.store.table import RolloutTable
    from grpo_async.utils.console import stdout_console
    from grpo_async.utils.safe_text import visible_line
    from grpo_async.viewer import printing

    (run,), query = runs_and_query(arguments, evaluation, several=False)
    order = sort_order(sort)
    most = limit or _ALL if limit is not None or as_json else _TABLE_LIMIT
    console = stdout_console(width_of_a_pipe=_WIDTH_OF_A_PIPE)
    with RolloutTable(run.rollouts) as table:
        num_stored = table.count().groups
        if num_stored == 0:
            raise RunError(f"{run.root} has no rollouts yet; the first appear with the first groups that are done")
        if rollout is not None:
            found, path = _named(table.rollout, rollout)
            if as_json:
                typer.echo(printing.rollout_json(found, path))
            else:
                console.print(printing.rollout_page(found, path))
        elif group is not None:
            row = _named(table.group, group)
            if as_json:
                typer.echo(printing.group_json(row, table.group_page(Query(f"seq = {row.seq}"))[0]))
            else:
                console.print(printing.group_page(row))
        else:
            rows = table.group_page(query, sort=order or "-seq", limit=most)
            if as_json:
                for summary in rows:
                    typer.echo(printing.group_json(table.group_at(summary["seq"]), summary))
                return
            console.print(printing.group_table(rows, table.count(query).groups, num_stored))
            for note in table.notes:
                console.print(Text(f"note: {visible_line(note, 400)}", style="yellow"))


def _named(read: Callable[[Any], Found], name: int | str) -> Found:
    """Call `read(name)`; a missing name becomes a ConfigError."""
    from grpo_async.errors import ConfigError, RunError

    try:
        return read(name)
    except RunError as error:
        raise ConfigError(f"{error}. Rollouts are named like g17-r3, the fourth of group 17") from error


def runs_and_query(arguments: list[str], evaluation: str | None, *, several: bool = True) -> tuple[list[RunDir], Query]:
    """RUN [QUERY], or with `several` RUN... [QUERY]: an argument that names a run is a run."""
    from grpo_async.errors import ConfigError
    from grpo_async.store.query import parse_query
    from grpo_async.viewer.runs import find_evaluation, find_run

    runs, rest = [find_run(arguments[0])], arguments[1:]
    while several and rest:
        try:
            runs.append(find_run(rest[0]))
        except ConfigError as no_run:
            try:
                parse_query(rest[0])
            except ConfigError as no_query:
                raise ConfigError(f"{rest[0]!r} is neither a run nor a query. {no_run}\n{no_query}") from no_query
            break
        rest = rest[1:]
    if len(rest) > 1:
        raise ConfigError(f"one QUERY is expected, got {len(rest)}: put it into quotes, '{' '.join(rest)}'")
    query = parse_query(rest[0] if rest else "")
    if evaluation is not None:
        runs = [find_evaluation(run, evaluation) for run in runs]
    return runs, query


def sort_order(text: str | None) -> str:
    """The order in the store's syntax: 'reward' -> '-reward', highest first; 'reward:asc' -> 'reward'; None -> ''."""
    from grpo_async.errors import ConfigError
    from grpo_async.store.query import QueryError
    from grpo_async.store.table import check_group_order

    if not text:
        return ""
    fields = []
    for part in text.split(","):
        name, _, order = part.strip().partition(":")
        if order not in ("", "asc", "desc"):
            raise ConfigError(f"--sort {text}: a field (highest first) or FIELD:asc, with commas between several")
        fields.append(name if order == "asc" else f"-{name}")
    try:
        check_group_order(",".join(fields))
    except QueryError as error:
        raise ConfigError(f"--sort {text}: {error.problem}") from error
    return ",".join(fields)
