"""What is known of a run: one state, from which the dashboard, the lines, the events, status.json and `status` are all made.
No I/O but for `Checkpoints.read`.

Unknown metrics are ignored and missing ones left out, so a trainer may report more or less than is shown.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from grpo_async.findings import Finding, MetricRow, Severity, Verdict
from grpo_async.records import FINAL_STATUSES
from grpo_async.run_directory import RunDir
from grpo_async.utils.safe_text import one_line, plain
from grpo_async.utils.text import both_ends, count, duration, finite, format_bytes

_AVERAGED_STEPS = 5
_EVALUATION_SHOWN = ("reward", "mean_length", "truncated", "num_failed", "num_unscored", "duration_s")
PASS_OR_MEAN_AT_K = re.compile(r"(pass|mean)@\d+")
_MAX_MESSAGES = 500
_TRAINER_TIME = {
    "idle": "trainer_idle_ratio", "train": "training_fraction", "push": "pushing_fraction", "save": "checkpoint_fraction",
    "other": "other_fraction",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One server, as the trainer last reported it. Numbers that are not known are None."""

    index: int
    url: str = ""
    state: str = "?"
    version: int | None = None
    running: int | None = None
    waiting: int | None = None
    max_running: int | None = None
    kv_usage: float | None = None
    restarts: int = 0
    reason: str = ""
    """What is wrong with one that is not up."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ServerStatus:
        """From a message or from status.json; text is made safe for a terminal."""
        known: dict[str, Any] = {
            each.name: content[each.name] for each in fields(cls) if content.get(each.name) is not None
        }
        return cls(**known | {name: one_line(value) for name, value in known.items() if isinstance(value, str)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """A note or a warning, on one line, and when (time.time())."""

    at: float
    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt of a step and completions of it with their rewards: the best and the worst, or one where these are equal."""

    step: int
    prompt: str
    completions: Sequence[tuple[float, str]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Example:
        """From a message or from status.json; text is made safe for a terminal."""
        completions = [(float(each["reward"]), one_line(str(each["text"]))) for each in content["completions"]]
        return cls(step=int(content["step"]), prompt=one_line(str(content["prompt"])), completions=completions)

    def as_dict(self) -> dict[str, Any]:
        completions = [{"reward": reward, "text": text} for reward, text in self.completions]
        return {"step": self.step, "prompt": self.prompt, "completions": completions}


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
    """What is on disk; `at`: when the newest was finished, by time.time()."""

    step: int | None = None
    at: float | None = None
    writing: int | None = None

    @classmethod
    def read(cls, run_dir: RunDir) -> Checkpoints:
        """What the trainer has written until now. The disk may be slow: hold no lock."""
        step, at = max(run_dir.checkpoint_steps(), default=None), None
        if step is not None:
            try:
                at = run_dir.checkpoint(step).stat().st_mtime
            except FileNotFoundError:  # removed since the folder was listed
                step = None
        return cls(step=step, at=at, writing=max(run_dir.unfinished_steps(), default=None))


@dataclass(slots=True)
class Progress:
    """Mutable state of one run. Hold `lock` to change it, or to read several fields that belong together. `started` is in
    time.monotonic() seconds, moments of events in those of time.time()."""

    max_steps: int
    """0: not known; with `training.epochs` the first step tells it."""
    step: int = 0
    phase: str = "starting"
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_AVERAGED_STEPS + 1))
    """Rewards of the last steps: as many as are shown."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    servers: list[ServerStatus] = field(default_factory=list)
    messages: deque[RunMessage] = field(default_factory=lambda: deque(maxlen=_MAX_MESSAGES))
    advice: Finding | None = None
    advice_step: int = 0
    verdict: Verdict | None = None
    """Whether it learns, as it was judged last."""
    example: Example | None = None
    push: LastPush | None = None
    checkpoints: Checkpoints = Checkpoints()
    started: float = field(default_factory=time.monotonic)
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add_step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        if step <= self.step:  # the ranks found the checkpoint damaged, and went on from an earlier one
            self.rewards.clear()
        self.step, self.max_steps, self.metrics = step, max_steps, dict(metrics)
        if (reward := self.value("reward")) is not None:
            self.rewards.append(reward)
        if (step_time := self.value("step_time")) is not None:
            self.step_times.append(step_time)
        if (seconds := self.value("sync/push_s")) is not None:
            num_bytes, bytes_per_s = self.value("sync/bytes"), self.value("sync/bytes_per_s")
            self.push = LastPush(
                at=time.time(), seconds=seconds, step=step, num_bytes=num_bytes, bytes_per_s=bytes_per_s
            )

    def past(self, rows: Iterable[MetricRow]) -> list[MetricRow]:
        """Those of metrics.jsonl up to `step`. When a run is resumed, later ones stay in the file until the trainer is there."""
        return [row for row in rows if row["step"] <= self.step]

    def set_past(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Fill the recent rewards from the metrics of earlier steps."""
        self.rewards.clear()
        self.rewards.extend(row["reward"] for row in rows if "reward" in row)

    def add_message(self, text: str, *, is_warning: bool = False) -> None:
        self.messages.append(RunMessage(at=time.time(), text=one_line(text), is_warning=is_warning))

    def last_message(self, *, is_warning: bool) -> RunMessage | None:
        return next((message for message in reversed(self.messages) if message.is_warning is is_warning), None)

    def set_servers(self, servers: Iterable[Mapping[str, Any]]) -> None:
        """What the trainer reports of every server."""
        self.servers = sorted((ServerStatus.of(content) for content in servers), key=lambda server: server.index)

    def as_dict(self) -> dict[str, Any]:
        """The part of status.json that says how far the run is; what is not known yet is null. Hold `lock`."""
        warning, advice = self.last_message(is_warning=True), self.advice
        return {
            "phase": self.phase,  # what it is doing, in words
            "step": self.step,  # finished optimizer steps
            "max_steps": self.max_steps or None,
            "eta_s": self.seconds_left,  # by the last ten steps
            "reward": {"last": self.reward, "average": self.reward_average},  # mean of all groups; of 5 steps
            "metrics": dict(self.metrics),  # of the newest step, as in metrics.jsonl
            "example": self.example and self.example.as_dict(),  # of some step: a good completion and a bad one
            "ledger": _ledger(self.metrics),  # groups and tokens by what became of them
            "servers": [asdict(server) for server in self.servers],
            "last_push": self.push and asdict(self.push),
            "checkpoint": asdict(self.checkpoints),  # the newest on disk, and the step that is being written
            "evaluations": {when: dict(metrics) for when, metrics in self.evaluations.items()},
            "advice": advice and {**advice.as_advice(), "step": self.advice_step},
            "learning": self.verdict and self.verdict.as_dict(),
            "last_warning": warning and {"at": warning.at, "text": warning.text},
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Progress:
        """From status.json, without older messages; text is made safe for a terminal."""
        progress = cls(max_steps=int(content.get("max_steps") or 0), step=int(content.get("step", 0)))
        progress.phase = one_line(str(content.get("phase", "")))
        progress.metrics = dict(content.get("metrics") or {})
        progress.set_servers(content.get("servers") or [])
        progress.evaluations = {str(when): dict(values) for when, values in (content.get("evaluations") or {}).items()}
        now = time.time()
        progress.started = time.monotonic() - max(0.0, now - float(content.get("started_at", now)))
        left = progress.max_steps - progress.step
        if isinstance(eta := content.get("eta_s"), int | float) and left > 0:
            progress.step_times.append(eta / left)
        if (reward := finite((content.get("reward") or {}).get("last"))) is not None:
            progress.rewards.append(reward)
        if example := content.get("example"):
            progress.example = Example.of(example)
        if push := content.get("last_push"):
            progress.push = LastPush(**push)
        progress.checkpoints = Checkpoints(**(content.get("checkpoint") or {}))
        if advice := content.get("advice"):
            progress.advice_step = int(advice.get("step", 0))
            changed = {name: advice.get(name) for name in ("text", "setting", "current", "suggested")}
            progress.advice = Finding(key=advice["bound_by"], severity=Severity.NOTE, title="", **changed)
        if learning := content.get("learning"):
            progress.verdict = Verdict(**learning)
        if warning := content.get("last_warning"):
            text = one_line(str(warning["text"]))
            progress.messages.append(RunMessage(at=float(warning["at"]), text=text, is_warning=True))
        return progress

    @property
    def reward(self) -> float | None:
        return self.rewards[-1] if self.rewards else None

    @property
    def reward_average(self) -> float | None:
        """Mean of the last 5 steps."""
        recent = list(self.rewards)[-_AVERAGED_STEPS:]
        return sum(recent) / len(recent) if recent else None

    @property
    def reward_change(self) -> float | None:
        """The newest reward minus the mean of up to 5 before it: rewards 0.4, 0.6, 0.7 -> 0.7 - 0.5 = +0.2."""
        before = list(self.rewards)[:-1]
        return self.rewards[-1] - sum(before) / len(before) if before else None

    @property
    def seconds_left(self) -> float | None:
        """Steps left x mean step time of the last 10."""
        if not self.step_times:
            return None
        return (self.max_steps - self.step) * sum(self.step_times) / len(self.step_times)

    @property
    def seconds_elapsed(self) -> float:
        return time.monotonic() - self.started

    def value(self, name: str) -> float | None:
        """The metric `name` of the newest step, or None where it is missing or not finite."""
        return finite(self.metrics.get(name))

    def text(self, name: str, pattern: str) -> str | None:
        """The metric `name` in `pattern` ("push {:.2f} s"), or None where there is none."""
        value = self.value(name)
        return None if value is None else pattern.format(value)

    def staleness_fractions(self) -> dict[int, float]:
        """Fraction of the newest step's trained tokens by staleness in steps: {0: 0.75, 1: 0.25}; empty where it is unknown."""
        prefix = "async/staleness/"
        ages = (name.removeprefix(prefix) for name in self.metrics if name.startswith(prefix))
        return {age: value for age in sorted(map(int, ages)) if (value := self.value(f"{prefix}{age}")) is not None}

    def trainer_fractions(self) -> dict[str, float]:
        """How the trainer spent the newest step, without what rounds to 0 %: {"idle": 0.2, "train": 0.7, "push": 0.1}."""
        found = {name: self.value(f"pipeline/{metric}") for name, metric in _TRAINER_TIME.items()}
        return {name: value for name, value in found.items() if value is not None and value >= 0.005}


def _ledger(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{"ledger/groups/trained": 3.0} -> {"groups": {"trained": 3}}."""
    ledger: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "ledger" and isinstance(value, int | float):
            ledger.setdefault(parts[1], {})[parts[2]] = int(value)
    return ledger


# -- in words


def join(parts: Iterable[str | None], separator: str = "  ") -> str:
    """The parts that are there."""
    return separator.join(part for part in parts if part)


RunRow = tuple[str, str, str]
"""A row of the dashboard and of `status`: name, text, style."""


def run_rows(progress: Progress, now: float, *, width: int) -> Iterator[RunRow]:
    """The rows of the dashboard and of `status`, the most important first: a small terminal leaves out the last ones.

    Args:
        now: time.time() seconds.
        width: cells for a prompt or a completion, whose middle is left out where it is longer.
    """
    warning, note = progress.last_message(is_warning=True), progress.last_message(is_warning=False)
    change = None if progress.verdict is None else progress.verdict.numbers.get("change")
    verdict = "not judged yet" if progress.verdict is None else progress.verdict.text
    # by how much comes first: of a line that is cut the beginning stays
    yield "learning", join([None if change is None else f"{change:+.3f}", verdict]), ""
    yield "warning", f"{ago(warning.at, now)}: {warning.text}" if warning else "none", "yellow" if warning else "dim"
    yield "advice", progress.advice.text if progress.advice else "none yet", "bold" if progress.advice else "dim"
    fractions, idle = progress.trainer_fractions(), progress.value("pipeline/generator_idle_ratio")
    generated = progress.text("perf/generated_tokens_per_s", "generated {:.0f}")
    yield "tokens/s", join([generated, progress.text("perf/trained_tokens_per_s", "trained {:.0f}")]), ""
    trainer = join(["trainer", *(f"{name} {part:.0%}" for name, part in fractions.items())], " ") if fractions else None
    most_idle = max(fractions.get("idle", 0.0), idle or 0.0)
    style = "" if most_idle < 0.3 else "yellow" if most_idle < 0.6 else "red"
    yield "time", join([trainer, None if idle is None else f"servers idle {idle:.0%}"]), style
    queued = progress.value("ledger/groups/queued")
    queue = [
        None if queued is None else count(int(queued), "group"),
        progress.text("ledger/groups/in_flight", "{:.0f} in flight"),
        progress.text("async/staleness_mean", "staleness mean {:.2f}"),
        progress.text("async/staleness_max", "max {:.0f}"),
        *(f"{age}: {part:.0%}" for age, part in progress.staleness_fractions().items()),
    ]
    yield "queue", join(queue), ""
    example = progress.example
    names = (("best", "green"), ("worst", "red")) if example and len(example.completions) > 1 else (("completion", ""),)
    for (name, style), (reward, text) in zip(names, example.completions if example else (), strict=False):
        yield name, both_ends(f"{reward:.3f}  {text}", max(width, 3)), style
    groups = join((progress.text(f"ledger/groups/{state}", f"{state} {{:.0f}}") for state in FINAL_STATUSES), " ")
    yield "groups", groups or "none yet", ""
    yield "held out", evaluations_text(progress) or "no evaluation yet", ""
    yield "last push", _push_text(progress.push, now), ""
    saved = progress.checkpoints
    when = "" if saved.at is None else f", {ago(saved.at, now)}"
    newest = "none yet" if saved.step is None else f"step {saved.step}{when}"
    yield "checkpoint", join([newest, None if saved.writing is None else f"writing step {saved.writing}"]), ""
    length = progress.text("completions/mean_length", "mean {:.0f} tokens")
    yield "lengths", join([length, progress.text("completions/clipped_ratio", "{:.0%} truncated")]), ""
    yield "zero std", progress.text("frac_reward_zero_std", "{:.0%} of the groups") or "", ""
    yield "overlap", progress.text("pipeline/overlap_efficiency", "{:.0%} efficiency") or "", ""
    if example is not None:
        yield "prompt", both_ends(f"{example.prompt} (step {example.step})", max(width, 3)), "dim"
    yield "note", f"{ago(note.at, now)}: {note.text}" if note else "", ""


def _push_text(push: LastPush | None, now: float) -> str:
    if push is None:
        return "none yet"
    size = None if push.num_bytes is None else format_bytes(push.num_bytes)
    speed = None if push.bytes_per_s is None else f"{format_bytes(push.bytes_per_s)}/s"
    return join([ago(push.at, now), f"took {push.seconds:.2f} s", size, speed, f"step {push.step}"])


def step_line(progress: Progress) -> str:
    """One line about the newest step: `step 12/60  reward 0.530 (all groups, +0.020)  loss 0.0123  entropy 0.31  ...`."""
    reward, change = progress.reward, progress.reward_change
    mean, most = (progress.text(f"async/staleness_{which}", "{:.3g}") for which in ("mean", "max"))
    changed = "" if change is None else f", {change:+.3f}"
    return join(
        [
            f"step {steps_text(progress)}",
            None if reward is None else f"reward {reward:.3f} (all groups{changed})",
            progress.text("loss", "loss {:.3g}"),
            progress.text("entropy", "entropy {:.3g}"),
            progress.text("kl", "kl {:.3g}"),
            progress.text("completions/mean_length", "length {:.0f}"),
            progress.text("completions/clipped_ratio", "truncated {:.0%}"),
            progress.text("perf/generated_tokens_per_s", "{:.0f} tok/s generated"),
            progress.text("perf/trained_tokens_per_s", "{:.0f} tok/s trained"),
            f"staleness {mean}/{most}" if mean and most else None,
            progress.text("ledger/groups/queued", "queued {:.0f}"),
            progress.text("ledger/groups/in_flight", "in flight {:.0f}"),
            progress.text("pipeline/trainer_idle_ratio", "trainer idle {:.0%}"),
            progress.text("sync/push_s", "push {:.2f} s"),
            restarts_text(progress),
            progress.text("step_time", "{:.1f} s/step"),
            left_text(progress),
        ]
    )


def steps_text(progress: Progress) -> str:
    """`12/60`; `12` while the most steps are not known."""
    return f"{progress.step}/{progress.max_steps}" if progress.max_steps else str(progress.step)


def left_text(progress: Progress) -> str | None:
    """`1:38 left`; None while it is not known."""
    return None if progress.seconds_left is None else f"{duration(round(progress.seconds_left))} left"


def example_lines(example: Example) -> list[str]:
    """`prompt of step 12: 3 + 4 =`, then a line for each completion: `  reward 1.000: 7`."""
    completions = (f"  reward {reward:.3f}: {text}" for reward, text in example.completions)
    return [f"prompt of step {example.step}: {example.prompt}", *completions]


def restarts_text(progress: Progress) -> str | None:
    """`servers 1  restarts 2  last recovery 12.3 s`; None while no server was ever lost."""
    if not progress.value("servers/restarts"):
        return None
    serving = progress.text("servers/serving", "servers {:.0f}")
    return join([serving, progress.text("servers/restarts", "restarts {:.0f}"), recovery_text(progress)])


def recovery_text(progress: Progress) -> str | None:
    """`last recovery 12.3 s`; None while no server has come back."""
    return (
        progress.text("servers/recovery_s", "last recovery {:.1f} s") if progress.value("servers/recovery_s") else None
    )


def evaluation_line(when: str, metrics: Mapping[str, float]) -> str:
    """`held-out before training: reward 0.540  pass@4 0.700`, `held-out at step 20: ... versions 20 to 22`; `when` is before,
    after, or "step 20". What `evaluation.group_by` adds (names that end in /VALUE) is left to the table at the end."""
    where = f"at {when}" if when.startswith("step") else f"{when} training"
    shown = join(
        f"{name} {value:.3f}"
        for name, value in metrics.items()
        if isinstance(value, int | float) and (name in _EVALUATION_SHOWN or PASS_OR_MEAN_AT_K.fullmatch(name))
    )
    mixed = f"versions {metrics['version_min']:.0f} to {metrics['version_max']:.0f}" if metrics.get("mixed") else None
    return f"held-out {where}: {join([shown, mixed])}"


def evaluations_text(progress: Progress) -> str:
    """The rewards of the first evaluation and of the last three: `before 0.300  step 20 0.450`."""
    known = [(when, metrics["reward"]) for when, metrics in progress.evaluations.items() if "reward" in metrics]
    return join(f"{plain(when)} {reward:.3f}" for when, reward in known[:1] + known[1:][-3:])


def ago(at: float, now: float) -> str:
    return f"{duration(max(0, round(now - at)))} ago"
