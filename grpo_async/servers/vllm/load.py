"""How busy vLLM's engine cores are, from the statistics that come with the outputs of every step. Imports no vLLM.

vLLM calls these statistics unstable: what a version does not say is left out, and nothing here may break an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineLoad:
    """What the scheduler of each engine core said last, by the core's number (more than one: data parallelism)."""

    running: dict[int, int] = field(default_factory=dict)
    """Requests that it generates for."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Requests in its queues."""
    kv_usage: dict[int, float] = field(default_factory=dict)
    """Share of its blocks of keys and values in use, 0 to 1."""

    def note(self, core: int, stats: Any) -> None:
        """`stats`: vLLM's SchedulerStats."""
        if isinstance(running := getattr(stats, "num_running_reqs", None), int):
            self.running[core] = running
        if isinstance(waiting := getattr(stats, "num_waiting_reqs", None), int):
            skipped = getattr(stats, "num_skipped_waiting_reqs", 0)  # some versions keep these in a queue of their own
            self.waiting[core] = waiting + (skipped if isinstance(skipped, int) else 0)
        if isinstance(usage := getattr(stats, "kv_cache_usage", None), int | float):
            self.kv_usage[core] = float(usage)

    def describe(self, *, is_idle: bool) -> dict[str, Any]:
        """The fields of ServerInfo. An engine whose last requests are aborted makes no further step and says no more, so
        `is_idle` (nothing is in it) overrules what it said before. The fullest core counts: it is the first to be full."""
        if is_idle:
            return {"running_requests": 0, "waiting_requests": 0, "kv_usage": 0.0 if self.kv_usage else None}
        return {
            "running_requests": sum(self.running.values()),
            "waiting_requests": sum(self.waiting.values()),
            "kv_usage": max(self.kv_usage.values(), default=None),
        }


def watch_load(engine: Any) -> EngineLoad:
    """The load of `engine` (an AsyncLLM), kept up to date from now on. Stays empty where it takes no statistics
    (`--disable-log-stats`)."""
    load = EngineLoad()
    manager = getattr(engine, "logger_manager", None)
    record = getattr(manager, "record", None)
    if record is None:
        return load

    def note_and_record(*args: Any, **kwargs: Any) -> Any:
        stats = kwargs.get("scheduler_stats", args[0] if args else None)
        load.note(kwargs.get("engine_idx") or 0, stats)
        return record(*args, **kwargs)

    assert manager is not None
    manager.record = note_and_record
    return load


def is_idle(engine: Any, *, active_requests: int) -> bool:
    """Whether nothing is in `engine`: none of the `active_requests` of our own routes, and nothing that users' code sends through
    vLLM's. Of a version that does not tell, our own routes decide."""
    unfinished = getattr(getattr(engine, "output_processor", None), "has_unfinished_requests", None)
    return active_requests == 0 and not (callable(unfinished) and unfinished())


def max_running_requests(engine: Any) -> int | None:
    """Most requests that all engine cores together run at once (`--max-num-seqs`); None where it cannot be read."""
    config = engine.vllm_config
    limit = getattr(config.scheduler_config, "max_num_seqs", None)
    return None if limit is None else int(limit) * int(getattr(config.parallel_config, "data_parallel_size", 1) or 1)
