"""Checks and what came of them: a record, a table, JSON. Used by preflight and doctor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from grpo_async.errors import message_of
from grpo_async.utils.console import print_rows

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["pass", "warn", "fail"]

_COLORS: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}
"""Style of each status, the worst last."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at ("logprobs"), and what was found: `warn` is worth knowing, `fail` must not start."""

    name: str
    status: Status
    detail: str


Found: TypeAlias = tuple[Status, str]
"""What a check returns: status and detail; its name is added by `run_check`."""


def worst_status(checks: Iterable[Check]) -> Status:
    return max((check.status for check in checks), key=list(_COLORS).index, default="pass")


def counts(checks: Sequence[Check]) -> str:
    """ "7 passed, 1 warned, 0 failed"."""
    found = [check.status for check in checks]
    return f"{found.count('pass')} passed, {found.count('warn')} warned, {found.count('fail')} failed"


def run_check(name: str, function: Callable[[], Found], *, prefix: str = "") -> Check:
    """Run one check; whatever goes wrong in it becomes a failed check."""
    try:
        status, detail = function()
    except Exception as error:  # noqa: BLE001 - a check that breaks must not hide what the others found
        status, detail = "fail", message_of(error)
    return Check(name, status, f"{prefix}{detail}")


def to_json(checks: Sequence[Check]) -> str:
    """{"status": the worst, "checks": [{"name", "status", "detail"}, ...]}"""
    return json.dumps({"status": worst_status(checks), "checks": [asdict(check) for check in checks]}, indent=2)


def print_checks(console: Console, checks: Sequence[Check], *, title: str) -> None:
    from rich.text import Text

    console.print(Text(title))
    # details quote servers and models: as text, never as markup
    rows = [(Text(each.status, style=_COLORS[each.status]), Text(each.name), Text(each.detail)) for each in checks]
    print_rows(console, rows)
    console.print(counts(checks))
