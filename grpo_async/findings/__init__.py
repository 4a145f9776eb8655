"""What the numbers of a run mean, for every page and command that shows one.

    run directory -> RunHistory -> diagnose -> Diagnosis      is it learning, why not, what to do
                                -> find -> [Finding, ...]     causes and advice, the worst first

Everything here is pure, except for what reads a run's files (`history`).
"""

from grpo_async.findings.diagnosis import Diagnosis, diagnose
from grpo_async.findings.history import MetricRow, RunHistory
from grpo_async.findings.rules import Finding, Severity, find

__all__ = ["Diagnosis", "Finding", "MetricRow", "RunHistory", "Severity", "diagnose", "find"]
