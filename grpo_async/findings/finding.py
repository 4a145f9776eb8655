"""One thing to know about a run : the record that commands render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Ordered, the worst first."""

    ERROR = "error"  # it cannot learn like this
    WARNING = "warning"  # may keep it from learning
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
        query: selects the rollouts that show it, for inspect-rollouts; None: no rollouts show it.
        plot: the plot of the run's page that shows it.
    """

    key: str
    severity: Severity
    title: str
    text: str = ""
    fix: str = ""
    query: str | None = None
    plot: str | None = None


def sentence(text: str) -> str:
    """Make a sentence: "trainer idle 41%: raise x" -> "Trainer idle 41%: raise x."."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sort by severity; within one, in their given order."""
    return sorted(findings, key=lambda finding: finding.severity.rank)
