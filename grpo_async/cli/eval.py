"""`eval`: how good a model is on held-out data, without training."""

from __future__ import annotations

from pathlib import Path
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


@with_json_logs_help
def evaluate(
    config: ConfigArgument,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="latest|best|STEP|PATH",
            help="A checkpoint of the run (best: by checkpoint.best_metric); PATH: RUN/checkpoints/step_N, RUN/model "
            "(what a run exported), or another Hugging Face folder.",
        ),
    ] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results; default: next to the run, NAME.eval-WHAT."),
    ] = None,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Evaluate a model on the held-out data of a configuration: a run of zero steps, which trains nothing and prints a table.

    Without --checkpoint, this is the model that CONFIG names. Like any run it gives its weights to the servers, also to those of
    `inference.urls`, and compares trainer and servers. Prompts, rollouts (tools, environments, rollout function), rewards and
    sampling are those of a run's own evaluations; the section `evaluation` says how many prompts and samples. Of several machines
    only this one takes part. Numbers go to DIR/evaluation.json, rollouts to DIR/evaluations. Exit
    code: 0 evaluated, 1 failed, 2 the configuration is wrong, 130 or 143 stopped by SIGINT or SIGTERM.

    \b
    Examples:
      grpo-async eval configs/quickstart.yaml
      grpo-async eval configs/quickstart.yaml --checkpoint latest
      grpo-async eval configs/quickstart.yaml --checkpoint runs/quickstart/model --set evaluation.samples_per_prompt=4 \\
          --set evaluation.temperature=1
      grpo-async eval configs/quickstart.yaml --checkpoint best --json-logs | jq 'select(.event == "end") | .summary'
    """
    from grpo_async.launch.evaluate import run_evaluation

    loaded, output = load_and_report(config, overrides, quiet=quiet, json_logs=json_logs)
    raise typer.Exit(run_evaluation(loaded, checkpoint=checkpoint, out=out, output=output).exit_code)
