"""What bounds the speed of a run, and the setting to change: a pure function of its metrics and settings.

    metrics of the last steps --pipeline_metrics--> PipelineMetrics --advise--> Finding

With t = seconds that the trainer works in a step (trains, pushes, copies a checkpoint) and g = seconds that the servers generate:

    step_s = 10, trainer_idle = 0.6, generator_idle = 0.4  ->  t = 4, g = 6; overlapped, a step would take max(4, 6) = 6 s

The first rule that has something to say is taken: what is wasted, whoever waits; then why the trainer waits; then why the servers
do. A rule whose metrics are missing is skipped. A suggested value is computed from the metrics, and never beyond what the rest of
the configuration can use. t and g are `PipelineMetrics.train_s` and `generation_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.findings.finding import Finding, Severity
from grpo_async.findings.statistics import mean_over_time
from grpo_async.utils.files import numbers
from grpo_async.utils.text import count, duration

_IDLE = 0.15
"""From this fraction of a step on, idleness is worth mentioning."""
_NO_GAIN = 0.1
"""What overlap could save at most, as a fraction of the step, below which asynchrony cannot help."""
_KV_FULL, _KV_TARGET = 0.95, 0.85
_MANY_TOOLS = 0.4
_MANY_PUSHES, _PUSH_TARGET = 0.2, 0.1
_MANY_SAVES, _SAVE_TARGET = 0.1, 0.05
_MANY_STALE = 0.1
_MIN_STEPS = 3
"""Fewer steps say nothing: the first steps of a run are unlike the others."""
_MAX_STALENESS = 4
"""Further behind, importance weights get so uneven that speed is bought with learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMetrics:
    """Means over the last steps; fractions are of the wall time of a step where nothing else is said. None: not measured."""

    num_steps: int
    step_s: float | None = None
    trainer_idle: float | None = None  # the trainer waits for samples
    generator_idle: float | None = None  # no server generates; the mean over the servers
    push_fraction: float | None = None  # the trainer pushes weights
    push_s: float | None = None  # seconds of one push
    checkpoint_s: float | None = None  # seconds that the trainer stands still for one checkpoint
    running: float | None = None  # requests that the servers generate for, all together
    waiting: float | None = None  # requests that wait inside the servers
    kv_usage: float | None = None  # of the servers' KV caches, 0 to 1
    stale_fraction: float | None = None  # of the groups finalized in these steps, those that were dropped for their age
    tool_fraction: float | None = None  # of a rollout's time, what its tools take
    scoring_fraction: float | None = None  # of a group's time from its first request on, what its rewards take

    @property
    def train_s(self) -> float:
        """t: seconds of a step in which the trainer works; 0 where that is not measured."""
        return (self.step_s or 0.0) * (1.0 - (1.0 if self.trainer_idle is None else self.trainer_idle))

    @property
    def generation_s(self) -> float:
        """g: seconds of a step in which the servers generate; 0 where that is not measured."""
        return (self.step_s or 0.0) * (1.0 - (1.0 if self.generator_idle is None else self.generator_idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The configuration of a run, and what is known of its machine.

    Args:
        engine: the one that was chosen where the configuration says auto; None: not known.
        on_gpu: whether processes have a GPU each, else all share the cores of the machine; None: as launch.device says.
        num_gpus: of the machine with the first trainer ranks; None: not known.
    """

    config: ExperimentConfig
    engine: str | None = None
    on_gpu: bool | None = None
    num_gpus: int | None = None

    @property
    def has_gpus(self) -> bool:
        return self.config.launch.device == "cuda" if self.on_gpu is None else self.on_gpu

    @property
    def server_engine(self) -> str:
        return self.engine or self.config.inference.engine

    @property
    def gpus_of_a_server(self) -> int:
        """0: servers work on the CPU."""
        return self.config.inference.gpus_of_a_server(self.server_engine) if self.has_gpus else 0

    @property
    def spawns_servers(self) -> bool:
        """False: others run them."""
        return not self.config.inference.urls


def pipeline_metrics(lines: Sequence[Mapping[str, float | None]]) -> PipelineMetrics:
    """The metrics of some consecutive steps, oldest first, as they stand in metrics.jsonl.

    Two steps of 8 and 12 s, pushes of 1 s in each -> step_s = 10, push_fraction = (1 + 1) / (8 + 12) = 0.1. The ledger's totals are
    compared between the first and the last step: 90 -> 98 trained, 10 -> 12 stale: stale_fraction = 2 / (8 + 2) = 0.2.
    """
    rows = [numbers(line) for line in lines]

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    def mean(name: str) -> float | None:
        return fmean(values(name)) if values(name) else None

    ended = {}
    for state in ("trained", "filtered", "stale", "failed"):
        totals = values(f"ledger/groups/{state}") or [0.0]
        ended[state] = max(0.0, totals[-1] - totals[0])
    num_ended, wall_s, push_s = sum(ended.values()), sum(values("step_time")), values("sync/push_s")
    rollout_s, tool_s = mean("rollout/duration_s"), mean("tools/duration_s/per_rollout")
    scoring_s = mean("scoring/duration_s")
    return PipelineMetrics(
        num_steps=len(lines),
        step_s=mean("step_time"),
        trainer_idle=mean_over_time(rows, "pipeline/trainer_idle_ratio"),
        generator_idle=mean_over_time(rows, "pipeline/generator_idle_ratio"),
        push_fraction=sum(push_s) / wall_s if push_s and wall_s else None,
        push_s=mean("sync/push_s"),
        checkpoint_s=mean("checkpoint/staged_s"),
        running=mean("servers/running"),
        waiting=mean("servers/waiting"),
        kv_usage=mean("servers/kv_usage"),
        stale_fraction=ended["stale"] / num_ended if num_ended else None,
        tool_fraction=None if tool_s is None or not rollout_s else min(1.0, tool_s / rollout_s),
        scoring_fraction=None if scoring_s is None or not rollout_s else scoring_s / (scoring_s + rollout_s),
    )


def advise(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """What bounds the run and what to change; None while too little is measured to say anything."""
    if metrics.num_steps < _MIN_STEPS or not metrics.step_s:
        return None
    if metrics.trainer_idle is None or metrics.generator_idle is None:
        return None
    trainer, servers = metrics.trainer_idle, metrics.generator_idle
    found = next(_wasted(metrics, setup), None)
    if found is None and trainer >= _IDLE:
        found = next(_trainer_waits(metrics, setup, trainer, servers), None)
    if found is None and trainer < _IDLE and servers >= 2 * _IDLE:
        found = _training(metrics, setup, servers)
    if found is not None:
        return found
    text = f"no setting would help: trainer idle {trainer:.0%}, servers idle {servers:.0%}"
    return Finding(key="nothing", severity=Severity.NOTE, title="Nothing to tune", text=text)


def _wasted(metrics: PipelineMetrics, setup: PipelineSetup) -> Iterator[Finding]:
    """What takes time whoever waits."""
    rollout, config = setup.config.rollout, setup.config
    running, waiting, usage = metrics.running or 0.0, metrics.waiting or 0.0, metrics.kv_usage or 0.0
    suggested = _whole_groups(running, setup)
    if usage >= _KV_FULL and waiting >= max(1.0, 0.1 * running) and suggested < rollout.max_in_flight:
        # what is admitted beyond the cache is preempted and computed again
        requests = f"{count(round(waiting), 'request')} waiting for room and {running:.0f} running"
        why = f"the servers' KV cache is {usage:.0%} full, with {requests}"
        yield _change("the KV cache", why, "rollout.max_in_flight", rollout.max_in_flight, suggested)
    stale, staleness = metrics.stale_fraction or 0.0, rollout.max_staleness
    if stale >= _MANY_STALE and staleness < _MAX_STALENESS:
        why = f"{stale:.0%} of the groups are dropped because they are older than {count(staleness, 'step')}"
        yield _change("dropped groups", why, "rollout.max_staleness", staleness, staleness + 1)
    # fewer pushes, as far as samples may be behind: a fraction p with k steps between them falls to 10 % with k x p / 0.1
    pushes, current = metrics.push_fraction or 0.0, config.training.weight_sync_steps
    if current > metrics.num_steps:  # too few steps to see how often one comes
        pushes = _fraction_of_steps(metrics.push_s, current, metrics)
    if pushes >= _MANY_PUSHES:
        why = f"weight pushes take {pushes:.0%} of a step"
        suggested = min(math.ceil(current * pushes / _PUSH_TARGET - 1e-9), staleness + 1)
        if suggested > current:
            yield _change("weight pushes", why, "training.weight_sync_steps", current, suggested)
        why += f", and rollout.max_staleness {staleness} does not allow fewer"
        help_ = "a faster network between trainer and servers would help, or sending less (model.lora.push: adapter)"
        yield _bound("weight pushes", f"{why}; {help_}")
    every = config.checkpoint.every_steps
    saves = _fraction_of_steps(metrics.checkpoint_s, every, metrics)
    if saves >= _MANY_SAVES:
        why = f"the trainer waits for checkpoints {saves:.0%} of the time"
        yield _change(
            "checkpoints", why, "checkpoint.every_steps", every, math.ceil(every * saves / _SAVE_TARGET - 1e-9)
        )


def _trainer_waits(metrics: PipelineMetrics, setup: PipelineSetup, trainer: float, servers: float) -> Iterator[Finding]:
    config, rollout = setup.config, setup.config.rollout
    step_s, idle = metrics.step_s or 0.0, f"trainer idle {trainer:.0%}"
    both = f"{idle}, servers idle {servers:.0%}"
    overlapped_s = max(metrics.train_s, metrics.generation_s)
    if rollout.max_staleness == 0 and servers >= _IDLE and step_s - overlapped_s >= _NO_GAIN * step_s:
        # they take turns: overlapped, a step would take max(t, g) and not t + g
        gain = f"a step of {duration(step_s)} could take {duration(overlapped_s)}"
        yield _change(
            "waiting for each other", f"{both}: they wait for each other", "rollout.max_staleness", 0, 1, tail=gain
        )
    usage, in_flight = metrics.kv_usage, rollout.max_in_flight
    most_in_flight = config.max_groups_ahead * rollout.group_size  # beyond it none is ever started
    tools = metrics.tool_fraction or 0.0
    if tools >= _MANY_TOOLS:
        # rollouts that wait for a tool keep no server busy: with n in flight and a fraction s in tools, n x (1 - s) generate
        why = f"{idle}, tools take {tools:.0%} of a rollout"
        wanted = math.ceil(in_flight / max(0.05, 1.0 - tools))
        suggested = _whole_groups(min(wanted, most_in_flight), setup)
        if suggested > in_flight and (usage or 0.0) < _KV_TARGET:
            yield _change("tools", why, "rollout.max_in_flight", in_flight, suggested)
        yield _bound(
            "tools", f"{why}, and no more rollouts can be in flight: faster tools would help; no setting would"
        )
    if (scoring := metrics.scoring_fraction or 0.0) >= _MANY_TOOLS:
        why = f"{idle}, scoring takes {scoring:.0%} of the time that a group needs"
        yield _bound("scoring", f"{why}: faster reward functions would help, or more of their workers")
    has_room = (
        usage is not None and metrics.running is not None and (metrics.waiting or 0.0) < 1.0 and usage < _KV_TARGET
    )
    if usage is not None and has_room and ((metrics.running or 0.0) >= 0.7 * in_flight or servers >= _IDLE):
        # n rollouts fill a fraction u of the cache, so n x 0.85 / u fit, at most twice as many at once:
        # KV 38 %, 64 in flight: min(64 x 2, 64 x 0.85 / 0.38) = 128
        is_embedded = setup.server_engine == "embedded" and setup.spawns_servers
        slots = config.inference.embedded.max_slots * config.num_servers if is_embedded else most_in_flight
        most = min(most_in_flight, slots)
        suggested = _whole_groups(min(in_flight * min(2.0, _KV_TARGET / max(usage, 0.01)), most), setup)
        if suggested > in_flight:
            why = f"{idle}, server KV {usage:.0%}"
            yield _change("too few rollouts in flight", why, "rollout.max_in_flight", in_flight, suggested)
    if 0 < rollout.max_staleness < _MAX_STALENESS and servers >= _IDLE:  # a few long rollouts hold up a step
        why = f"{both}: generation is not allowed to run further ahead"
        current = rollout.max_staleness
        yield _change("the staleness limit", why, "rollout.max_staleness", current, current + 1)
    yield _generation(metrics, setup, idle)


def _generation(metrics: PipelineMetrics, setup: PipelineSetup, idle: str) -> Finding:
    """The servers do what they can. With r of them, r x g / t generate as fast as is trained; at most twice as many at once."""
    config, step_s = setup.config, metrics.step_s or 0.0
    launch, replicas, servers = config.launch, config.inference.max_replicas, config.num_servers
    why = f"generation takes {duration(metrics.generation_s)} of a step of {duration(step_s)}, training {duration(metrics.train_s)}"
    dominates = metrics.train_s < _NO_GAIN * step_s
    why = f"asynchrony cannot help here: {why}" if dominates else f"{idle}: {why}"
    wanted = math.ceil(servers * metrics.generation_s / max(metrics.train_s, 1e-9) - 1e-9)
    needed = max(servers + 1, min(2 * servers, wanted))
    if not setup.spawns_servers:
        return _bound("generation", f"{why}; {servers} -> {needed} servers in inference.urls would keep up")
    if launch.ray is not None:
        return _change("generation", why, "inference.replicas", replicas, needed)
    if not setup.gpus_of_a_server:
        return _bound("generation", f"{why}; faster or more cores would help, or shorter completions")
    suggested = needed
    if setup.num_gpus is not None:
        free = setup.num_gpus - (0 if launch.colocate else launch.num_trainer_ranks)
        suggested = min(suggested, free // setup.gpus_of_a_server)
    if suggested > replicas:
        return _change("generation", why, "inference.replicas", replicas, suggested)
    help_ = "GPUs for more servers (more machines with launch.ray, or one of the trainer's) would help, or shorter completions"
    return _bound("generation", f"{why}; there is no room for another server: {help_}")


def _training(metrics: PipelineMetrics, setup: PipelineSetup, servers: float) -> Finding:
    """The servers wait for the trainer. With n ranks, n x t / g train as fast as is generated; at most twice as many at once."""
    launch, inference = setup.config.launch, setup.config.inference
    train_s, ranks = metrics.train_s, launch.num_trainer_ranks
    why = (
        f"servers idle {servers:.0%}: training takes {duration(train_s)} of a step of {duration(metrics.step_s or 0.0)}"
    )
    if not setup.has_gpus:
        return _bound("training", f"{why}; a faster trainer would help, generation is not the limit")
    suggested = min(2 * ranks, math.ceil(ranks * train_s / max(metrics.generation_s, 0.25 * train_s) - 1e-9))
    if setup.num_gpus is not None:
        # on the machine with the first ranks, on GPUs of their own
        has_servers = setup.spawns_servers and not (launch.ray or launch.colocate)
        taken = inference.max_replicas * setup.gpus_of_a_server if has_servers else 0
        suggested = min(suggested, setup.num_gpus - taken)
    if suggested > ranks:
        tail = "of each machine" if launch.trainer_nodes > 1 else ""
        return _change("training", why, "launch.num_trainer_ranks", ranks, suggested, tail=tail)
    return _bound("training", f"{why}; GPUs for more ranks (launch.trainer_nodes, or one of a server's) would help")


def _bound(bound_by: str, text: str, **change: Any) -> Finding:
    """`bound_by`: the bottleneck, in a few words. `change`: the fields `setting`, `current` and `suggested` of a finding."""
    return Finding(key=bound_by, severity=Severity.NOTE, title=f"Bottleneck: {bound_by}", text=text, **change)


def _change(bound_by: str, why: str, setting: str, current: int, suggested: int, *, tail: str = "") -> Finding:
    """why: raise SETTING CURRENT -> SUGGESTED, tail. A `why` with a colon is followed by a semicolon."""
    verb = "raise" if suggested > current else "lower"
    text = f"{why}{';' if ':' in why else ':'} {verb} {setting} {current} -> {suggested}{', ' if tail else ''}{tail}"
    return _bound(bound_by, text, setting=setting, current=current, suggested=suggested)


def _fraction_of_steps(seconds: float | None, every_steps: int, metrics: PipelineMetrics) -> float:
    """Fraction of the time that `seconds` every `every_steps` steps are: 60 s every 50 steps of 10 s -> 0.12; 0: not measured."""
    return 0.0 if seconds is None or not metrics.step_s else seconds / (every_steps * metrics.step_s)


def _whole_groups(rollouts: float, setup: PipelineSetup) -> int:
    """Rounded down to whole groups, at least one: 100 rollouts in groups of 8 -> 96."""
    return max(1, int(rollouts + 1e-9) // setup.config.rollout.group_size) * setup.config.rollout.group_size
