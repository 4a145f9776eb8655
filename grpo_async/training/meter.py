"""Measures the pipeline: who waited for whom, tokens per second, over each step and over the run. Pure arithmetic on readings.

trainer idle    = seconds blocked on samples / wall            generator idle = 1 - seconds generating / wall
overlap         = max(generation, training) / wall             1.0 is perfect overlap
tokens/s        = tokens of the window / seconds of the window
shares          of the trainer's wall time, which add up to 1: waiting for samples, training, pushing, checkpoint, other

Idle and the share of waiting differ by the pushes to servers that came back while the trainer waited: those are pushing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean

_NUM_REWARDS = 3  # kept of each end: totals do not grow with the run
ACTIVITIES = ("waiting", "training", "pushing", "checkpoint")
"""What the trainer's thread does: wait for samples, train, push weights, copy a checkpoint or wait until the last one is written.
The rest of its time is "other"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters at one instant. Times in seconds; `generation_busy_s` and `generated_tokens` are the server's."""

    time_s: float
    generation_busy_s: float
    generated_tokens: int


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the steps so far, of bounded size; survives a resume."""

    wall_s: float = 0.0
    waited_s: float = 0.0
    generation_busy_s: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    staleness_sum: float = 0.0
    staleness_max: float = 0.0
    first_rewards: list[float] = field(default_factory=list)  # of the first three steps that have one
    last_rewards: list[float] = field(default_factory=list)  # of the last three
    spent_s: dict[str, float] = field(default_factory=dict)  # of ACTIVITIES

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class PipelineMeter:
    """Turns readings into metrics. Call `step` once per optimizer step.

    Args:
        first: reading when training began.
        totals: of the steps before a resume.
    """

    def __init__(self, first: Reading, totals: Totals | None = None) -> None:
        self._last = first
        self.totals = totals or Totals()

    def restart(self, now: Reading) -> None:
        """Leave out what happened since the last reading (evaluation, start-up)."""
        self._last = now

    def step(
        self,
        now: Reading,
        *,
        waited_s: float,
        trained_tokens: int,
        staleness: Mapping[int, int],
        reward: float | None,
        spent: Mapping[str, float],
    ) -> dict[str, float]:
        """Metrics of the step that ended at `now`.

        Args:
            waited_s: for samples.
            staleness: number of trained tokens by their staleness.
            reward: mean of the step; None: none was scored.
            spent: seconds since the reading before, by what of ACTIVITIES they went into.
        """
        wall = max(now.time_s - self._last.time_s, 1e-9)
        busy = min(max(now.generation_busy_s - self._last.generation_busy_s, 0.0), wall)
        generated = max(now.generated_tokens - self._last.generated_tokens, 0)
        # tokens of evaluations may be taken off late, so a reading may fall: what was counted is not counted again
        self._last = replace(now, generated_tokens=max(now.generated_tokens, self._last.generated_tokens))
        totals = self.totals
        totals.wall_s += wall
        totals.waited_s += waited_s
        totals.generation_busy_s += busy
        totals.generated_tokens += generated
        totals.trained_tokens += trained_tokens
        totals.staleness_sum += sum(age * count for age, count in staleness.items())
        totals.staleness_max = max([totals.staleness_max, *map(float, staleness)])
        for what, seconds in spent.items():
            totals.spent_s[what] = totals.spent_s.get(what, 0.0) + seconds
        if reward is not None:
            if len(totals.first_rewards) < _NUM_REWARDS:
                totals.first_rewards.append(reward)
            totals.last_rewards = [*totals.last_rewards, reward][-_NUM_REWARDS:]
        metrics = {
            "step_time": wall,
            "pipeline/trainer_idle_ratio": waited_s / wall,
            "pipeline/generator_idle_ratio": 1.0 - busy / wall,
            "pipeline/overlap_efficiency": max(busy, wall - waited_s) / wall,
            "perf/trained_tokens_per_s": trained_tokens / wall,
            "perf/generated_tokens_per_s": generated / wall,
            **{f"pipeline/{what}_share": share for what, share in _shares(spent, wall).items()},
        }
        num_tokens = sum(staleness.values())
        if num_tokens:
            metrics["async/staleness_mean"] = sum(age * count for age, count in staleness.items()) / num_tokens
            metrics["async/staleness_max"] = float(max(staleness))
            for age in range(int(totals.staleness_max) + 1):  # those of earlier steps too: a share of 0 is a share
                metrics[f"async/staleness/{age}"] = staleness.get(age, 0) / num_tokens
        return metrics

    def summary(self) -> dict[str, float]:
        """The same figures over the whole run, and the mean reward of its first and last three steps."""
        totals = self.totals
        wall = max(totals.wall_s, 1e-9)
        summary = {
            "wall_s": totals.wall_s,
            "trained_tokens_per_s": totals.trained_tokens / wall,
            "generated_tokens_per_s": totals.generated_tokens / wall,
            "trainer_idle_ratio": totals.waited_s / wall,
            "generator_idle_ratio": 1.0 - totals.generation_busy_s / wall,
            "overlap_efficiency": max(totals.generation_busy_s, wall - totals.waited_s) / wall,
            "staleness_mean": totals.staleness_sum / max(totals.trained_tokens, 1),
            "staleness_max": totals.staleness_max,
            **{f"{what}_share": share for what, share in _shares(totals.spent_s, wall).items()},
        }
        if totals.first_rewards:
            summary["reward_first"] = fmean(totals.first_rewards)
            summary["reward_last"] = fmean(totals.last_rewards)
        return summary


def _shares(spent: Mapping[str, float], wall: float) -> dict[str, float]:
    """Shares of `wall` that add up to 1. Worked example: {"training": 2.0, "pushing": 1.0} of 4 s -> training 0.5, pushing 0.25,
    other 0.25, the rest 0.0.
    """
    whole = max(
        wall, sum(spent.get(what, 0.0) for what in ACTIVITIES)
    )  # the two are read from the clock one after the other
    shares = {what: spent.get(what, 0.0) / whole for what in ACTIVITIES}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}
