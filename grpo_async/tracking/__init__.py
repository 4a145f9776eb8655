"""Records metrics: `jsonl` writes one line per step to metrics.jsonl, `trackers` hands the same to TensorBoard and others."""

from grpo_async.tracking.jsonl import MetricsWriter
from grpo_async.tracking.trackers import Trackers, open_trackers

__all__ = ["MetricsWriter", "Trackers", "open_trackers"]
