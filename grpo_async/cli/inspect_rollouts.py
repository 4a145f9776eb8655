"""`inspect-rollouts`: what a run generated, while it runs or after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

_TABLE_LIMIT = 40
_WIDTH_OF_A_PIPE = 200  # wide enough for grep; rich would take 80


def inspect_rollouts(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run below runs/, or a run directory.")],
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--evaluation", metavar="STEP|last", help="Rollouts of an evaluation instead of those of training."
        ),
    ] = None,
    group: Annotated[int | None, typer.Option("--group", metavar="ID", help="All rollouts of one group.")] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="One rollout with all its tokens.")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="N|A..B", help="Groups of one step or of a range.")
    ] = None,
    status: Annotated[
        str | None, typer.Option("--status", metavar="A,B", help="Groups with one of these statuses: trained,stale.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Lowest mean reward of a group.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Highest mean reward of a group.")] = None,
    truncated: Annotated[
        bool | None, typer.Option("--truncated/--finished", help="Groups with a truncated rollout / without one.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", metavar="TEXT", help="Groups with this text, in any case.")
    ] = None,
    sort: Annotated[
        Literal["step", "reward", "length"] | None,
        typer.Option("--sort", help="Highest first; default: what was written last."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help=f"Most groups; 0 = all. Default: {_TABLE_LIMIT}, with --json all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with every field.")] = False,
) -> None:
    """Look at the rollouts of a run: a table of groups, one group, or one rollout with its tokens.

    \b
    Examples:
      grpo-async inspect-rollouts quickstart
      grpo-async inspect-rollouts quickstart --step 10..20 --status trained --sort reward --limit 5
      grpo-async inspect-rollouts quickstart --max-reward 0 --truncated --search "what is"
      grpo-async inspect-rollouts quickstart --group 17
      grpo-async inspect-rollouts quickstart --rollout g17-r3
      grpo-async inspect-rollouts quickstart --evaluation last --max-reward 0.5
      grpo-async inspect-rollouts quickstart --status trained --json | jq .summary.reward_mean
    """
    if group is not None and rollout is not None:
        raise typer.BadParameter("choose one of --group and --rollout", param_hint="--group")

    from grpo_async.viewer.runs import find_evaluation, find_run
    from grpo_async.viewer.selection import Filters, parse_statuses, parse_steps
    from grpo_async.viewer.show import show_group, show_groups, show_rollout, write_json

    filters = Filters(
        steps=None if step is None else parse_steps(step),
        statuses=frozenset() if status is None else parse_statuses(status),
        min_reward=min_reward,
        max_reward=max_reward,
        truncated=truncated,
        search=search,
        group_id=group,
        rollout_id=rollout,
    )
    run_dir = find_run(run)
    if evaluation is not None:
        run_dir = find_evaluation(run_dir, evaluation)
    if as_json:
        write_json(run_dir, filters, sort, limit or None, typer.echo)
    elif rollout is not None:
        show_rollout(run_dir, rollout, filters, _console())
    elif group is not None:
        show_group(run_dir, group, filters, _console())
    else:
        show_groups(run_dir, filters, sort, _TABLE_LIMIT if limit is None else limit or None, _console())


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)
