"""Stand-ins for what the main loop talks to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_async.weights.verify import TrainerScores


class FakeSync:
    """training.loop.WeightSync without servers. `up`: whether a server is there; `pushed`: the versions that reached it."""

    def __init__(self, *, up: bool = True) -> None:
        self.up = up
        self.has_joiners = False
        self.has_serving = True
        self.pushed: list[int] = []
        self.events: list[str] = []

    def push(self, version: int, *, before_gather: Callable[[], None]) -> dict[str, float] | None:
        if not self.up:
            self.events.append(f"skip {version}")
            return None
        before_gather()
        self.has_joiners = False
        self.pushed.append(version)
        self.events.append(f"push {version}")
        return {"sync/total_s": 0.1}

    def verify(self, score: Callable[[Sequence[Sequence[int]], str], TrainerScores]) -> dict[str, float]:
        return {}

    def rest(self) -> None:
        self.events.append("rest")
