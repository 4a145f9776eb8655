"""What else to change in a run: at most ten rules, each a pure function.

With t = seconds of a step in which the trainer works and g = seconds in which the servers generate:

    step 10 s, trainer idle 0.6, servers idle 0.4 -> t = 4, g = 6; overlapped, a step takes max(t, g)

Of the rules about speed the first that applies is taken. Each names a setting that would help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_async.config.sections import NEUTRAL_SAMPLING
from grpo_async.findings.finding import Finding, Severity
from grpo_async.findings.history import RunHistory
from grpo_async.findings.statistics import mean_over_time
from grpo_async.utils.text import duration, format_number, percent

_WARM_UP, _WINDOW, _MIN_STEPS = 2, 50, 3  # steps that are unlike the others; those looked at
_IDLE = 0.15  # from this fraction of a step on, idleness is worth mentioning
_NO_GAIN = 0.1  # what overlap could save at most, as a fraction of the step
_KV_FULL, _KV_ROOM = 0.95, 0.85
_MUCH = 0.4  # of a group's time for its rewards, of a rollout's time for its tools
_MANY_PUSHES, _MANY_STALE = 0.2, 0.1
_MAX_STALENESS = 4  # further behind, importance weights get so uneven that learning suffers
_OFF_POLICY, _FAR_OFF_POLICY = 1.1, 1.5  # mean importance ratio, or 1 / it
_MISMATCH, _LARGE_MISMATCH = 0.1, 0.3  # mean |trainer - sampler| log-probability, nats
_LOW_ESS, _VERY_LOW_ESS = 0.5, 0.2
_SMALL_ENTROPY, _EXPLODED = 0.1, 2.0  # nats, and of the beginning; times the beginning
_RATIO = "sampling/importance_sampling_ratio/mean"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """Where the time of the last steps went; idleness in fractions of it."""

    history: RunHistory
    rows: Sequence[Mapping[str, float]]
    step_s: float
    trainer_idle: float
    servers_idle: float

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def mean(self, name: str) -> float:
        """Return the mean of a metric; 0 where it is not measured."""
        return fmean(self.values(name) or [0.0])

    def setting(self, path: str, default: Any = 0) -> Any:
        """Return a setting, or `default` where the configuration lacks it."""
        value = self.history.setting(path)
        return default if value is None else value


def speed_advice(history: RunHistory) -> Finding | None:
    """Return what limits the speed: a warning where a setting, or code of the user's, wastes time.
    None: too little is measured to say."""
    rows = history.metrics
    rows = rows[_WARM_UP if len(rows) > 2 * _WARM_UP else 0 :][-_WINDOW:]
    trainer = mean_over_time(rows, "pipeline/trainer_idle_ratio")
    servers = mean_over_time(rows, "pipeline/generator_idle_ratio")
    if len(rows) < _MIN_STEPS or trainer is None or servers is None:
        return None
    step_s = fmean(row["step_time"] for row in rows if "step_time" in row)
    at = _Pipeline(history=history, rows=rows, step_s=step_s, trainer_idle=trainer, servers_idle=servers)
    for rule in (_dropped, _pushes, _scoring, _tools, _in_flight, _taking_turns):
        if (found := rule(at)) is not None:
            key, title, fix = found
            return Finding(key=key, severity=Severity.WARNING, title=title, fix=fix)
    train_s, generation_s = step_s * (1.0 - trainer), step_s * (1.0 - servers)
    title = f"A step of {duration(step_s)} generates for {duration(generation_s)} and trains for {duration(train_s)}"
    fix = "Both are busy."
    if servers >= 2 * _IDLE > trainer:
        fix = "A faster trainer would help (more GPUs: launch.num_trainer_ranks)."
    elif trainer >= _IDLE:
        fix = "Faster generation would help (more GPUs: inference.replicas), or shorter completions."
    return Finding(key="balance", severity=Severity.NOTE, title=title, fix=fix)


def quality_advice(history: RunHistory) -> Iterator[Finding]:
    """Yield what may keep the updates from being good ones."""
    yield from (found for rule in (_off_policy, _entropy) if (found := rule(history)) is not None)


# -- speed: (key, what is wasted, what to do)

_Advice = tuple[str, str, str]


def _change(setting: str, current: int, suggested: int) -> str:
    return f"{'Raise' if suggested > current else 'Lower'} {setting} {current} -> {suggested}."


def _dropped(at: _Pipeline) -> _Advice | None:
    ended = {}
    for status in ("trained", "filtered", "stale", "failed"):
        totals = at.values(f"ledger/groups/{status}") or [0.0]
        ended[status] = max(0.0, totals[-1] - totals[0])
    stale, staleness = ended["stale"] / max(1.0, sum(ended.values())), at.setting("rollout.max_staleness")
    if stale < _MANY_STALE or staleness >= _MAX_STALENESS:
        return None
    fix = _change("rollout.max_staleness", staleness, staleness + 1)
    return "dropped-groups", f"{stale:.0%} of the groups are dropped because they are too old", fix


def _pushes(at: _Pipeline) -> _Advice | None:
    steps = at.setting("training.weight_sync_steps", 1)
    fraction = at.mean("sync/push_s") / (steps * at.step_s)
    if fraction < _MANY_PUSHES:
        return None
    fix = _change("training.weight_sync_steps", steps, steps + 1)
    if steps > at.setting("rollout.max_staleness"):
        fix = "Raise training.weight_sync_steps and rollout.max_staleness, or send less (model.lora.push: adapter)."
    return "pushes", f"Weight pushes take {fraction:.0%} of the time", fix


def _scoring(at: _Pipeline) -> _Advice | None:
    seconds, rollout_s = at.mean("scoring/duration_s"), at.mean("rollout/duration_s")
    if at.trainer_idle < _IDLE or not rollout_s or seconds < _MUCH * (seconds + rollout_s):
        return None
    names = [str(each.get("function") or each.get("model")) for each in at.setting("rewards", [])]
    title = f"Scoring limits the speed: {' and '.join(names) or 'it'} takes {duration(seconds)} a group, generating it "
    fix = "Make the function faster, `async` if it waits for others; rewards.0.run_in: process if it computes."
    return "scoring", f"{title}{duration(rollout_s)}", fix


def _tools(at: _Pipeline) -> _Advice | None:
    rollout_s, tools_s, what = at.mean("rollout/duration_s"), at.mean("tools/duration_s/per_rollout"), "Tools take"
    if at.setting("rollout.agent", None) is not None:
        tools_s = rollout_s - at.mean("rollout/generation_duration_s") * at.mean("rollout/num_turns")
        what = "The agent's own work takes"
    if at.trainer_idle < _IDLE or not rollout_s or tools_s < _MUCH * rollout_s:
        return None
    current, most = at.setting("rollout.max_in_flight"), _most_in_flight(at)
    fix = _change("rollout.max_in_flight", current, min(2 * current, most)) if current < most else "Make that faster."
    return "tools", f"{what} {tools_s / rollout_s:.0%} of a rollout's time", fix


def _in_flight(at: _Pipeline) -> _Advice | None:
    """Too many rollouts for the servers' cache, or too few to fill it."""
    usage, waiting, running = (at.mean(f"servers/{what}") for what in ("kv_usage", "waiting", "running"))
    current, size = at.setting("rollout.max_in_flight"), at.setting("rollout.group_size", 1)
    fits, title = current, f"The servers' KV cache is {usage:.0%} full"
    if usage >= _KV_FULL and waiting >= max(1.0, 0.1 * running):
        fits, title = running, f"{title}, and {waiting:.0f} requests wait for room"
    elif 0.0 < usage < _KV_ROOM and waiting < 1.0 and at.trainer_idle >= _IDLE and running >= 0.7 * current:
        # n rollouts fill a fraction u of the cache, so n x 0.85 / u fit; at most twice as many at once
        fits, title = min(current * min(2.0, _KV_ROOM / usage), _most_in_flight(at)), f"{title} while the trainer waits"
    fits = max(1, int(fits + 1e-9) // size) * size
    return (
        None
        if fits == current or not current
        else ("in-flight", title, _change("rollout.max_in_flight", current, fits))
    )


def _taking_turns(at: _Pipeline) -> _Advice | None:
    idle, staleness = min(at.trainer_idle, at.servers_idle), at.setting("rollout.max_staleness")
    if idle < max(_IDLE, _NO_GAIN) or staleness >= _MAX_STALENESS:
        return None
    took_s, could_s = duration(at.step_s), duration(at.step_s * (1.0 - idle))
    title = f"Trainer and servers wait for each other: a step of {took_s} could take {could_s}"
    return "taking-turns", title, _change("rollout.max_staleness", staleness, staleness + 1)


def _most_in_flight(at: _Pipeline) -> int:
    """Rollouts of all groups that may be ahead of the trainer: beyond it none is started."""
    groups = (at.setting("rollout.max_staleness") + 1) * at.setting("rollout.groups_per_step")
    return int(groups * at.setting("rollout.group_size", 1))


# -- quality


def _off_policy(history: RunHistory) -> Finding | None:
    """Ratio, difference of log-probabilities and effective sample size: views of one thing."""
    ratio, ess = history.recent(_RATIO) or 1.0, history.recent("sampling/ess") or 1.0
    first, difference = (history.values(_DIFFERENCE) or [0.0])[0], history.recent(_DIFFERENCE) or 0.0
    if any(history.setting(f"rollout.{name}") not in (None, value) for name, value in NEUTRAL_SAMPLING.items()):
        # two distributions on purpose: what is more than in the first step came later
        ratio /= next(iter(history.values(_RATIO)), 1.0) or 1.0
        difference, first = difference - first, 0.0
    off = max(ratio, 1.0 / ratio)
    views = {
        f"the mean importance ratio is {format_number(ratio)}": off > _OFF_POLICY,
        f"trainer and sampler differ by {format_number(difference)} nats per token": difference > _MISMATCH,
        f"the effective sample size is {percent(ess)}": ess < _LOW_ESS,
    }
    shown = "; ".join(view for view, is_off in views.items() if is_off)
    if not shown:
        return None
    is_far = off > _FAR_OFF_POLICY or difference > _LARGE_MISMATCH or ess < _VERY_LOW_ESS
    why, fix = "It developed during training.", "Lower rollout.max_staleness or optimizer.lr, or set loss.correction."
    if first > _MISMATCH:
        why = "It was so in the first step already: the server computes other log-probabilities."
        fix = "See the check of log-probabilities in preflight.json, and inference.dtype."
    return Finding(
        key="off-policy",
        severity=Severity.ERROR if is_far else Severity.WARNING,
        title="Samples are far off policy" if is_far else "Samples are off policy",
        text=f"In the last third of the steps {shown}. {why}",
        fix=fix,
        query="mismatch>0.1",
        plot="ratio",
    )


def _entropy(history: RunHistory) -> Finding | None:
    values = history.values("entropy")
    if len(values) < 6 or values[0] <= 0.0 or history.has_risen:
        return None
    first, last = fmean(values[:3]), fmean(values[-3:])
    if last < _SMALL_ENTROPY * min(1.0, first):
        title = "The entropy collapsed: the policy says the same each time"
        fix = "Raise loss.epsilon_high, loss.entropy_bonus or rollout.temperature, or lower optimizer.lr."
    elif last > _EXPLODED * first and last - first > 0.5:
        title = "The entropy exploded: the text is becoming random"
        fix = "Lower optimizer.lr or loss.entropy_bonus, or set a KL term (loss.beta)."
    else:
        return None
    text = f"It went from {format_number(first)} to {format_number(last)} nats."
    return Finding(key="entropy", severity=Severity.WARNING, title=title, text=text, fix=fix, query="", plot="entropy")
