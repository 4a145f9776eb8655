"""`export` and `export-model`: the rollouts of a run as one file, a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import EvaluationOption, RunArgument


def export(
    run: RunArgument,
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERY",
            help="Which rollouts to export, as an SQL condition; `inspect-rollouts --help` lists the columns.",
        ),
    ] = None,
    out: Annotated[
        str,
        typer.Option(
            "--out", metavar="FILE|-", help="Output file, .jsonl or .parquet; - is standard output (JSON lines)."
        ),
    ] = "-",
    evaluation: EvaluationOption = None,
    superseded: Annotated[
        bool,
        typer.Option(
            "--superseded",
            help="Include rollouts that a resume discarded and that are no longer part of the run.",
        ),
    ] = False,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Skip what cannot be read instead of failing.")
    ] = False,
) -> None:
    """Export a run's rollouts to one file, one row per rollout. Works while the run is active, too.

    docs/reference/columns.md describes every column, docs/rollout-store.md how to read the run's own files directly. The
    file is replaced only once the new one is complete; messages go to stderr. Exit code: 0 written, 1 something is damaged, 2
    the input is wrong.

    \b
    Examples:
      grpo-async export quickstart --out rollouts.parquet
      grpo-async export quickstart "reward<0.2 and truncated" --out bad.jsonl
      grpo-async export quickstart --evaluation latest | jq .completion_text
      grpo-async export quickstart "trained and text ilike '%what is%'" --out found.parquet
    """
    from grpo_async.store.export import SUFFIXES, export_rollouts
    from grpo_async.store.query import parse_query
    from grpo_async.utils.safe_text import visible
    from grpo_async.utils.text import count, format_bytes
    from grpo_async.viewer.runs import find_evaluation, find_run

    wanted = parse_query(query or "")
    suffix = Path(out).suffix.lower()
    if out != "-" and suffix not in SUFFIXES:
        raise typer.BadParameter(
            f"{out}: the extension says the format; use {' or '.join(SUFFIXES)}", param_hint="--out"
        )
    run_dir = find_run(run)
    if evaluation is not None:
        run_dir = find_evaluation(run_dir, evaluation)
    target = sys.stdout.buffer if out == "-" else Path(out)
    try:
        done = export_rollouts(
            run_dir.rollouts,
            target,
            SUFFIXES.get(suffix, "jsonl"),
            wanted,
            with_superseded=superseded,
            skip_damaged=skip_damaged,
        )
    except BrokenPipeError:  # `| head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered is flushed at the end, and must not fail then
        os.close(nowhere)
        return
    for note in done.notes:
        typer.echo(f"note: {visible(note)}", err=True)
    if out != "-":
        what = f"{count(done.rollouts, 'rollout')} of {count(done.groups, 'group')}"
        typer.echo(f"{what} -> {out} ({format_bytes(Path(out).stat().st_size)})", err=True)
    elif not done.rollouts:
        typer.echo("no rollout matches", err=True)


def export_model(
    run: RunArgument,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="latest|best|STEP|PATH",
            help="best: by checkpoint.best_metric, among those that were kept; PATH: RUN/checkpoints/step_N.",
        ),
    ] = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: RUN/model_step_N.")
    ] = None,
) -> None:
    """Make a model that transformers and vLLM load (config, safetensors, tokenizer, model card) from a checkpoint of a run.

    A finished run has written RUN/model itself; this is for a stopped run, or for another step. Adapters (LoRA) are merged.
    Runs on the CPU and needs memory for one copy of the model. `hf upload OWNER/NAME FOLDER` uploads what was written.

    Exit code: 0 written, 1 the checkpoint is damaged, 2 the input is wrong.

    \b
    Examples:
      grpo-async export-model quickstart
      grpo-async export-model quickstart --checkpoint best --out my-model
    """
    from grpo_async.config.loader import load_config
    from grpo_async.training.checkpoint_manifest import find_checkpoint
    from grpo_async.training.export import export_checkpoint
    from grpo_async.viewer.runs import find_run

    run_dir = find_run(run)
    step = find_checkpoint(run_dir, checkpoint, option="--checkpoint")
    config = load_config(run_dir.config)
    folder = out or run_dir.root / f"model_step_{step}"
    is_model = (folder / "config.json").is_file()
    if not folder.name or (folder.exists() and not is_model and (not folder.is_dir() or any(folder.iterdir()))):
        raise typer.BadParameter(
            f"{folder} would be replaced, and it is not a model's folder; name a new one", param_hint="--out"
        )
    export_checkpoint(run_dir, step, config, folder)
    typer.echo(f"step {step} -> {folder}")
