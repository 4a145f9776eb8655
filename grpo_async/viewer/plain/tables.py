"""Printed tables: of groups, and of the rollouts of one group."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_async.records import TaggedMessage
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.store.summaries import GroupSummary
from grpo_async.viewer.figures import STATUS_STYLES, number, share, span, whole
from grpo_async.viewer.safe_text import one_line, visible

_PROMPT_WIDTH = 60
_COMPLETION_WIDTH = 400


def status_text(status: str, superseded: bool = False) -> Text:
    return Text.assemble((status, STATUS_STYLES.get(status, "")), (" superseded", "dim") if superseded else "")


def group_table(summaries: Sequence[GroupSummary], num_matching: int, num_stored: int) -> Table:
    """One line per group. The caption says what a limit hides."""
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        caption=f"{len(summaries)} of {num_matching} matching groups, {num_stored} in the run",
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
            whole(summary.step),
            str(summary.group_id),
            status_text(summary.status, summary.superseded),
            Text(one_line(summary.prompt_preview, _PROMPT_WIDTH), no_wrap=True, overflow="ellipsis"),
            number(summary.reward_mean),
            number(summary.reward_min),
            number(summary.reward_max),
            number(summary.num_tokens_mean, 1),
            span(summary.version_min, summary.version_max),
            share(summary.num_truncated, summary.size),
        )
    return table


def group_page(row: GroupRow) -> RenderableType:
    """The prompt of a group, its columns, and its rollouts in one table."""
    heading = Text.assemble(
        (f"group {row.group_id}", "bold"),
        f"  step {whole(row.step)}  prompt {row.prompt_id}  ",
        status_text(row.status),
    )
    own = [rollout.reset_messages for rollout in row.rollouts if rollout.reset_messages is not None]
    said = own[0] if own and all(messages == own[0] for messages in own) else row.messages  # with what reset() said
    prompt = [Text.assemble((f"{visible(m.role)}: ", "bold cyan"), visible(m.content)) for m in said]
    columns = [
        Text.assemble((f"{one_line(name, 60)} = ", "dim"), one_line(str(v), 200)) for name, v in row.columns.items()
    ]
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
            span(min(versions, default=None), max(versions, default=None)),
            _completion(rollout),
        )
    return table


def _completion(rollout: RolloutRow) -> Text:
    if rollout.error is not None:
        return Text(one_line(rollout.error, _COMPLETION_WIDTH), style="red")
    return Text(one_line(" ".join(_said(message) for message in rollout.messages), _COMPLETION_WIDTH))


def _said(message: TaggedMessage) -> str:
    """Content and calls: `calculator({"expression": "1 + 2"})`."""
    functions = [call.get("function", {}) for call in message.tool_calls]
    calls = [f"{each.get('name')}({json.dumps(each.get('arguments'), ensure_ascii=False)})" for each in functions]
    return " ".join([message.content, *calls]).strip()
