"""`inspect-rollouts` without a screen of its own: printed tables and pages, and JSON lines.

Tokens are coloured by how likely the sampler found them: plain from 0.5 up, yellow from 0.1, red below; dim where the mask is 0
(tool and environment tokens, not trained on)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_async.errors import ConfigError, RunError
from grpo_async.records import TaggedMessage
from grpo_async.rundir import RunDir
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.store.export import printable
from grpo_async.store.query import Query, both, parse_query, quote
from grpo_async.store.rows import to_json
from grpo_async.store.summaries import GroupSummary
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.figures import STATUS_STYLES, number, share, span, whole
from grpo_async.viewer.safe_text import one_line, quoted, visible
from grpo_async.viewer.token_colours import mark_words
from grpo_async.viewer.token_text import TokenTexts, load_token_texts

_PROMPT_WIDTH = 60
_COMPLETION_WIDTH = 400


def status_text(status: str, superseded: bool = False) -> Text:
    return Text.assemble((status, STATUS_STYLES.get(status, "")), (" superseded", "dim") if superseded else "")


def group_table(summaries: Sequence[GroupSummary], num_matching: int, num_stored: int) -> Table:
    """One line per group. The caption says what a limit hides."""
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        caption=f"{len(summaries)} of {num_matching} matching groups, {num_stored} in the run",
        caption_justify="left",
    )
    for name in ("step", "group"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("prompt", min_width=8)  # the one column that may shrink: its cells are cut, not wrapped
    for name in ("reward", "min", "max", "length", "versions", "trunc"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            whole(summary.step),
            str(summary.group_id),
            status_text(summary.status, summary.superseded),
            Text(one_line(summary.prompt_preview, _PROMPT_WIDTH), no_wrap=True, overflow="ellipsis"),
            number(summary.reward_mean),
            number(summary.reward_min),
            number(summary.reward_max),
            number(summary.num_tokens_mean, 1),
            span(summary.version_min, summary.version_max),
            share(summary.num_truncated, summary.size),
        )
    return table


def group_page(row: GroupRow) -> RenderableType:
    """The prompt of a group, its columns, and its rollouts in one table."""
    heading = Text.assemble(
        (f"group {row.group_id}", "bold"),
        f"  step {whole(row.step)}  prompt {row.prompt_id}  ",
        status_text(row.status),
    )
    own = [rollout.reset_messages for rollout in row.rollouts if rollout.reset_messages is not None]
    said = own[0] if own and all(messages == own[0] for messages in own) else row.messages  # with what reset() said
    prompt = [Text.assemble((f"{visible(m.role)}: ", "bold cyan"), visible(m.content)) for m in said]
    columns = [
        Text.assemble((f"{one_line(name, 60)} = ", "dim"), one_line(str(v), 200)) for name, v in row.columns.items()
    ]
    return Group(heading, *prompt, *columns, Text(), _rollout_table(row.rollouts))


def _rollout_table(rollouts: Sequence[RolloutRow]) -> Table:
    reward_names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    table = Table(box=None, header_style="bold", pad_edge=False, row_styles=["", "on grey7"])
    table.add_column("rollout", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ("reward", *(reward_names if len(reward_names) > 1 else []), "advantage", "tokens", "versions"):
        table.add_column(Text(one_line(name, 24)), justify="right", no_wrap=True)
    table.add_column("completion", overflow="fold", min_width=20)
    for rollout in rollouts:
        versions = rollout.sampled_versions
        named = [number(rollout.rewards.get(name)) for name in reward_names] if len(reward_names) > 1 else []
        table.add_row(
            Text(visible(rollout.rollout_id)),
            status_text(rollout.status),
            number(rollout.reward),
            *named,
            number(rollout.advantage),
            str(rollout.num_tokens),
            span(min(versions, default=None), max(versions, default=None)),
            _completion(rollout),
        )
    return table


def _completion(rollout: RolloutRow) -> Text:
    if rollout.error is not None:
        return Text(one_line(rollout.error, _COMPLETION_WIDTH), style="red")
    return Text(one_line(" ".join(_said(message) for message in rollout.messages), _COMPLETION_WIDTH))


def _said(message: TaggedMessage) -> str:
    """Content and calls: `calculator({"expression": "1 + 2"})`."""
    functions = [call.get("function", {}) for call in message.tool_calls]
    calls = [f"{each.get('name')}({json.dumps(each.get('arguments'), ensure_ascii=False)})" for each in functions]
    return " ".join([message.content, *calls]).strip()


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


_PAGE = 500  # groups of one read


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is asked for. `text` is a query, `sort` an order of the store ("" = newest first), `limit` None shows all."""

    text: str = ""
    sort: str = ""
    limit: int | None = None
    group_id: int | None = None
    rollout_id: str | None = None
    with_superseded: bool = False

    @property
    def query(self) -> Query:
        return parse_query(self.text)

    @property
    def order(self) -> str:
        return self.sort or "-seq"


def show_groups(run: RunDir, table: RolloutTable, selection: Selection, console: Console) -> None:
    """The table of groups, and what a reader must know of the store."""
    num_stored = _num_groups(run, table, selection)
    matching = table.count(selection.query, with_superseded=selection.with_superseded).groups
    console.print(group_table(list(_summaries(table, selection)), matching, num_stored))
    _print_notes(table, console)


def show_group(run: RunDir, table: RolloutTable, selection: Selection, console: Console) -> None:
    """The rollouts of one group.

    Raises:
        ConfigError: the run has no such group, or the query leaves none of it.
    """
    assert selection.group_id is not None
    _demand(run, table, selection)
    console.print(group_page(table.group(selection.group_id, with_superseded=selection.with_superseded)))


def show_rollout(run: RunDir, table: RolloutTable, selection: Selection, console: Console) -> None:
    """One rollout with its tokens.

    Raises:
        ConfigError: the run has no such rollout, or the query excludes it.
    """
    assert selection.rollout_id is not None
    _demand(run, table, selection)
    group, rollout = table.rollout(selection.rollout_id, with_superseded=selection.with_superseded)
    console.print(rollout_page(group, rollout, load_token_texts(run)))


def write_json(run: RunDir, table: RolloutTable, selection: Selection, write: Callable[[bytes], Any]) -> None:
    """One line per group: the stored row with a `summary`; with `rollout_id`, the rollout alone, with what its group is.

    Raises:
        ConfigError: the group or rollout that is asked for is not there.

    `write` gets lines without their end. Groups are read one by one: a store may be larger than the memory.
    """
    superseded = selection.with_superseded
    if selection.rollout_id is not None:
        _demand(run, table, selection)
        group, rollout = table.rollout(selection.rollout_id, with_superseded=superseded)
        known = {
            "group_id": group.group_id,
            "prompt_id": group.prompt_id,
            "step": group.step,
            "group_status": group.status,
        }
        write(_line({**known, **orjson.loads(orjson.dumps(rollout))}))
        return
    _num_groups(run, table, selection)
    if selection.group_id is not None:
        _demand(run, table, selection)
    for summary in _summaries(table, selection):
        row = table.group_at(summary.seq)
        write(_line({**orjson.loads(to_json(row)), "summary": summary}))


def _line(content: dict[str, Any]) -> bytes:
    return printable(orjson.dumps(content).decode()).encode()


def _summaries(table: RolloutTable, selection: Selection) -> Iterator[GroupSummary]:
    query, superseded = _narrowed(selection), selection.with_superseded
    left, offset = selection.limit, 0
    while left is None or left > 0:
        limit = _PAGE if left is None else min(left, _PAGE)
        page = table.group_page(query, sort=selection.order, offset=offset, limit=limit, with_superseded=superseded)
        yield from page
        if len(page) < limit:
            return
        offset += limit
        left = None if left is None else left - limit


def _narrowed(selection: Selection) -> Query:
    """The query, and only the group that was asked for."""
    if selection.group_id is None:
        return selection.query
    return both(selection.query, parse_query(f"group_id={selection.group_id}"))


def _num_groups(run: RunDir, table: RolloutTable, selection: Selection) -> int:
    """Groups of the store.

    Raises:
        RunError: there is none.
    """
    num_groups = table.count(with_superseded=selection.with_superseded).groups
    if num_groups == 0:
        raise RunError(f"{run.root} has no rollouts yet; the first appear with the first groups that are done")
    return num_groups


def _demand(run: RunDir, table: RolloutTable, selection: Selection) -> None:
    """Raises ConfigError where the group or rollout is not there, or not in the query."""
    num_groups = _num_groups(run, table, selection)
    if selection.rollout_id is not None:
        only = f"id={quote(selection.rollout_id)}"
        what = f"rollout '{one_line(selection.rollout_id, 60)}' (they are named like g17-r3: the fourth of group 17)"
    else:
        only, what = f"group_id={selection.group_id}", f"group {selection.group_id}"
    query = both(selection.query, parse_query(only))
    if table.count(query, with_superseded=selection.with_superseded).groups == 0:
        others = " that the other options let through" if selection.text else ""
        raise ConfigError(
            f"{run.root} has no {what}{others} among its {num_groups} groups; without options it lists them"
        )


def _print_notes(table: RolloutTable, console: Console) -> None:
    for note in table.notes:
        console.print(Text(f"note: {one_line(note, 400)}", style="yellow"))
