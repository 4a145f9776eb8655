r"""Which answer a completion gives, for majority votes: as a reward function said, else as its text says, else none.

A vote needs answers that are equal as texts, so only what is clearly an answer counts: a \boxed{}, what follows `####`, or a final
text of one short line. Prose has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_async.records import Origin, RolloutCompletion
from grpo_async.rewards.text import after_thinking, last_boxed

ANSWER_COLUMNS = ("extracted_answer", "answer_parsed")
"""Columns that reward functions give to `log_extra`, by the custom of TRL's examples; the first that is there is taken."""

_MAX_ANSWER = 64  # characters; a longer line is prose


def read_answer(completion: RolloutCompletion, extra: Mapping[str, Any]) -> str | None:
    r"""The answer in a normal form (letter case, whitespace, `$` and a full stop at the end aside); None where there is none.

    `extra` holds what reward functions noted of this completion: where it has a column of ANSWER_COLUMNS, that is the answer, and
    None, "" or a text in brackets such as "[none]" means that there is none. Else the final text decides:

        "... so \boxed{1/2}" -> "1/2"      "<think>3+4=7</think> 7." -> "7"      "a\nb\n#### 1,250" -> "1,250"
        "It is hard to say.\nMaybe seven." -> None      a completion that was cut, or ends in a tool call: only its \boxed{}
    """
    for column in ANSWER_COLUMNS:
        if column in extra:
            return _normal(_from_reward(extra[column]))
    messages = completion.completion_messages()
    text = after_thinking("".join(message.content for message in messages[-1:] if message.origin is Origin.POLICY))
    boxed = last_boxed(text)
    if boxed is not None:
        return _normal(boxed)
    if completion.truncated or any(message.tool_calls for message in messages[-1:]):
        return None
    marked = text.rpartition("####")
    return _normal(marked[2] if marked[1] else text)


def _from_reward(value: Any) -> str:
    text = "" if value is None else str(value).strip()
    return "" if text.startswith("[") and text.endswith("]") and text[1:-1].isalpha() else text


def _normal(text: str) -> str | None:
    lines = text.strip().splitlines()
    if len(lines) != 1:
        return None
    words = " ".join(lines[0].split()).strip("$ ").removesuffix(".").strip("$ ").casefold()
    return words if 0 < len(words) <= _MAX_ANSWER else None
