"""`check-reward`: what the configured reward functions give good and bad completions, before a run relies on them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_async.cli.options import ConfigArgument, SetOption
from grpo_async.errors import FAILURE
from grpo_async.utils.console import stdout_console

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig
    from grpo_async.records import Prompt
    from grpo_async.rewards import RewardFunction
    from grpo_async.rewards.check import RewardReport

_COLORS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def check_reward(
    config: ConfigArgument,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Try the first N rows of data.train.")] = 8,
    gold_column: Annotated[
        str | None,
        typer.Option(
            "--gold-column", metavar="NAME", help="Column with the right answers; default: answer, solution, ..."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with every finding.")] = False,
    overrides: SetOption = None,
) -> None:
    """Try the reward functions on right answers, wrong ones, empty text, garbage, the repeated prompt and very long text.

    Reports exceptions and timeouts, garbage that is rewarded, right answers that are not, and scores that change from call to
    call or with the other completions of a call. Needs no model. Exit code 1 if there are errors (warnings
    alone: 0), 2 if the configuration is wrong.

    \b
    Examples:
      grpo-async check-reward configs/math.yaml
      grpo-async check-reward configs/quickstart.yaml --rows 32
      grpo-async check-reward configs/math.yaml --gold-column solution
      grpo-async check-reward configs/math.yaml --json | jq '.rewards[].findings'
    """
    from rich.console import Console

    from grpo_async.config.loader import load_config
    from grpo_async.data import first_rows, make_prompt
    from grpo_async.rewards import load_rewards
    from grpo_async.rewards.check import check_reward as check
    from grpo_async.rewards.function import load_reward

    resolved = load_config(config, overrides or ())
    source = resolved.data.train
    prompts = [
        make_prompt(row, number, source.system_prompt)
        for number, row in enumerate(first_rows(source, rows, needs_prompt=not resolved.environments))
    ]
    functions = load_rewards(resolved.rewards)
    reports: list[RewardReport] = []
    try:
        chosen, notes = _what_to_check(functions, resolved, prompts, gold_column)
        for index in chosen:
            with Console(stderr=True).status(f"Trying {functions[index].name} ..."):
                # In a process, which can be killed.
                section = resolved.rewards[index].model_copy(update={"run_in": "process"})
                with contextlib.closing(load_reward(section, f"rewards.{index}")) as tried:
                    reports.append(check(tried, prompts, runs_in=functions[index].runs_in, gold_column=gold_column))
    finally:
        for function in functions:
            function.close()
    if as_json:
        typer.echo(json.dumps({"rewards": [dataclasses.asdict(each) for each in reports], "notes": notes}, indent=2))
    else:
        _print(reports, notes)
    if any(each.has_errors for each in reports):
        raise typer.Exit(FAILURE)


def _what_to_check(
    functions: Sequence[RewardFunction], config: ExperimentConfig, prompts: Sequence[Prompt], gold_column: str | None
) -> tuple[list[int], list[str]]:
    """Indices of the functions that can be called with what the data has, and notes on what is not checked."""
    from grpo_async.errors import Problems
    from grpo_async.rewards.check import GOLD_COLUMNS, gold_of

    columns = prompts[0].columns
    problems = Problems()
    notes = []
    if gold_column is not None and gold_column not in columns:
        problems.append(f"--gold-column {gold_column}: the data has no such column; it has {sorted(columns)}")
    elif not any(gold_of(prompt, gold_column) for prompt in prompts):
        notes.append(
            f"No column is one of {', '.join(GOLD_COLUMNS)}, so right answers are not tried; name it with --gold-column."
        )
    if config.environments or config.rollout.agent is not None:
        notes.append("The rewards that environments (`get_reward`) and agents give are not checked here.")
    chosen = []
    for index, function in enumerate(functions):
        missing = function.missing_inputs(columns, has_environments=bool(config.environments))
        if function.needs_environments and config.environments:
            notes.append(f"{function.name} is skipped: it needs `environments`, which only a rollout has.")
        elif missing is None:
            chosen.append(index)
        elif config.has_own_rollouts:
            notes.append(f"{function.name} is skipped: it {missing}; your rollouts may bring it.")
        else:
            problems.append(f"reward {function.name!r} {missing}")
    problems.raise_if_any()
    return chosen, notes


def _print(reports: Sequence[RewardReport], notes: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from grpo_async.utils.safe_text import visible_line
    from grpo_async.utils.text import count

    console = stdout_console()
    for report in reports:
        title = Text(f"{report.name}  (in: {report.runs_in})")
        table = Table("completion", title=title, title_justify="left", box=None, pad_edge=False)
        for heading in ("lowest", "mean", "highest"):
            table.add_column(heading, justify="right")
        for kind, scores in report.scores.items():
            table.add_row(kind, *(f"{value:.4g}" for value in scores.values()))
        console.print(table)
        console.print(
            f"{report.num_calls} calls, {report.num_failed} failed; {report.median_s * 1000:.1f} ms per completion (median), "
            f"{report.longest_s:.2f} s at most"
        )
        for finding in report.findings:
            where = f" Completions: {', '.join(finding.inputs)}." if finding.inputs else ""
            where += f" Rows: {', '.join(map(str, finding.rows))}." if finding.rows else ""
            sentence = Text(f"{finding.severity.value}: ", style=_COLORS[finding.severity.value])
            sentence.append(visible_line(f"{finding.title} {finding.fix}{where}", 800), "default not bold not dim")
            console.print(sentence)
        console.print()
    for note in notes:
        console.print(Text(f"note: {note}", style=_COLORS["note"]))
    if not reports:
        console.print("No reward function was checked.")
        return
    severities = [finding.severity.value for report in reports for finding in report.findings]
    found = ", ".join(count(severities.count(severity), severity) for severity in ("error", "warning"))
    console.print(f"{count(len(reports), 'reward function')} checked: {found}.")
