"""`replay`: a stored step under other losses, advantages or corrections."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_async.cli.options import RunArgument, SetOption

if TYPE_CHECKING:
    from grpo_async.run_directory import RunDir

_TOKENS = 10


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
    tokens = found.tokens(_TOKENS)
    text_of = load_renderer(found.config).token_text if tokens else str
    content = {
        "step": step,
        "changes": list(found.changes),
        "recorded": {name: found.recorded.get(name) for name in found.own.metrics},
        "own": dict(found.own.metrics),
        "other": None if found.other is None else dict(found.other.metrics),
        "cosine": found.cosine,
        "tokens": [(rollout, at, repr(text_of(number)), own, other) for rollout, at, number, own, other in tokens],
    }
    if found.other is not None:
        _keep(content, directory)
    typer.echo(json.dumps(content)) if as_json else _show(content)


def _keep(content: Mapping[str, Any], run: RunDir) -> None:
    from grpo_async.utils.files import write_atomically

    run.replays.mkdir(exist_ok=True)
    paths = (run.replays / f"step_{content['step']}.{number}.json" for number in count(1))
    write_atomically(next(path for path in paths if not path.exists()), json.dumps(content))


def _show(content: Mapping[str, Any]) -> None:
    """The tables that the run's page has."""
    from rich.text import Text

    from grpo_async.utils.console import print_rows, stdout_console
    from grpo_async.utils.safe_text import plain
    from grpo_async.viewer.web.overview import replay_tables

    for table in replay_tables(content):
        typer.echo(f"{plain(table['caption'])}\n")
        heads = tuple(head.removeprefix("#") for head in table["head"])
        print_rows(stdout_console(), [heads, *(tuple(Text(plain(cell)) for cell in row) for row in table["rows"])])
        typer.echo("")
