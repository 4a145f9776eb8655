"""`preflight`: start what `train` would start, check that all parts agree, and shut it down."""

from __future__ import annotations

from typing import Annotated

import typer

from grpo_async.cli.options import (
    ConfigArgument,
    JsonLogsOption,
    QuietOption,
    SetOption,
    alone_on_stdout,
    with_json_logs_help,
)


@with_json_logs_help
def preflight(
    config: ConfigArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with every check on stdout; everything else goes to stderr.")
    ] = False,
    overrides: SetOption = None,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Test a configuration for real: start servers and trainer, push the weights once, compare both sides, shut down.

    Compares log-probabilities token by token, and checks weights, tokenizer, chat template, dtypes, addresses, memory and
    disk. `train` makes the same checks before its first step. The run directory is not touched. Exit code: 0 every check
    passed or warned, 1 one failed or something could not be started, 2 the configuration is wrong.

    \b
    Examples:
      grpo-async preflight configs/quickstart.yaml
      grpo-async preflight configs/quickstart.yaml --set inference.dtype=bfloat16
      grpo-async preflight configs/quickstart.yaml --json | jq '.checks[] | select(.status != "pass")'
    """
    from grpo_async.checks.report import as_json as to_json
    from grpo_async.config.loader import load_config
    from grpo_async.display.output import Output, OutputMode
    from grpo_async.launcher import train

    with alone_on_stdout(as_json, json_logs=json_logs):
        output = Output(OutputMode.of(quiet=quiet, json_logs=json_logs))
        with output.reporting():
            resolved = load_config(config, overrides or ())
        outcome = train.preflight(resolved, output=output)
    if as_json and outcome.checks is not None:
        typer.echo(to_json(outcome.checks))
    raise typer.Exit(outcome.exit_code)
