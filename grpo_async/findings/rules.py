"""What the metrics of a run say about its learning, its rollouts and its updates: each rule is a pure function. Fractions are of 1.

Where a threshold is a judgment, it stands here as a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf

from grpo_async.config.sections import NEUTRAL_SAMPLING
from grpo_async.findings.evidence import Evidence
from grpo_async.findings.finding import Finding, Severity, sentence
from grpo_async.findings.messages import equal_value, first_reward_failure
from grpo_async.findings.statistics import Change, are_equal
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.utils.run_state import RUNNING
from grpo_async.utils.text import count, first_line, format_number, percent

ERROR, WARNING, GOOD, NOTE = Severity.ERROR, Severity.WARNING, Severity.GOOD, Severity.NOTE

_MANY_UNSCORED = 0.05  # of the rollouts
_MOSTLY, _OFTEN = 0.9, 0.5
_NEAR_TOP = 0.02  # of the range of rewards: nothing left to gain
_MANY_FAILED = 0.05  # of the groups
_OFF_POLICY, _FAR_OFF_POLICY = 1.1, 1.5  # mean importance ratio, or 1 / it
_MISMATCH, _LARGE_MISMATCH = 0.1, 0.3  # mean |trainer - sampler| log-probability, nats
_LOW_ESS = 0.5
_COLLAPSED, _SMALL_ENTROPY, _EXPLODED = 0.1, 0.1, 2.0  # of the entropy at the beginning; nats; times the beginning
_STILL = 0.02  # between the smallest and the largest importance ratio of all tokens
_SOME_STALENESS, _FEW_STEPS = 0.3, 5  # from here on an update between sampling and training would show
_MIN_MOVE = 1e-6  # of the learning rates of all steps together: about what a weight moves by in all of them
_LOST = 0.25  # of the range of rewards: what a run must have had and lost to have collapsed
_RATIO = "sampling/importance_sampling_ratio"
_LATE = "In the last third of the steps"


def no_steps(evidence: Evidence) -> Finding | None:
    if evidence.metrics:
        return None
    if evidence.status == RUNNING:
        return Finding(key="no-steps", severity=NOTE, title="No optimizer step has finished yet")
    error = first_line(evidence.error or "")
    how = sentence(f" It ended with: {error}") if error else ""
    return Finding(
        key="no-steps", severity=ERROR, title="No optimizer step was finished",
        text=f"metrics.jsonl is empty, so nothing was trained.{how}", fix="See the logs: logs/latest/.", query="",
    )  # fmt: skip


def reward_fails(evidence: Evidence) -> Finding | None:
    """A reward function that raises ends the run, or its evaluations."""
    errors = [evidence.error or "", *(each.why_not or "" for each in evidence.evaluations if each.error)]
    found = next((line for text in errors if (line := first_reward_failure(text))), None)
    if found is None:
        return None
    return Finding(
        key="reward-fails", severity=WARNING if evidence.metrics else ERROR, title="A reward function fails",
        text=f"{found}.", query="failed",
        fix="Groups that it cannot score are not trained. Fix it, then test it: grpo-async check-reward.",
    )  # fmt: skip


def unscored(evidence: Evidence) -> Finding | None:
    total, missing = evidence.num_sampled, evidence.num_unscored
    has_no_reward = bool(evidence.metrics) and not evidence.values("reward")
    if total and missing / total >= _MANY_UNSCORED:
        why = f"{percent(missing / total)} of the rollouts ({missing} of {total}) have no reward"
    elif has_no_reward:
        why = f"None of the {evidence.num_steps} steps has a reward"
    else:
        return None
    return Finding(
        key="unscored", severity=ERROR if has_no_reward or missing >= _OFTEN * total else WARNING, title="Rewards are missing",
        text=f"{why}: the reward functions returned None for them. Such rollouts are not trained.",
        fix="Try the functions on one good and one bad answer: grpo-async check-reward.", query="unscored", plot="reward",
    )  # fmt: skip


def no_gradient(evidence: Evidence) -> Finding | None:
    norms, rates = evidence.values("grad_norm"), evidence.values("lr")
    if len(rates) >= 3 and max(rates) == 0.0:
        return Finding(
            key="no-gradient", severity=ERROR, title="The learning rate is 0",
            text="lr is 0 in every step: the policy cannot move.",
            fix="See optimizer.lr, optimizer.schedule and optimizer.warmup_steps.", setting="optimizer.lr", current=0.0, plot="lr",
        )  # fmt: skip
    if len(norms) >= 3 and max(norms) == 0.0:
        return Finding(
            key="no-gradient", severity=ERROR, title="The gradient is 0",
            text="grad_norm is 0 in every step: either every advantage is 0, or every token is clipped or masked.",
            query="trained", plot="grad-norm",
        )  # fmt: skip
    return None


def hardly_moves(evidence: Evidence) -> Finding | None:
    """Whether the steps are too small: the learning rates add up to next to nothing, and an update of AdamW moves a weight by about
    lr; or samples are a step old, and still the importance ratio is 1: an update changes the probability of no token."""
    rates, staleness = evidence.values("lr"), evidence.recent("async/staleness_mean")
    if evidence.num_steps < _FEW_STEPS or evidence.has_risen:
        return None
    least = min(evidence.values(f"{_RATIO}/min"), default=None)
    most = max(evidence.values(f"{_RATIO}/max"), default=None)
    if rates and 0.0 < sum(rates) < _MIN_MOVE:
        text = f"The learning rates of all steps add up to {sum(rates):.2g}, and an update moves a weight by about as much."
    elif staleness is None or least is None or most is None or staleness < _SOME_STALENESS or most - least > _STILL:
        return None
    else:
        text = (
            f"Of all tokens of all steps the importance ratio stayed between {least:.6g} and {most:.6g}, although the samples "
            f"were {format_number(staleness)} steps old on average: an update changes next to nothing."
        )
    rate = rates[-1] if rates else None
    return Finding(
        key="hardly-moves", severity=ERROR, title="The policy hardly moves", text=text,
        fix=f"optimizer.lr is too small{'' if rate is None else f' ({rate:g} in the last step)'}, or gradients are cut to nothing "
        "(optimizer.max_grad_norm).",
        setting="optimizer.lr", current=rate, query="trained", sort="-step", plot="ratio",
    )  # fmt: skip


def zero_variance(evidence: Evidence) -> Finding | None:
    """All rewards equal: of the run, or of most groups at its end."""
    value = constant_reward(evidence)
    if value is not None:
        rest = (
            "the prompts are solved (use harder ones or a stricter reward), or the function pays for all"
            if value > 0.0
            else "the prompts are too hard for this policy (use easier ones, or a reward with partial credit), or the "
            "function does not recognize right answers"
        )
        return Finding(
            key="zero-variance", severity=ERROR, title=f"All rewards are {format_number(value)}", numbers={"reward": value},
            text="Every group's rewards are all equal, so its advantages are 0 and there is nothing to learn from.",
            fix=f"Either {rest}. Try it on one good and one bad answer: grpo-async check-reward.", query="group_std=0",
            sort="-step", plot="zero-variance" if evidence.metrics else None,
        )  # fmt: skip
    fraction = evidence.recent("frac_reward_zero_std")
    if fraction is None or fraction < _OFTEN:
        return None
    reward, top = evidence.recent("reward"), evidence.top
    text = f"In {percent(fraction)} of the groups of the last third of the steps all rewards are equal"
    if reward is not None and top is not None and top > 0.0 and reward >= 0.8 * top:
        return Finding(
            key="zero-variance", severity=NOTE if evidence.has_risen else WARNING, title="Most groups are solved by now",
            text=f"{text}, mostly at the top (mean reward {format_number(reward)} of at most {format_number(top)}): "
            "they teach nothing more.",
            fix="Use harder prompts or end the run to save compute.", plot="zero-variance",
        )  # fmt: skip
    severity = ERROR if fraction >= _MOSTLY else WARNING
    size = evidence.setting("rollout.group_size")
    return Finding(
        key="zero-variance", severity=severity, numbers={"fraction": fraction},
        title="Almost every group has no learning signal" if severity is ERROR else "Many groups have no learning signal",
        text=f"{text} (mean reward {format_number(reward or 0.0)}), so their advantages are 0 and nothing is learned from them. "
        f"A group{f' of {size}' if isinstance(size, int) else ''} needs better and worse answers.",
        fix="Use easier prompts, a reward with partial credit, a larger rollout.group_size or a higher rollout.temperature; and "
        "check that the reward can be earned at all: grpo-async check-reward.",
        query="group_std=0", sort="-step", plot="zero-variance",
    )  # fmt: skip


def constant_reward(evidence: Evidence) -> float | None:
    """The reward that every rollout of the run got; None where they differ, or there are none. A run that ends before its first
    step because nothing can be learned says it in its error."""
    lows, highs = evidence.values("reward_min"), evidence.values("reward_max")
    if lows and highs:
        return highs[0] if are_equal(min(lows), max(highs)) else None
    return None if evidence.metrics else equal_value(evidence.error or "")


def collapsed(evidence: Evidence) -> Finding | None:
    """Whether the sampled reward was much better before: the mean of the best tenth of the steps against the last one."""
    rows = [row for row in evidence.metrics if "reward" in row]  # a step may have none
    steps, values = [int(row["step"]) for row in rows], [row["reward"] for row in rows]
    size = max(3, len(values) // 10)
    if len(values) < 3 * size:
        return None
    means = [sum(values[begin : begin + size]) / size for begin in range(len(values) - size + 1)]
    best = max(range(len(means)), key=means.__getitem__)
    noise = sum(abs(one - other) for one, other in pairwise(values)) / (len(values) - 1) / size**0.5
    lost = means[best] - means[-1]
    if lost < max(_LOST * evidence.reward_range, 4.0 * noise):
        return None
    return Finding(
        key="collapsed", severity=ERROR, title="The reward collapsed",
        numbers={"best": means[best], "best_step": steps[best], "last": means[-1]},
        text=f"It was {format_number(means[best])} at steps {steps[best]} to {steps[best + size - 1]}, and is "
        f"now {format_number(means[-1])}.",
        fix="Resume from an earlier checkpoint with a lower optimizer.lr. Look at the entropy, the importance ratio and the "
        "gradient norm before the fall.",
        setting="optimizer.lr", current=evidence.last("lr"), query="", sort="-step", plot="reward",
    )  # fmt: skip


def reward_trend(evidence: Evidence) -> Finding | None:
    values, change, top = evidence.values("reward"), evidence.trend("reward"), evidence.top
    if not values or constant_reward(evidence) is not None:
        return None
    if change is None:
        return Finding(
            key="reward-trend", severity=NOTE, title=f"Only {count(len(values), 'step')} had a reward",
            text=f"A trend needs at least 6. The reward went from {format_number(values[0])} to {format_number(values[-1])}.",
            plot="reward",
        )  # fmt: skip
    severity, title, fix, is_shown = WARNING, "The reward is flat", (
        "The other findings may explain why; otherwise try more steps, a higher optimizer.lr or a larger rollout.group_size."
    ), True  # fmt: skip
    if change.has_risen:
        severity, title, fix, is_shown = GOOD, "The reward rose", "", False
    elif change.has_fallen:
        severity, title, fix = ERROR, "The reward fell", (
            "Often the steps are too large (a lower optimizer.lr) or the samples too far off policy (see the importance ratio and "
            "the staleness), or one part of the reward works against another (see the parts)."
        )  # fmt: skip
    elif top is not None and change.first >= top - _NEAR_TOP * evidence.reward_range:
        title, is_shown = "The reward was at its maximum from the first step on", False
        fix = f"No rollout got more than {format_number(top)}. Harder prompts or a stricter reward would leave something to learn."
    return Finding(
        key="reward-trend", severity=severity, title=title, text=f"The line through the steps goes {change}.", fix=fix,
        numbers=change.numbers, query="" if is_shown else None, sort="reward" if is_shown else None, plot="reward",
    )  # fmt: skip


def held_out(evidence: Evidence) -> Finding | None:
    """Whether held-out prompts agree with the training reward."""
    results = evidence.evaluated()
    if len(results) < 2:
        return _few_evaluations(evidence, results)
    first, last, change = results[0], results[-1], evidence.between(results[0], results[-1])
    baseline = last.metrics.get("majority_baseline")
    against = "" if baseline is None else f" Always giving the most frequent answer scores {format_number(baseline)}."
    text = f"Between steps {first.step} and {last.step} it goes {change}.{against}"
    numbers = change.numbers | ({} if baseline is None else {"baseline": baseline})

    def found(severity: Severity, title: str, why: str = "", fix: str = "", query: str | None = None) -> Finding:
        return Finding(
            key="held-out", severity=severity, title=title, text=f"{text} {why}".strip(), fix=fix, numbers=numbers,
            plot="held-out", query=query, sort=None if query is None else "-reward",
        )  # fmt: skip

    if change.has_risen and is_no_better_than_baseline(last, change):
        why = "As far as can be seen, it learned no more than that."
        fix = "Read the answers: are they all the same? More steps, more varied data or a larger rollout.group_size may go further."
        return found(WARNING, "The held-out reward is no better than always giving the most frequent answer", why, fix)
    if change.has_risen:
        return found(GOOD, "The held-out reward rose")
    training = evidence.trend("reward")
    if training is not None and training.has_risen:
        behind = training.value - change.value
        if not are_equal(change.first, change.last) and behind <= hypot(
            change.high - change.value, training.high - training.value
        ):
            why = f"That is within chance, and not far from the change of the training reward ({format_number(training.value)})."
            fix = "More prompts would settle it: raise evaluation.num_prompts."
            return found(NOTE, "It is not clear whether the held-out reward rose", why, fix)
        why = (
            f"The training reward rose by {format_number(training.value)}. Either this is reward hacking (read the rollouts "
            "with the highest reward: are they what you want?), or it memorized the prompts (use more data or fewer steps), or "
            "evaluation and training differ (prompts, reward, temperature, lengths)."
        )
        severity = ERROR if change.has_fallen else WARNING
        return found(severity, "The training reward rose, the held-out reward did not follow", why, query="")
    if change.has_fallen:
        fix = "Often the steps are too large (a lower optimizer.lr) or the samples too far off policy."
        return found(ERROR, "The held-out reward fell", fix=fix)
    fix = "More prompts (evaluation.num_prompts) would show smaller changes."
    return found(WARNING, "The held-out reward did not change by more than chance", fix=fix)


def _few_evaluations(evidence: Evidence, results: list[EvaluationRecord]) -> Finding:
    failed = next((each for each in reversed(evidence.evaluations) if each.error), None)
    if failed is not None:
        return Finding(
            key="failed-evaluation", severity=WARNING, title="The evaluation failed",
            text=sentence(f"At step {failed.step}: {first_line(failed.error or '')}"), fix="trainer.log has the traceback.",
        )  # fmt: skip
    if results:
        return Finding(
            key="few-evaluations", severity=NOTE, title="There is only one evaluation",
            text=f"Held-out reward {format_number(results[0].metrics['reward'])} at step {results[0].step}; a second one would "
            "show whether it changes.",
            plot="held-out",
        )  # fmt: skip
    if evidence.setting("evaluation") is not None:
        return Finding(
            key="few-evaluations", severity=NOTE, title="No evaluation has ended yet",
            text="`evaluation` is set, but evaluations.jsonl has no result.",
        )  # fmt: skip
    return Finding(
        key="no-evaluation", severity=NOTE, title="There is no evaluation",
        text="The training reward alone cannot distinguish learning from reward hacking.",
        fix="Set evaluation.data and evaluation.every_steps.", setting="evaluation.data",
    )  # fmt: skip


def held_out_peak(evidence: Evidence) -> Finding | None:
    """Whether an evaluation between the first and the last was better than the last."""
    results = evidence.evaluated()
    if len(results) < 3:
        return None
    last, best = results[-1], max(results, key=lambda each: each.metrics["reward"])
    fell = evidence.between(best, last)
    if best is results[0] or best is last or not fell.has_fallen or -fell.value <= _NEAR_TOP * evidence.reward_range:
        return None
    return Finding(
        key="held-out-peaked", severity=WARNING, title="The held-out reward was better earlier",
        text=f"It is {format_number(fell.last)} at step {last.step}; the best was {format_number(fell.first)} at step {best.step}.",
        fix="The checkpoint of that step may be the one to keep (checkpoint.keep_best).",
        numbers={"best": fell.first, "best_step": best.step, "last": fell.last}, plot="held-out",
    )  # fmt: skip


def failed_groups(evidence: Evidence) -> Finding | None:
    failed, started = evidence.last("ledger/groups/failed"), evidence.last("ledger/groups/started")
    fraction = (failed or 0.0) / started if started else 0.0
    if fraction < _MANY_FAILED:
        return None
    kinds = {name.removeprefix("failures/"): evidence.last(name) or 0.0 for name in evidence.names("failures/")}
    kinds |= dict(evidence.errors)
    kind = max(kinds, key=kinds.__getitem__, default=None)
    text = f"{percent(fraction)} of the groups failed: too few rollouts survived, scoring raised, or the update was not finite."
    if kind is not None:
        text += f" The most frequent failure, {count(round(kinds[kind]), 'time')}: {kind}"
    return Finding(
        key="failed-groups", severity=ERROR if fraction >= _OFTEN else WARNING, title="Rollouts fail", numbers={"failed": fraction},
        text=sentence(text),
        fix="trainer.log has the first traceback of each kind.", query="failed", sort="-step", plot="ledger",
    )  # fmt: skip


def off_policy(evidence: Evidence) -> Finding | None:
    """Ratio, difference of log-probabilities and effective sample size: three views of one thing."""
    ratio, ess = evidence.recent(f"{_RATIO}/mean") or 1.0, evidence.recent("sampling/ess")
    differences = evidence.values("sampling/sampling_logp_difference/mean")
    first, difference = (
        (differences[0] if differences else 0.0),
        evidence.recent("sampling/sampling_logp_difference/mean") or 0.0,
    )
    if any(evidence.setting(f"rollout.{name}") not in (None, neutral) for name, neutral in NEUTRAL_SAMPLING.items()):
        # sampler and trainer have two distributions on purpose: what the first step shows is that, what is more came later
        ratio /= next(iter(evidence.values(f"{_RATIO}/mean")), 1.0) or 1.0
        difference, first = difference - first, 0.0
    off = max(ratio, 1.0 / ratio)
    views = [f"the mean importance ratio is {format_number(ratio)} times that on policy"] if off > _OFF_POLICY else []
    if difference > _MISMATCH:
        views.append(f"log-probabilities of trainer and sampler differ by {format_number(difference)} nats on average")
    if ess is not None and ess < _LOW_ESS:
        views.append(f"the effective sample size is {percent(ess)}")
    if not views:
        return None
    is_far = off > _FAR_OFF_POLICY or difference > _LARGE_MISMATCH or (ess is not None and ess < 0.2)
    why, fix = "It developed during training.", "Lower rollout.max_staleness or optimizer.lr, or set loss.correction."
    if first > _MISMATCH:
        why = "This was already so in the first step, before any staleness: the server computes different log-probabilities."
        fix = "See the log-probability check in preflight.json, inference.dtype and the chat template."
    return Finding(
        key="off-policy", severity=ERROR if is_far else WARNING,
        title="Samples are far off policy" if is_far else "Samples are off policy",
        text=f"{_LATE} {'; '.join(views)}. {why}", fix=fix, query="mismatch>0.1", sort="-mismatch", plot="ratio",
    )  # fmt: skip


def entropy(evidence: Evidence) -> Finding | None:
    ends = evidence.ends("entropy")
    if ends is None or ends[0] <= 0.0:
        return None
    (first, last), learns = ends, evidence.has_risen
    moved = f"It went from {format_number(first)} to {format_number(last)} nats"
    if last < _SMALL_ENTROPY and last < _COLLAPSED * first:
        return Finding(
            key="entropy", severity=NOTE if learns else WARNING,
            title="The entropy is nearly 0" if learns else "The entropy collapsed",
            text=f"{moved}: the policy says nearly the same each time, and then all rewards of a group are equal. "
            + ("The reward rose, so this may be the end of what these prompts teach." if learns else "The reward did not rise."),
            fix="" if learns else "A higher loss.epsilon_high, loss.entropy_bonus or rollout.temperature, or a lower optimizer.lr "
            "keeps it up.",
            query="entropy<0.05", sort="-step", plot="entropy",
        )  # fmt: skip
    if last > _EXPLODED * first and last - first > 0.5 and not learns:
        return Finding(
            key="entropy", severity=WARNING, title="The entropy exploded", text=f"{moved}: the text is becoming random tokens.",
            fix="A lower optimizer.lr, no loss.entropy_bonus, or a KL term (loss.beta) stabilizes it.",
            query="entropy>2", sort="-step", plot="entropy",
        )  # fmt: skip
    return None


def bad_updates(evidence: Evidence) -> Finding | None:
    skipped = sum(evidence.values("training/skipped_updates"))
    if not skipped:
        return None
    return Finding(
        key="bad-updates", severity=WARNING, title="Updates were skipped",
        text=f"Not finite, and so skipped: {count(round(skipped), 'update')}.",
        fix="If it happens again: a lower optimizer.lr, or model.dtype: float32.", plot="grad-norm",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A finding where the mean of a metric over the last third of the steps reaches `warns`, or `fails`, or falls below `least`.
    `text` takes the value; `setting` is the one to change."""

    key: str
    metric: str
    warns: float = inf
    fails: float = inf
    least: float = -inf
    title: str
    text: str
    fix: str = ""
    setting: str | None = None
    query: str
    sort: str | None = None
    plot: str
    form: Callable[[float], str] = percent

    def __call__(self, evidence: Evidence) -> Finding | None:
        value = evidence.recent(self.metric)
        if value is None or self.least <= value < self.warns:
            return None
        current = evidence.setting(self.setting) if self.setting else None
        current = current if isinstance(current, int | float) else None
        why = "" if current is None else f" ({self.setting} is {current})"
        return Finding(
            key=self.key, severity=ERROR if value >= self.fails else WARNING, title=self.title, fix=self.fix, query=self.query,
            text=f"{_LATE} {self.text.format(self.form(value))}{why}.", numbers={self.metric: value}, sort=self.sort,
            plot=self.plot, setting=self.setting, current=current,
        )  # fmt: skip


_TRUNCATED = _Limit(
    key="truncated", metric="completions/clipped_ratio", warns=0.3, fails=0.9, title="Completions are truncated",
    text="{} of the rollouts hit a limit before they ended, and a truncated answer rarely earns its reward",
    fix="Raise the limit, and check whether the policy ends its turns at all: the end-of-turn token may be missing from "
    "model.end_of_turn_tokens, or the chat template may not be the model's.",
    setting="rollout.max_completion_tokens", query="truncated", sort="-step", plot="truncated",
)  # fmt: skip
_LEFT_OUT = "leaves {} of the tokens out of the loss"
_WIDEN = "Widen it, or find out why the samples are so far off policy."
_LIMITS = (
    _Limit(key="tools", metric="tools/call_frequency", least=0.01, title="The tools are hardly ever called", form=format_number,
           text="there are {} calls per completion, and a policy that never calls a tool cannot learn to use it",
           fix="Explain in the system prompt (data.train.system_prompt) how to call them, or start from a model that does.",
           query="tool_calls=0", plot="tools"),
    _Limit(key="tools", metric="tools/parse_error_frequency", warns=0.1, fails=0.5, title="Tool calls cannot be read",
           text="{} of the turns could not be parsed for calls", query="tool_calls=0", plot="tools",
           fix="tool_calling.parser may be wrong for this model, or the policy writes calls that its template does not know."),
    _Limit(key="tools", metric="tools/failure_frequency", warns=0.5, title="Most tool calls fail",
           text="{} of the calls failed", query="failed_tool_calls>0", sort="-step", plot="tools"),
    _Limit(key="clipped", metric="clip_ratio/region_mean", warns=0.2, title="Many tokens are clipped",
           text="{} of the tokens are clipped, so they do not move the policy", query="clipped", plot="clip",
           sort="-clipped_fraction",
           fix="The steps are too large (optimizer.lr, training.minibatches), or the samples too old (rollout.max_staleness)."),
    _Limit(key="masked", metric="masked/correction", warns=0.5, fails=0.9, title="Most tokens are left out of the loss",
           text=f"loss.correction {_LEFT_OUT}", fix=_WIDEN, query="masked", sort="-masked_fraction", plot="masked"),
    _Limit(key="masked", metric="masked/off_policy", warns=0.5, fails=0.9, title="Most tokens are left out of the loss",
           text=f"loss.off_policy_mask {_LEFT_OUT}", fix=_WIDEN, query="masked", sort="-masked_fraction", plot="masked"),
    _Limit(key="kl", metric="kl", warns=5.0, title="The policy is far from the reference", form=format_number,
           text="the KL divergence is {} nats per token", fix="A higher loss.beta or a lower optimizer.lr keeps it closer.",
           query="", sort="-step", plot="kl"),
)  # fmt: skip


def is_no_better_than_baseline(last: EvaluationRecord, change: Change) -> bool:
    """Whether the last evaluation is not above the frequency of the most frequent answer by more than chance. False where that is
    not known (`evaluation.baseline_column`), or the first evaluation was above it already."""
    baseline = last.metrics.get("majority_baseline")
    if baseline is None or change.first > baseline:
        return False
    passed = last.metrics.get("pass@1", last.metrics["reward"])
    return passed - 2.0 * last.metrics.get("reward_stderr", 0.0) <= baseline


RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    # what explains the rest stands before it
    no_steps, reward_fails, unscored, _TRUNCATED, no_gradient, hardly_moves, collapsed, zero_variance, reward_trend,
    held_out, held_out_peak, failed_groups, off_policy, entropy, bad_updates, *_LIMITS,
)  # fmt: skip
