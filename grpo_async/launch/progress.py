"""What is known of a running run, from the trainer's messages: the state behind both displays. No I/O.

Unknown metrics are ignored and missing ones left out, so a trainer may report more or less than the display shows.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from grpo_async.launch.wording import plain

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 24
_AVERAGED_STEPS = 5
_EVALUATION_SHOWN = ("reward", "mean_length", "truncated", "num_failed", "num_unscored", "duration_s")
_OF_SAMPLES = re.compile(r"(pass|mean|majority)@\d+")
LEDGER_STATES = ("trained", "filtered", "stale", "failed", "cancelled", "queued", "in_flight")


@dataclass(slots=True)
class Progress:
    """Mutable state of one run. Times are time.monotonic() seconds."""

    max_steps: int
    step: int = 0
    phase: str = "starting"
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Of the last steps: as many as are shown."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    servers_down: dict[str, str] = field(default_factory=dict)
    """What is wrong, by name of the server."""
    started: float = field(default_factory=time.monotonic)
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def add_step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        self.step, self.max_steps, self.metrics = step, max_steps, dict(metrics)
        if math.isfinite(reward := metrics.get("reward", math.nan)):
            self.rewards = [*self.rewards, reward][-_NUM_BARS:]
        if math.isfinite(step_time := metrics.get("step_time", math.nan)):
            self._step_times.append(step_time)

    def set_server(self, name: str, trouble: str | None) -> None:
        """Note what is wrong with a server; None: nothing any more."""
        if trouble is None:
            self.servers_down.pop(name, None)
        else:
            self.servers_down[name] = trouble

    @property
    def reward(self) -> float | None:
        return self.rewards[-1] if self.rewards else None

    @property
    def reward_average(self) -> float | None:
        """Mean of the last 5 steps."""
        recent = self.rewards[-_AVERAGED_STEPS:]
        return sum(recent) / len(recent) if recent else None

    @property
    def reward_change(self) -> float | None:
        """The newest reward minus the mean of up to 5 before it: rewards 0.4, 0.6, 0.7 -> 0.7 - 0.5 = +0.2."""
        before = self.rewards[-_AVERAGED_STEPS - 1 : -1]
        return self.rewards[-1] - sum(before) / len(before) if before else None

    @property
    def seconds_left(self) -> float | None:
        """Steps left x mean step time of the last 10."""
        if not self._step_times:
            return None
        return (self.max_steps - self.step) * sum(self._step_times) / len(self._step_times)

    @property
    def seconds_elapsed(self) -> float:
        return time.monotonic() - self.started

    def text(self, name: str, pattern: str, *, scale: float = 1.0) -> str | None:
        """The metric `name` in `pattern` ("push {:.2f} s"), or None where it is missing or not finite."""
        value = self.metrics.get(name, math.nan)
        return pattern.format(value * scale) if math.isfinite(value) else None


def sparkline(values: Iterable[float], width: int = _NUM_BARS) -> str:
    """The last `width` values as bars between their minimum and maximum: [0, 1, 2] -> "▁▅█"; all equal -> all "▁"."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or math.inf
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


def duration(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def join(parts: Iterable[str | None], separator: str = "  ") -> str:
    """The parts that are there."""
    return separator.join(part for part in parts if part)


def step_line(progress: Progress) -> str:
    """One line about the newest step: `step 12/60  reward 0.530 (+0.020)  1234 tok/s generated  ...`."""
    reward, change = progress.reward, progress.reward_change
    return join(
        [
            f"step {progress.step}/{progress.max_steps}",
            None if reward is None else f"reward {reward:.3f}" + (f" ({change:+.3f})" if change is not None else ""),
            progress.text("perf/generated_tokens_per_s", "{:.0f} tok/s generated"),
            progress.text("perf/trained_tokens_per_s", "{:.0f} tok/s trained"),
            staleness_text(progress),
            queue_text(progress),
            progress.text("pipeline/trainer_idle_ratio", "trainer idle {:.0f}%", scale=100),
            progress.text("sync/push_s", "push {:.2f} s"),
            restarts_text(progress),
            progress.text("step_time", "{:.1f} s/step"),
            None if progress.seconds_left is None else f"{duration(progress.seconds_left)} left",
        ]
    )


def staleness_text(progress: Progress) -> str | None:
    mean, most = (progress.text(f"async/staleness_{which}", "{:.3g}") for which in ("mean", "max"))
    return f"staleness {mean}/{most}" if mean and most else None


def queue_text(progress: Progress) -> str | None:
    queued = progress.text("buffer/queued_groups", "{:.0f}") or progress.text("ledger/groups/queued", "{:.0f}")
    in_flight = progress.text("ledger/groups/in_flight", "{:.0f}")
    return join([queued and f"queued {queued}", in_flight and f"in flight {in_flight}"]) or None


def ledger_text(progress: Progress) -> str | None:
    """Groups by state; started is their sum by the ledger's invariant."""
    parts = [progress.text(f"ledger/groups/{state}", state.replace("_", " ") + " {:.0f}") for state in LEDGER_STATES]
    return join(parts) or None


def restarts_text(progress: Progress) -> str | None:
    """`servers 1  restarts 2  last recovery 12.3 s`; None while no server was ever lost."""
    if not progress.metrics.get("servers/restarts") and not progress.servers_down:
        return None
    parts = [
        progress.text("servers/serving", "servers {:.0f}"),
        progress.text("servers/restarts", "restarts {:.0f}"),
        progress.text("servers/recovery_s", "last recovery {:.1f} s")
        if progress.metrics.get("servers/recovery_s")
        else None,
    ]
    return join(parts) or None


def servers_text(progress: Progress) -> str | None:
    """`restarts_text`, and who is down now."""
    down = join((f"the {name} {trouble}" for name, trouble in progress.servers_down.items()), "; ")
    return join([restarts_text(progress), down and f"DOWN: {plain(down)}"]) or None


def evaluation_line(when: str, metrics: Mapping[str, float]) -> str:
    """`held-out before training: reward 0.540  pass@4 0.700`, `held-out at step 20: ... versions 20 to 22`; `when` is before,
    after, or "step 20". What `evaluation.group_by` adds (names that end in /VALUE) is left to the table at the end."""
    where = f"at {when}" if when.startswith("step") else f"{when} training"
    shown = join(
        f"{name} {value:.3f}"
        for name, value in metrics.items()
        if isinstance(value, int | float) and (name in _EVALUATION_SHOWN or _OF_SAMPLES.fullmatch(name))
    )
    mixed = f"versions {metrics['version_min']:.0f} to {metrics['version_max']:.0f}" if metrics.get("mixed") else None
    return f"held-out {where}: {join([shown, mixed])}"


def evaluations_text(progress: Progress) -> str | None:
    """The rewards of the first evaluation and of the last three: `before 0.300  step 20 0.450`."""
    known = [(when, metrics["reward"]) for when, metrics in progress.evaluations.items() if "reward" in metrics]
    shown = known[:1] + known[1:][-3:]
    return join(f"{plain(when)} {reward:.3f}" for when, reward in shown) or None
