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
from typing import Any

from grpo_async.display.curve import Curve
from grpo_async.findings import Finding, Verdict
from grpo_async.processes.wording import one_line, plain
from grpo_async.rundir import RunDir

_AVERAGED_STEPS = 5
_EVALUATION_SHOWN = ("reward", "mean_length", "truncated", "num_failed", "num_unscored", "duration_s")
_OF_SAMPLES = re.compile(r"(pass|mean|majority)@\d+")
_MOST_MESSAGES = 500
LEDGER_STATES = ("trained", "filtered", "stale", "failed", "cancelled", "queued", "in_flight")


CURVES: Mapping[str, str] = {
    "reward": "reward",
    "generated": "perf/generated_tokens_per_s",
    "trained": "perf/trained_tokens_per_s",
    "length": "completions/mean_length",
    "trainer idle": "pipeline/trainer_idle_ratio",
    "servers idle": "pipeline/generator_idle_ratio",
    "entropy": "entropy",
    "gradient norm": "grad_norm",
}
"""What is kept over the whole run, and the metric that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLine:
    """One server, as the trainer last said. Figures that are not known are None."""

    index: int
    url: str
    state: str
    version: int | None = None
    running: int | None = None
    waiting: int | None = None
    max_running: int | None = None
    kv_usage: float | None = None
    restarts: int = 0
    words: str = ""
    """What is wrong with one that is not up."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ServerLine | None:
        """From a message or from status.json; None where it is something else. Text is made safe for a terminal."""
        index = content.get("index")
        if not isinstance(index, int):
            return None
        whole = {
            name: int(value)
            for name in ("version", "running", "waiting", "max_running", "restarts")
            if isinstance(value := content.get(name), int | float) and math.isfinite(value)
        }
        usage = content.get("kv_usage")
        return cls(
            index=index,
            url=one_line(str(content.get("url", ""))),
            state=one_line(str(content.get("state", "?"))),
            kv_usage=float(usage) if isinstance(usage, int | float) and math.isfinite(usage) else None,
            words=one_line(str(content.get("words", ""))),
            **whole,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """A note or a warning, on one line, and when (time.time())."""

    at: float
    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPush:
    """The newest push of weights that a step reported; `at` by time.time()."""

    at: float
    seconds: float
    step: int
    num_bytes: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What stands on disk; `at`: when the newest was finished, by time.time()."""

    step: int | None = None
    at: float | None = None
    writing: int | None = None


@dataclass(slots=True)
class Progress:
    """Mutable state of one run. `started` is in time.monotonic() seconds, moments of events in those of time.time()."""

    max_steps: int
    step: int = 0
    phase: str = "starting"
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Of the last steps: as many as are shown."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    servers_down: dict[str, str] = field(default_factory=dict)
    """What is wrong, by name of the server."""
    servers: list[ServerLine] = field(default_factory=list)
    messages: deque[RunMessage] = field(default_factory=lambda: deque(maxlen=_MOST_MESSAGES))
    advice: Finding | None = None
    advice_step: int = 0
    verdict: Verdict | None = None
    """Whether it learns, as it was judged last."""
    push: LastPush | None = None
    checkpoints: Checkpoints = Checkpoints()
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in CURVES})
    started: float = field(default_factory=time.monotonic)
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def add_step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        self.step, self.max_steps, self.metrics = step, max_steps, dict(metrics)
        if math.isfinite(reward := _number(metrics, "reward")):
            self.rewards = [*self.rewards, reward][-_AVERAGED_STEPS - 1 :]
        if math.isfinite(step_time := _number(metrics, "step_time")):
            self._step_times.append(step_time)
        self.add_to_curves(step, metrics)
        if math.isfinite(seconds := _number(metrics, "sync/push_s")):
            num_bytes, bytes_per_s = (_number(metrics, f"sync/{name}") for name in ("bytes", "bytes_per_s"))
            self.push = LastPush(
                at=time.time(),
                seconds=seconds,
                step=step,
                num_bytes=num_bytes if math.isfinite(num_bytes) else None,
                bytes_per_s=bytes_per_s if math.isfinite(bytes_per_s) else None,
            )

    def set_speed(self, step_s: float) -> None:
        """Seconds of a step, where they are known from elsewhere."""
        self._step_times.append(step_s)

    def add_to_curves(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """A step of the past, for the curves only."""
        for name, metric in CURVES.items():
            spread = _number(metrics, "reward_std") if name == "reward" else 0.0
            self.curves[name].add(step, _number(metrics, metric), spread)

    def add_message(self, text: str, *, is_warning: bool = False) -> None:
        self.messages.append(RunMessage(at=time.time(), text=one_line(text), is_warning=is_warning))

    @property
    def last_warning(self) -> RunMessage | None:
        return next((message for message in reversed(self.messages) if message.is_warning), None)

    @property
    def last_note(self) -> RunMessage | None:
        return next((message for message in reversed(self.messages) if not message.is_warning), None)

    def set_servers(self, servers: Iterable[Mapping[str, Any]]) -> None:
        """What the trainer says of every server."""
        lines = [line for content in servers if (line := ServerLine.of(content)) is not None]
        self.servers = sorted(lines, key=lambda line: line.index)

    def look_at_checkpoints(self, run_dir: RunDir) -> None:
        """Read from the disk what the trainer has written."""
        steps = run_dir.checkpoint_steps()
        step = steps[-1] if steps else None
        names = (path.name.removeprefix("writing_step_") for path in run_dir.checkpoints.glob("writing_step_*"))
        writing = max((int(name) for name in names if name.isdecimal()), default=None)
        at = self.checkpoints.at
        if step != self.checkpoints.step:
            at = None
            if step is not None:
                try:
                    at = run_dir.checkpoint(step).stat().st_mtime
                except FileNotFoundError:  # removed between the two looks
                    step = None
        self.checkpoints = Checkpoints(step=step, at=at, writing=writing)

    def set_server(self, name: str, trouble: str | None) -> None:
        """Note what is wrong with a server; None: nothing any more."""
        if trouble is None:
            self.servers_down.pop(one_line(name), None)
        else:
            self.servers_down[one_line(name)] = one_line(trouble)

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
        value = _number(self.metrics, name)
        return pattern.format(value * scale) if math.isfinite(value) else None

    def value(self, name: str) -> float | None:
        """The metric `name` of the newest step, or None where it is missing or not finite."""
        value = _number(self.metrics, name)
        return value if math.isfinite(value) else None

    def staleness_shares(self) -> dict[int, float]:
        """Share of the newest step's trained tokens by staleness, in steps: {0: 0.75, 1: 0.25}; empty where it is not said."""
        prefix = "async/staleness/"
        shares = {
            int(name.removeprefix(prefix)): value
            for name in self.metrics
            if name.startswith(prefix)
            and name.removeprefix(prefix).isdecimal()
            and (value := self.value(name)) is not None
        }
        return dict(sorted(shares.items()))

    def trainer_shares(self) -> dict[str, float]:
        """How the trainer spent the newest step: waiting for samples, training, pushing, copying a checkpoint; shares of 1.

        step_time 10, idle ratio 0.2, push 1 s -> idle 0.2, train 0.7, push 0.1
        """
        step_s, idle = self.value("step_time"), self.value("pipeline/trainer_idle_ratio")
        if idle is None:
            return {}
        push = min(1.0, (self.value("sync/push_s") or 0.0) / step_s) if step_s else 0.0
        saving = min(1.0, (self.value("checkpoint/staged_s") or 0.0) / step_s) if step_s else 0.0
        shares = {"idle": idle, "train": max(0.0, 1.0 - idle - push - saving), "push": push}
        return {**shares, "save": saving} if saving >= 0.005 else shares


def _number(metrics: Mapping[str, float | None], name: str) -> float:
    """The value, or NaN where there is none (metrics.jsonl has null for what was not finite)."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def duration(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def join(parts: Iterable[str | None], separator: str = "  ") -> str:
    """The parts that are there."""
    return separator.join(part for part in parts if part)


def step_line(progress: Progress) -> str:
    """One line about the newest step: `step 12/60  reward 0.530 (all groups, +0.020)  1234 tok/s generated  ...`."""
    reward, change = progress.reward, progress.reward_change
    return join(
        [
            f"step {progress.step}/{progress.max_steps}",
            None
            if reward is None
            else f"reward {reward:.3f} (all groups{f', {change:+.3f}' if change is not None else ''})",
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
