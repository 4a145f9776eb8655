"""Checks of what is learned: the reward, its spread, its parts, and whether held-out prompts agree. Pure.

Shares are of 1. Where a threshold is a judgement, it stands here as a constant.
"""

from __future__ import annotations

from math import hypot

from grpo_async.viewer.report.evidence import Evidence, Finding, Level, Windows, figure, percent

_MANY_UNSCORED = 0.05  # of the rollouts
_MOSTLY = 0.9
_OFTEN = 0.5
_NEAR_TOP = 0.02  # of the range of rewards: nothing left to gain
_LEAST_PART_STEPS = 5
_NOTHING = 1e-9  # no change of a reward: sums are not exact
_SMALL_FALL = 0.02  # of the held-out reward


def no_steps(evidence: Evidence) -> Finding | None:
    if evidence.metrics:
        return None
    how = (
        f" It ended with: {evidence.error.strip().splitlines()[0]}" if evidence.error and evidence.error.strip() else ""
    )
    return Finding(
        name="no-steps",
        level=Level.BAD,
        title="No optimizer step was finished",
        text=f"There is no line in metrics.jsonl, so nothing was trained.{how} The logs say more: logs/latest/.",
        query="",
    )


def unscored(evidence: Evidence) -> Finding | None:
    total = sum(step.num_rollouts - step.num_failed for step in evidence.steps)
    missing = sum(max(0, step.num_unscored - step.num_failed) for step in evidence.steps)
    has_no_reward = bool(evidence.metrics) and not evidence.values("reward")
    if total and missing / total >= _MANY_UNSCORED:
        what = f"{percent(missing / total)} of the rollouts ({missing} of {total}) have no reward"
    elif has_no_reward:
        what = f"None of the {evidence.num_steps} steps has a reward"
    else:
        return None
    return Finding(
        name="unscored",
        level=Level.BAD if has_no_reward or missing >= _OFTEN * total else Level.WARNING,
        title="Rewards are missing",
        text=f"{what}: the reward functions returned None for them. Such rollouts are not trained. Try the "
        "functions on one good and "
        "one bad answer: grpo-async check-reward.",
        query="unscored",
        plot="reward",
    )


def reward_trend(evidence: Evidence) -> Finding | None:
    windows = evidence.windows("reward")
    values = evidence.values("reward")
    if not values:
        return None
    if windows is None:
        return Finding(
            name="reward-trend",
            level=Level.NOTE,
            title=f"There are only {len(values)} steps with a reward",
            text=f"A trend needs at least 6. The reward went from {figure(values[0])} to {figure(values[-1])}.",
            plot="reward",
        )
    moved = f"from {figure(windows.first)} (mean of the first steps) to {figure(windows.last)} (of the last)"
    if windows.has_risen:
        return Finding(
            name="reward-trend",
            level=Level.GOOD,
            title="The reward rose",
            text=f"It went {moved}, by more than chance would do ({figure(2 * windows.noise)}).",
            plot="reward",
        )
    if windows.has_fallen:
        return Finding(
            name="reward-trend",
            level=Level.BAD,
            title="The reward fell",
            text=f"It went {moved}. Often the steps are too large (a lower optimizer.lr) or the samples too far off "
            "policy (see the "
            "importance ratio and the staleness); or one part of the reward works against another (see the parts).",
            query="",
            sort="reward",
            plot="reward",
        )
    top = _top(evidence)
    if top is not None and windows.first >= top - _NEAR_TOP * max(abs(top), 1.0):
        return Finding(
            name="reward-trend",
            level=Level.WARNING,
            title="The reward was at its top from the first step on",
            text=f"It is {figure(windows.last)}, and the highest reward of any rollout is {figure(top)}: there is "
            "nothing to gain. "
            "Harder prompts or a stricter reward would leave something to learn.",
            plot="reward",
        )
    return Finding(
        name="reward-trend",
        level=Level.WARNING,
        title="The reward is flat",
        text=f"It went {moved}; chance alone moves it by {figure(2 * windows.noise)}. The findings below may say "
        "why; if there is none, "
        "give it more steps, a higher optimizer.lr or a larger rollout.group_size.",
        sort="reward",
        query="",
        plot="reward",
    )


def zero_variance(evidence: Evidence) -> Finding | None:
    share = evidence.recent("frac_reward_zero_std")
    if share is None or share < _OFTEN:
        return None
    windows = evidence.windows("reward")
    reward, top = evidence.recent("reward"), _top(evidence)
    is_at_top = reward is not None and top is not None and top > 0.0 and reward >= 0.8 * top
    size = evidence.setting("rollout.group_size")
    text = f"In {percent(share)} of the groups of the last third of the steps all rewards are equal"
    if is_at_top:
        rose = windows is not None and windows.has_risen
        return Finding(
            name="zero-variance",
            level=Level.NOTE if rose else Level.WARNING,
            title="Most groups are solved by now",
            text=f"{text}, mostly at the top (mean reward {figure(reward or 0.0)} of at most {figure(top or 0.0)}): "
            "they teach nothing "
            "more. Harder prompts, or an end of the run, would save the compute.",
            plot="zero-variance",
        )
    level = Level.BAD if share >= _MOSTLY else Level.WARNING
    group = f" of {size}" if isinstance(size, int) else ""
    return Finding(
        name="zero-variance",
        level=level,
        title="Almost every group has no learning signal"
        if level is Level.BAD
        else "Many groups have no learning signal",
        text=f"{text} (mean reward {figure(reward or 0.0)}), so their advantages are 0 and nothing is learned from "
        f"them. A group{group} "
        "needs better and worse answers: take easier prompts, a reward with partial credit, a larger "
        "rollout.group_size or a higher "
        "rollout.temperature; and check that the reward can be earned at all: grpo-async check-reward.",
        query="group.std=0",
        sort="-step",
        plot="zero-variance",
    )


def reward_parts(evidence: Evidence) -> Finding | None:
    """A part that never moves while there are several."""
    parts = evidence.names("rewards/", "/mean")
    if len(parts) < 2:
        return None
    still = []
    for name in parts:
        values = evidence.values(name)
        spreads = evidence.values(name.removesuffix("/mean") + "/std")
        if len(values) >= _LEAST_PART_STEPS and max(values) - min(values) < 1e-9 and max(spreads, default=0.0) < 1e-9:
            still.append((name.removeprefix("rewards/").removesuffix("/mean"), values[0]))
    if not still:
        return None
    named = ", ".join(f"{name} ({figure(value)})" for name, value in still)
    return Finding(
        name="reward-parts",
        level=Level.WARNING,
        title="A part of the reward never changes",
        text=f"Every rollout of every step got the same from {named}. It adds nothing to the advantage: either it "
        "cannot be earned "
        "(look at completions that ought to), or everything earns it.",
        query=f"reward.{still[0][0]}<={still[0][1]:g}" if still[0][0].replace("_", "").isalnum() else "",
        plot="reward-parts",
    )


def held_out(evidence: Evidence) -> Finding | None:
    """Whether held-out prompts agree with the training reward."""
    results = evidence.evaluated()
    if not results:
        return Finding(
            name="no-evaluation",
            level=Level.NOTE,
            title="There is no evaluation",
            text="The training reward alone cannot tell learning from gaming the reward. Set evaluation.data and "
            "evaluation.every_steps.",
        )
    if len(results) < 2:
        return Finding(
            name="one-evaluation",
            level=Level.NOTE,
            title="There is one evaluation only",
            text=f"Held-out reward {figure(results[0].metrics['reward'])} at step {results[0].step}; a second one "
            "would show whether it "
            "changes.",
            plot="held-out",
        )
    first, last = results[0].metrics, results[-1].metrics
    change, chance = last["reward"] - first["reward"], 2.0 * _noise(first, last)
    moved = (
        f"Held-out reward {figure(first['reward'])} at step {results[0].step}, {figure(last['reward'])} "
        f"at step {results[-1].step} (chance: {figure(chance)})."
    )
    training = evidence.windows("reward")
    if change > chance + _NOTHING:
        return Finding(name="held-out", level=Level.GOOD, title="The held-out reward rose", text=moved, plot="held-out")
    if training is not None and training.has_risen:
        return _held_out_behind(training, change, chance, moved)
    if change < -chance - _NOTHING:
        return Finding(
            name="held-out",
            level=Level.BAD,
            title="The held-out reward fell",
            text=f"{moved} Often the steps are too large (a lower optimizer.lr) or the samples too far off policy.",
            plot="held-out",
        )
    return Finding(
        name="held-out",
        level=Level.WARNING,
        title="The held-out reward did not change by more than chance",
        text=f"{moved} More prompts (evaluation.num_prompts) would show smaller changes.",
        plot="held-out",
    )


def _held_out_behind(training: Windows, change: float, chance: float, moved: str) -> Finding:
    """The training reward rose, the held-out reward not by more than chance: is it behind, or are its prompts too few?"""
    if change > _NOTHING and training.change - change <= hypot(chance, 2.0 * training.noise):
        return Finding(
            name="held-out",
            level=Level.NOTE,
            title="Whether the held-out reward rose cannot be told",
            text=f"{moved} Its change is within chance, and not far from that of the training reward "
            f"({figure(training.change)}). More prompts would tell: raise evaluation.num_prompts.",
            plot="held-out",
        )
    did = "rose far less" if change > _NOTHING else "did not"
    return Finding(
        name="held-out",
        level=Level.BAD if change < -chance - _NOTHING else Level.WARNING,
        title=f"The training reward rose, the held-out reward {did}",
        text=f"{moved} The training reward rose by {figure(training.change)}. Either the policy games the "
        "reward (read the rollouts with the highest reward: are they what you want?), or it learned the prompts by "
        "heart (more data, fewer steps), or evaluation and training differ (prompts, reward, temperature, lengths).",
        query="",
        sort="-reward",
        plot="held-out",
    )


def held_out_peak(evidence: Evidence) -> Finding | None:
    """Whether an evaluation between the first and the last was better than the last."""
    results = evidence.evaluated()
    if len(results) < 3:
        return None
    last = results[-1]
    best = max(results, key=lambda each: each.metrics["reward"])
    fell = best.metrics["reward"] - last.metrics["reward"]
    if best is results[0] or fell <= max(2.0 * _noise(best.metrics, last.metrics), _SMALL_FALL):
        return None
    return Finding(
        name="held-out-peaked",
        level=Level.WARNING,
        title="The held-out reward was better before",
        text=f"It is {figure(last.metrics['reward'])} at step {last.step}; the best was "
        f"{figure(best.metrics['reward'])} at step {best.step}. The checkpoint of that step may be the one to keep "
        "(checkpoint.keep_best).",
        plot="held-out",
    )


def ended_early(evidence: Evidence) -> Finding | None:
    if evidence.status == "finished" or not evidence.metrics:
        return None
    last = int(evidence.metrics[-1]["step"])
    planned = evidence.setting("training.max_steps")
    of = f" of {planned}" if isinstance(planned, int) else ""
    what, text = {
        "failed": ("failed", "How it ended stands above; logs/latest/ says more."),
        "stopped": ("was stopped", "`grpo-async train ... --resume` goes on from its checkpoint."),
        "running": ("goes on, and is", "This report is of the time when it was made."),
        "killed": ("was killed", "Its launcher is gone without a word. `--resume` goes on from the last checkpoint."),
        "silent": ("fell silent", "Its launcher, on another machine, has written nothing for a while: is it dead?"),
    }.get(
        evidence.status, ("has not come to an end; it is", "It still runs, or it was killed: then `--resume` goes on.")
    )
    return Finding(
        name="ended-early",
        level=Level.WARNING if evidence.status in ("failed", "killed", "silent") else Level.NOTE,
        title=f"The run {what} at step {last}{of}",
        text=text,
    )


def _top(evidence: Evidence) -> float | None:
    """The highest reward that any rollout got, where that is recorded; else the highest mean of a step."""
    return max(evidence.values("reward_max") or evidence.values("reward"), default=None)


def _noise(one: object, other: object) -> float:
    """Standard error of the difference of two evaluations."""
    errors = [float(metrics.get("reward_stderr", 0.0)) for metrics in (one, other) if isinstance(metrics, dict)]
    return float(sum(error**2 for error in errors) ** 0.5)


CHECKS = (no_steps, unscored, reward_trend, zero_variance, reward_parts, held_out, held_out_peak, ended_early)
