"""Reward functions that `check-reward` should find something about, each one thing."""

from __future__ import annotations

import os
import re
from typing import Any


def honest(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Right: the text after any thinking is the answer."""
    return [float(c.rpartition("</think>")[2].strip() == gold) for c, gold in zip(completions, answer, strict=True)]


def raises_on_empty(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c.split()[-1] == gold) for c, gold in zip(completions, answer, strict=True)]


def pays_everything_with_a_digit(completions: list[str], answer: list[str]) -> list[float]:
    return [float(gold in c or any(d.isdigit() for d in c)) for c, gold in zip(completions, answer, strict=True)]


def substring(completions: list[str], answer: list[str]) -> list[float]:
    """Pays a list of all numbers like the answer."""
    return [float(gold in c) for c, gold in zip(completions, answer, strict=True)]


def asks_but_ignores(completions: list[str], answer: list[str]) -> list[float]:
    return [float(len(c) > 3) for c in completions]


def form_only(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("boxed" in c) for c in completions]


def catastrophic(completions: list[str], answer: list[str]) -> list[float]:
    """One long C call that holds the GIL: no time limit inside its process can end it."""
    return [
        float(bool(re.fullmatch(r"(?:\s|\d|\w+)+!", c[:60])) or c == gold)
        for c, gold in zip(completions, answer, strict=True)
    ]


def dies(completions: list[str], **kwargs: Any) -> list[float]:
    if any("boxed" in c for c in completions):
        os._exit(7)
    return [0.0] * len(completions)


def prints(completions: list[str], answer: list[str]) -> list[float]:
    print("a line on stdout")
    return [float(c == gold) for c, gold in zip(completions, answer, strict=True)]


def wants_environments(completions: list[str], environments: list[Any]) -> list[float]:
    return [0.0] * len(completions)
