"""`replay`: a stored step under other losses, advantages or corrections."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_async.cli.options import RunArgument, SetOption

if TYPE_CHECKING:
    from grpo_async.run_directory import RunDir
    from grpo_async.trainer.replay import Comparison

_TOKENS = 10
_Token = tuple[str, int, str, float, float]
"""Rollout, number among its trained tokens, text, its slope as it was and with --set."""


def replay(
    run: RunArgument,
    step: Annotated[
        int, typer.Option("--step", min=1, help="The step; the checkpoint of the step before it is needed.")
    ],
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Replay a stored step: its loss, gradient and tokens, as they were and under other settings. Generates nothing.

    The step is computed from the checkpoint before it and from its rollouts in the run's store, first with the run's own settings
    (to be compared with what was recorded), then with those of --set: loss, advantage, optimizer, rewards,
    rollout.overlong, training.minibatches and training.num_iterations. Shows the metrics of both, the cosine of the angle
    between their gradients, and the tokens whose slope differs most: the derivative of the loss by the token's
    log-probability (below 0: the token is made likelier). A comparison is also kept for the run's page in the inspector. Step 1
    needs no checkpoint. Exit code: 0 replayed, 2 it cannot be.

    \b
    Examples:
      grpo-async replay quickstart --step 26
      grpo-async replay quickstart --step 26 --set 'loss={type: gspo, epsilon: 3e-4, epsilon_high: 4e-4}'
      grpo-async replay quickstart --step 26 --set advantage.type=none
      grpo-async replay quickstart --step 26 --set 'rewards=[{function: mine:stricter}]'
    """
    from grpo_async.chat.renderer import load_renderer
    from grpo_async.trainer.replay import replay as replay_step
    from grpo_async.viewer.runs import find_run

    directory = find_run(run)
    found = replay_step(directory, step, overrides or ())
    content = _as_json(found)
    tokens: list[_Token] = []
    if found.other is not None:
        text_of = load_renderer(found.config).token_text
        tokens = [(name, at, text_of(number), own, other) for name, at, number, own, other in content["tokens"]]
        _keep({"step": step, **content, "tokens": tokens}, directory)
    typer.echo(json.dumps(content)) if as_json else _show(found, tokens)


def _keep(content: Mapping[str, Any], run: RunDir) -> None:
    from grpo_async.utils.files import write_atomically

    run.replays.mkdir(exist_ok=True)
    paths = (run.replays / f"step_{content['step']}.{number}.json" for number in count(1))
    write_atomically(next(path for path in paths if not path.exists()), json.dumps(content))


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "changes": list(found.changes),
        "recorded": {name: found.recorded.get(name) for name in found.own.metrics},
        "own": dict(found.own.metrics),
        "other": None if found.other is None else dict(found.other.metrics),
        "cosine": found.cosine,
        "tokens": found.tokens(_TOKENS),
    }


def _show(found: Comparison, most: Sequence[_Token]) -> None:
    from rich.text import Text

    from grpo_async.utils.console import print_rows, stdout_console
    from grpo_async.utils.safe_text import plain
    from grpo_async.utils.text import format_number

    console, own, other = stdout_console(), found.own.metrics, {} if found.other is None else found.other.metrics
    for change in found.changes:
        typer.echo(plain(change))
    rows = [("", "recorded", "replayed", *(["with --set"] if other else []))]
    for name in {**own, **other}:
        columns = [found.recorded, own, *([other] if other else [])]
        rows.append((name, *(format_number(values[name]) if name in values else "" for values in columns)))
    print_rows(console, rows)
    if found.cosine is None:
        return
    typer.echo(f"\ncosine of the angle between the gradients: {found.cosine:.4f}\n")
    if not most:
        typer.echo("no token's slope differs by more than 0.1%")
        return
    heads = ("rollout", "token", "", "slope as it was", "with --set")
    tokens = [
        (name, str(at), Text(plain(repr(text))), f"{old:+.2e}", f"{new:+.2e}") for name, at, text, old, new in most
    ]
    print_rows(console, [heads, *tokens])
