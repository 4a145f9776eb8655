"""What a rollout leaves in the timeline beside its spans."""

from __future__ import annotations

import time

from grpo_async.inference.client import Generation
from grpo_async.tracking.timeline import Span, Timeline, Track

SHORTEST_WAIT_S = 0.001
"""Shorter waits are left out of the timeline: every request and every group has one."""


def record_turn(track: Track, span: Span, generation: Generation) -> None:
    """Tell the span of a generation what came of it, and record where it waited for a server."""
    versions = generation.policy_versions
    span.details |= {"tokens": len(generation.token_ids), "finish": str(generation.finish_reason or "")}
    if versions:
        span.details |= {"version": max(versions), "oldest_version": min(versions)}
    if generation.first_token_s is not None:
        span.details["first_token_s"] = generation.first_token_s
    for start, end in generation.waits:
        if end - start >= SHORTEST_WAIT_S:
            track.add("wait for a server", start, end)


def record_admission(timeline: Timeline, began: float) -> None:
    """No further group might begin since `began` (unix seconds): enough were generated, queued, or too many steps ahead."""
    now = time.time()
    if now - began >= SHORTEST_WAIT_S:
        timeline.add("wait for the trainer", "rollout", began, now)
