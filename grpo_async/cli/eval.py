"""`eval`: how good a model is on held-out data, without training."""

from __future__ import annotations

import json
from pathlib import Path
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
def evaluate(
    config: ConfigArgument,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="latest|best|STEP|PATH",
            help="A checkpoint of the run (best: by checkpoint.best_metric); PATH: RUN/checkpoints/step_N, or a Hugging Face "
            "folder.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="Run directory, if it is not that of CONFIG. Without --checkpoint: the model that the run "
            "exported, or else its newest checkpoint.",
        ),
    ] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results; default: next to the run, NAME.eval-WHAT."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with the results on stdout; everything else goes to stderr.")
    ] = False,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Evaluate a model on the held-out data of a configuration: start its servers, generate, print a table, stop the servers.

    Without --checkpoint and --run, this is the model that CONFIG names, or the one that the servers of `inference.urls` serve.
    Prompts, rollouts (tools, environments, rollout function), rewards and sampling are those of a run's own evaluations; the
    section `evaluation` says how many prompts and samples. Numbers go to DIR/evaluation.json, rollouts to DIR/rollouts. Exit
    code: 0 evaluated, 1 failed, 2 the configuration is wrong, 130 or 143 stopped by SIGINT or SIGTERM.

    \b
    Examples:
      grpo-async eval configs/quickstart.yaml
      grpo-async eval configs/quickstart.yaml --checkpoint latest
      grpo-async eval configs/quickstart.yaml --checkpoint runs/quickstart/model --set evaluation.samples_per_prompt=4 \\
          --set evaluation.temperature=1
      grpo-async eval configs/quickstart.yaml --run runs/quickstart --json | jq .metrics.reward
    """
    from grpo_async.config.loader import load_config
    from grpo_async.display.output import Output, OutputMode
    from grpo_async.launcher.evaluate import evaluate as run_evaluation

    with alone_on_stdout(as_json, json_logs=json_logs):
        output = Output(OutputMode.of(quiet=quiet, json_logs=json_logs))
        with output.reporting():
            resolved = load_config(config, overrides or ())
        outcome = run_evaluation(resolved, checkpoint=checkpoint, run=run, out=out, output=output)
    if as_json and outcome.summary is not None:
        typer.echo(json.dumps(outcome.summary))
    raise typer.Exit(outcome.exit_code)
