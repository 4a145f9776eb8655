"""Checks and what came of them: a record, a runner that isolates each check, a table, JSON. Used by preflight and doctor."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from grpo_async.errors import DeadlineError, message_of
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.console import print_rows

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["pass", "warn", "fail"]

_COLORS: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}
"""Style of each status, the worst last."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Args:
        name: what was looked at ("logprobs").
        status: pass; warn: it runs, but something is worth knowing; fail: the run must not start.
        detail: what was found and where; for warn and fail also what to do.
    """

    name: str
    status: Status
    detail: str


Found: TypeAlias = tuple[Status, str]
"""What a check yields: status and detail; its name is added by `run_check`."""


def worst_status(checks: Iterable[Check]) -> Status:
    """fail if any failed, else warn if any warned, else pass."""
    return max((check.status for check in checks), key=list(_COLORS).index, default="pass")


def counts(checks: Sequence[Check]) -> str:
    """ "7 passed, 1 warned, 0 failed"."""
    found = [check.status for check in checks]
    return f"{found.count('pass')} passed, {found.count('warn')} warned, {found.count('fail')} failed"


def run_check(
    name: str, function: Callable[[], Iterable[Found]], *, timeout_s: float, setting: str | None = None
) -> list[Check]:
    """Run one check in a thread of its own. Whatever goes wrong in it becomes a failed check of this name.

    Args:
        timeout_s: time it has, in seconds; a check that takes longer is abandoned.
        setting: dotted path of what holds the limit; None: nothing does, the check should take a moment only.
    """
    began = time.monotonic()
    future = in_thread(lambda: list(function()), name=f"check {name}")
    try:
        return [Check(name, status, detail) for status, detail in future.result(timeout=timeout_s)]
    except Exception as error:  # noqa: BLE001 - a check that breaks must not hide what the others found
        if future.done():
            detail = message_of(error)
        elif setting is None:
            detail = f"no result within {timeout_s:.0f} s: a disk, a network or the machine itself hangs"
        else:
            waited_s = time.monotonic() - began
            detail = str(DeadlineError(f"the check of {name}", waited_s=waited_s, setting=setting))
    return [Check(name, "fail", detail)]


def to_json(checks: Sequence[Check]) -> str:
    """{"status": the worst, "checks": [{"name", "status", "detail"}, ...]}"""
    return json.dumps({"status": worst_status(checks), "checks": [asdict(check) for check in checks]}, indent=2)


def print_checks(console: Console, checks: Sequence[Check], *, title: str) -> None:
    """The title, a row for each check, and one line with the counts."""
    from rich.text import Text

    console.print(Text(title))
    # details quote servers and models: as text, never as markup
    rows = [(Text(each.status, style=_COLORS[each.status]), Text(each.name), Text(each.detail)) for each in checks]
    print_rows(console, rows)
    console.print(counts(checks))
