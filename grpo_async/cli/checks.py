"""`doctor` and `preflight`: what matters to a run on this machine, and whether all its parts agree."""

from __future__ import annotations

from typing import Annotated

import typer

from grpo_async.cli.options import (
    ConfigArgument,
    JsonLogsOption,
    QuietOption,
    SetOption,
    load_and_report,
    with_json_logs_help,
)
from grpo_async.errors import FAILURE


@with_json_logs_help
def preflight(
    config: ConfigArgument,
    overrides: SetOption = None,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Test a configuration for real: start servers and trainer, push the weights once, compare both sides, shut down.

    Compares log-probabilities token by token, and checks tokenizer, chat template, token, dtypes, addresses, memory and
    disk. `train` makes the same checks before its first step. The run directory is not touched. Exit code: 0 every check
    passed or warned, 1 one failed or something could not be started, 2 the configuration is wrong.

    \b
    Examples:
      grpo-async preflight configs/quickstart.yaml
      grpo-async preflight configs/quickstart.yaml --set inference.dtype=bfloat16
      grpo-async preflight configs/quickstart.yaml --json-logs | jq 'select(.event == "preflight") | .checks[]'
    """
    from grpo_async.launcher import train

    loaded, output = load_and_report(config, overrides, quiet=quiet, json_logs=json_logs)
    raise typer.Exit(train.run_preflight(loaded, output=output).exit_code)


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
