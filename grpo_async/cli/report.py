"""`report`: one offline HTML page about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Names of runs below runs/, or run directories; several are compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where to write. Default: report.html in the run directory; for several runs, in the first one's.",
        ),
    ] = None,
    diff_config: Annotated[
        bool, typer.Option("--diff-config", help="Only print the settings that differ between the runs.")
    ] = False,
) -> None:
    """Write a report: what happened, whether it learns and if not, why, with curves, rollouts and settings, in one HTML file.

    The file is self-contained and works offline. It omits what may be secret: arguments of your code, addresses, accounts.
    `train` writes one at the end of every run (record.report). This also works for a run that is active, failed or was killed.

    \b
    Examples:
      grpo-async report quickstart
      grpo-async report quickstart higher-lr --out comparison.html
      grpo-async report quickstart higher-lr --diff-config
    """
    if diff_config and len(runs) < 2:
        raise typer.BadParameter("it requires at least two runs", param_hint="--diff-config")

    from grpo_async.viewer.report.write import config_differences, write_report
    from grpo_async.viewer.runs import find_run

    run_dirs = [find_run(name) for name in runs]
    if diff_config:
        labels, different = config_differences(run_dirs)
        if not different:
            typer.echo("the configurations are the same")
        for each in different:
            typer.echo(each.path)
            for label, value in zip(labels, each.values, strict=True):
                typer.echo(f"  {label}: {value}")
        return
    typer.echo(str(write_report(run_dirs, out)))
