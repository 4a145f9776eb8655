"""What bounds the speed of a run, and the setting to change: a pure function of its metrics and settings.

    metrics of the last steps --pipeline_metrics--> PipelineMetrics --advise--> Finding

With t = seconds that the trainer works in a step (trains, pushes, copies a checkpoint) and g = seconds that the servers generate:

    step_s = 10, trainer_idle = 0.6, generator_idle = 0.4  ->  t = 4, g = 6; overlapped, a step would take max(4, 6) = 6 s

The first rule that has something to say is taken. What is not measured holds no rule up. A suggested value is computed from the
metrics, and never beyond what the rest of the configuration can use. t and g are `PipelineMetrics.train_s` and `generation_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import RolloutSection
from grpo_async.findings.finding import Finding, Severity
from grpo_async.findings.statistics import mean_over_time
from grpo_async.utils.files import numbers
from grpo_async.utils.text import duration

_IDLE = 0.15
"""From this fraction of a step on, idleness is worth mentioning."""
_NO_GAIN = 0.1
"""What overlap could save at most, as a fraction of the step, below which asynchrony cannot help."""
_KV_FULL, _KV_TARGET = 0.95, 0.85
_MANY_TOOLS = 0.4
_MANY_PUSHES, _PUSH_TARGET = 0.2, 0.1
_MANY_SAVES, _SAVE_TARGET = 0.1, 0.05
_MANY_STALE = 0.1
_MANY_FILTERED = 0.5
_MIN_STEPS = 3
"""Fewer say nothing: the first steps of a run are unlike the others."""
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
    kv_usage: float | None = None  # of the servers' key/value caches, 0 to 1
    stale_fraction: float | None = None  # of the groups finalized in these steps, those that were dropped for their age
    filtered_fraction: float | None = None  # of them, those whose rewards were all equal
    tool_fraction: float | None = None  # of a rollout's time, what its tools take
    scoring_fraction: float | None = None  # of a group's time from its first request on, what its rewards take
    padding_fraction: float | None = None  # of the tokens that are computed in training

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
    def rollout(self) -> RolloutSection:
        return self.config.rollout

    @property
    def has_gpus(self) -> bool:
        return self.config.launch.device == "cuda" if self.on_gpu is None else self.on_gpu

    @property
    def spawns_servers(self) -> bool:
        """False: others run them."""
        return not self.config.inference.urls

    @property
    def servers(self) -> int:
        return self.config.num_servers

    @property
    def is_alone(self) -> bool:
        """Whether the run has one machine."""
        nodes = self.config.launch.nodes
        return nodes.count == 1

    @property
    def gpus_per_server(self) -> int:
        vllm = self.config.inference.vllm
        return vllm.num_gpus

    @property
    def gpus_of_servers(self) -> int:
        """Of those on the machine with the first trainer ranks."""
        has_servers = self.spawns_servers and not self.config.launch.nodes.infer
        return self.config.inference.replicas * self.gpus_per_server if has_servers else 0

    @property
    def embedded_slots(self) -> int | None:
        """Of each server; None with another engine."""
        is_embedded = (self.engine or self.config.inference.engine) == "embedded" and self.spawns_servers
        return self.config.inference.embedded.max_slots if is_embedded else None

    @property
    def most_in_flight(self) -> int:
        """Rollouts beyond which none is ever started: (max_staleness + 1) x groups_per_step x group_size."""
        return self.config.max_groups_ahead * self.rollout.group_size


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
        filtered_fraction=ended["filtered"] / num_ended if num_ended else None,
        tool_fraction=None if tool_s is None or not rollout_s else min(1.0, tool_s / rollout_s),
        scoring_fraction=None if scoring_s is None or not rollout_s else scoring_s / (scoring_s + rollout_s),
        padding_fraction=mean("training/padding_fraction"),
    )


# ------------------------------------------------------------------------------------------------------- the rules


def full_cache(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Requests wait inside the servers for room: what is admitted above that is preempted and computed again."""
    running, waiting, usage = metrics.running or 0.0, metrics.waiting or 0.0, metrics.kv_usage
    if usage is None or usage < _KV_FULL or waiting < max(1.0, 0.1 * running):
        return None
    suggested = _whole_groups(running, setup)
    if suggested >= setup.rollout.max_in_flight:
        return None
    why = f"the servers' KV cache is {usage:.0%} full and {waiting:.0f} requests wait for room while {running:.0f} run"
    return _change("the KV cache", why, "rollout.max_in_flight", setup.rollout.max_in_flight, suggested)


def stale_groups(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """What is dropped for its age was generated for nothing."""
    fraction = metrics.stale_fraction
    if fraction is None or fraction < _MANY_STALE or setup.rollout.max_staleness >= _MAX_STALENESS:
        return None
    why = f"{fraction:.0%} of the groups are dropped because they are older than {setup.rollout.max_staleness} steps"
    suggested = setup.rollout.max_staleness + 1
    return _change("dropped groups", why, "rollout.max_staleness", setup.rollout.max_staleness, suggested)


def weight_pushes(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Fewer of them, as far as samples may be behind: a fraction p with k steps between them falls to 10 % with k x p / 0.1."""
    fraction, current = metrics.push_fraction, setup.config.training.weight_sync_steps
    if current > metrics.num_steps:  # too few steps to see how often one comes
        fraction = _fraction_of_steps(metrics.push_s, current, metrics)
    if fraction is None or fraction < _MANY_PUSHES:
        return None
    why = f"weight pushes take {fraction:.0%} of a step"
    suggested = min(math.ceil(current * fraction / _PUSH_TARGET - 1e-9), setup.rollout.max_staleness + 1)
    if suggested > current:
        return _change("weight pushes", why, "training.weight_sync_steps", current, suggested)
    why += f", and rollout.max_staleness {setup.rollout.max_staleness} does not allow fewer"
    help_ = "a faster network between trainer and servers would help, or sending less (model.lora.push: adapter)"
    return _bound("weight pushes", f"{why}; {help_}")


def checkpoints(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """They may be further apart than the steps that the metrics are of."""
    current = setup.config.checkpoint.every_steps
    fraction = _fraction_of_steps(metrics.checkpoint_s, current, metrics)
    if fraction is None or fraction < _MANY_SAVES:
        return None
    suggested = math.ceil(current * fraction / _SAVE_TARGET - 1e-9)
    why = f"the trainer waits for checkpoints {fraction:.0%} of the time"
    return _change("checkpoints", why, "checkpoint.every_steps", current, suggested)


def synchronous(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Trainer and servers take turns: overlapped, a step would take max(t, g) and not t + g."""
    trainer, generator = metrics.trainer_idle, metrics.generator_idle
    assert trainer is not None
    assert generator is not None
    if setup.rollout.max_staleness > 0 or min(trainer, generator) < _IDLE:
        return None
    step_s, overlapped_s = metrics.step_s or 0.0, max(metrics.train_s, metrics.generation_s)
    if step_s - overlapped_s < _NO_GAIN * step_s:
        return None
    why = f"trainer idle {trainer:.0%}, servers idle {generator:.0%}: they wait for each other"
    gain = f"a step of {duration(step_s)} could take {duration(overlapped_s)}"
    return _change("waiting for each other", why, "rollout.max_staleness", 0, 1, tail=gain)


def slow_tools(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Rollouts that wait for a tool keep no server busy: with n in flight and a fraction s in tools, n x (1 - s) generate."""
    trainer, fraction = metrics.trainer_idle or 0.0, metrics.tool_fraction
    if trainer < _IDLE or fraction is None or fraction < _MANY_TOOLS:
        return None
    why = f"trainer idle {trainer:.0%}, tools take {fraction:.0%} of a rollout"
    wanted = math.ceil(setup.rollout.max_in_flight / max(0.05, 1.0 - fraction))
    suggested = _whole_groups(min(wanted, setup.most_in_flight), setup)
    if suggested > setup.rollout.max_in_flight and (metrics.kv_usage or 0.0) < _KV_TARGET:
        return _change("tools", why, "rollout.max_in_flight", setup.rollout.max_in_flight, suggested)
    return _bound("tools", f"{why}, and no more rollouts can be in flight: faster tools would help; no setting would")


def slow_scoring(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    trainer, fraction = metrics.trainer_idle or 0.0, metrics.scoring_fraction
    if trainer < _IDLE or fraction is None or fraction < _MANY_TOOLS:
        return None
    why = f"trainer idle {trainer:.0%}, scoring takes {fraction:.0%} of the time that a group needs"
    return _bound("scoring", f"{why}: faster reward functions would help, or more of their workers")


def full_slots(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Requests wait for a slot of the embedded engine."""
    trainer, slots = metrics.trainer_idle or 0.0, setup.embedded_slots
    running, waiting = metrics.running or 0.0, metrics.waiting or 0.0
    if trainer < _IDLE or slots is None or waiting < 1.0 or running < 0.9 * slots * setup.servers:
        return None
    wanted = slots + math.ceil(waiting / setup.servers)
    suggested = min(wanted, math.ceil(min(setup.rollout.max_in_flight, setup.most_in_flight) / setup.servers))
    if suggested <= slots:
        return None
    why = f"trainer idle {trainer:.0%}, {waiting:.0f} requests wait for a slot"
    return _change("slots of the embedded engine", why, "inference.embedded.max_slots", slots, suggested)


def few_in_flight(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """The servers have room, and nothing waits: n rollouts fill a fraction u of the cache, so n x 0.85 / u fit; at most twice as
    many at once. Trainer idle 41 %, KV 38 %, 64 in flight: min(64 x 2, 64 x 0.85 / 0.38) = 128."""
    trainer, usage = metrics.trainer_idle or 0.0, metrics.kv_usage
    if trainer < _IDLE or usage is None or metrics.running is None or (metrics.waiting or 0.0) >= 1.0:
        return None
    is_at_the_limit = metrics.running >= 0.7 * setup.rollout.max_in_flight
    if usage >= _KV_TARGET or not (is_at_the_limit or (metrics.generator_idle or 0.0) >= _IDLE):
        return None
    factor = min(2.0, _KV_TARGET / max(usage, 0.01))
    limit = setup.most_in_flight
    if setup.embedded_slots is not None:  # beyond its slots they would only wait
        limit = min(limit, setup.embedded_slots * setup.servers)
    suggested = _whole_groups(min(setup.rollout.max_in_flight * factor, limit), setup)
    if suggested <= setup.rollout.max_in_flight:
        return None
    why = f"trainer idle {trainer:.0%}, server KV {usage:.0%}"
    return _change("too few rollouts in flight", why, "rollout.max_in_flight", setup.rollout.max_in_flight, suggested)


def held_back(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Both are idle although generation may run ahead: it may not run far enough (a few long rollouts hold up a step)."""
    trainer, generator = metrics.trainer_idle or 0.0, metrics.generator_idle or 0.0
    if not 0 < setup.rollout.max_staleness < _MAX_STALENESS or min(trainer, generator) < _IDLE:
        return None
    why = f"trainer idle {trainer:.0%}, servers idle {generator:.0%}: generation is not allowed to run further ahead"
    suggested = setup.rollout.max_staleness + 1
    return _change("the staleness limit", why, "rollout.max_staleness", setup.rollout.max_staleness, suggested)


def generation(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """The servers do what they can. With r of them, r x g / t generate as fast as is trained."""
    trainer = metrics.trainer_idle or 0.0
    if trainer < _IDLE:
        return None
    train_s, generation_s, step_s = metrics.train_s, metrics.generation_s, metrics.step_s or 0.0
    dominates = train_s < _NO_GAIN * step_s
    why = f"generation takes {duration(generation_s)} of a step of {duration(step_s)}, training {duration(train_s)}"
    why = f"asynchrony cannot help here: {why}" if dominates else f"trainer idle {trainer:.0%}: {why}"
    bound = "generation"
    if not setup.spawns_servers:
        needed = _servers_needed(metrics, setup)
        return _bound(bound, f"{why}; {setup.servers} -> {needed} servers in inference.urls would keep up")
    if not setup.has_gpus:
        return _bound(bound, f"{why}; faster or more cores would help, or shorter completions")
    nodes, replicas = setup.config.launch.nodes, setup.config.inference.replicas
    if nodes.infer:
        needed = math.ceil(_servers_needed(metrics, setup) / replicas)
        return _change(bound, why, "launch.nodes.infer", nodes.infer, max(nodes.infer + 1, needed))
    suggested, ranks = math.ceil(_servers_needed(metrics, setup) / nodes.train), setup.config.launch.num_trainer_ranks
    can_move = setup.gpus_per_server == 1 and ranks > 1
    if setup.num_gpus is not None:
        suggested = min(suggested, (setup.num_gpus - ranks) // setup.gpus_per_server)
    if suggested > replicas:
        tail = "or move one GPU from the trainer to a server" if can_move else ""
        return _change(bound, why, "inference.replicas", replicas, suggested, tail=tail)
    why += f"; {_gpus(setup)} no room for another server"
    is_shared = setup.num_gpus is not None and ranks + replicas > setup.num_gpus
    # with one rank less the trainer must not bound the run instead
    if can_move and not is_shared and train_s * ranks / (ranks - 1) < generation_s:
        tail = f"and inference.replicas {replicas} -> {replicas + 1}"
        return _change(bound, why, "launch.num_trainer_ranks", ranks, ranks - 1, tail=tail)
    text = f"{why}, so servers on another machine (launch.nodes.infer) would help, or shorter completions"
    return _bound(bound, text)


def padding(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """Packed samples are not padded."""
    fraction = metrics.padding_fraction
    if setup.config.training.pack or fraction is None or fraction < 0.25:
        return None
    why = f"{fraction:.0%} of the tokens that the trainer computes are padding"
    return _change("padding", why, "training.pack", "false", "true")


def training(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """The servers wait for the trainer. n trainer and r server GPUs with work t x n and g x r are best divided in this
    proportion: n 1, r 3, t 9, g 3 -> 9 : 9, so 2 and 2. Of several machines that train each has as many ranks, so the GPU that a
    server gives up is one of one of them only."""
    generator = metrics.generator_idle or 0.0
    if generator < max(_IDLE, 0.3) or (metrics.trainer_idle or 0.0) >= _IDLE:
        return None
    train_s, step_s = duration(metrics.train_s), duration(metrics.step_s or 0.0)
    why = f"servers idle {generator:.0%}: training takes {train_s} of a step of {step_s}"
    ranks, servers = setup.config.launch.num_trainer_ranks, setup.servers
    if not setup.has_gpus:
        return _bound("training", f"{why}; a faster trainer would help, generation is not the limit")
    free = math.inf if setup.num_gpus is None else setup.num_gpus - ranks - setup.gpus_of_servers
    is_alone = setup.is_alone and setup.spawns_servers and setup.gpus_per_server == 1
    if is_alone and servers > 1 and free >= 0:
        work_t, work_g = metrics.train_s * ranks, metrics.generation_s * servers
        suggested = min(servers - 1, max(1, (ranks + servers) - round((ranks + servers) * work_t / (work_t + work_g))))
        freed = servers - suggested
        tail = f"and launch.num_trainer_ranks {ranks} -> {ranks + freed}"
        return _change("training", why, "inference.replicas", servers, suggested, tail=tail)
    world = (
        setup.config.launch.nodes.train * ranks * metrics.train_s / max(metrics.generation_s, 0.25 * metrics.train_s)
    )
    wanted = max(ranks + 1, min(math.ceil(world / setup.config.launch.nodes.train - 1e-9), 2 * ranks))
    suggested = int(min(wanted, ranks + free))
    if suggested > ranks:
        where = "of each machine" if setup.config.launch.nodes.train > 1 else ""
        return _change("training", why, "launch.num_trainer_ranks", ranks, suggested, tail=where)
    text = f"{why}; {_gpus(setup)} no room for another rank, so another machine that trains (launch.nodes.train) would help"
    return _bound("training", text)


def filtered_groups(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """With a fraction f of the groups filtered, n / (1 - f) of them leave n to train on; at most twice as many at once."""
    fraction = metrics.filtered_fraction
    if fraction is None or fraction < _MANY_FILTERED or setup.rollout.zero_variance != "skip":
        return None
    current = setup.rollout.groups_per_step
    suggested = min(2 * current, math.ceil(current / max(1.0 - fraction, 0.01) - 1e-9))
    left = current * (1.0 - fraction)
    why = f"{fraction:.0%} of the groups teach nothing (all rewards equal), so steps train on {left:.1f} groups"
    tail = "or choose prompts that are neither always nor never solved"
    return _change("equal rewards", why, "rollout.groups_per_step", current, suggested, tail=tail)


def nothing_to_gain(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    trainer, generator = metrics.trainer_idle or 0.0, metrics.generator_idle or 0.0
    return _bound("nothing", f"no setting would help: trainer idle {trainer:.0%}, servers idle {generator:.0%}")


RULES: tuple[Callable[[PipelineMetrics, PipelineSetup], Finding | None], ...] = (
    # what is wasted, whoever waits; then: the trainer waits; then: the trainer works
    full_cache, stale_groups, weight_pushes, checkpoints,
    synchronous, slow_tools, slow_scoring, full_slots, few_in_flight, held_back, generation,
    padding, training, filtered_groups, nothing_to_gain,
)  # fmt: skip


def advise(metrics: PipelineMetrics, setup: PipelineSetup) -> Finding | None:
    """What bounds the run and what to change; None while too little is measured to say anything."""
    if metrics.num_steps < _MIN_STEPS or not metrics.step_s:
        return None
    if metrics.trainer_idle is None or metrics.generator_idle is None:
        return None
    return next((advice for rule in RULES if (advice := rule(metrics, setup)) is not None), None)


def _bound(bound_by: str, text: str, **change: Any) -> Finding:
    """`bound_by`: what bounds the run, in a few words. `change`: the fields `setting`, `current` and `suggested` of a finding."""
    return Finding(key=bound_by, severity=Severity.NOTE, title=f"Bound by {bound_by}", text=text, **change)


def _change(
    bound_by: str, why: str, setting: str, current: float | str, suggested: float | str, *, tail: str = ""
) -> Finding:
    """why: raise SETTING CURRENT -> SUGGESTED, tail. A `why` with a colon is followed by a semicolon."""
    verb = (
        "set" if isinstance(current, str) or isinstance(suggested, str) else "raise" if suggested > current else "lower"
    )
    text = f"{why}{';' if ':' in why else ':'} {verb} {setting} {current} -> {suggested}{', ' if tail else ''}{tail}"
    return _bound(bound_by, text, setting=setting, current=current, suggested=suggested)


def _fraction_of_steps(seconds: float | None, every_steps: int, metrics: PipelineMetrics) -> float | None:
    """Of the wall time, what takes `seconds` every `every_steps` steps: 60 s every 50 steps of 10 s -> 0.12."""
    return None if seconds is None or not metrics.step_s else seconds / (every_steps * metrics.step_s)


def _servers_needed(metrics: PipelineMetrics, setup: PipelineSetup) -> int:
    """r x g / t, at least one more, at most twice as many."""
    ratio = metrics.generation_s / max(metrics.train_s, 1e-9)
    return max(setup.servers + 1, min(2 * setup.servers, math.ceil(setup.servers * ratio - 1e-9)))


def _whole_groups(rollouts: float, setup: PipelineSetup) -> int:
    """Rounded down to whole groups, at least one: 100 rollouts in groups of 8 -> 96."""
    return max(1, int(rollouts + 1e-9) // setup.rollout.group_size) * setup.rollout.group_size


def _gpus(setup: PipelineSetup) -> str:
    """Before what they have: "one GPU has", "4 GPUs have"."""
    return "one GPU has" if setup.num_gpus == 1 else f"{setup.num_gpus} GPUs have"
