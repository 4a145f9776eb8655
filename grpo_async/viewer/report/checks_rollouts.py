"""Checks of what is generated: lengths, truncation, tools, failures, staleness. Pure."""

from __future__ import annotations

from grpo_async.viewer.report.evidence import Evidence, Finding, Level, figure, percent

_MANY_TRUNCATED, _MOST_TRUNCATED = 0.3, 0.9
_GROWN = 2.0  # times the length at the beginning
_SHRUNK = 0.35
_MANY_PARSE_ERRORS = 0.1
_MANY_TOOL_FAILURES = 0.5
_MANY_FAILED, _MANY_STALE, _MANY_FILTERED = 0.05, 0.2, 0.8  # of the groups


def truncated(evidence: Evidence) -> Finding | None:
    share = evidence.recent("rollout/truncated")
    if share is None:
        share = evidence.recent("completions/clipped_ratio")
    if share is None or share < _MANY_TRUNCATED:
        return None
    limit = evidence.setting("rollout.max_completion_tokens")
    of = f" (rollout.max_completion_tokens is {limit})" if isinstance(limit, int) else ""
    is_most = share >= _MOST_TRUNCATED
    return Finding(
        name="truncated",
        level=Level.BAD if is_most else Level.WARNING,
        title="Almost every completion is cut" if is_most else "Many completions are cut",
        text=f"{percent(share)} of the rollouts of the last third of the steps hit a limit{of} before they ended. A "
        "cut answer "
        "rarely earns its reward. Raise the limit, and look whether the policy ends its turns at all: the "
        "end-of-turn token may be "
        "missing from model.end_of_turn_tokens, or the chat template may not be the model's.",
        query="truncated",
        sort="-step",
        plot="truncated",
    )


def lengths(evidence: Evidence) -> Finding | None:
    windows = evidence.windows("completions/mean_length")
    if windows is None or windows.first <= 0.0:
        return None
    ratio = windows.last / windows.first
    moved = f"The mean length went from {figure(windows.first)} to {figure(windows.last)} tokens"
    reward = evidence.windows("reward")
    learns = reward is not None and reward.has_risen
    if ratio >= _GROWN and windows.has_risen:
        cut = evidence.recent("rollout/truncated") or 0.0
        return Finding(
            name="lengths",
            level=Level.NOTE if learns and cut < _MANY_TRUNCATED else Level.WARNING,
            title="Completions grew long",
            text=f"{moved} ({ratio:.1f} times); {percent(cut)} of them are cut by now. "
            + (
                "The reward rose with it: longer answers may be what it takes."
                if learns
                else "The reward did not rise with it: it may pay for length itself, or the policy has stopped "
                "ending its answers."
            ),
            query="",
            sort="-length",
            plot="lengths",
        )
    if ratio <= _SHRUNK and windows.has_fallen:
        return Finding(
            name="lengths",
            level=Level.NOTE if learns else Level.WARNING,
            title="Completions grew short",
            text=f"{moved}. "
            + (
                "The reward rose with it."
                if learns
                else "The reward did not rise: the policy may have given up thinking, or short answers may get away "
                "with a reward."
            ),
            query="",
            sort="length",
            plot="lengths",
        )
    return None


def tools(evidence: Evidence) -> Finding | None:
    """Calls that cannot be read, fail, or are not made at all."""
    parse_errors = evidence.recent("tools/parse_error_frequency")
    if parse_errors is not None and parse_errors >= _MANY_PARSE_ERRORS:
        return Finding(
            name="tools",
            level=Level.BAD if parse_errors >= 0.5 else Level.WARNING,
            title="Tool calls cannot be read",
            text=f"In {percent(parse_errors)} of the turns the text could not be searched for calls. "
            "tool_calling.parser may not be that "
            "of the model, or the policy writes calls that its template does not know.",
            query="tool_calls=0",
            plot="tools",
        )
    failures = evidence.recent("tools/failure_frequency")
    if failures is not None and failures >= _MANY_TOOL_FAILURES:
        return Finding(
            name="tools",
            level=Level.WARNING,
            title="Most tool calls fail",
            text=f"{percent(failures)} of the calls of a rollout failed, in the mean of the last third of the steps.",
            query="failed_tool_calls>0",
            sort="-step",
            plot="tools",
        )
    calls = evidence.recent("tools/call_frequency")
    if calls is not None and calls < 0.01:
        return Finding(
            name="tools",
            level=Level.WARNING,
            title="The tools are hardly ever called",
            text=f"There are {figure(calls)} calls in a completion. A policy that never calls a tool cannot learn "
            "to use it: say in the "
            "system prompt (data.train.system_prompt) how, or begin with a model that does.",
            query="tool_calls=0",
            plot="tools",
        )
    return None


def failed_groups(evidence: Evidence) -> Finding | None:
    share = _share_of_groups(evidence, "failed")
    if share is None or share < _MANY_FAILED:
        return None
    most = evidence.errors[0] if evidence.errors else None
    why = f" The most frequent error, {most[1]} times: {most[0]}" if most else ""
    return Finding(
        name="failed-groups",
        level=Level.BAD if share >= 0.5 else Level.WARNING,
        title="Rollouts fail",
        text=f"{percent(share)} of the groups failed: too few of their rollouts survived, or scoring raised.{why}",
        query="failed",
        sort="-step",
        plot="ledger",
    )


def stale_groups(evidence: Evidence) -> Finding | None:
    share = _share_of_groups(evidence, "stale")
    if share is None or share < _MANY_STALE:
        return None
    return Finding(
        name="stale-groups",
        level=Level.WARNING,
        title="Much of what is generated is too old to train on",
        text=f"{percent(share)} of the groups were dropped as stale. Generation runs too far ahead, or single "
        "rollouts take many steps: "
        "lower rollout.max_in_flight, or raise rollout.max_staleness.",
        query="group.status=stale",
        sort="-duration",
        plot="ledger",
    )


def _share_of_groups(evidence: Evidence, state: str) -> float | None:
    number, started = evidence.last(f"ledger/groups/{state}"), evidence.last("ledger/groups/started")
    return number / started if number is not None and started else None


CHECKS = (truncated, failed_groups, tools, lengths, stale_groups)
