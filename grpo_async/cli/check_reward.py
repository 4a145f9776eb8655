"""`check-reward`: a table of what the configured rewards give right answers, wrong ones and garbage.

Each completion is scored alone, in a process that can be killed. Of the forms of an answer (boxed, in tags, as a code block,
each with and without thinking before it) the best score counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_async.cli.options import ConfigArgument, SetOption
from grpo_async.errors import FAILURE

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig
    from grpo_async.records import Prompt
    from grpo_async.rewards import RewardFunction

_GOLD_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")
_RIGHT, _WRONG = "right answer", "wrong answer"
_GARBAGE = {
    "empty": "",
    "garbage": "bako tuvi reso dalu pemi zofa " * 10,
    "code that does nothing": "```python\npass\n```",
    "counting": " ".join(str(number) for number in range(101)),
    "odd characters": "\x00\x1b\u202e👍🏽" * 20 + "9^{9^{9^{9}}}" + "\\boxed{" * 100,
    "very long": "so it goes on and on " * 10_000,
}
_MAX_LOST = 4  # calls that took too long or ended their process; after that the rest is not tried


def check_reward(
    config: ConfigArgument,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Try the first N rows of data.train.")] = 8,
    gold_column: Annotated[
        str | None,
        typer.Option(
            "--gold-column", metavar="NAME", help="Column with the right answers; default: answer, solution, ..."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    overrides: SetOption = None,
) -> None:
    """Try the reward functions on right answers, wrong ones, empty text, garbage, the prompt and very long text.

    Shows what each kind gets over the rows. Needs no model. Exit code 1 if a call raises or takes too long, or if
    something else gets as much as the right answer of its row, 2 if the configuration is wrong.

    \b
    Examples:
      grpo-async check-reward configs/math.yaml
      grpo-async check-reward configs/quickstart.yaml --rows 32
      grpo-async check-reward configs/math.yaml --gold-column solution
      grpo-async check-reward configs/math.yaml --json | jq '.rewards[].problems'
    """
    from grpo_async.config.loader import load_config
    from grpo_async.data import first_rows, make_prompt
    from grpo_async.rewards import load_rewards
    from grpo_async.rewards.function import load_reward

    resolved = load_config(config, overrides or ())
    prompts = {}
    for key, source in resolved.data.sources.items():
        given = first_rows(source, rows, needs_prompt=not resolved.environments)
        prompts[key] = [make_prompt(row, number, source.system_prompt) for number, row in enumerate(given)]
    functions = load_rewards(resolved.rewards)
    for function in functions:
        function.close()
    chosen, notes = _what_to_check(functions, resolved, prompts, gold_column)
    reports = []
    for index, tried in chosen.items():
        section = resolved.rewards[index].model_copy(update={"run_in": "process"})
        with contextlib.closing(load_reward(section, f"rewards.{index}")) as reward:
            reports.append(asyncio.run(_try(reward, tried, gold_column)))
    if as_json:
        typer.echo(json.dumps({"rewards": reports, "notes": notes}, indent=2))
    else:
        _print(reports, notes)
    if any(report["problems"] for report in reports):
        raise typer.Exit(FAILURE)


def _what_to_check(
    functions: Sequence[RewardFunction],
    config: ExperimentConfig,
    prompts: Mapping[str, Sequence[Prompt]],
    gold_column: str | None,
) -> tuple[dict[int, list[Prompt]], list[str]]:
    """Return the prompts to try each function on, by its index, where it can be called with what the data has, and notes on what
    is not tried."""
    from grpo_async.errors import Problems

    problems, notes = Problems(), []
    chosen: dict[int, list[Prompt]] = {}
    every = [prompt for some in prompts.values() for prompt in some]
    names = sorted({name for prompt in every for name in prompt.columns})
    if gold_column is not None and gold_column not in names:
        problems.append(f"--gold-column {gold_column}: the data has no such column; it has {names}")
    elif not any(_gold_of(prompt, gold_column) for prompt in every):
        notes.append(
            f"No column is one of {', '.join(_GOLD_COLUMNS)}, so right answers are not tried; name it with --gold-column."
        )
    if config.environments or config.rollout.agent is not None:
        notes.append("The rewards that environments (`get_reward`) and agents give are not tried here.")
    pairs = [(index, function, key) for index, function in enumerate(functions) for key in prompts]
    for index, function, key in pairs:
        if function.name not in (config.sources[key].rewards or [function.name]):
            continue
        columns = prompts[key][0].columns
        missing = function.missing_inputs(columns, has_environments=bool(config.environments), source=key)
        if missing is None and function.live_inputs:
            live = " and ".join(f"`{each}`" for each in function.live_inputs)
            notes.append(f"{function.name} is skipped: it needs {live}, which only a rollout has.")
        elif missing is None:
            chosen.setdefault(index, []).extend(prompts[key])
        elif config.has_own_rollouts:
            notes.append(f"{function.name} is skipped: it {missing}; your rollouts may bring it.")
        else:
            problems.append(f"reward {function.name!r} {missing}")
    problems.raise_if_any()
    return chosen, notes


def _gold_of(prompt: Prompt, gold_column: str | None) -> str | None:
    for name in _GOLD_COLUMNS if gold_column is None else (gold_column,):
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and str(value).strip():
            return str(value).strip()
    return None


def _completions(prompt: Prompt, gold: str | None) -> list[tuple[str, str]]:
    """Return (kind, text) of what is tried for a row; "72 km" is also tried as the wrong "83 ln"."""
    from grpo_async.rewards.text import answer_of_solution

    tried = [("prompt", prompt.messages[-1].content), *_GARBAGE.items()]
    if gold is not None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        shifted = letters[1:] + letters[0]
        shift = str.maketrans(f"0123456789{letters}{letters.upper()}", f"1234567891{shifted}{shifted.upper()}")
        final = answer_of_solution(gold) or gold
        tried += [(_RIGHT, form) for answer in dict.fromkeys([gold, final]) for form in _forms(answer)]
        if (wrong := final.translate(shift)) != final:
            tried += [(_WRONG, form) for form in _forms(wrong)]
    return tried


def _forms(answer: str) -> list[str]:
    plain = [answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"```python\n{answer}\n```"]
    return [*plain, *(f"<think>Let me see.</think>\n{text}" for text in plain)]


async def _try(reward: RewardFunction, prompts: Sequence[Prompt], gold_column: str | None) -> dict[str, Any]:
    """Return the scores by kind over the rows, and what is wrong with them."""
    from grpo_async.rewards import RewardError

    best: list[dict[str, float]] = [{} for _ in prompts]  # by row: kind -> the best score of its forms
    failures: dict[str, list[str]] = defaultdict(list)  # what went wrong -> the kinds that it happened to
    num_lost = 0
    for row, prompt in enumerate(prompts):
        for kind, text in _completions(prompt, _gold_of(prompt, gold_column)):
            if num_lost == _MAX_LOST:
                break
            completion = [{"role": "assistant", "content": text}] if prompt.is_conversational else text
            columns = {column: [value] for column, value in prompt.columns.items()}
            token_ids = [[1] * (1 + len(text) // 4)]  # there is no tokenizer here
            try:
                outcome = await reward.score([prompt.as_given()], [completion], token_ids, columns)
            except RewardError as error:
                num_lost += error.is_lost
                failures[error.problem.splitlines()[0]].append(kind)
                continue
            if (score := outcome.values[0]) is not None:
                best[row][kind] = max(score, best[row].get(kind, score))
    problems = [f"{text} (on: {', '.join(dict.fromkeys(kinds))})" for text, kinds in failures.items()]
    if any(map(reward.has_parameter, (gold_column,) if gold_column else _GOLD_COLUMNS)):
        problems += _paid_as_well(best)
    kinds = dict.fromkeys([_RIGHT, _WRONG, *(kind for scores in best for kind in scores)])
    by_kind = {kind: [scores[kind] for scores in best if kind in scores] for kind in kinds}
    table = {
        kind: {"lowest": min(scores), "mean": statistics.fmean(scores), "highest": max(scores)}
        for kind, scores in by_kind.items()
        if scores
    }
    return {"name": reward.name, "scores": table, "problems": problems}


def _paid_as_well(best: Sequence[dict[str, float]]) -> list[str]:
    """Return a problem for each kind that gets as much as the right answer; on a quarter of the rows it may be by chance."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, scores in enumerate(best):
        for kind, score in scores.items():
            if _RIGHT in scores and kind != _RIGHT and score >= scores[_RIGHT]:
                rows[kind].append(row)
    return [
        f"`{kind}` gets as much as the right answer, on rows {', '.join(map(str, found))}"
        for kind, found in rows.items()
        if len(found) > len(best) / 4
    ]


def _print(reports: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    from rich.text import Text

    from grpo_async.utils.console import print_rows, stdout_console
    from grpo_async.utils.safe_text import visible_line

    console = stdout_console()
    for report in reports:
        console.print(Text(report["name"]))
        table = {kind: [f"{score:.4g}" for score in scores.values()] for kind, scores in report["scores"].items()}
        rows = [("completion", "lowest", "mean", "highest"), *((kind, *scores) for kind, scores in table.items())]
        print_rows(console, rows)
        for problem in report["problems"]:
            console.print(Text(visible_line(f"error: {problem}", 800), style="red"))
    for note in notes:
        console.print(Text(f"note: {note}", style="dim"))
    if not reports:
        console.print("No reward function was checked.")
