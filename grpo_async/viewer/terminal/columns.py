"""The columns of the tables: groups, rollouts, steps, and one prompt over the steps."""

from __future__ import annotations

from rich.text import Text

from grpo_async.store.summaries import GroupSummary, RolloutSummary, StepSummary
from grpo_async.viewer.figures import STATUS_STYLES, number, share, signed, span, whole
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.paged_table import Column

_TEXT = 240


def status_cell(status: str, superseded: bool = False) -> Text:
    """A superseded row's status is struck out: it is no part of the run as it now is."""
    style = STATUS_STYLES.get(status, "")
    return Text(status, style=f"{style} strike".strip() if superseded else style)


def bar(value: float | None, low: float, high: float, width: int) -> str:
    """A value between two bounds as a bar of eighths: 0.5 of 0..1 in 4 cells -> '██  '."""
    if value is None or high <= low:
        return " " * width
    eighths = round(max(0.0, min(1.0, (value - low) / (high - low))) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)


def _matching(row: GroupSummary) -> str:
    return str(row.size) if row.num_matching == row.size else f"{row.num_matching}/{row.size}"


GROUP_COLUMNS: tuple[Column[GroupSummary], ...] = (
    Column(title="step", width=5, sort="step", cell=lambda row: whole(row.step)),
    Column(title="group", width=7, sort="id", cell=lambda row: str(row.group_id)),
    Column(title="status", width=9, sort="status", left=True, cell=lambda row: status_cell(row.status, row.superseded)),
    Column(title="size", width=5, cell=_matching),
    Column(title="reward", width=7, sort="reward", cell=lambda row: number(row.reward_mean)),
    Column(title="std", width=6, sort="std", cell=lambda row: number(row.reward_std), from_width=100),
    Column(title="min", width=6, cell=lambda row: number(row.reward_min), from_width=100),
    Column(title="max", width=6, cell=lambda row: number(row.reward_max), from_width=100),
    Column(title="length", width=7, sort="length", cell=lambda row: number(row.num_tokens_mean, 1)),
    Column(title="trunc", width=6, sort="truncated", cell=lambda row: share(row.num_truncated, row.size)),
    Column(
        title="tools", width=6, cell=lambda row: _tools(row.num_tool_calls, row.num_failed_tool_calls), from_width=120
    ),
    Column(title="stale", width=6, sort="staleness", cell=lambda row: whole(row.staleness), from_width=110),
    Column(title="versions", width=8, cell=lambda row: span(row.version_min, row.version_max), from_width=140),
    Column(title="prompt", width=8, left=True, grows=True, cell=lambda row: one_line(row.prompt_preview, _TEXT)),
)
ROLLOUT_COLUMNS: tuple[Column[RolloutSummary], ...] = (
    Column(title="step", width=5, sort="step", cell=lambda row: whole(row.step)),
    Column(title="rollout", width=9, left=True, cell=lambda row: one_line(row.rollout_id, 24)),
    Column(title="status", width=9, sort="status", left=True, cell=lambda row: status_cell(row.status, row.superseded)),
    Column(title="reward", width=7, sort="reward", cell=lambda row: number(row.reward)),
    Column(title="advant.", width=7, sort="advantage", cell=lambda row: signed(row.advantage)),
    Column(title="length", width=7, sort="length", cell=lambda row: str(row.num_tokens)),
    Column(title="turns", width=5, sort="turns", cell=lambda row: str(row.num_turns), from_width=100),
    Column(
        title="tools", width=6, cell=lambda row: _tools(row.num_tool_calls, row.num_failed_tool_calls), from_width=100
    ),
    Column(title="stale", width=6, sort="staleness", cell=lambda row: whole(row.staleness), from_width=110),
    Column(title="entropy", width=7, sort="entropy", cell=lambda row: number(row.entropy_mean), from_width=130),
    Column(
        title="clipped", width=7, sort="clipped_share", cell=lambda row: _percent(row.clipped_share), from_width=130
    ),
    Column(title="completion", width=10, left=True, grows=True, cell=lambda row: _said(row)),
)
STEP_COLUMNS: tuple[Column[StepSummary], ...] = (
    Column(title="step", width=5, cell=lambda row: whole(row.step)),
    Column(title="groups", width=6, cell=lambda row: str(row.num_groups)),
    Column(title="rollouts", width=8, cell=lambda row: str(row.num_rollouts)),
    Column(title="reward", width=7, cell=lambda row: number(row.reward_mean)),
    Column(title="", width=10, left=True, cell=lambda row: ""),  # the bar; its bounds are those of all steps
    Column(title="std", width=6, cell=lambda row: number(row.reward_std)),
    Column(title="q10..q90", width=13, cell=lambda row: _quantiles(row), from_width=100),
    Column(title="length", width=7, cell=lambda row: number(row.num_tokens_mean, 1)),
    Column(title="trunc", width=6, cell=lambda row: _percent(row.truncated_share)),
    Column(title="failed", width=6, cell=lambda row: _percent(row.failed_share), from_width=100),
    Column(title="stale", width=6, cell=lambda row: number(row.staleness_mean, 1), from_width=90),
    Column(title="entropy", width=7, cell=lambda row: number(row.entropy_mean), from_width=110),
    Column(title="clipped", width=7, cell=lambda row: _percent(row.clipped_share), from_width=120),
    Column(title="groups by status", width=8, left=True, grows=True, cell=lambda row: _statuses(row)),
)


def step_columns(low: float, high: float) -> list[Column[StepSummary]]:
    """STEP_COLUMNS with the bar of the mean reward, from `low` (empty) to `high`."""
    drawn: Column[StepSummary] = Column(
        title="", width=10, left=True, cell=lambda row: Text(bar(row.reward_mean, low, high, 10), style="green")
    )
    return [drawn if column.title == "" else column for column in STEP_COLUMNS]


def history_columns(low: float, high: float) -> list[Column[GroupSummary]]:
    """The groups of one prompt; the bar is the mean reward, from `low` (empty) to `high`."""
    drawn: Column[GroupSummary] = Column(
        title="",
        width=12,
        left=True,
        grows=True,
        cell=lambda row: Text(bar(row.reward_mean, low, high, 12), style="green"),
    )
    return [column for column in GROUP_COLUMNS if column.title != "prompt"] + [drawn]


def _tools(calls: int, failed: int) -> Text:
    """'3', or '3!1' where one of three failed."""
    if calls == 0:
        return Text("-", style="dim")
    return Text(f"{calls}!{failed}", style="red") if failed else Text(str(calls))


def _said(row: RolloutSummary) -> Text:
    if row.error is not None:
        return Text(one_line(row.error, _TEXT), style="red")
    return Text(one_line(row.completion_preview, _TEXT))


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _quantiles(row: StepSummary) -> str:
    return "-" if row.reward_q10 is None else f"{number(row.reward_q10, 2)}..{number(row.reward_q90, 2)}"


def _statuses(row: StepSummary) -> str:
    return " ".join(f"{name} {number_of}" for name, number_of in row.group_statuses.items())
