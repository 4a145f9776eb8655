"""`inspect-rollouts`: what a run generated, during or after it, printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from grpo_async.cli.inspect import runs_and_query, sort_order
from grpo_async.cli.options import EvaluationOption

Found = TypeVar("Found")

_TABLE_LIMIT = 40
_WIDTH_OF_A_PIPE = 200  # tables cut texts to it


class InspectCommand(TyperCommand):
    """Its help page ends with what a query may say. With --web it is the command `inspect`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if "--web" in args:
            command = parent.command.get_command(parent, "inspect")
            return command.make_context("inspect", [each for each in args if each != "--web"], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from grpo_async.store.query_names import help_text

        formatter.write_paragraph()
        formatter.write("QUERY: an SQL condition on rollouts.\n\n" + help_text(width=max(60, formatter.width)))


def inspect_rollouts(
    context: typer.Context,
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
        str | None, typer.Option("--rollout", metavar="ID", help="One rollout with all its tokens.")
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
    """Print the rollouts of a run: a table of groups, one group with its rollouts, or one rollout token by token.

    `grpo-async inspect` shows the same in the browser.

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
    given = _given(context) | ({"QUERY"} if len(arguments) > 1 else set())
    for one in ("--group", "--rollout"):
        for other in ("--group", "--rollout", "--sort", "--limit", "QUERY"):
            if other != one and {one, other} <= given:
                raise typer.BadParameter(f"{one} shows only one; leave out {other}", param_hint=other)

    from rich.text import Text

    from grpo_async.errors import RunError
    from grpo_async.store.query import parse_query
    from grpo_async.store.table import RolloutTable
    from grpo_async.utils.console import stdout_console
    from grpo_async.utils.safe_text import visible_line
    from grpo_async.viewer import printing
    from grpo_async.viewer.token_text import load_token_texts

    (run,), text = runs_and_query(arguments, evaluation, several=False)
    query, order = parse_query(text), sort_order(sort)
    shown = (None if as_json else _TABLE_LIMIT) if limit is None else limit or None
    console = stdout_console(width_of_a_pipe=_WIDTH_OF_A_PIPE)
    with RolloutTable.open(run.rollouts) as table:
        num_stored = table.count().groups
        if num_stored == 0:
            raise RunError(f"{run.root} has no rollouts yet; the first appear with the first groups that are done")
        if rollout is not None:
            found, path = _named(table.rollout, rollout)
            if as_json:
                typer.echo(printing.rollout_json(found, path))
            else:
                console.print(printing.rollout_page(found, path, load_token_texts(run)))
        elif group is not None:
            row = _named(table.group, group)
            if as_json:
                typer.echo(printing.group_json(row, table.group_summary_at(row.seq)))
            else:
                console.print(printing.group_page(row))
        elif as_json:
            for summary in printing.groups(table, query, sort=order, limit=shown):
                typer.echo(printing.group_json(table.group_at(summary.seq), summary))
        else:
            rows = list(printing.groups(table, query, sort=order, limit=shown))
            console.print(printing.group_table(rows, table.count(query).groups, num_stored))
            for note in table.notes:
                console.print(Text(f"note: {visible_line(note, 400)}", style="yellow"))


def _named(read: Callable[[Any], Found], name: int | str) -> Found:
    """What `read` finds by a name that the user gave; that there is none is the user's mistake."""
    from grpo_async.errors import ConfigError, RunError

    try:
        return read(name)
    except RunError as error:
        raise ConfigError(f"{error}. Rollouts are named like g17-r3, the fourth of group 17") from error


def _given(context: typer.Context) -> set[str]:
    """Names of the options given on the command line."""
    return {
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name or "")) is not None and source.name == "COMMANDLINE"
    }
