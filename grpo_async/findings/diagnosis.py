"""Is the run learning, what stands in its way, and what to do about it. Pure.

Held-out prompts decide where there are two evaluations, else the sampled reward. A change counts
when its 95% interval excludes 0 and, for a rise, when it is at least 2% of the range of rewards.
A cause that the numbers show comes before what the reward did, unless the run learns all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_async.findings.history import RunHistory
from grpo_async.findings.rules import CAUSES, SPEED, Severity, apply, fix_of_fall, sentence
from grpo_async.findings.statistics import Change
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.utils.run_state import FAILED, RUNNING
from grpo_async.utils.text import count, first_line, format_number

_LITTLE = 0.02  # of the range of rewards
_TOO_WIDE = 0.1  # of it: a rise of so much that cannot be excluded leaves the question open
_MANY_STEPS = 100


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


def diagnose(history: RunHistory) -> Diagnosis:
    """Return how a run stands, and what to do about it."""
    if isinstance(metrics := history.evaluation_result.get("metrics"), Mapping):
        return _of_evaluation(history.evaluation_result.get("evaluated", "a model"), metrics)
    if history.purpose == "evaluation":
        text = f"The evaluation {'is running' if history.status == RUNNING else 'has no result'}."
        text += f" {sentence(first_line(history.error))}" if history.error else ""
        return Diagnosis(is_learning=None, key="evaluation", text=text)
    causes = list(apply(CAUSES, history))
    errors = [cause for cause in causes if cause.severity is Severity.ERROR]
    stands = _of_reward(history, {cause.key for cause in errors})
    if errors and not stands.is_learning:
        cause = errors[0]
        sentences = [f"It does not learn: {_inside(cause.title)}.", cause.text, _went(history, cause.key)]
        text = " ".join(filter(None, sentences))
        return Diagnosis(is_learning=False, key=cause.key, text=text, fix=cause.fix, numbers=stands.numbers)
    fixes = [" ".join([f"{cause.title}.", cause.text, cause.fix]) for cause in [*errors, *causes][:1]]
    if not fixes or stands.is_learning is not False:
        fixes.insert(0, stands.fix)
    if stands.is_learning is not False:
        fixes += [f"{speed.title}. {speed.fix}" for speed in apply(SPEED, history)][:1]
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
    cannot_move = errors & {"hardly-moves", "no-gradient", "no-change"}  # then a fall is chance
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
        is_learning, key, text, fix = False, "fell", "It does not learn: the reward fell", fix_of_fall(history)
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
        key, text, fix = "fell" if peak is None else "collapsed", "It does not learn", fix_of_fall(history)
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
