"""Every figure of one token, in words: what stands under the cursor of a rollout. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_async.store import RolloutRow
from grpo_async.viewer.figures import number, signed
from grpo_async.viewer.safe_text import quoted
from grpo_async.viewer.token_colours import log_ratio, mark_words


def token_details(rollout: RolloutRow, index: int, text: str | None, turn: int | None) -> list[list[tuple[str, str]]]:
    """Lines of (name, value) pairs. `text` None: token texts are not known; `turn` None: it is in none."""
    kept = bool(rollout.mask[index])
    first = [
        ("token", f"{index + 1} of {len(rollout.completion_ids)}"),
        ("id", str(rollout.completion_ids[index])),
        ("text", "-" if text is None else quoted(text)),
        ("turn", "-" if turn is None else str(turn + 1)),
        ("version", str(rollout.versions[index]) if kept else "-"),
    ]
    if not kept:
        return [first, [("mask", "0: not trained on (a tool's answer, an environment's text, or the chat template)")]]
    sampler = _at(rollout.logprobs, index)
    trainer = _at(rollout.trainer_logprobs, index)
    proximal = _at(rollout.proximal_logprobs, index)
    difference = log_ratio(trainer, sampler)
    marks = mark_words(_whole_at(rollout.marks, index))
    return [
        first,
        [("sampler", _likely(sampler)), ("trainer", _likely(trainer)), ("proximal", _likely(proximal))],
        [
            ("log ratio", signed(difference, 4)),
            ("ratio", "-" if difference is None else f"{math.exp(min(difference, 700.0)):.4f}"),
            ("weight", number(_at(rollout.weights, index), 4)),
            ("entropy", number(_at(rollout.entropies, index), 4)),
        ],
        [("advantage", signed(rollout.advantage)), ("marks", _words(rollout, marks))],
    ]


def _words(rollout: RolloutRow, marks: list[str]) -> str:
    if rollout.marks is None:
        return "not recorded: no update used it, or record.rollouts.token_figures"
    return ", ".join(marks) or "none: trained on"


def _likely(logprob: float | None) -> str:
    """-0.6931 -> '-0.6931 (50.0%)'."""
    return "-" if logprob is None else f"{logprob:.4f} ({math.exp(min(logprob, 0.0)):.1%})"


def _at(values: Sequence[float | None] | None, index: int) -> float | None:
    return None if values is None else values[index]


def _whole_at(values: Sequence[int | None] | None, index: int) -> int | None:
    return None if values is None else values[index]
