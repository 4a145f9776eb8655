"""One thing to know about a run or about a reward function: the record that every command renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """Ordered, the worst first."""

    ERROR = "error"  # it cannot learn like this
    WARNING = "warning"  # may keep it from learning
    GOOD = "good"  # as it should be
    NOTE = "note"  # worth knowing

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the data says.

    Args:
        key: of the rule; of a finding about speed, what bounds the run, in a few words.
        title: what was found, in a few words.
        text: the numbers, and what they mean.
        fix: the remedy.
        setting: dotted path of the setting to change, with its value (`current`) and a better one (`suggested`).
        numbers: the evidence, by name.
        query: selects the rollouts that show it, for inspect-rollouts, in the order `sort`; None: no rollouts show it.
        plot: the plot of the run's page that shows it.
        inputs, rows: kinds of completions and 0-based rows that the check of a reward function found fault with.
    """

    key: str
    severity: Severity
    title: str
    text: str = ""
    fix: str = ""
    setting: str | None = None
    current: float | int | str | None = None
    suggested: float | int | str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    query: str | None = None
    sort: str | None = None
    plot: str | None = None
    inputs: Sequence[str] = ()
    rows: Sequence[int] = ()

    def as_advice(self) -> dict[str, Any]:
        """The fields of a finding about speed, as status.json and advice.jsonl have them."""
        return {
            "bound_by": self.key,
            "text": self.text,
            "setting": self.setting,
            "current": self.current,
            "suggested": self.suggested,
        }


def sentence(text: str) -> str:
    """ "trainer idle 41%: raise x" -> "Trainer idle 41%: raise x."; lines and displays show it without."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def worst_first(found: Sequence[Finding]) -> list[Finding]:
    """Within a severity, in their given order."""
    return sorted(found, key=lambda finding: finding.severity.rank)
