"""`check-reward`: a table of what the configured rewards give right answers, wrong ones and garbage.

Each completion is scored alone, in a process that can be killed. Of the forms of an answer (boxed, in tags, as a code block,
each with and without thinking before it) the best score counts.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_async.cli.options import ConfigArgument, SetOption
from grpo_async.errors import FAILURE, Problems

if TYPE_CHECKING:
    from grpo_async.records import Prompt
    from grpo_async.rewards import RewardFunction

_GOLD_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")
_RIGHT, _WRONG = "right answer", "wrong answer"
_GARBAGE = {
    "empty": "",
    "garbage": "bako tuvi reso dalu pemi zofa " * 10,
    "counting": " ".join(str(number) for number in range(101)),
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
    import asyncio  # 40 ms of every `--help`

    from grpo_async.config.loader import load_config
    from grpo_async.data import first_rows, make_prompt
    from grpo_async.rewards import load_rewards
    from grpo_async.rewards.function import load_reward

    resolved = load_config(config, overrides or ())
    problems, notes, reports = Problems(), [], []
    has_environments = bool(resolved.environments)
    chosen: dict[int, list[Prompt]] = defaultdict(list)  # by the index of the function
    for key, source in resolved.data.sources.items():
        given = first_rows(source, rows, needs_prompt=not has_environments)
        prompts = [make_prompt(row, number, source.system_prompt) for number, row in enumerate(given)]
        columns = prompts[0].columns
        if gold_column is not None and gold_column not in columns:
            problems.append(f"--gold-column {gold_column}: the data has no such column; it has {sorted(columns)}")
        elif not any(_gold_of(prompt, gold_column) for prompt in prompts):
            names = ", ".join(_GOLD_COLUMNS)
            notes.append(
                f"{key}: no column is one of {names}, so right answers are not tried; name it with --gold-column."
            )
        for index, function in enumerate(load_rewards(resolved.rewards)):
            function.close()
            missing = function.missing_inputs(columns, has_environments=has_environments, source=key)
            if function.name not in (source.rewards or [function.name]):
                continue
            if missing is None and function.live_inputs:
                notes.append(
                    f"{function.name} is skipped: it needs `{function.live_inputs[0]}`, which only a rollout has."
                )
            elif missing is None:
                chosen[index] += prompts
            elif resolved.has_own_rollouts:
                notes.append(f"{function.name} is skipped: it {missing}; your rollouts may bring it.")
            else:
                problems.append(f"reward {function.name!r} {missing}")
    problems.raise_if_any()
    for index, tried in chosen.items():
        section = resolved.rewards[index].model_copy(update={"run_in": "process"})
        with contextlib.closing(load_reward(section, f"rewards.{index}")) as reward:
            reports.append(asyncio.run(_try(reward, tried, gold_column)))
    typer.echo(json.dumps({"rewards": reports, "notes": notes}, indent=2)) if as_json else _print(reports, notes)
    if any(report["problems"] for report in reports):
        raise typer.Exit(FAILURE)


def _gold_of(prompt: Prompt, gold_column: str | None) -> str | None:
    for name in _GOLD_COLUMNS if gold_column is None else (gold_column,):
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and str(value).strip():
            return str(value).strip()
    return None


def _completions(prompt: Prompt, gold: str | None) -> list[tuple[str, str]]:
    """Return (kind, text) of what is tried for a row; "72 km" is also tried as the wrong "83 km"."""
    from grpo_async.rewards.text import answer_of_solution

    tried = [("prompt", prompt.messages[-1].content), *_GARBAGE.items()]
    if gold is not None:
        final = answer_of_solution(gold) or gold
        shifted = final.translate(str.maketrans("0123456789", "1234567891"))
        wrong = shifted if shifted != final else final[::-1]
        tried += [(_RIGHT, form) for answer in dict.fromkeys([gold, final]) for form in _forms(answer)]
        tried += [(_WRONG, form) for form in _forms(wrong) if wrong != final]
    return tried


def _forms(answer: str) -> list[str]:
    plain = [answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"```python\n{answer}\n```"]
    return [*plain, *(f"<think>Let me see.</think>\n{text}" for text in plain)]


async def _try(reward: RewardFunction, prompts: Sequence[Prompt], gold_column: str | None) -> dict[str, Any]:
    from grpo_async.rewards import RewardError

    best: dict[str, dict[int, float]] = {_RIGHT: {}, _WRONG: {}}  # by kind and row: the best score of its forms
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
                scores = best.setdefault(kind, {})
                scores[row] = max(score, scores.get(row, score))
    problems = [f"{text} (on: {', '.join(dict.fromkeys(kinds))})" for text, kinds in failures.items()]
    right = best[_RIGHT]
    for kind, scores in best.items():
        paid = [row for row, score in scores.items() if row in right and score >= right[row]]
        reads_gold = any(map(reward.has_parameter, (gold_column,) if gold_column else _GOLD_COLUMNS))
        if kind != _RIGHT and reads_gold and len(paid) > len(prompts) / 4:  # on fewer rows it may be by chance
            problems.append(f"`{kind}` gets as much as the right answer, on rows {', '.join(map(str, paid))}")
    table = {
        kind: {"lowest": min(each), "mean": statistics.fmean(each), "highest": max(each)}
        for kind, scores in best.items()
        if (each := list(scores.values()))
    }
    return {"name": reward.name, "scores": table, "problems": problems}


def _print(reports: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    from rich.text import Text

    from grpo_async.utils.console import print_rows, stdout_console
    from grpo_async.utils.safe_text import visible_line

    console = stdout_console()
    for report in reports:
        console.print(Text(report["name"]))
        heads = tuple(Text(name, "bold") for name in ("completion", "lowest", "mean", "highest"))
        table = [
            (kind, *(Text(f"{score:.4g}", "not bold") for score in scores.values()))
            for kind, scores in report["scores"].items()
        ]
        print_rows(console, [heads, *table])
        for problem in report["problems"]:
            console.print(Text(visible_line(f"error: {problem}", 800), style="red"))
    for note in notes if reports else [*notes, "No reward function was checked."]:
        console.print(Text(f"note: {note}", style="dim"))
