"""Tables of groups, and of the rollouts of one group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_async.records import GroupStatus, RolloutStatus, TaggedMessage
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.viewer.safe_text import one_line, visible
from grpo_async.viewer.selection import GroupSummary

_STATUS_STYLES: dict[str, str] = {
    GroupStatus.TRAINED: "green",
    GroupStatus.FILTERED: "yellow",
    GroupStatus.STALE: "magenta",
    GroupStatus.FAILED: "red",
    GroupStatus.CANCELLED: "dim",
    RolloutStatus.FINISHED: "green",
    RolloutStatus.TRUNCATED: "yellow",
}
_PROMPT_WIDTH = 60
_COMPLETION_WIDTH = 400


def status_text(status: GroupStatus | RolloutStatus) -> Text:
    return Text(status.value, style=_STATUS_STYLES.get(status, ""))


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def span(versions: tuple[int, int] | None) -> str:
    """(2, 2) -> '2'; (2, 3) -> '2-3'."""
    if versions is None:
        return "-"
    return str(versions[0]) if versions[0] == versions[1] else f"{versions[0]}-{versions[1]}"


def group_table(summaries: Sequence[GroupSummary], num_matching: int, num_read: int) -> Table:
    """One line per group. The caption says what a limit hides."""
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        caption=f"{len(summaries)} of {num_matching} matching groups, {num_read} in the run",
        caption_justify="left",
    )
    for name in ("step", "group"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("prompt", min_width=8)  # the one column that may shrink: its cells are cut, not wrapped
    for name in ("reward", "min", "max", "length", "versions", "trunc"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            "-" if summary.step is None else str(summary.step),
            str(summary.group_id),
            status_text(summary.status),
            Text(one_line(summary.prompt, _PROMPT_WIDTH), no_wrap=True, overflow="ellipsis"),
            number(summary.reward_mean),
            number(summary.reward_min),
            number(summary.reward_max),
            number(summary.mean_length, 1),
            span(summary.versions),
            f"{summary.truncated_share:.0%}",
        )
    return table


def group_page(row: GroupRow) -> RenderableType:
    """The prompt of a group, its columns, and its rollouts in one table."""
    step = "-" if row.step is None else str(row.step)
    heading = Text.assemble(
        (f"group {row.group_id}", "bold"), f"  step {step}  prompt {row.prompt_id}  ", status_text(row.status)
    )
    own = [rollout.prompt_messages for rollout in row.rollouts if rollout.prompt_messages is not None]
    said = own[0] if own and all(messages == own[0] for messages in own) else row.messages  # with what reset() said
    prompt = [Text.assemble((f"{m.role}: ", "bold cyan"), visible(m.content)) for m in said]
    columns = [Text.assemble((f"{name} = ", "dim"), one_line(str(v), 200)) for name, v in row.columns.items()]
    return Group(heading, *prompt, *columns, Text(), _rollout_table(row.rollouts))


def _rollout_table(rollouts: Sequence[RolloutRow]) -> Table:
    reward_names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    table = Table(box=None, header_style="bold", pad_edge=False, row_styles=["", "on grey7"])
    table.add_column("rollout", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ("reward", *(reward_names if len(reward_names) > 1 else []), "advantage", "tokens", "versions"):
        table.add_column(Text(one_line(name, 24)), justify="right", no_wrap=True)
    table.add_column("completion", overflow="fold", min_width=20)
    for rollout in rollouts:
        versions = rollout.sampled_versions
        named = [number(rollout.rewards.get(name)) for name in reward_names] if len(reward_names) > 1 else []
        table.add_row(
            Text(visible(rollout.rollout_id)),
            status_text(rollout.status),
            number(rollout.reward),
            *named,
            number(rollout.advantage),
            str(rollout.num_tokens),
            span((min(versions), max(versions)) if versions else None),
            _completion(rollout),
        )
    return table


def _completion(rollout: RolloutRow) -> Text:
    if rollout.error is not None:
        return Text(one_line(rollout.error, _COMPLETION_WIDTH), style="red")
    return Text(one_line(" ".join(_said(message) for message in rollout.messages), _COMPLETION_WIDTH))


def _said(message: TaggedMessage) -> str:
    """Content and calls: `calculator({'expression': '1 + 2'})`."""
    functions = [call.get("function", {}) for call in message.tool_calls]
    calls = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    return " ".join([message.content, *calls]).strip()
