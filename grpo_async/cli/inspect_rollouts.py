"""`inspect-rollouts`: what a run generated, while it runs or after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from rich.console import Console

    from grpo_async.rundir import RunDir
    from grpo_async.viewer.plain.show import Selection

_TABLE_LIMIT = 40
_WIDTH_OF_A_PIPE = 200  # wide enough for grep; rich would take 80
_LOOPBACK = "127.0.0.1"


class InspectCommand(TyperCommand):
    """Its help page ends with the query language."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from grpo_async.store.query_help import help_text

        formatter.write_paragraph()
        formatter.write("QUERY: what the rollouts have to be like.\n\n" + help_text(width=max(60, formatter.width)))


def inspect_rollouts(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [QUERY]",
            help="Name of a run below runs/, or a run directory; with --web also several. QUERY: see below.",
            show_default=False,
        ),
    ],
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--evaluation", metavar="STEP|last", help="Rollouts of an evaluation instead of those of training."
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", metavar="ID", help="All rollouts of one group, printed.")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="One rollout with all its tokens, printed.")
    ] = None,
    step: Annotated[str | None, typer.Option("--step", metavar="N|A..B|last", help="Short for step=A..B.")] = None,
    status: Annotated[
        str | None, typer.Option("--status", metavar="A,B", help="Short for group.status=trained,stale.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Short for group.reward>=X.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Short for group.reward<=X.")] = None,
    truncated: Annotated[
        bool | None, typer.Option("--truncated/--finished", help="Groups with a truncated rollout / without one.")
    ] = None,
    search: Annotated[str | None, typer.Option("--search", metavar="TEXT", help="Short for text~TEXT.")] = None,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Also what a resume left behind: it is no part of the run any more.")
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", metavar="FIELD", help="Highest first; FIELD:asc lowest first; default: what was written last."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help=f"Most groups; 0 = all. Default: {_TABLE_LIMIT}, with --json all."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print a table, also on a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with every field.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Show it in the browser, served on this machine only.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address of --web.")] = _LOOPBACK,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of --web; 0 = any that is free.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address of --web.")] = False,
) -> None:
    """Look at the rollouts of a run: groups, one group side by side, one rollout with every figure of its tokens.

    On a terminal it opens a screen (? shows its keys). Into a pipe, and with --plain, --json, --group or --rollout, it prints.

    \b
    Examples:
      grpo-async inspect-rollouts quickstart
      grpo-async inspect-rollouts quickstart "reward<0.2 and truncated"
      grpo-async inspect-rollouts quickstart --step 10..20 --status trained --sort reward --limit 5
      grpo-async inspect-rollouts quickstart --max-reward 0 --truncated --search "what is"
      grpo-async inspect-rollouts quickstart --group 17
      grpo-async inspect-rollouts quickstart --rollout g17-r3
      grpo-async inspect-rollouts quickstart --evaluation last --max-reward 0.5
      grpo-async inspect-rollouts quickstart "tool=python and failed" --json | jq .summary.reward_mean
      grpo-async inspect-rollouts quickstart another-run --web
    """
    if group is not None and rollout is not None:
        raise typer.BadParameter("choose one of --group and --rollout", param_hint="--group")
    if web and (plain or as_json or group is not None or rollout is not None):
        raise typer.BadParameter(
            "it is shown in the browser; leave out --plain, --json, --group and --rollout", param_hint="--web"
        )

    from grpo_async.viewer.plain.show import Selection
    from grpo_async.viewer.short_forms import query_text, sort_order

    runs, query = _runs_and_query(arguments, evaluation, several=web)
    text = query_text(
        query,
        step=step,
        status=status,
        min_reward=min_reward,
        max_reward=max_reward,
        truncated=truncated,
        search=search,
    )
    order = sort_order(sort)
    if web:
        from grpo_async.viewer.web.serve import serve

        serve(runs, host=host, port=port, open_browser=not no_browser, query=text)
        return
    is_printed = plain or as_json or group is not None or rollout is not None or not _is_terminal()
    if not is_printed:
        _open_screen(runs[0], arguments[0], text, order, superseded)
        return
    selection = Selection(
        text=text,
        sort=order,
        limit=(None if as_json else _TABLE_LIMIT) if limit is None else limit or None,
        group_id=group,
        rollout_id=rollout,
        with_superseded=superseded,
    )
    _print(runs[0], selection, as_json=as_json)


def _runs_and_query(arguments: list[str], evaluation: str | None, *, several: bool) -> tuple[list[RunDir], str]:
    """RUN [QUERY], or with `several` RUN... [QUERY]: what names a run is one.

    Raises:
        ConfigError: there is no such run, or the query is wrong.
    """
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
                raise ConfigError(f"{rest[0]!r} is neither a run nor a query. {no_run}\n{no_query}") from None
            break
        rest = rest[1:]
    if len(rest) > 1:
        raise ConfigError(f"one QUERY is expected, got {len(rest)}: put it into quotes, '{' '.join(rest)}'")
    query = rest[0] if rest else ""
    parse_query(query)
    if evaluation is not None:
        runs = [find_evaluation(run, evaluation) for run in runs]
    return runs, query


def _is_terminal() -> bool:
    """Whether a screen can be drawn: input and output are a terminal that can move its cursor."""
    import os
    import sys

    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _open_screen(run: RunDir, name: str, text: str, order: str, superseded: bool) -> None:
    from grpo_async.store.table import RolloutTable
    from grpo_async.viewer.terminal.app import run_inspector
    from grpo_async.viewer.terminal.session import Session
    from grpo_async.viewer.token_text import load_token_texts

    with RolloutTable.open(run.rollouts) as table:
        session = Session(run=run, name=name, table=table, texts=load_token_texts(run), with_superseded=superseded)
        run_inspector(session, text=text, sort=order)


def _print(run: RunDir, selection: Selection, *, as_json: bool) -> None:
    from grpo_async.store.table import RolloutTable
    from grpo_async.viewer.plain.show import show_group, show_groups, show_rollout, write_json

    with RolloutTable.open(run.rollouts) as table:
        if as_json:
            write_json(run, table, selection, typer.echo)
        elif selection.rollout_id is not None:
            show_rollout(run, table, selection, _console())
        elif selection.group_id is not None:
            show_group(run, table, selection, _console())
        else:
            show_groups(run, table, selection, _console())


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)
