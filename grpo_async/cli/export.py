"""`export`: the rollouts of a run as one file, for notebooks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run below runs/, or a run directory.")],
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERY", help="Which rollouts, as an SQL condition; `inspect-rollouts --help` lists the columns."
        ),
    ] = None,
    format_: Annotated[
        Literal["jsonl", "parquet"] | None,
        typer.Option("--format", help="Default: as the name of --out says; without one, jsonl."),
    ] = None,
    where: Annotated[str | None, typer.Option("--where", metavar="QUERY", help="QUERY, as an option.")] = None,
    out: Annotated[str, typer.Option("--out", metavar="FILE|-", help="Where to; - is the standard output.")] = "-",
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--evaluation", metavar="STEP|last", help="Rollouts of an evaluation instead of those of training."
        ),
    ] = None,
    superseded: Annotated[
        bool,
        typer.Option(
            "--superseded",
            "--with-superseded",
            help="Also what a resume left behind: it is no part of the run any more.",
        ),
    ] = False,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out what cannot be read, instead of ending with an error.")
    ] = False,
) -> None:
    """Write the rollouts of a run to one file, one row per rollout, also while the run goes on.

    docs/rollout-store.md describes every column, and how to read the run's own files without a copy. The file is replaced when the
    new one is whole; messages go to stderr. Exit code: 0 written, 1 something is damaged, 2 the input is wrong.

    \b
    Examples:
      grpo-async export quickstart --out rollouts.parquet
      grpo-async export quickstart "reward<0.2 and truncated" --out bad.jsonl
      grpo-async export quickstart --evaluation last | jq .completion_text
      grpo-async export quickstart "trained and text ilike '%what is%'" --format parquet --out found.parquet
    """
    from grpo_async.store.export import SUFFIXES, export_rollouts
    from grpo_async.store.query import parse_query
    from grpo_async.viewer.runs import find_evaluation, find_run
    from grpo_async.viewer.safe_text import visible

    if query is not None and where is not None:
        raise typer.BadParameter(f"one QUERY is expected: {query!r}, or {where!r}", param_hint="--where")
    wanted = parse_query(query or where or "")
    suffix = Path(out).suffix.lower()
    if format_ is None and suffix and suffix not in SUFFIXES:
        raise typer.BadParameter(
            f"{out}: the name does not say the format; end it in {' or '.join(SUFFIXES)}, or add --format jsonl or parquet",
            param_hint="--out",
        )
    chosen = format_ or SUFFIXES.get(suffix, "jsonl")
    if out == "-" and chosen == "parquet":
        raise typer.BadParameter(
            "Parquet is not for a terminal or a pipe; name a file: --out rollouts.parquet", param_hint="--out"
        )
    run_dir = find_run(run)
    if evaluation is not None:
        run_dir = find_evaluation(run_dir, evaluation)
    target = sys.stdout.buffer if out == "-" else Path(out)
    try:
        done = export_rollouts(
            run_dir.rollouts, target, chosen, wanted, with_superseded=superseded, skip_damaged=skip_damaged
        )
    except BrokenPipeError:  # `| head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered is flushed at the end, and must not fail then
        os.close(nowhere)
        raise typer.Exit(0) from None
    for note in done.notes:
        typer.echo(f"note: {visible(note)}", err=True)
    if out != "-":
        size = Path(out).stat().st_size
        typer.echo(f"{done.rollouts} rollouts of {done.groups} groups -> {out} ({_bytes(size)})", err=True)
    elif not done.rollouts:
        typer.echo("no rollout matches", err=True)


def _bytes(number: int) -> str:
    """1,234,567 -> "1.2 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
