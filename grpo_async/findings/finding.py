"""One thing to know about a run or about a reward function: the record that commands render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


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
        key: of the rule, in one word.
        title: what was found, as a sentence without its full stop.
        text: the numbers, and what they mean.
        fix: the remedy.
        numbers: those that it rests on, by name.
        query: selects the rollouts that show it, for inspect-rollouts; None: no rollouts show it.
        plot: the plot of the run's page that shows it.
        inputs, rows: kinds of completions and 0-based rows with which a reward function went wrong.
    """

    key: str
    severity: Severity
    title: str
    text: str = ""
    fix: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    query: str | None = None
    plot: str | None = None
    inputs: Sequence[str] = ()
    rows: Sequence[int] = ()


def sentence(text: str) -> str:
    """Make a sentence: "trainer idle 41%: raise x" -> "Trainer idle 41%: raise x."."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sort by severity; within one, in their given order."""
    return sorted(findings, key=lambda finding: finding.severity.rank)
