"""The rules behind every verdict and piece of advice: what a run's metrics say, for the report, `status`, the dashboard and
summary.json.

    run directory -> Evidence -> find -> [Finding, ...]     the worst first (rules)
                              -> judge -> Verdict           is it learning, by how much (verdict)
    metrics + settings        -> advise -> Finding          what bounds the speed (speed)

Everything here is pure, except for what reads a run's files (`evidence`). Commands and pages only render findings. The check of
reward functions gives the same records (rewards.check).
"""

from grpo_async.findings.evidence import Evidence, MetricRow
from grpo_async.findings.finding import Finding, Severity
from grpo_async.findings.verdict import Verdict, find, judge

__all__ = [
    "Evidence",
    "Finding",
    "MetricRow",
    "Severity",
    "Verdict",
    "find",
    "judge",
]
