"""`train`: one command for every process of a run. `study`: several runs. `eval`: how good a model is, without training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from grpo_async.cli.options import (
    ConfigArgument,
    JsonLogsOption,
    QuietOption,
    SetOption,
    load_and_report,
    with_json_logs_help,
)

_CHECKPOINT = re.compile(r"latest|best|\d+|(.*/)?step_\d+/?")


class TrainCommand(TyperCommand):
    """`--resume` takes an optional value, which typer's options cannot: the default is spelled out before parsing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spell_out_resume(args))


def spell_out_resume(arguments: Sequence[str]) -> list[str]:
    """A bare `--resume` becomes `--resume latest`: ["--resume", "x.yaml"] -> ["--resume", "latest", "x.yaml"].

    `--resume best`, `--resume 40`, `--resume runs/x/checkpoints/step_40` and `--resume=40` stay as they are.
    """
    spelled: list[str] = []
    for index, argument in enumerate(arguments):
        spelled.append(argument)
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument == "--resume" and not _CHECKPOINT.fullmatch(following):
            spelled.append("latest")
    return spelled


@with_json_logs_help
def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the experiment; with --fork it may be left out."),
    ] = None,
    overrides: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[latest|best|STEP|PATH]",
            help="Continue from a checkpoint; no value: latest, the newest complete one. best: by checkpoint.best_metric.",
        ),
    ] = None,
    fork: Annotated[
        str | None,
        typer.Option(
            "--fork",
            metavar="RUN@STEP",
            help="Begin a new run at another run's checkpoint, with its queue and unfinished conversations; see --set.",
        ),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove the run directory of an earlier run first.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Validate the configuration, check the files and functions it names, and print the plan. "
            "Starts and writes nothing.",
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, metavar="N", help="With --dry-run: plan for N GPUs of 80 GB, and estimate a step."
        ),
    ] = None,
    quiet: QuietOption = False,
    json_logs: JsonLogsOption = False,
) -> None:
    """Train: start the inference servers and the trainer, show progress, and stop them all at the end.

    A server that dies or hangs is restarted (inference.max_restarts) while training continues. Ctrl-C saves a
    checkpoint and stops; a second Ctrl-C stops immediately. Exit code: 0 finished, 1 failed, 2 the configuration is wrong,
    130 or 143 stopped by SIGINT or SIGTERM.

    With launch.ray the processes run on the nodes of a Ray cluster, wherever this command was typed, and are shown here. A
    server whose node is lost starts again on another one; when a node that trains is lost, the run ends, or goes on from its
    last checkpoint (launch.max_restarts).

    On a terminal a dashboard shows the run; elsewhere, or with --quiet, it prints lines. `grpo-async status` shows the run's
    state from any other terminal.

    \b
    Examples:
      grpo-async train configs/quickstart.yaml
      grpo-async train configs/quickstart.yaml --set optimizer.lr=1e-5 --set run.name=higher-lr
      grpo-async train configs/quickstart.yaml --resume
      grpo-async train configs/quickstart.yaml --resume 40
      grpo-async train --fork quickstart@25 --set 'loss={type: cispo}' --set run.name=with-cispo
      grpo-async train configs/quickstart.yaml --dry-run
      grpo-async train configs/quickstart.yaml --json-logs | jq 'select(.event == "step") | .metrics.reward'
      grpo-async train configs/math.yaml --dry-run --gpus 8
    """
    from grpo_async.launch.start import launch

    if gpus is not None and not dry_run:
        raise typer.BadParameter("goes with --dry-run: a run takes the GPUs that are there", param_hint="--gpus")
    if fork is not None:
        if resume is not None or clean:
            raise typer.BadParameter("goes with neither --resume nor --clean: a fork is a new run", param_hint="--fork")
        from grpo_async.display.output import Output, OutputMode
        from grpo_async.launch.fork import run_fork

        forked_output = Output(OutputMode.of(quiet=quiet, json_logs=json_logs))
        raise typer.Exit(run_fork(fork, config, overrides or (), dry_run=dry_run, gpus=gpus, output=forked_output))
    if config is None:
        raise typer.BadParameter("name the YAML file of the experiment", param_hint="CONFIG")
    loaded, output = load_and_report(config, overrides, quiet=quiet, json_logs=json_logs)
    raise typer.Exit(launch(loaded, resume=resume, clean=clean, dry_run=dry_run, gpus=gpus, output=output))


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
            out=out,
            tolerance=tolerance,
            output=output,
        )
    )
