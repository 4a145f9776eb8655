"""One rollout, printed: its conversation, what it was rewarded for, its turns, and every token with every figure.

Tokens are coloured by how likely the sampler found them: plain from 0.5 up, yellow from 0.1, red below; dim where the
mask is 0 (tool and environment tokens, not trained on).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_async.store import GroupRow, RolloutRow
from grpo_async.viewer.figures import number, whole
from grpo_async.viewer.plain.tables import status_text
from grpo_async.viewer.safe_text import one_line, quoted, visible
from grpo_async.viewer.token_colours import mark_words
from grpo_async.viewer.token_text import TokenTexts


def rollout_page(group: GroupRow, rollout: RolloutRow, texts: TokenTexts | str) -> RenderableType:
    """`texts`: the token texts, or the sentence that says why there are none."""
    return Group(*_parts(group, rollout, texts))


def token_style(logprob: float | None, mask: int) -> str:
    """ln 0.5 = -0.693 and ln 0.1 = -2.303 are the bounds."""
    if not mask:
        return "dim"
    if logprob is None or logprob >= math.log(0.5):
        return ""
    return "yellow" if logprob >= math.log(0.1) else "red"


def _parts(group: GroupRow, rollout: RolloutRow, texts: TokenTexts | str) -> Iterator[RenderableType]:
    yield Text.assemble(
        (f"rollout {visible(rollout.rollout_id)}", "bold"),
        f"  group {group.group_id} (",
        status_text(group.status),
        f")  step {whole(group.step)}  ",
        status_text(rollout.status),
        f"{'  environment done' if rollout.done else ''}  {rollout.total_duration_s:.2f} s",
    )
    if rollout.error is not None:
        yield Text(visible(rollout.error), style="red")
    prompt = group.messages if rollout.reset_messages is None else rollout.reset_messages
    for message in [*prompt, *rollout.messages]:
        name = f" {visible(message.name)}" if message.name else ""
        yield Text(f"\n{visible(message.role)}{name} ({message.origin.value})", style="bold cyan")
        if message.content or not message.tool_calls:
            yield Text(visible(message.content))
        for called in message.tool_calls:
            function = called.get("function", {})
            yield Text(f"calls {visible(str(function.get('name')))}({_arguments(function.get('arguments'))})")
    yield Text(f"\nreward {number(rollout.reward)}  advantage {number(rollout.advantage)}", style="bold")
    for name, value in rollout.rewards.items():
        yield Text(f"  {visible(name)} {number(value)}")
    for name, noted in rollout.extra.items():
        yield Text(f"  {visible(name)}: {one_line(str(noted), 200)}", style="dim")
    yield Text()
    yield _turn_table(rollout)
    for turn in rollout.turns:
        if turn.parse_error is not None:
            yield Text(f"  not searched for tool calls: {one_line(turn.parse_error, 200)}", style="yellow")
        for call in turn.tool_calls:
            failed = " failed" if call.failed else ""
            outcome = one_line(call.result, 200)
            yield Text(
                f"  {visible(call.name)}({_arguments(call.arguments)}){failed} {call.duration_s:.2f} s -> {outcome}"
            )
    yield Text()
    if isinstance(texts, str):
        yield Text(texts, style="dim")
    yield _token_table(rollout, texts)


def _arguments(arguments: Any) -> str:
    return one_line(json.dumps(arguments, ensure_ascii=False), 200)


def _turn_table(rollout: RolloutRow) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("turn", "tokens", "ended by", "generation s", "tools s", "tool calls"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, turn in enumerate(rollout.turns, start=1):
        durations = (f"{turn.generation_duration_s:.2f}", f"{turn.tool_execution_duration_s:.2f}")
        table.add_row(str(place), str(turn.num_tokens), turn.finish_reason.value, *durations, str(len(turn.tool_calls)))
    return table


def _token_table(rollout: RolloutRow, texts: TokenTexts | str) -> Table:
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        caption=f"behind a prompt of {len(rollout.prompt_ids)} tokens",
        caption_justify="left",
    )
    for name in ("index", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    if isinstance(texts, TokenTexts):
        table.add_column("text", no_wrap=True, overflow="ellipsis")
    for name in ("mask", "logprob", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    figures = _trainer_figures(rollout)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    if rollout.marks is not None:
        table.add_column("marks", no_wrap=True, overflow="ellipsis")
    columns = (rollout.completion_ids, rollout.mask, rollout.logprobs, rollout.versions)
    for index, (token_id, mask, logprob, version) in enumerate(zip(*columns, strict=True)):
        text = [Text(quoted(texts.of(token_id)))] if isinstance(texts, TokenTexts) else []
        sampled = (number(logprob, 4), str(version)) if mask else ("-", "-")
        found = [number(values[index], 4) for values in figures.values()]
        marks = [] if rollout.marks is None else [", ".join(mark_words(rollout.marks[index]))]
        style = token_style(logprob, mask)
        table.add_row(str(index), str(token_id), *text, str(mask), *sampled, *found, *marks, style=style)
    return table


def _trainer_figures(rollout: RolloutRow) -> dict[str, Sequence[float | None]]:
    """What the trainer found, by the name of its column; empty where it never saw the rollout."""
    named = {
        "trainer": rollout.trainer_logprobs,
        "proximal": rollout.proximal_logprobs,
        "weight": rollout.weights,
        "entropy": rollout.entropies,
    }
    return {name: values for name, values in named.items() if values is not None}
