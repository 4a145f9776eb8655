"""`inspect-rollouts`: what a run generated, during or after it, on a screen or printed."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from grpo_async.cli.inspect import runs_and_query, sort_order
from grpo_async.cli.options import EvaluationOption, SupersededOption, WhereOption

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
    group: Annotated[
        int | None, typer.Option("--group", metavar="ID", help="All rollouts of one group, printed.")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="One rollout with all its tokens, printed.")
    ] = None,
    where: WhereOption = None,
    superseded: SupersededOption = False,
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
    plain: Annotated[bool, typer.Option("--plain", help="Print a table, also on a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, with every field.")] = False,
    _web: Annotated[
        bool,
        typer.Option("--web", help="Alias of `grpo-async inspect`, with its arguments and options."),
    ] = False,
) -> None:
    """Look at the rollouts of a run: groups, one group side by side, one rollout token by token.

    On a terminal this opens a screen (? shows its keys). In a pipe, or with --plain, --json, --group or --rollout, it prints.

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
    is_printed = plain or as_json or group is not None or rollout is not None or not _is_terminal()
    _refuse_what_has_no_effect(_given(context), is_printed=is_printed)

    from grpo_async.store.table import RolloutTable
    from grpo_async.utils.console import stdout_console
    from grpo_async.viewer import plain as printed

    runs, text = runs_and_query(arguments, where, evaluation, several=False)
    order = sort_order(sort)
    with RolloutTable.open(runs[0].rollouts) as table:
        if not is_printed:
            from grpo_async.viewer.terminal.app import run_inspector
            from grpo_async.viewer.terminal.base import Session
            from grpo_async.viewer.token_text import load_token_texts

            texts = load_token_texts(runs[0])
            session = Session(run=runs[0], name=arguments[0], table=table, texts=texts, with_superseded=superseded)
            run_inspector(session, text=text, sort=order)
            return
        selection = printed.Selection(
            text=text,
            sort=order,
            limit=(None if as_json else _TABLE_LIMIT) if limit is None else limit or None,
            group_id=group,
            rollout_id=rollout,
            with_superseded=superseded,
        )
        if as_json:
            printed.write_json(runs[0], table, selection, typer.echo)
        else:
            printed.show(runs[0], table, selection, stdout_console(width_of_a_pipe=_WIDTH_OF_A_PIPE))


_EXCLUDE_EACH_OTHER = (
    ("--group", "--rollout", "choose one of --group and --rollout"),
    ("--plain", "--json", "choose one of --plain and --json"),
    *((option, "--group", "--group shows only one; leave it out") for option in ("--sort", "--limit")),
    *((option, "--rollout", "--rollout shows only one; leave it out") for option in ("--sort", "--limit")),
)


def _given(context: typer.Context) -> set[str]:
    """Names of the options given on the command line."""
    return {
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name or "")) is not None and source.name == "COMMANDLINE"
    }


def _refuse_what_has_no_effect(given: set[str], *, is_printed: bool) -> None:
    """Raises BadParameter where one of the options that are `given` would be ignored together with the others."""
    for option, other, why in _EXCLUDE_EACH_OTHER:
        if {option, other} <= given:
            raise typer.BadParameter(why, param_hint=option)
    if "--limit" in given and not is_printed:
        raise typer.BadParameter(
            "the screen has all groups; leave it out, or print them with --plain", param_hint="--limit"
        )


def _is_terminal() -> bool:
    """Whether a screen can be drawn: input and output are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
