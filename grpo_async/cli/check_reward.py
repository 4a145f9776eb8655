"""`check-reward`: what the configured reward functions give good and bad completions, before a run relies on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_async.cli.errors import FAILURE
from grpo_async.cli.options import ConfigArgument, SetOption
from grpo_async.utils.console import stdout_console
from grpo_async.utils.text import shortlist

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from grpo_async.config import ExperimentConfig
    from grpo_async.findings import Finding
    from grpo_async.records import Prompt
    from grpo_async.rewards import RewardFunction
    from grpo_async.rewards.audit_report import RewardReport, ScoreRange

_MAX_NAMED = 4
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
    slow_s: Annotated[
        float, typer.Option("--slow-s", min=0.0, help="Report completions that take longer than this many seconds.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the garbage completions.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with every finding.")] = False,
    overrides: SetOption = None,
) -> None:
    """Try the reward functions on right answers, empty text, garbage, the repeated prompt, very long text and more.

    Reports exceptions and timeouts, garbage that is rewarded, right answers that are not, scores that change from call to
    call or with the other completions of a call, and slow functions. Needs no model. Exit code 1 if there are errors (warnings
    alone: 0), 2 if the configuration is wrong.

    \b
    Examples:
      grpo-async check-reward configs/math.yaml
      grpo-async check-reward configs/quickstart.yaml --rows 32 --seed 1
      grpo-async check-reward configs/math.yaml --gold-column solution --slow-s 0.2
      grpo-async check-reward configs/math.yaml --json | jq '.rewards[].findings'
    """
    from grpo_async.config.loader import load_config
    from grpo_async.data import first_rows, make_prompt
    from grpo_async.rewards import audit_report, load_rewards

    resolved = load_config(config, overrides or ())
    source = resolved.data.train
    prompts = [make_prompt(row, number, source.system_prompt) for number, row in enumerate(first_rows(source, rows))]
    notes = _notes(resolved, prompts, gold_column)
    functions = load_rewards(resolved.rewards)
    reports: list[RewardReport] = []
    try:
        chosen = _without_those_that_need_a_run(functions, resolved, prompts, notes)
        for index, function in chosen.items():
            with _progress(function.name) as on_progress:
                reports.append(
                    audit_report.check_reward(
                        function,
                        resolved.rewards[index],
                        f"rewards.{index}",
                        prompts,
                        gold_column=gold_column,
                        seed=seed,
                        slow_s=slow_s,
                        on_progress=on_progress,
                    )
                )
    finally:
        for function in functions:
            function.close()
    if as_json:
        typer.echo(
            json.dumps({"rewards": [dataclasses.asdict(report) for report in reports], "notes": notes}, indent=2)
        )
    else:
        _print(reports, notes)
    if any(report.worst == "error" for report in reports):
        raise typer.Exit(FAILURE)


def _notes(config: ExperimentConfig, prompts: Sequence[Prompt], gold_column: str | None) -> list[str]:
    """What is not checked.

    Raises:
        ConfigError: the data has no column `gold_column`.
    """
    from grpo_async.errors import ConfigError
    from grpo_async.rewards.fuzz import GOLD_COLUMNS, find_gold_column

    notes = []
    if gold_column is not None and not any(gold_column in prompt.columns for prompt in prompts):
        raise ConfigError(
            f"--gold-column {gold_column}: the data has no such column; it has {sorted(prompts[0].columns)}"
        )
    if gold_column is None and not any(find_gold_column(prompt.columns) for prompt in prompts):
        notes.append(
            f"No column is one of {', '.join(GOLD_COLUMNS)}, so right answers are not tried, and what garbage earns is "
            "not judged; name the column with --gold-column."
        )
    if config.environments:
        notes.append("The rewards of environments (`get_reward`) are not checked here.")
    if config.rollout.agent is not None:
        notes.append("The reward that the agent gives itself is not checked here.")
    return notes


def _without_those_that_need_a_run(
    functions: Sequence[RewardFunction], config: ExperimentConfig, prompts: Sequence[Prompt], notes: list[str]
) -> dict[int, RewardFunction]:
    """Those that can be called with what the data has, by their place in `rewards`. A missing column is an error, as at the
    start of a run."""
    from grpo_async.errors import ConfigError

    chosen: dict[int, RewardFunction] = {}
    problems = []
    for index, function in enumerate(functions):
        lack = function.lack(prompts[0].columns, has_environments=bool(config.environments))
        if function.needs_environments and config.environments:
            notes.append(f"{function.name} is skipped: it needs `environments`, which only a rollout has.")
        elif lack is not None and (config.rollout_function is not None or config.rollout.agent is not None):
            maker = "rollout function" if config.rollout_function is not None else "agent"
            notes.append(f"{function.name} is skipped: it {lack}; your {maker} may return them.")
        elif lack is not None:
            problems.append(f"reward {function.name!r} {lack}")
        else:
            chosen[index] = function
    if problems:
        raise ConfigError("\n".join(problems))
    return chosen


def _print(reports: Sequence[RewardReport], notes: Sequence[str]) -> None:
    from rich.text import Text

    console = stdout_console()
    for report in reports:
        _print_report(console, report)
    for note in notes:
        console.print(Text(f"note: {note}", style=_COLORS["note"]))
    counts = {kind: sum(f.severity == kind for r in reports for f in r.findings) for kind in ("error", "warning")}
    console.print(
        f"{len(reports)} reward function(s) checked: {counts['error']} error(s), {counts['warning']} warning(s)."
    )


def _print_report(console: Console, report: RewardReport) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{report.name}  (in: {report.place})"), title_justify="left", box=None, pad_edge=False)
    table.add_column("input")
    for heading in ("lowest", "mean", "highest"):
        table.add_column(heading, justify="right")
    table.add_row("gold", *_numbers(report.gold))
    for kind, scores in report.others.items():
        table.add_row(kind, *_numbers(scores))
    console.print(table)
    console.print(
        f"{report.num_inputs} inputs: {report.num_failed} failed, {report.num_none} None; "
        f"{report.median_s * 1000:.1f} ms per completion (median), {report.longest_s:.2f} s at most",
        end="",
    )
    console.print(Text(f" ({report.slowest_input})" if report.slowest_input else ""))
    for finding in report.findings:
        console.print(_sentence(finding))
    console.print()


def _sentence(finding: Finding) -> Any:
    from rich.text import Text

    from grpo_async.utils.safe_text import visible_line

    text = Text(f"{finding.severity.value}: ", style=_COLORS[finding.severity.value])
    text.append(
        f"{visible_line(finding.title, 400)} {visible_line(finding.fix, 400)}", style="default not bold not dim"
    )
    where = [f"inputs: {shortlist(finding.inputs, ', ', limit=_MAX_NAMED)}"] if finding.inputs else []
    where += [f"rows: {shortlist([*map(str, finding.rows)], ', ', limit=_MAX_NAMED)}"] if finding.rows else []
    if where:
        text.append(f"\n    {'; '.join(where)}", style="dim")
    return text


def _numbers(scores: ScoreRange | None) -> list[str]:
    if scores is None:
        return ["-", "-", "-"]
    return [f"{value:.4g}" for value in (scores.lowest, scores.mean, scores.highest)]


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, nothing in a pipe; on stderr, so that --json stays clean."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
