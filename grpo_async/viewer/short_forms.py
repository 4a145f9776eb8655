"""The options of `inspect-rollouts` that are short for a query. Pure.

--step 3..5 --status trained --max-reward 0 -> step BETWEEN 3 AND 5 and group_status IN ('trained') and group_reward<=0
"""

from __future__ import annotations

import re

from grpo_async.errors import ConfigError
from grpo_async.records import GroupStatus
from grpo_async.store.query import quote

_STEPS = re.compile(r"(\d+)|(\d*)\.\.(\d*)")


def query_text(
    query: str = "",
    *,
    step: str | None = None,
    status: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    truncated: bool | None = None,
    search: str | None = None,
) -> str:
    """The query that holds for what `query` and every option let through. The options are about groups: `truncated` are those with
    a truncated rollout, False those without one.

    Raises:
        ConfigError: --step or --status cannot be read.
    """
    parts = [f"({query})"] if query.strip() else []
    if step is not None:
        parts.append(_steps(step))
    if status is not None:
        parts.append(f"group_status IN ({_statuses(status)})")
    if min_reward is not None:
        parts.append(f"group_reward>={min_reward!r}")
    if max_reward is not None:
        parts.append(f"group_reward<={max_reward!r}")
    if truncated is not None:
        parts.append("group_truncated>0" if truncated else "group_truncated=0")
    if search is not None:
        parts.append(f"contains(lower(text), {quote(search.lower())})")
    return query.strip() if parts == [f"({query})"] else " and ".join(parts)


def sort_order(text: str | None) -> str:
    """'reward' -> '-reward', highest first; 'reward:asc' -> 'reward'; None -> ''."""
    if not text:
        return ""
    fields = []
    for part in text.split(","):
        name, _, order = part.strip().partition(":")
        if order not in ("", "asc", "desc") or not name:
            raise ConfigError(
                f"--sort {text}: write a field, highest first (reward), or FIELD:asc, with commas between several"
            )
        fields.append(name if order == "asc" or name.startswith("-") else f"-{name}")
    return ",".join(fields)


def _steps(text: str) -> str:
    """'3' -> 'step=3'; '3..5' -> 'step BETWEEN 3 AND 5'; '3..' -> 'step>=3'; '..5' -> 'step<=5'."""
    if text.strip() == "last":
        return "step=last"
    match = _STEPS.fullmatch(text.replace(" ", ""))
    if match is None or match[0] == "..":
        raise ConfigError(f"--step {text}: write a step (12), `last`, or a range (10..20, 10.., ..20)")
    one, first, last = match.groups()
    if one is not None:
        return f"step={one}"
    if first and last and int(last) < int(first):
        raise ConfigError(f"--step {text}: the range ends before it begins")
    return f"step BETWEEN {first} AND {last}" if first and last else f"step>={first}" if first else f"step<={last}"


def _statuses(text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    known = [status.value for status in GroupStatus if status.is_final]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigError(f"--status {text}: {unknown[0]!r} is not a status; the statuses are {', '.join(known)}")
    return ", ".join(map(quote, words))
