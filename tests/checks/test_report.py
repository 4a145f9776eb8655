"""Checks: the runner that isolates each of them, and how they are shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from grpo_async.checks.report import Check, Found, print_checks, run_check
from grpo_async.errors import ConfigError


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ConfigError("write 127.0.0.1"), "write 127.0.0.1"),
        (TimeoutError("within the check"), "TimeoutError: within the check"),
    ],
)
def test_errors_of_a_check_become_its_result(error: Exception, detail: str) -> None:
    def check() -> Iterator[Found]:
        yield "pass", "fine until here"
        raise error

    assert run_check("one", check, timeout_s=5.0) == [Check("one", "fail", detail)]


@pytest.mark.parametrize(
    ("setting", "words"), [("weights.timeout_s", "raise `weights.timeout_s`"), (None, "no result within 0 s")]
)
def test_a_check_that_hangs_is_left_after_its_limit(setting: str | None, words: str) -> None:
    never = threading.Event()

    def hang() -> Iterator[Found]:
        never.wait(20.0)
        yield "pass", "too late"

    (timed,) = run_check("x", hang, timeout_s=0.1, setting=setting)
    never.set()
    assert (timed.status, words in timed.detail) == ("fail", True)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_table_shows_text_as_text_and_colors_on_a_terminal_only(terminal: bool) -> None:
    console = Console(
        file=StringIO(), width=120, force_terminal=terminal, color_system="standard" if terminal else None, _environ={}
    )
    print_checks(console, [Check("a", "pass", "fine"), Check("b", "warn", "[red]no markup[/red]")], title="Checks")
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b[32m" in output) == terminal
    assert "[red]no markup[/red]" in output
    assert "passed" in output.splitlines()[-1]
