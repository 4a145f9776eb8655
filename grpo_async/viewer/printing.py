"""What `inspect-rollouts` prints: a table of groups, a page about one group or one rollout, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_async.records import GroupStatus, Origin, RolloutStatus
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.store.export import printable
from grpo_async.store.table import Row
from grpo_async.utils.safe_text import visible, visible_line
from grpo_async.utils.text import duration, percent
from grpo_async.viewer.format import call_text, call_tree, message_text, number, or_dash, prompt_of

_PROMPT_WIDTH = 60
_COMPLETION_WIDTH = 400
_DETAIL_WIDTH = 200  # of arguments, results and what rewards noted
_STATUS_STYLES: dict[str, str] = {
    GroupStatus.TRAINED: "green",
    GroupStatus.FILTERED: "yellow",
    GroupStatus.STALE: "magenta",
    GroupStatus.FAILED: "red",
    GroupStatus.CANCELLED: "dim",
    GroupStatus.EVALUATED: "cyan",
    RolloutStatus.FINISHED: "green",
    RolloutStatus.TRUNCATED: "yellow",
}


def group_json(group: GroupRow, summary: Row) -> bytes:
    """The stored row with a `summary`, as one line without its end."""
    return _json_line({**orjson.loads(orjson.dumps(group)), "summary": summary})


def rollout_json(group: GroupRow, rollout: RolloutRow) -> bytes:
    """One rollout, with the ids, the step and the status of its group."""
    known = {"group_id": group.group_id, "prompt_id": group.prompt_id, "step": group.step, "group_status": group.status}
    return _json_line({**known, **orjson.loads(orjson.dumps(rollout))})


def _json_line(content: dict[str, Any]) -> bytes:
    return printable(orjson.dumps(content).decode()).encode()


# -- pages


def _table(*names: str, caption: str | None = None) -> Table:
    """A table of numbers, whose columns are aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False, caption=caption, caption_justify="left")
    _add_numbers(table, *names)
    return table


def _add_numbers(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(Text(visible_line(name, 24)), justify="right", no_wrap=True)


def _status(status: str) -> Text:
    return Text(status, style=_STATUS_STYLES.get(status, ""))


def _span(first: int | None, last: int | None) -> str:
    """2, 2 -> '2'; 2, 3 -> '2-3'; None -> '-'."""
    return or_dash(first) if first == last else f"{first}-{last}"


def _fraction(part: int, whole: int) -> str:
    """1, 4 -> '25%'; of nothing '-'."""
    return percent(part / whole) if whole else "-"


def _versions(rollout: RolloutRow) -> str:
    """Policy versions that sampled its tokens: '3', '3-5', '-' for none."""
    sampled = rollout.sampled_versions
    return _span(min(sampled, default=None), max(sampled, default=None))


def group_table(summaries: Sequence[Row], num_matching: int, num_stored: int) -> Table:
    """One line per group. The caption says what a limit hides."""
    caption = f"{len(summaries)} of {num_matching} matching groups, {num_stored} in the run"
    table = _table("step", "group", caption=caption)
    table.add_column("status", no_wrap=True)
    table.add_column("prompt", min_width=8)  # the one column that may shrink: its cells are cut, not wrapped
    _add_numbers(table, "reward", "min", "max", "length", "versions", "trunc")
    for summary in summaries:
        table.add_row(
            or_dash(summary["step"]),
            str(summary["group_id"]),
            _status(summary["status"]),
            Text(visible_line(summary["prompt_preview"], _PROMPT_WIDTH), no_wrap=True, overflow="ellipsis"),
            number(summary["reward_mean"]),
            number(summary["reward_min"]),
            number(summary["reward_max"]),
            number(summary["num_tokens_mean"], 1),
            _span(summary["version_min"], summary["version_max"]),
            _fraction(summary["num_truncated"], summary["size"]),
        )
    return table


def group_page(group: GroupRow) -> RenderableType:
    """The prompt of a group, its columns, and its rollouts in one table."""
    parts = [
        Text.assemble(
            (f"group {group.group_id}", "bold"),
            f"  step {or_dash(group.step)}  prompt {group.prompt_id}  ",
            _status(group.status),
        )
    ]
    for message in prompt_of(group):
        parts.append(Text.assemble((f"{visible(message.role)}: ", "bold cyan"), visible(message_text(message))))
    for name, value in group.columns.items():
        parts.append(Text.assemble((f"{visible_line(name, 60)} = ", "dim"), visible_line(str(value), _DETAIL_WIDTH)))
    return Group(*parts, Text(), _rollout_table(group.rollouts))


def _rollout_table(rollouts: Sequence[RolloutRow]) -> Table:
    reward_names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    shown_names = reward_names if len(reward_names) > 1 else []  # one alone is the reward itself
    table = _table()
    table.row_styles = ["", "on grey7"]
    for name in ("rollout", "status"):
        table.add_column(name, no_wrap=True)
    _add_numbers(table, "reward", *shown_names, "advantage", "tokens", "versions")
    table.add_column("completion", overflow="fold", min_width=20)
    for rollout in rollouts:
        said = " ".join(message_text(each) for each in rollout.messages if each.origin is Origin.POLICY)
        completion = Text(visible_line(said, _COMPLETION_WIDTH))
        if rollout.error is not None:
            completion = Text(visible_line(rollout.error, _COMPLETION_WIDTH), style="red")
        table.add_row(
            Text(visible(rollout.rollout_id)),
            _status(rollout.status),
            number(rollout.reward),
            *(number(rollout.rewards.get(name)) for name in shown_names),
            number(rollout.advantage),
            str(rollout.num_tokens),
            _versions(rollout),
            completion,
        )
    return table


def rollout_page(group: GroupRow, rollout: RolloutRow) -> RenderableType:
    """One rollout: its messages, rewards, turns and tool calls, and the calls of its branches."""
    return Group(*_rollout_parts(group, rollout))


def _rollout_parts(group: GroupRow, rollout: RolloutRow) -> Iterator[RenderableType]:
    yield Text.assemble(
        (f"rollout {visible(rollout.rollout_id)}", "bold"),
        f"  group {group.group_id} (",
        _status(group.status),
        f")  step {or_dash(group.step)}  ",
        _status(rollout.status),
        f"{'  environment done' if rollout.done else ''}  {duration(rollout.total_duration_s)}",
    )
    if rollout.error is not None:
        yield Text(visible(rollout.error), style="red")
    for message in [*prompt_of(group, rollout), *rollout.messages]:
        name = f" {visible(message.name)}" if message.name else ""
        yield Text(f"\n{visible(message.role)}{name} ({message.origin.value})", style="bold cyan")
        if message.content or not message.tool_calls:
            yield Text(visible(message.content))
        for call in message.tool_calls:
            yield Text(f"calls {visible_line(call_text(call), _DETAIL_WIDTH)}")
    yield Text(f"\nreward {number(rollout.reward)}  advantage {number(rollout.advantage)}", style="bold")
    for name, value in rollout.rewards.items():
        yield Text(f"  {visible(name)} {number(value)}")
    for name, noted in rollout.extra.items():
        yield Text(f"  {visible(name)}: {visible_line(str(noted), _DETAIL_WIDTH)}", style="dim")
    yield Text()
    table = _table("turn", "tokens", "ended by", "generation", "tools", "tool calls")
    for index, turn in enumerate(rollout.turns, start=1):
        durations = (duration(turn.generation_duration_s), duration(turn.tool_execution_duration_s))
        ended_by = visible_line(turn.ended_by, _DETAIL_WIDTH)
        table.add_row(str(index), str(turn.num_tokens), ended_by, *durations, str(len(turn.tool_calls)))
    yield table
    for turn in rollout.turns:
        if turn.parse_error is not None:
            yield Text(f"  tool calls were not parsed: {visible_line(turn.parse_error, _DETAIL_WIDTH)}", style="yellow")
        for record in turn.tool_calls:
            arguments = visible_line(json.dumps(record.arguments, ensure_ascii=False), _DETAIL_WIDTH)
            failed = " failed" if record.failed else ""
            outcome = visible_line(record.result, _DETAIL_WIDTH)
            yield Text(f"  {visible(record.name)}({arguments}){failed} {duration(record.duration_s)} -> {outcome}")
    if rollout.branches:
        yield Text("\ncalls in all branches (--rollout takes the name of a branch, too)", style="bold")
        for line in call_tree(group, rollout):
            yield Text("  " * (line.depth + 1) + line.text, style="cyan" if line.is_path else "")
