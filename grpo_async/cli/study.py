"""`study`: the same task under several settings and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import ConfigArgument, JsonLogsOption, QuietOption, SetOption


def study(
    config: ConfigArgument,
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY=[VALUES]",
            help="Values of a key, e.g. 'rollout.max_staleness=[0, 1, 4]', or named settings: "
            "NAME={LABEL: {KEY: VALUE}, ...}. One to three of them; all combinations are run.",
        ),
    ],
    overrides: SetOption = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Runs of each setting, with seeds from run.seed on.")
    ] = 3,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="Runs at once, each with the devices that it takes alone.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the study; default: next to the run, NAME.study."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, help="How much less held-out reward than the best setting's is safe."),
    ] = 0.05,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Study: is a setting safe, and which is the cheapest? Trains under several settings and seeds and compares held-out rewards.

    Every run is one of `train`, with a directory below DIR. The same command goes on where a study was stopped or killed: finished
    runs are kept, others continue from their checkpoints. More values and seeds may be added later. A setting is
    safe if none of its runs failed and it loses at most --tolerance to the best one, with 95% confidence; that takes three seeds.
    Choose a task that takes minutes: a smaller model, fewer steps (--set). Exit code: 0 done, 1 a run failed, 2 the input is
    wrong, 130 or 143 stopped by SIGINT or SIGTERM.

    \b
    Examples:
      grpo-async study configs/quickstart.yaml --vary 'rollout.max_staleness=[0, 1, 4]' --set training.max_steps=30
      grpo-async study configs/quickstart.yaml --vary 'optimizer.lr=[1e-4, 3e-4]' --vary 'loss.type=[dapo, cispo]' --seeds 5
      grpo-async study configs/quickstart.yaml --vary 'rollout.max_staleness=[1, 4]' \\
          --vary 'correction={none: {}, TIS: {loss.proximal: recomputed, loss.correction: {level: token, action: truncate}}}'
    """
    from grpo_async.display.output import Output, OutputMode
    from grpo_async.launch.study import run_study

    output = Output(OutputMode.of(quiet=quiet, json_logs=json_logs))
    raise typer.Exit(
        run_study(
            config,
            vary,
            overrides or (),
            num_seeds=seeds,
            parallel=parallel,
            out=out,
            tolerance=tolerance,
            output=output,
        )
    )
