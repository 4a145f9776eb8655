"""Checks and what came of them: a record, a runner that isolates each check, a table, JSON. Used by preflight and doctor."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from grpo_async.errors import DeadlineError, GrpoAsyncError

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["pass", "warn", "fail"]

_ORDER: tuple[Status, ...] = ("pass", "warn", "fail")
_COLORS: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Args:
        name: what was looked at ("logprobs").
        status: pass; warn: it runs, but something is worth knowing; fail: it must not go on like this.
        detail: what was found and where; for warn and fail also what to do.
    """

    name: str
    status: Status
    detail: str


def passed(name: str, detail: str) -> Check:
    return Check(name, "pass", detail)


def warned(name: str, detail: str) -> Check:
    return Check(name, "warn", detail)


def failed(name: str, detail: str) -> Check:
    return Check(name, "fail", detail)


def worst_status(checks: Iterable[Check]) -> Status:
    """fail if any failed, else warn if any warned, else pass."""
    return max((check.status for check in checks), key=_ORDER.index, default="pass")


def run_check(
    name: str, function: Callable[[], Check | Sequence[Check]], *, limit_s: float, setting: str | None = None
) -> list[Check]:
    """Run one check in a thread of its own. Whatever goes wrong in it becomes a failed check of this name.

    Args:
        limit_s: time it has, in seconds; a check that takes longer is abandoned.
        setting: dotted path of what holds the limit; None: nothing does, the check should take a moment only.
    """
    future: Future[Check | Sequence[Check]] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting side
            future.set_exception(error)

    began = time.monotonic()
    threading.Thread(target=run, name=f"check {name}", daemon=True).start()
    try:
        result = future.result(timeout=limit_s)
    except TimeoutError as error:
        if not future.done():
            waited_s = time.monotonic() - began
            if setting is None:
                return [
                    failed(name, f"no result within {waited_s:.0f} s: a disk, a network or the machine itself hangs")
                ]
            return [failed(name, str(DeadlineError(f"the check of {name}", waited_s=waited_s, setting=setting)))]
        return [failed(name, f"TimeoutError: {error}")]
    except GrpoAsyncError as error:
        return [failed(name, str(error))]
    except Exception as error:  # noqa: BLE001 - a check that breaks must not hide what the others found
        return [failed(name, f"the check itself broke: {type(error).__name__}: {error}")]
    return [result] if isinstance(result, Check) else list(result)


def as_json(checks: Sequence[Check]) -> str:
    """{"status": the worst, "checks": [{"name", "status", "detail"}, ...]}"""
    content: dict[str, Any] = {"status": worst_status(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(content, indent=2)


def from_json(text: str) -> list[Check]:
    """The checks that `as_json` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [Check(**entry) for entry in json.loads(text)["checks"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the result of checks: {error!r}") from error


def print_checks(console: Console, checks: Sequence[Check], *, title: str) -> None:
    """A table, in a pipe a line for each check, and one line with the counts."""
    from rich.table import Table
    from rich.text import Text

    counts = {status: sum(check.status == status for check in checks) for status in _ORDER}
    total = f"{counts['pass']} passed, {counts['warn']} warned, {counts['fail']} failed"
    if not console.is_terminal:
        width = max((len(check.name) for check in checks), default=0)
        lines = [f"{check.status:4}  {check.name:{width}}  {' '.join(check.detail.split())}" for check in checks]
        lines = [title, *lines, total]
        console.print(Text("\n".join(lines)), soft_wrap=True)
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column("status", no_wrap=True)
    table.add_column("name", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for check in checks:
        # details quote servers and models: as text, never as markup
        table.add_row(Text(check.status, style=_COLORS[check.status]), Text(check.name), Text(check.detail))
    console.print(table)
    console.print(total)
