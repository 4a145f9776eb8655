"""The one description of the query language, made of its fields and words: the command line prints `help_text`, the terminal and
the web page lay out `HELP` themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from grpo_async.store.query_fields import FIELDS, WORDS, Field


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpRow:
    """`syntax` is what one writes, `meaning` one sentence; `example` (or "") is a query that can be run."""

    syntax: str
    meaning: str
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpSection:
    title: str
    rows: Sequence[HelpRow]


EXAMPLES: tuple[HelpRow, ...] = tuple(
    HelpRow(syntax=query, meaning=meaning, example=query)
    for query, meaning in (
        ("reward<0.2 and truncated", "bad ones that a limit ended"),
        ("tool=python and failed", "python was called, and a call or the rollout failed"),
        ("step=10..20 group.std=0", "groups without anything to learn from; side by side means and"),
        ("not finished or reward.format<1", "no answer of its own, or in the wrong form"),
        ('"i cannot" and advantage>0', "the text was rewarded though it should not be, perhaps"),
        ("columns.answer=9 and group.reward in 0.2..0.8", "sometimes right"),
        ("staleness>=2 or clipped_share>10%", "far off policy"),
        ("step=last and group.status=filtered,stale", "what the newest step did not use"),
    )
)

OPERATORS: tuple[HelpRow, ...] = (
    HelpRow(
        syntax="= !=", meaning="equal or not; several values: status=finished,failed", example="status=finished,failed"
    ),
    HelpRow(syntax="< <= > >=", meaning="of numbers; 1k is 1000, 5% is 0.05", example="length>=1k"),
    HelpRow(
        syntax="=A..B, in A..B", meaning="from A to B, both included; A.. and ..B have no end", example="step in 10..20"
    ),
    HelpRow(syntax="~ !~", meaning="contains the text or not, in any case", example='prompt~"what is"'),
    HelpRow(
        syntax="=none",
        meaning="has no value; a comparison with a missing value is false, != and not are true",
        example="reward=none",
    ),
    HelpRow(
        syntax='"some text"',
        meaning='in the prompt or the completion; \\" within quotes is a quote',
        example='"what is"',
    ),
    HelpRow(
        syntax="and or not ( )",
        meaning="not binds before and, and before or; side by side means and",
        example="not (done or stale)",
    ),
)


def _field_row(field: Field) -> HelpRow:
    values = f" ({', '.join(field.values)})" if field.values else ""
    aliases = f"; also {', '.join(field.aliases)}" if field.aliases else ""
    return HelpRow(syntax=field.name, meaning=f"{field.help}{values}{aliases}", example=field.example)


HELP: tuple[HelpSection, ...] = (
    HelpSection(title="Examples", rows=EXAMPLES),
    HelpSection(title="Operators", rows=OPERATORS),
    HelpSection(
        title="Words", rows=tuple(HelpRow(syntax=word.name, meaning=word.help, example=word.name) for word in WORDS)
    ),
    HelpSection(
        title="Fields of a rollout", rows=tuple(_field_row(f) for f in FIELDS if not f.name.startswith("group."))
    ),
    HelpSection(title="Fields of its group", rows=tuple(_field_row(f) for f in FIELDS if f.name.startswith("group."))),
)


def help_text(width: int = 100) -> str:
    """HELP as plain text, at most `width` (>= 60) columns."""
    lines: list[str] = []
    for section in HELP:
        lines += [section.title, ""]
        left = max(len(row.syntax) for row in section.rows)
        for row in section.rows:
            meaning = wrap(row.meaning, max(width - left - 4, 20)) or [""]
            lines.append(f"  {row.syntax:<{left}}  {meaning[0]}")
            lines += [" " * (left + 4) + rest for rest in meaning[1:]]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
