"""`preflight`: start what `train` would start, check everything against everything, and end it again."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_async.cli.options import JSON_LOGS_HELP, ConfigArgument, JsonLogsOption, QuietOption, SetOption

if TYPE_CHECKING:
    from grpo_async.checks.report import Check


def preflight(
    config: ConfigArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with every check on stdout; all else goes to stderr.")
    ] = False,
    overrides: SetOption = None,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Check a configuration for real: start servers and trainer, push the weights once, compare both sides, end them.

    Compares log-probabilities token by token, and checks weights, tokenizer, chat template, dtypes, addresses, memory and
    disk. `train` makes the same checks before its first step. The run directory is not touched. Exit code: 0 every check
    passed or warned, 1 one failed or something could not be started, 2 the configuration is wrong.

    \b
    Examples:
      grpo-async preflight configs/quickstart.yaml
      grpo-async preflight configs/quickstart.yaml --set inference.dtype=bfloat16
      grpo-async preflight configs/quickstart.yaml --json | jq '.checks[] | select(.status != "pass")'
    """
    if as_json and json_logs:
        raise typer.BadParameter("choose one of --json (the checks alone) and --json-logs", param_hint="--json-logs")

    from grpo_async.config.loader import load_config
    from grpo_async.display.output import Output, OutputMode
    from grpo_async.launcher.train import launch

    mode = OutputMode.of(quiet=quiet, json_logs=json_logs)
    if not as_json:
        output = Output(mode)
        with output.reporting():
            resolved = load_config(config, overrides or ())
        code = launch(resolved, resume=None, clean=False, dry_run=False, preflight_only=True, output=output)
        raise typer.Exit(code)
    resolved = load_config(config, overrides or ())

    from grpo_async.checks.report import as_json as to_json

    checks: list[Check] = []
    with contextlib.redirect_stdout(sys.stderr):
        exit_code = launch(
            resolved,
            resume=None,
            clean=False,
            dry_run=False,
            preflight_only=True,
            on_checks=checks.extend,
            output=Output(mode),
        )
    if checks:
        typer.echo(to_json(checks))
    raise typer.Exit(exit_code)


preflight.__doc__ = f"{inspect.cleandoc(preflight.__doc__ or '')}\n\n{JSON_LOGS_HELP}"
