"""Twelve rules: what keeps a run from learning, what may spoil its updates, what wastes its time.

Each is a pure function of a run's history that names a setting or a command that would help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean

from grpo_async.config.sections import NEUTRAL_SAMPLING
from grpo_async.findings.history import RunHistory
from grpo_async.findings.messages import first_reward_failure, read_equal_rewards
from grpo_async.findings.statistics import are_equal
from grpo_async.utils.text import count, duration, format_number, percent


class Severity(StrEnum):
    """Ordered, the worst first."""

    ERROR = "error"  # it cannot learn like this
    WARNING = "warning"  # may keep it from learning, or wastes time
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the data says.

    Args:
        key: for programs, in one word.
        title: what was found, as a sentence without its full stop.
        text: the numbers, and what they mean.
        fix: the remedy.
        query: selects the rollouts that show it, for inspect-rollouts; None: no rollouts show it.
        plot: the plot of the run's page that shows it.
    """

    key: str
    severity: Severity
    title: str
    text: str = ""
    fix: str = ""
    query: str | None = None
    plot: str | None = None


ERROR, WARNING, NOTE = Severity

_MOSTLY, _OFTEN = 0.9, 0.5
_CUT = 0.3  # of the completions that hit a limit
_MANY_FAILED = 0.05  # of the groups
_STILL = 0.02  # between the smallest and the largest importance ratio of all tokens
_SOME_STEPS = 10  # times of fewer are noise
_SOME_STALENESS, _FEW_STEPS = 0.3, 5  # from here on an update would show in the ratio
_MIN_MOVE = 1e-6  # sum of the learning rates: about what a weight moves by in all steps
_LOST = 0.25  # of the range of rewards: what a run must have had and lost to have collapsed
_OFF_POLICY, _FAR_OFF_POLICY = 1.1, 1.5  # mean importance ratio, or 1 / it
_MISMATCH, _LARGE_MISMATCH = 0.1, 0.3  # mean |trainer - sampler| log-probability, nats
_LOW_ESS, _VERY_LOW_ESS = 0.5, 0.2
_SMALL_ENTROPY, _EXPLODED = 0.1, 2.0  # nats, and of the beginning; times the beginning
_IDLE = 0.15  # from this fraction of a step on, idleness is worth mentioning
_MUCH = 0.4  # of a group's time for its rewards, of a rollout's time for its tools
_MANY_STALE = 0.1
_RECOMPUTED = 0.05  # of the tokens that servers compute
_MAX_STALENESS = 4  # further behind, importance weights get so uneven that learning suffers
_RATIO = "sampling/importance_sampling_ratio"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"
_CHECK = "grpo-async check-reward CONFIG"


# -- what keeps a run from learning; what explains the others comes first


def failures(history: RunHistory) -> Finding | None:
    """A reward function that raises (this ends the run, or its evaluations), rewards that are all
    None, or groups that fail."""
    errors = [history.error or "", *(record.error or "" for record in history.evaluations)]
    if failure := next((line for text in errors if (line := first_reward_failure(text))), None):
        return Finding(
            key="reward-fails",
            severity=WARNING if history.metrics else ERROR,
            title="A reward function fails",
            text=f"{failure}.",
            fix=f"Correct the function, then test it: {_CHECK}.",
            query="failed",
        )
    if history.metrics and not history.values("reward"):
        return Finding(
            key="unscored",
            severity=ERROR,
            title="The reward functions returned None for every completion",
            fix=f"Check which rows they apply to, and try them on a good and a bad answer: {_CHECK}.",
            query="unscored",
        )
    failed, started = history.last("ledger/groups/failed") or 0.0, history.last("ledger/groups/started")
    if not started or failed / started < _MANY_FAILED:
        return None
    kinds = {name.removeprefix("failures/"): history.last(name) or 0.0 for name in history.names("failures/")}
    most = max(kinds, key=kinds.__getitem__, default=None)
    return Finding(
        key="failed-groups",
        severity=ERROR if failed / started >= _OFTEN else WARNING,
        title=f"{percent(failed / started)} of the groups failed",
        text="" if most is None else f"Most often: {most}, {count(round(kinds[most]), 'time')}.",
        fix="Correct what raises: logs/latest/trainer.log has the first traceback of each kind.",
        query="failed",
        plot="ledger",
    )


def truncated(history: RunHistory) -> Finding | None:
    fraction, limit = history.recent("completions/clipped_ratio"), history.setting("rollout.max_completion_tokens")
    if fraction is None or fraction < _CUT:
        return None
    return Finding(
        key="truncated",
        severity=ERROR if fraction >= _MOSTLY else WARNING,
        title=f"{percent(fraction)} of the completions are cut off (rollout.max_completion_tokens is {limit})",
        fix="Raise rollout.max_completion_tokens. If that does not help, the policy does not end its turns: check "
        "model.end_of_turn_tokens and the chat template.",
        query="truncated",
        plot="truncated",
    )


def no_update(history: RunHistory) -> Finding | None:
    """The gradient is 0; pushes bring what was there; the learning rates add up to next to nothing (an update of AdamW moves a
    weight by about lr); or samples are a step old, and the importance ratio is still 1."""
    norms, rates, changed = history.values("grad_norm"), history.values("lr"), history.values("sync/changed")
    lows, highs = history.values(f"{_RATIO}/min"), history.values(f"{_RATIO}/max")
    key, plot, rate = "hardly-moves", "ratio", f" (it is {rates[-1]:g})" if rates else ""
    fix = f"Raise optimizer.lr{rate}, or optimizer.max_grad_norm if gradients are clipped away."
    is_stale = (history.recent("async/staleness_mean") or 0.0) >= _SOME_STALENESS
    if len(norms) >= 3 and max(norms) == 0.0:
        key, plot = "no-gradient", "grad-norm"
        title = "The gradient is 0: every advantage is 0, or every token is clipped or masked"
        fix = "Look at advantages, clipping and masks: grpo-async inspect-rollouts RUN trained."
    elif len(changed) >= 3 and max(changed[-3:]) == 0.0:
        key, plot = "no-change", "lr"
        title = "The pushed weights do not change: no tensor of the last 3 pushes was another than before"
        fix = "Check that what is trained is not frozen, that it gets gradients (grad_norm), and optimizer.lr."
    elif history.num_steps < _FEW_STEPS or history.has_risen:
        return None
    elif rates and sum(rates) < _MIN_MOVE:
        title = f"The policy hardly moves: the learning rates of all steps add up to {sum(rates):.2g}"
    elif lows and highs and is_stale and max(highs) - min(lows) <= _STILL:
        title = f"The policy hardly moves: no update changed any importance ratio, {min(lows):.6g} to {max(highs):.6g}"
    else:
        return None
    return Finding(key=key, severity=ERROR, title=title, fix=fix, query="trained", plot=plot)


def delivery(history: RunHistory) -> Finding | None:
    """Servers that had other weights than were pushed were found, and the push was repeated."""
    if not (num_wrong := round(sum(history.values("sync/wrong")))):
        return None
    return Finding(
        key="delivery",
        severity=WARNING,
        title=f"Pushes left other weights than the trainer's on a server, {count(num_wrong, 'time')}; they were repeated",
        fix="trainer.log names servers and tensors. Check their memory and network, and try another weights.transport.",
    )


def collapsed(history: RunHistory) -> Finding | None:
    """The best tenth of the steps had a much higher reward than the last tenth."""
    rows = [row for row in history.metrics if "reward" in row]
    steps, values = [int(row["step"]) for row in rows], [row["reward"] for row in rows]
    size = max(3, len(values) // 10)
    if len(values) < 3 * size:
        return None
    means = [sum(values[at : at + size]) / size for at in range(len(values) - size + 1)]
    best = max(range(len(means)), key=means.__getitem__)
    noise = 4.0 * sum(abs(one - other) for one, other in pairwise(values)) / (len(values) - 1) / size**0.5
    if means[best] - means[-1] < max(_LOST * history.reward_range, noise):
        return None
    key = "collapsed" if means[best] - means[0] > noise else "fell"
    was = f"{format_number(means[best])} at steps {steps[best]} to {steps[best + size - 1]}"
    title = f"The reward {key}, from {was} to {format_number(means[-1])} now"
    return Finding(key=key, severity=ERROR, title=title, fix=fix_of_fall(history), query="", plot="reward")


def fix_of_fall(history: RunHistory) -> str:
    lower = "Resume from an earlier checkpoint with a lower optimizer.lr"
    rate = history.last("lr")
    return f"{lower}." if rate is None else f"{lower} (it was {rate:g} in the last step)."


def tools(history: RunHistory) -> Finding | None:
    """Tools that cannot be called, are never called, or always fail."""
    calls, unread = history.recent("tools/call_frequency"), history.recent("tools/parse_error_frequency") or 0.0
    failed, query = history.recent("tools/failure_frequency") or 0.0, "tool_calls=0"
    if unread >= 0.1:
        severity = ERROR if unread >= _OFTEN else WARNING
        title = f"{percent(unread)} of the turns have tool calls that cannot be read"
        fix = "Set tool_calling.parser to the format that this model writes."
    elif calls is not None and calls < 0.01:
        severity, title = ERROR, f"The tools are hardly ever called ({format_number(calls)} calls per completion)"
        fix = "Explain in data.train.system_prompt when and how to call them, or start from a model that calls tools."
    elif failed >= _OFTEN:
        severity, title = ERROR if failed >= _MOSTLY else WARNING, f"{percent(failed)} of the tool calls fail"
        query = "failed_tool_calls>0"
        fix = f"Read their errors and correct the tools: grpo-async inspect-rollouts RUN '{query}'."
    else:
        return None
    return Finding(key="tools", severity=severity, title=title, fix=fix, query=query, plot="tools")


def zero_variance(history: RunHistory) -> Finding | None:
    """All rewards are equal: of the run, or of most groups at its end."""
    lows, highs = history.values("reward_min"), history.values("reward_max")
    equal = None if history.metrics else read_equal_rewards(history.error or "")
    if lows and highs and are_equal(min(lows), max(highs)):
        equal = highs[0], "every completion of every step got it"
    fraction, reward = history.recent("frac_reward_zero_std") or 0.0, history.recent("reward") or 0.0
    severity, text = ERROR if fraction >= _MOSTLY else WARNING, ""
    if equal is not None:
        severity, title, text = ERROR, f"All rewards are {format_number(equal[0])}", sentence(equal[1])
        fix = f"If they should differ, correct the reward ({_CHECK}); else use harder or easier prompts."
    elif fraction < _OFTEN:
        return None
    elif reward > 0.0 and reward >= 0.8 * max(history.values("reward_max") or history.values("reward")):
        severity, title = NOTE if history.has_risen else WARNING, "Most groups are solved by now"
        fix = "Use harder prompts, or end the run to save compute."
    else:
        title = f"{percent(fraction)} of the groups have equal rewards (mean {format_number(reward)}) and teach nothing"
        fix = (
            "Use easier prompts, a reward with partial credit, a larger rollout.group_size or a higher "
            f"rollout.temperature, and try the reward on a good and a bad answer: {_CHECK}."
        )
    plot = "zero-variance" if history.metrics else None
    return Finding(
        key="zero-variance", severity=severity, title=title, text=text, fix=fix, query="group_std=0", plot=plot
    )


def sentence(text: str) -> str:
    """Make a sentence: "trainer idle 41%: raise x" -> "Trainer idle 41%: raise x."."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


# -- what may keep the updates from being good ones


def off_policy(history: RunHistory) -> Finding | None:
    """Ratio, difference of log-probabilities and effective sample size: views of one thing."""
    ratio, ess = history.recent(f"{_RATIO}/mean") or 1.0, history.recent("sampling/ess") or 1.0
    first, difference = (history.values(_DIFFERENCE) or [0.0])[0], history.recent(_DIFFERENCE) or 0.0
    if any(history.setting(f"rollout.{name}") not in (None, value) for name, value in NEUTRAL_SAMPLING.items()):
        # two distributions on purpose: what is more than in the first step came later
        ratio /= next(iter(history.values(f"{_RATIO}/mean")), 1.0) or 1.0
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
        severity=ERROR if is_far else WARNING,
        title="Samples are far off policy" if is_far else "Samples are off policy",
        text=f"In the last third of the steps {shown}. {why}",
        fix=fix,
        query="mismatch>0.1",
        plot="ratio",
    )


def entropy(history: RunHistory) -> Finding | None:
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
    return Finding(key="entropy", severity=WARNING, title=title, text=text, fix=fix, query="", plot="entropy")


# -- what wastes time, in the last third of the steps; of these the first that applies is told


def slow_code(history: RunHistory) -> Finding | None:
    """Rewards, tools or an agent that take much of the time while the trainer waits."""
    scoring_s, rollout_s = history.recent("scoring/duration_s") or 0.0, history.recent("rollout/duration_s")
    if not rollout_s or (history.recent("pipeline/trainer_idle_ratio") or 0.0) < _IDLE:
        return None
    if scoring_s >= _MUCH * (scoring_s + rollout_s):
        names = [str(each.get("function") or each.get("model")) for each in history.setting("rewards") or ()]
        took = f"takes {duration(scoring_s)} a group, generating it {duration(rollout_s)}"
        title = f"Scoring limits the speed: {' and '.join(names) or 'it'} {took}"
        fix = "Make the function faster, `async` if it waits for others; rewards.0.run_in: process if it computes."
        return Finding(key="scoring", severity=WARNING, title=title, fix=fix, plot="idle")
    tools_s, what = history.recent("tools/duration_s/per_rollout") or 0.0, "Tools take"
    if history.setting("rollout.agent") is not None:
        turn_s, turns = history.recent("rollout/generation_duration_s"), history.recent("rollout/num_turns")
        tools_s, what = rollout_s - (turn_s or 0.0) * (turns or 0.0), "The agent's own work takes"
    if tools_s < _MUCH * rollout_s:
        return None
    title = f"{what} {percent(tools_s / rollout_s)} of a rollout's time"
    fix = "Make that faster, or raise rollout.max_in_flight, so that more rollouts run at once."
    return Finding(key="slow-tools", severity=WARNING, title=title, fix=fix, plot="durations")


def waiting(history: RunHistory) -> Finding | None:
    """Groups that are dropped, or trainer and servers that take turns.

    A step of 10 s, trainer idle 0.6, servers idle 0.4: 4 s of training and 6 s of generation, which
    overlapped would take 6 s.
    """
    staleness = history.setting("rollout.max_staleness")
    if not isinstance(staleness, int) or staleness >= _MAX_STALENESS:
        return None
    ended = {}
    for status in ("trained", "filtered", "stale", "failed"):
        totals = history.values(f"ledger/groups/{status}") or [0.0]
        ended[status] = max(0.0, totals[-1] - totals[len(totals) * 2 // 3 - 1])
    stale = ended["stale"] / max(1.0, sum(ended.values()))
    idle = min(history.recent(f"pipeline/{who}_idle_ratio") or 0.0 for who in ("trainer", "generator"))
    key, plot, title = (
        "dropped-groups",
        "ledger",
        f"{percent(stale)} of the groups are dropped because they are too old",
    )
    if stale < _MANY_STALE:
        if idle < _IDLE or history.num_steps < _SOME_STEPS:
            return None
        step_s = history.recent("step_time") or 0.0
        took = f"a step of {duration(step_s)} could take {duration(step_s * (1.0 - idle))}"
        key, plot, title = "taking-turns", "idle", f"Trainer and servers wait for each other: {took}"
    fix = f"Raise rollout.max_staleness from {staleness} to {staleness + 1}."
    return Finding(key=key, severity=WARNING, title=title, fix=fix, plot=plot)


def recomputed(history: RunHistory) -> Finding | None:
    ratio = history.recent("sync/recomputed_ratio") or 0.0
    if ratio <= _RECOMPUTED:
        return None
    return Finding(
        key="recomputed",
        severity=NOTE,
        title=f"{percent(ratio)} of the tokens that servers compute are those of requests in flight, again after a push",
        fix="Set weights.mode: keep_kv: requests in flight then go on with the keys and values that the old weights computed.",
        plot="idle",
    )


Rule = Callable[[RunHistory], Finding | None]
CAUSES: Sequence[Rule] = (failures, truncated, no_update, delivery, collapsed, tools, zero_variance)
SPEED: Sequence[Rule] = (slow_code, waiting, recomputed)
RULES: Sequence[Rule] = (*CAUSES, off_policy, entropy, *SPEED)


def apply(rules: Sequence[Rule], history: RunHistory) -> Iterator[Finding]:
    """Yield what the rules find, in their order."""
    return (finding for rule in rules if (finding := rule(history)) is not None)


def find(history: RunHistory) -> list[Finding]:
    """Return what all rules find, the worst first."""
    return sorted(apply(RULES, history), key=lambda finding: list(Severity).index(finding.severity))
