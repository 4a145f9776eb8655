"""Is the run learning, what stands in its way, and what to do about it. Pure.

Held-out prompts decide where there are two evaluations, else the sampled reward. A change counts
when its 95% interval excludes 0 and, for a rise, when it is at least 2% of the range of rewards.
A cause that the numbers show comes before what the reward did, unless the run learns all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from grpo_async.findings.advice import quality_advice, speed_advice
from grpo_async.findings.finding import Finding, Severity, sentence, worst_first
from grpo_async.findings.history import RunHistory
from grpo_async.findings.messages import first_reward_failure, read_equal_rewards
from grpo_async.findings.statistics import Change, are_equal
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.utils.run_state import FAILED, RUNNING
from grpo_async.utils.text import count, first_line, format_number, percent

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_LITTLE = 0.02  # of the range of rewards
_TOO_WIDE = 0.1  # of it: a rise of so much that cannot be excluded leaves the question open
_MANY_STEPS = 100
_MOSTLY, _OFTEN = 0.9, 0.5
_CUT = 0.3  # of the completions that hit a limit
_MANY_FAILED = 0.05  # of the groups
_STILL = 0.02  # between the smallest and the largest importance ratio of all tokens
_SOME_STALENESS, _FEW_STEPS = 0.3, 5  # from here on an update would show in the ratio
_MIN_MOVE = 1e-6  # sum of the learning rates: about what a weight moves by in all steps
_LOST = 0.25  # of the range of rewards: what a run must have had and lost to have collapsed
_RATIO = "sampling/importance_sampling_ratio"
_CHECK = "grpo-async check-reward CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Whether a run learns.

    Args:
        is_learning: None where the data cannot tell.
        key: one word for programs: learns, little, baseline, unconfirmed, collapsed, fell, flat,
            unclear, too-early, no-steps, evaluation, or the key of the cause.
        text: how the run stands, and the cause where it does not learn.
        fix: what to do; "" where nothing stands in the way.
        numbers: first, last, change, low, high (95%), count and baseline of the reward that decided.
    """

    is_learning: bool | None
    key: str
    text: str
    fix: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The two sentences, or one: what every page and command shows of a run first."""
        return [line for line in (self.text, self.fix) if line]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find(history: RunHistory) -> list[Finding]:
    """Return the causes and the advice on quality, the worst first; `speed_advice` is apart."""
    return worst_first([*_causes(history), *quality_advice(history)])


def diagnose(history: RunHistory) -> Diagnosis:
    """Return how a run stands, and what to do about it."""
    if isinstance(metrics := history.evaluation_result.get("metrics"), Mapping):
        return _of_evaluation(history.evaluation_result.get("evaluated", "a model"), metrics)
    if history.setting("training.max_steps") == 0 and history.evaluated():
        return _of_evaluation("a model", history.evaluated()[-1].metrics)
    if history.purpose == "evaluation":
        text = f"The evaluation {'is running' if history.status == RUNNING else 'has no result'}."
        text += f" {sentence(first_line(history.error))}" if history.error else ""
        return Diagnosis(is_learning=None, key="evaluation", text=text)
    causes = _causes(history)
    errors = [cause for cause in causes if cause.severity is ERROR]
    stands = _of_reward(history, {cause.key for cause in errors})
    if errors and not stands.is_learning:
        cause = errors[0]
        sentences = [f"It does not learn: {_inside(cause.title)}.", cause.text, _went(history, cause.key)]
        text = " ".join(filter(None, sentences))
        numbers = stands.numbers
        return Diagnosis(is_learning=False, key=cause.key, text=text, fix=cause.fix, numbers=numbers)
    fixes = [" ".join([f"{cause.title}.", cause.text, cause.fix]) for cause in [*errors, *causes][:1]]
    if not fixes or stands.is_learning is not False:
        fixes.insert(0, stands.fix)
    speed = speed_advice(history)
    if speed is not None and speed.severity is WARNING and stands.is_learning is not False:
        fixes.append(f"{speed.title}. {speed.fix}")
    fix, text = " ".join(" ".join(fixes).split()), stands.text
    if history.metrics and history.status == FAILED and (error := first_line(history.error or "")):
        text = f"{text} Then the run failed: {sentence(error)}"
    return Diagnosis(is_learning=stands.is_learning, key=stands.key, text=text, fix=fix, numbers=stands.numbers)


def _inside(text: str) -> str:
    """Make a sentence the part of another: its first letter small, unless more of them are not."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _went(history: RunHistory, cause: str) -> str:
    """By how much the reward changed, where it did at all and the cause does not say it."""
    change, sampled = history.held_out(), history.trend("reward")
    if change is not None:
        return f"The held-out reward went {change}.{_against(history)}"
    if sampled is None or sampled.low == sampled.high or cause in ("collapsed", "fell"):
        return ""
    return f"The reward went {sampled}."


def _against(history: RunHistory) -> str:
    baseline = history.evaluated()[-1].metrics.get("majority_baseline") if history.evaluated() else None
    return "" if baseline is None else f" Always giving the most frequent answer scores {format_number(baseline)}."


# -- what the reward did


def _of_evaluation(model: object, metrics: Mapping[str, Any]) -> Diagnosis:
    """Of what `eval` leaves: there is nothing to learn."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    score = f"reward {format_number(numbers['reward'])}" if "reward" in numbers else "no reward"
    prompts = count(int(numbers.get("num_prompts", 0)), "held-out prompt")
    text = f"An evaluation of {model}: {score} on {prompts}."
    return Diagnosis(is_learning=None, key="evaluation", text=text, numbers=numbers)


def _of_reward(history: RunHistory, errors: set[str]) -> Diagnosis:
    """What the rewards alone say. `errors`: keys of the causes."""
    change, sampled, rewards = history.held_out(), history.trend("reward"), history.values("reward")
    cannot_move = errors & {"hardly-moves", "no-gradient"}  # then a fall is chance
    if change is not None and (change.has_risen or (change.has_fallen and not cannot_move)):
        return _of_held_out(history, change, errors)
    if not history.metrics:
        return _without_steps(history)
    if sampled is None:
        went = f"{format_number(rewards[0])} to {format_number(rewards[-1])}" if rewards else "none"
        why = f"only {count(len(rewards), 'step')} had a reward, and a trend needs at least 6 ({went})"
        return Diagnosis(is_learning=None, key="too-early", text=f"Too early to say: {why}.")
    is_learning: bool | None
    fix = ""
    widest = max(sampled.high, 0.0 if change is None else change.high)
    if sampled.has_fallen:
        is_learning, key, text, fix = False, "fell", "It does not learn: the reward fell", _fix_of_fall(history)
    elif sampled.has_risen and sampled.value < _LITTLE * history.reward_range:
        is_learning, key, text = None, "little", "It hardly learns: the reward rose"
    elif sampled.has_risen and change is not None:
        is_learning, key = None, "unconfirmed"
        rose = f"the training reward rose by {format_number(sampled.value)}"
        text, sampled = f"Not confirmed: {rose}, but the held-out reward went", change
        fix = (
            "Read the rollouts with the highest reward: are they what you want? If so, use more data, and more prompts to "
            "evaluate (evaluation.num_prompts)."
        )
    elif sampled.has_risen:
        why, fix = _why_not_evaluated(history)
        is_learning, key, text = True, "learns", f"It learns, by the sampled reward ({why}): it rose"
    elif widest < _TOO_WIDE * history.reward_range or sampled.count >= _MANY_STEPS:
        is_learning, key, text = False, "flat", "It does not learn: the reward stayed flat,"
        fix = "Try more steps, a higher optimizer.lr or a larger rollout.group_size."
        if sampled.first >= max(history.values("reward_max") or rewards) - _LITTLE * history.reward_range:
            fix = "It was at its maximum from the first step on: use harder prompts or a stricter reward."
    else:
        is_learning, key, text = None, "unclear", "Not clear yet: the reward went"
    return Diagnosis(is_learning=is_learning, key=key, text=f"{text} {sampled}.", fix=fix, numbers=sampled.numbers)


def _without_steps(history: RunHistory) -> Diagnosis:
    if history.status == RUNNING:
        text, fix = "Too early to say: no optimizer step has finished yet.", ""
    else:
        error = first_line(history.error or "")
        text = f"It did not train: no optimizer step was finished. {sentence(error)}" if error else "It did not train."
        fix = "The logs say more: logs/latest/ in the run directory."
    return Diagnosis(is_learning=None, key="no-steps", text=text, fix=fix)


def _of_held_out(history: RunHistory, change: Change, errors: set[str]) -> Diagnosis:
    """The held-out reward changed by more than chance."""
    results, peak = history.evaluated(), _peak(history)
    is_learning: bool | None = False
    last, better = results[-1], ""
    went = "rose" if change.has_risen else "fell"
    went = f"between steps {results[0].step} and {last.step} the held-out reward {went} {change}.{_against(history)}"
    if peak is not None:
        better = f"The held-out reward was better earlier: {format_number(peak.metrics['reward'])} at step {peak.step}."
    if change.has_fallen or (errors & {"collapsed", "fell"} and peak is not None):
        key, text, fix = "fell" if peak is None else "collapsed", "It does not learn", _fix_of_fall(history)
        went = f"{went} {better}".strip()
    elif is_no_better_than_baseline(last, change):
        key, text = "baseline", "It learned no more than the most frequent answer"
        fix = "Read the answers: if all are the same, use more varied data or a larger rollout.group_size; else train longer."
    elif change.value < _LITTLE * history.reward_range:
        key, text, fix, is_learning = "little", "It hardly learns", "", None
    else:
        key, text, fix, is_learning = "learns", "It learns", "", True
        if peak is not None:
            fix = f"{better} Its checkpoint may be the one to keep (checkpoint.keep_best)."
    baseline = last.metrics.get("majority_baseline")
    numbers = change.numbers | ({} if baseline is None else {"baseline": baseline})
    return Diagnosis(is_learning=is_learning, key=key, text=f"{text}: {went}", fix=fix, numbers=numbers)


def _fix_of_fall(history: RunHistory) -> str:
    lower = "Resume from an earlier checkpoint with a lower optimizer.lr"
    rate = history.last("lr")
    return f"{lower}." if rate is None else f"{lower} (it was {rate:g} in the last step)."


def _why_not_evaluated(history: RunHistory) -> tuple[str, str]:
    """Why there are not two evaluations, and what to do about it."""
    failed = next((record for record in reversed(history.evaluations) if record.error), None)
    if failed is not None:
        why = f"the evaluation of step {failed.step} failed: {first_line(failed.error or '')}"
        return why, "trainer.log has the traceback of the evaluation."
    if history.evaluated() or history.setting("evaluation") is not None:
        return "there is no second evaluation yet", ""
    return "there is no evaluation", "Set evaluation.data: held-out prompts show whether the reward is only gamed."


def _peak(history: RunHistory) -> EvaluationRecord | None:
    """The best evaluation, where it is neither the first nor the last, and the last is worse."""
    first, *between, last = history.evaluated()
    best = max([first, *between, last], key=lambda record: record.metrics["reward"])
    fell = history.between(best, last)
    is_peak = best not in (first, last) and fell.has_fallen and -fell.value > _LITTLE * history.reward_range
    return best if is_peak else None


def is_no_better_than_baseline(last: EvaluationRecord, change: Change) -> bool:
    """Whether the last evaluation is not above the frequency of the most frequent answer by more than chance. False where that is
    not known, or the first evaluation was above it already."""
    baseline = last.metrics.get("majority_baseline")
    if baseline is None or change.first > baseline:
        return False
    passed = last.metrics.get("pass@1", last.metrics["reward"])
    return passed - 2.0 * last.metrics.get("reward_stderr", 0.0) <= baseline


# -- what keeps a run from learning


def reward_fails(history: RunHistory) -> Finding | None:
    """A reward function that raises ends the run, or its evaluations."""
    errors = [history.error or "", *(record.error or "" for record in history.evaluations)]
    failure = next((line for text in errors if (line := first_reward_failure(text))), None)
    if failure is None:
        return None
    return Finding(
        key="reward-fails",
        severity=WARNING if history.metrics else ERROR,
        title="A reward function fails",
        text=f"{failure}.",
        fix=f"Correct the function, then test it: {_CHECK}.",
        query="failed",
    )


def unscored(history: RunHistory) -> Finding | None:
    if not history.metrics or history.values("reward"):
        return None
    return Finding(
        key="unscored",
        severity=ERROR,
        title="The reward functions returned None for every completion",
        fix=f"Check which rows they apply to, and try them on a good and a bad answer: {_CHECK}.",
        query="unscored",
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


def no_gradient(history: RunHistory) -> Finding | None:
    norms, rates = history.values("grad_norm"), history.values("lr")
    if len(rates) >= 3 and max(rates) == 0.0:
        title, fix = (
            "The learning rate is 0",
            "Set optimizer.lr, and check optimizer.schedule and optimizer.warmup_steps.",
        )
    elif len(norms) >= 3 and max(norms) == 0.0:
        title = "The gradient is 0: every advantage is 0, or every token is clipped or masked"
        fix = "Look at advantages, clipping and masks: grpo-async inspect-rollouts RUN trained."
    else:
        return None
    return Finding(key="no-gradient", severity=ERROR, title=title, fix=fix, query="trained", plot="grad-norm")


def hardly_moves(history: RunHistory) -> Finding | None:
    """The learning rates add up to next to nothing (an update of AdamW moves a weight by about lr); or samples are a step old, and
    the importance ratio is still 1."""
    rates, staleness = history.values("lr"), history.recent("async/staleness_mean") or 0.0
    ratios = history.values(f"{_RATIO}/min"), history.values(f"{_RATIO}/max")
    if history.num_steps < _FEW_STEPS or history.has_risen:
        return None
    if rates and 0.0 < sum(rates) < _MIN_MOVE:
        why = f"the learning rates of all steps add up to {sum(rates):.2g}"
    elif all(ratios) and staleness >= _SOME_STALENESS and max(ratios[1]) - min(ratios[0]) <= _STILL:
        why = f"no update changed any importance ratio, {min(ratios[0]):.6g} to {max(ratios[1]):.6g}"
    else:
        return None
    last = f" (it is {rates[-1]:g})" if rates else ""
    return Finding(
        key="hardly-moves",
        severity=ERROR,
        title=f"The policy hardly moves: {why}",
        fix=f"Raise optimizer.lr{last}, or optimizer.max_grad_norm if gradients are clipped away.",
        query="trained",
        plot="ratio",
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
    return Finding(
        key=key,
        severity=ERROR,
        title=f"The reward {key}, from {was} to {format_number(means[-1])} now",
        fix=_fix_of_fall(history),
        query="",
        plot="reward",
    )


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
        fix = _fix_of_equal_rewards(*equal)
    elif fraction < _OFTEN:
        return None
    elif reward > 0.0 and reward >= 0.8 * max(history.values("reward_max") or history.values("reward")):
        severity, title = NOTE if history.has_risen else WARNING, "Most groups are solved by now"
        fix = "Use harder prompts, or end the run to save compute."
    else:
        title = f"{percent(fraction)} of the groups have equal rewards (mean {format_number(reward)}) and teach nothing"
        fix = (
            "Use easier prompts, a reward with partial credit, a larger rollout.group_size or a higher rollout.temperature, and "
            f"try the reward on a good and a bad answer: {_CHECK}."
        )
    return Finding(
        key="zero-variance",
        severity=severity,
        title=title,
        text=text,
        fix=fix,
        query="group_std=0",
        plot="zero-variance" if history.metrics else None,
    )


def _fix_of_equal_rewards(value: float, why: str) -> str:
    if "rollout.max_completion_tokens" in why:
        return "Raise rollout.max_completion_tokens."
    if "rollout.temperature" in why:
        return "Raise rollout.temperature, or start again from a model that has not collapsed."
    if value > 0.0:
        return (
            f"If wrong answers get it too, correct the reward ({_CHECK}); if the prompts are solved, use harder ones."
        )
    return (
        f"If right answers get it too, correct the reward ({_CHECK}); if there are none, use easier prompts or a reward with "
        "partial credit."
    )


def failed_groups(history: RunHistory) -> Finding | None:
    failed, started = history.last("ledger/groups/failed") or 0.0, history.last("ledger/groups/started")
    if not started or failed / started < _MANY_FAILED:
        return None
    failures = {name: history.last(name) or 0.0 for name in history.names("failures/")}
    most = max(failures, key=failures.__getitem__, default=None)
    return Finding(
        key="failed-groups",
        severity=ERROR if failed / started >= _OFTEN else WARNING,
        title=f"{percent(failed / started)} of the groups failed",
        text=""
        if most is None
        else f"Most often: {most.removeprefix('failures/')}, {count(round(failures[most]), 'time')}.",
        fix="Correct what raises: logs/latest/trainer.log has the first traceback of each kind.",
        query="failed",
        plot="ledger",
    )


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


_CAUSES: tuple[Callable[[RunHistory], Finding | None], ...] = (
    # what explains the others comes first
    *(reward_fails, unscored, truncated, no_gradient, hardly_moves, collapsed, failed_groups, tools, zero_variance),
)


def _causes(history: RunHistory) -> list[Finding]:
    return [finding for cause in _CAUSES if (finding := cause(history)) is not None]
