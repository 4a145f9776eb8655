"""`doctor`: what matters to a run on this machine, before there is a configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from grpo_async.cli.errors import FAILURE


def doctor(
    full: Annotated[bool, typer.Option("--full", help="Also import vLLM, which takes up to a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with every check.")] = False,
) -> None:
    """Check this machine: Python, packages, torch, vLLM, GPUs, drivers, limits, disk, network, sandbox.

    Every check passes, warns or fails, and says what to do. Starts and changes nothing. Exit code 1 only if something fails.

    \b
    Examples:
      grpo-async doctor
      grpo-async doctor --full
      grpo-async doctor --json | jq '.checks[] | select(.status != "pass")'
    """
    from grpo_async.checks.doctor import run_doctor
    from grpo_async.checks.report import as_json as to_json
    from grpo_async.checks.report import print_checks, worst_status
    from grpo_async.utils.console import stdout_console

    checks = run_doctor(full=full)
    if as_json:
        typer.echo(to_json(checks))
    else:
        print_checks(stdout_console(), checks, title="This machine")
    if worst_status(checks) == "fail":
        raise typer.Exit(FAILURE)
