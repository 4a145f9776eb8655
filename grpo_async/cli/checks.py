"""`doctor`: what matters to a run on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from grpo_async.errors import FAILURE


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with every check.")] = False,
) -> None:
    """Check this machine: Python, torch, vLLM, GPUs, drivers, limits, disk, sandbox.

    Every check passes, warns or fails, and says what to do. Starts and changes nothing. Exit code 1 only if something fails.

    \b
    Examples:
      grpo-async doctor
      grpo-async doctor --json | jq '.checks[] | select(.status != "pass")'
    """
    from grpo_async.checks.doctor import run_doctor
    from grpo_async.checks.report import print_checks, to_json, worst_status
    from grpo_async.utils.console import stdout_console

    checks = run_doctor()
    if as_json:
        typer.echo(to_json(checks))
    else:
        print_checks(stdout_console(), checks, title="This machine")
    if worst_status(checks) == "fail":
        raise typer.Exit(FAILURE)
