"""What bounds the speed of a run, and the setting to change: a pure function of measured figures.

    metrics of the last steps --figures_of--> PipelineFigures --advise--> Finding

With t = seconds that the trainer works in a step (trains, pushes, copies a checkpoint) and g = seconds that the servers generate:

    step_s = 10, trainer_idle = 0.6, generator_idle = 0.4  ->  t = 4, g = 6; overlapped, a step would take max(4, 6) = 6 s

The first rule that has something to say is taken. What is not measured holds no rule up. A suggested value is computed from the
figures, and never beyond what the rest of the configuration can use. t and g are `PipelineFigures.train_s` and `generation_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from grpo_async.findings.finding import Finding, Severity
from grpo_async.findings.pipeline_figures import PipelineFigures, PipelineSetup

_IDLE = 0.15
"""From this share of a step on, idleness is worth a word."""
_NO_GAIN = 0.1
"""What overlap could save at most, as a share of the step, below which asynchrony cannot help."""
_KV_FULL, _KV_TARGET = 0.95, 0.85
_MANY_TOOLS = 0.4
_MANY_PUSHES, _PUSH_TARGET = 0.2, 0.1
_MANY_SAVES, _SAVE_TARGET = 0.1, 0.05
_MANY_STALE = 0.1
_MANY_FILTERED = 0.5
_LEAST_STEPS = 3
"""Fewer say nothing: the first steps of a run are unlike the others."""
_HIGHEST_STALENESS = 4
"""Further behind, importance weights get so uneven that speed is bought with learning."""


def full_cache(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Requests wait inside the servers for room: what is admitted above that is preempted and computed again."""
    running, waiting, usage = figures.running or 0.0, figures.waiting or 0.0, figures.kv_usage
    if usage is None or usage < _KV_FULL or waiting < max(1.0, 0.1 * running):
        return None
    suggested = _whole_groups(running, setup)
    if suggested >= setup.max_in_flight:
        return None
    words = f"the servers' KV cache is {usage:.0%} full and {waiting:.0f} requests wait for room beside {running:.0f} that run"
    return _change("the KV cache", words, "rollout.max_in_flight", setup.max_in_flight, suggested)


def stale_groups(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """What is dropped for its age was generated for nothing."""
    share = figures.stale_share
    if share is None or share < _MANY_STALE or setup.max_staleness >= _HIGHEST_STALENESS:
        return None
    words = f"{share:.0%} of the groups are dropped because they are older than {setup.max_staleness} steps"
    suggested = setup.max_staleness + 1
    return _change("dropped groups", words, "rollout.max_staleness", setup.max_staleness, suggested)


def weight_pushes(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Fewer of them, as far as samples may be behind: k pushes' share p falls to 10 % with k x p / 0.1 steps between them."""
    share = figures.push_share
    if setup.weight_sync_steps > figures.num_steps:  # too few steps to see how often one comes
        share = _share_of_steps(figures.push_s, setup.weight_sync_steps, figures)
    if share is None or share < _MANY_PUSHES:
        return None
    words = f"weight pushes take {share:.0%} of a step"
    wanted = math.ceil(setup.weight_sync_steps * share / _PUSH_TARGET - 1e-9)
    suggested = min(wanted, setup.max_staleness + 1)
    if suggested > setup.weight_sync_steps:
        return _change("weight pushes", words, "training.weight_sync_steps", setup.weight_sync_steps, suggested)
    why = f"rollout.max_staleness {setup.max_staleness} allows no fewer of them"
    help_ = "a faster network between trainer and servers would help, or sending less (model.lora.push: adapter)"
    return _bound(bound_by="weight pushes", text=f"{words}, and {why}; {help_}")


def checkpoints(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """They may be further apart than the steps that the figures are of."""
    current = setup.checkpoint_every_steps
    share = _share_of_steps(figures.checkpoint_s, current, figures)
    if share is None or share < _MANY_SAVES:
        return None
    suggested = math.ceil(current * share / _SAVE_TARGET - 1e-9)
    words = f"the trainer stands still {share:.0%} of the time for checkpoints"
    return _change("checkpoints", words, "checkpoint.every_steps", current, suggested)


def synchronous(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Trainer and servers take turns: overlapped, a step would take max(t, g) and not t + g."""
    trainer, generator = figures.trainer_idle, figures.generator_idle
    assert trainer is not None
    assert generator is not None
    if setup.max_staleness > 0 or min(trainer, generator) < _IDLE:
        return None
    step_s, overlapped_s = figures.step_s or 0.0, max(figures.train_s, figures.generation_s)
    if step_s - overlapped_s < _NO_GAIN * step_s:
        return None
    words = f"trainer idle {trainer:.0%}, servers idle {generator:.0%}: they wait for each other"
    gain = f"a step of {_seconds(step_s)} could take {_seconds(overlapped_s)}"
    return _change("waiting for each other", words, "rollout.max_staleness", 0, 1, tail=gain)


def slow_tools(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Rollouts that wait for a tool keep no server busy: with n in flight and a share s in tools, n x (1 - s) generate."""
    trainer, share = figures.trainer_idle or 0.0, figures.tool_share
    if trainer < _IDLE or share is None or share < _MANY_TOOLS:
        return None
    words = f"trainer idle {trainer:.0%}, tools take {share:.0%} of a rollout"
    wanted = math.ceil(setup.max_in_flight / max(0.05, 1.0 - share))
    suggested = _whole_groups(min(wanted, setup.most_in_flight), setup)
    if suggested > setup.max_in_flight and (figures.kv_usage or 0.0) < _KV_TARGET:
        return _change("tools", words, "rollout.max_in_flight", setup.max_in_flight, suggested)
    return _bound(
        bound_by="tools", text=f"{words}, and no more rollouts can be in flight: faster tools would help, no setting"
    )


def slow_scoring(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    trainer, share = figures.trainer_idle or 0.0, figures.scoring_share
    if trainer < _IDLE or share is None or share < _MANY_TOOLS:
        return None
    words = f"trainer idle {trainer:.0%}, scoring takes {share:.0%} of the time that a group needs"
    return _bound(bound_by="scoring", text=f"{words}: faster reward functions would help, or more of their workers")


def full_slots(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Requests wait for a slot of the embedded engine."""
    trainer, slots = figures.trainer_idle or 0.0, setup.embedded_slots
    running, waiting = figures.running or 0.0, figures.waiting or 0.0
    if trainer < _IDLE or slots is None or waiting < 1.0 or running < 0.9 * slots * setup.replicas:
        return None
    wanted = slots + math.ceil(waiting / setup.replicas)
    suggested = min(wanted, math.ceil(min(setup.max_in_flight, setup.most_in_flight) / setup.replicas))
    if suggested <= slots:
        return None
    words = f"trainer idle {trainer:.0%}, {waiting:.0f} requests wait for a slot"
    return _change("slots of the embedded engine", words, "inference.embedded.max_slots", slots, suggested)


def few_in_flight(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """The servers have room, and nothing waits: n rollouts fill a share u of the cache, so n x 0.85 / u fit; at most twice as
    many at once. Trainer idle 41 %, KV 38 %, 64 in flight: min(64 x 2, 64 x 0.85 / 0.38) = 128."""
    trainer, usage = figures.trainer_idle or 0.0, figures.kv_usage
    if trainer < _IDLE or usage is None or figures.running is None or (figures.waiting or 0.0) >= 1.0:
        return None
    has_room = usage < _KV_TARGET
    is_at_the_limit = figures.running >= 0.7 * setup.max_in_flight
    is_idle = (figures.generator_idle or 0.0) >= _IDLE
    if not has_room or not (is_at_the_limit or is_idle):
        return None
    factor = min(2.0, _KV_TARGET / max(usage, 0.01))
    limit = setup.most_in_flight
    if setup.embedded_slots is not None:  # beyond its slots they would only wait
        limit = min(limit, setup.embedded_slots * setup.replicas)
    suggested = _whole_groups(min(setup.max_in_flight * factor, limit), setup)
    if suggested <= setup.max_in_flight:
        return None
    words = f"trainer idle {trainer:.0%}, server KV {usage:.0%}"
    return _change("too few rollouts in flight", words, "rollout.max_in_flight", setup.max_in_flight, suggested)


def held_back(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Both are idle although generation may run ahead: it may not run far enough (a few long rollouts hold up a step)."""
    trainer, generator = figures.trainer_idle or 0.0, figures.generator_idle or 0.0
    if not 0 < setup.max_staleness < _HIGHEST_STALENESS or min(trainer, generator) < _IDLE:
        return None
    words = f"trainer idle {trainer:.0%}, servers idle {generator:.0%}: generation may not run further ahead"
    suggested = setup.max_staleness + 1
    return _change("the staleness limit", words, "rollout.max_staleness", setup.max_staleness, suggested)


def generation(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """The servers do what they can. With r of them, r x g / t generate as fast as is trained."""
    trainer = figures.trainer_idle or 0.0
    if trainer < _IDLE:
        return None
    train_s, generation_s, step_s = figures.train_s, figures.generation_s, figures.step_s or 0.0
    dominates = train_s < _NO_GAIN * step_s
    words = f"generation takes {_seconds(generation_s)} of a step of {_seconds(step_s)}, training {_seconds(train_s)}"
    words = f"asynchrony cannot help here: {words}" if dominates else f"trainer idle {trainer:.0%}: {words}"
    bound = "generation"
    if not setup.spawns_servers:
        needed = _servers_needed(figures, setup)
        return _bound(
            bound_by=bound, text=f"{words}; {setup.replicas} -> {needed} servers in inference.urls would keep up"
        )
    if not setup.on_gpu:
        return _bound(bound_by=bound, text=f"{words}; faster or more cores would help, or shorter completions")
    suggested, ranks = _servers_needed(figures, setup), setup.num_trainer_ranks
    can_move = setup.tensor_parallel_size == 1 and ranks > 1
    if setup.num_gpus is not None:
        suggested = min(suggested, (setup.num_gpus - ranks) // setup.tensor_parallel_size)
    if suggested > setup.replicas:
        tail = "or move one GPU from the trainer to a server" if can_move else ""
        return _change(bound, words, "inference.replicas", setup.replicas, suggested, tail=tail)
    words += f"; {_gpus(setup)} no room for another server"
    is_shared = setup.num_gpus is not None and ranks + setup.replicas > setup.num_gpus
    if (
        can_move and not is_shared and train_s * ranks / (ranks - 1) < generation_s
    ):  # else the trainer would bound the run instead
        tail = f"and inference.replicas {setup.replicas} -> {setup.replicas + 1}"
        return _change(bound, words, "launch.num_trainer_ranks", ranks, ranks - 1, tail=tail)
    text = f"{words}, so servers on another machine (inference.urls) would help, or shorter completions"
    return _bound(bound_by=bound, text=text)


def padding(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """Packed samples are not padded."""
    share = figures.padding_share
    if setup.pack or share is None or share < 0.25:
        return None
    words = f"{share:.0%} of the tokens that the trainer computes are padding"
    return _change("padding", words, "training.pack", "false", "true")


def training(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """The servers wait for the trainer. n trainer and r server GPUs with work t x n and g x r are best divided in this
    proportion: n 1, r 3, t 9, g 3 -> 9 : 9, so 2 and 2. Of several machines that train each has as many ranks, so the GPU that a
    server gives up is one of one of them only."""
    generator = figures.generator_idle or 0.0
    if generator < max(_IDLE, 0.3) or (figures.trainer_idle or 0.0) >= _IDLE:
        return None
    train_s, step_s = _seconds(figures.train_s), _seconds(figures.step_s or 0.0)
    words = f"servers idle {generator:.0%}: training takes {train_s} of a step of {step_s}"
    ranks, servers = setup.num_trainer_ranks, setup.replicas
    if not setup.on_gpu:
        return _bound(bound_by="training", text=f"{words}; a faster trainer would help, generation is no limit")
    used = ranks + (servers * setup.tensor_parallel_size if setup.spawns_servers else 0)
    free = math.inf if setup.num_gpus is None else setup.num_gpus - used
    is_alone = setup.nodes == 1 and setup.spawns_servers and setup.tensor_parallel_size == 1
    if is_alone and servers > 1 and free >= 0:
        work_t, work_g = figures.train_s * ranks, figures.generation_s * servers
        suggested = min(servers - 1, max(1, (ranks + servers) - round((ranks + servers) * work_t / (work_t + work_g))))
        freed = servers - suggested
        tail = f"and launch.num_trainer_ranks {ranks} -> {ranks + freed}"
        return _change("training", words, "inference.replicas", servers, suggested, tail=tail)
    world = setup.world_size * figures.train_s / max(figures.generation_s, 0.25 * figures.train_s)
    wanted = max(ranks + 1, min(math.ceil(world / setup.nodes - 1e-9), 2 * ranks))
    suggested = int(min(wanted, ranks + free))
    if suggested > ranks:
        where = "of each machine" if setup.nodes > 1 else ""
        return _change("training", words, "launch.num_trainer_ranks", ranks, suggested, tail=where)
    text = f"{words}; {_gpus(setup)} no room for another rank, so another machine that trains (launch.nodes) would help"
    return _bound(bound_by="training", text=text)


def filtered_groups(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """With a share f of the groups filtered, n / (1 - f) of them leave n to train on; at most twice as many at once."""
    share = figures.filtered_share
    if share is None or share < _MANY_FILTERED or setup.zero_variance != "skip":
        return None
    current = setup.groups_per_step
    suggested = min(2 * current, math.ceil(current / max(1.0 - share, 0.01) - 1e-9))
    words = f"{share:.0%} of the groups teach nothing (all rewards equal), so steps train on {current * (1.0 - share):.1f} groups"
    tail = "or choose prompts that are neither always nor never solved"
    return _change("equal rewards", words, "rollout.groups_per_step", current, suggested, tail=tail)


def nothing_to_gain(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    trainer, generator = figures.trainer_idle or 0.0, figures.generator_idle or 0.0
    return _bound(
        bound_by="nothing",
        text=f"nothing to gain from a setting: trainer idle {trainer:.0%}, servers idle {generator:.0%}",
    )


RULES: tuple[Callable[[PipelineFigures, PipelineSetup], Finding | None], ...] = (
    # what is wasted, whoever waits
    full_cache,
    stale_groups,
    weight_pushes,
    checkpoints,
    # the trainer waits
    synchronous,
    slow_tools,
    slow_scoring,
    full_slots,
    few_in_flight,
    held_back,
    generation,
    # the trainer works
    padding,
    training,
    filtered_groups,
    nothing_to_gain,
)


def advise(figures: PipelineFigures, setup: PipelineSetup) -> Finding | None:
    """What bounds the run and what to change; None while too little is measured to say anything."""
    if figures.num_steps < _LEAST_STEPS or not figures.step_s:
        return None
    if figures.trainer_idle is None or figures.generator_idle is None:
        return None
    return next((advice for rule in RULES if (advice := rule(figures, setup)) is not None), None)


def _bound(
    *,
    bound_by: str,
    text: str,
    setting: str | None = None,
    current: float | str | None = None,
    suggested: float | str | None = None,
) -> Finding:
    """`bound_by`: in a few words."""
    what = f"Bound by {bound_by}"
    return Finding(
        key=bound_by,
        severity=Severity.NOTE,
        what=what,
        text=text,
        setting=setting,
        current=current,
        suggested=suggested,
    )


def _change(
    bound_by: str, words: str, setting: str, current: float | str, suggested: float | str, *, tail: str = ""
) -> Finding:
    """words: raise SETTING CURRENT -> SUGGESTED, tail."""
    verb = (
        "set" if isinstance(current, str) or isinstance(suggested, str) else "raise" if suggested > current else "lower"
    )
    text = f"{words}: {verb} {setting} {current} -> {suggested}" + (f", {tail}" if tail else "")
    if words.count(":"):  # one colon in a sentence is enough
        text = f"{words}; {verb} {setting} {current} -> {suggested}" + (f", {tail}" if tail else "")
    return _bound(bound_by=bound_by, text=text, setting=setting, current=current, suggested=suggested)


def _share_of_steps(seconds: float | None, every_steps: int, figures: PipelineFigures) -> float | None:
    """Of the wall time, what takes so many seconds every so many steps: 60 s every 50 steps of 10 s -> 0.12."""
    return None if seconds is None or not figures.step_s else seconds / (every_steps * figures.step_s)


def _servers_needed(figures: PipelineFigures, setup: PipelineSetup) -> int:
    """r x g / t, at least one more, at most twice as many."""
    ratio = figures.generation_s / max(figures.train_s, 1e-9)
    return max(setup.replicas + 1, min(2 * setup.replicas, math.ceil(setup.replicas * ratio - 1e-9)))


def _whole_groups(rollouts: float, setup: PipelineSetup) -> int:
    """Rounded down to whole groups, at least one: 100 rollouts in groups of 8 -> 96."""
    return max(1, int(rollouts + 1e-9) // setup.group_size) * setup.group_size


def _gpus(setup: PipelineSetup) -> str:
    """Before what they have: "one GPU has", "4 GPUs have"."""
    return "one GPU has" if setup.num_gpus == 1 else f"{setup.num_gpus} GPUs have"


def _seconds(value: float) -> str:
    """0.1234 -> "0.12 s", 12.34 -> "12.3 s", 1234.0 -> "1234 s"."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
