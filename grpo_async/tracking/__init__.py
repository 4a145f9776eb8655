"""Where numbers go: one line per step in metrics.jsonl."""

from grpo_async.tracking.jsonl import MetricsLog, read_metrics

__all__ = ["MetricsLog", "read_metrics"]
