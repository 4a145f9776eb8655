"""Checks of how the policy moves: gradient, importance ratio, entropy, clipping, KL. Pure."""

from __future__ import annotations

from statistics import median

from grpo_async.viewer.report.evidence import Evidence, Finding, Level, figure, percent

_OFF_POLICY, _FAR_OFF_POLICY = 1.1, 1.5  # mean importance ratio, or 1 / it
_MISMATCH, _LARGE_MISMATCH = 0.1, 0.3  # mean |trainer - sampler| log-probability, nats
_LOW_ESS = 0.5
_COLLAPSED = 0.1  # of the entropy at the beginning
_SMALL_ENTROPY = 0.1  # nats
_EXPLODED = 2.0
_MUCH_CLIPPED, _MUCH_MASKED = 0.2, 0.5
_SPIKE = 50.0  # times the median gradient norm
_FAR_FROM_REFERENCE = 5.0  # nats
_STILL = 0.02  # between the smallest and the largest importance ratio of all tokens
_SOME_STALENESS, _FEW_STEPS = 0.3, 5  # from here on an update between sampling and training would show
_RATIO = "sampling/importance_sampling_ratio"


def no_gradient(evidence: Evidence) -> Finding | None:
    norms, rates = evidence.values("grad_norm"), evidence.values("lr")
    if len(rates) >= 3 and max(rates) == 0.0:
        return Finding(
            name="no-gradient",
            level=Level.BAD,
            title="The learning rate is 0",
            text="lr is 0 in every step: the policy cannot move. See optimizer.lr, optimizer.schedule and "
            "optimizer.warmup_steps.",
            plot="lr",
        )
    if len(norms) >= 3 and max(norms) == 0.0:
        return Finding(
            name="no-gradient",
            level=Level.BAD,
            title="The gradient is 0",
            text="grad_norm is 0 in every step: no advantage is different from 0, or every token is clipped or masked.",
            query="trained",
            plot="grad-norm",
        )
    return None


def bad_updates(evidence: Evidence) -> Finding | None:
    skipped, norms = sum(evidence.values("training/skipped_updates")), evidence.values("grad_norm")
    if skipped:
        return Finding(
            name="bad-updates",
            level=Level.WARNING,
            title="Updates were skipped",
            text=f"{figure(skipped)} updates were not finite and were not made. Where it happens again: a lower "
            "optimizer.lr, "
            "or model.dtype: float32.",
            plot="grad-norm",
        )
    middle = median(norms) if len(norms) >= 10 else 0.0
    if middle > 0.0 and max(norms) > _SPIKE * middle:
        step = next(int(row["step"]) for row in evidence.metrics if row.get("grad_norm") == max(norms))
        return Finding(
            name="bad-updates",
            level=Level.WARNING,
            title="The gradient has spikes",
            text=f"Its norm reached {figure(max(norms))} at step {step}; its median is {figure(middle)}. "
            "optimizer.max_grad_norm cuts "
            "what it does; look at the rollouts of that step.",
            query=f"step={step}",
            sort="-ratio_max",
            plot="grad-norm",
        )
    return None


def off_policy(evidence: Evidence) -> Finding | None:
    """Ratio, difference of log-probabilities and effective sample size: three views of one thing."""
    ratio = evidence.recent(f"{_RATIO}/mean")
    difference = evidence.recent("sampling/sampling_logp_difference/mean")
    ess = evidence.recent("sampling/ess")
    off = max(ratio, 1.0 / ratio) if ratio else None
    said = [
        f"the mean importance ratio is {figure(ratio)} (1 is on policy)" if ratio and off and off > _OFF_POLICY else "",
        f"log-probabilities of trainer and sampler differ by {figure(difference)} nats in the mean"
        if difference is not None and difference > _MISMATCH
        else "",
        f"the effective sample size is {percent(ess)}" if ess is not None and ess < _LOW_ESS else "",
    ]
    if not any(said):
        return None
    is_far = bool(
        (off and off > _FAR_OFF_POLICY) or (difference and difference > _LARGE_MISMATCH) or (ess and ess < 0.2)
    )
    first = next(iter(evidence.values("sampling/sampling_logp_difference/mean")), None)
    cause = (
        "It was so in the first step already, before any staleness: the server computes other log-probabilities "
        "than the trainer. "
        "See the check of the log-probabilities in preflight.json, inference.dtype and the chat template."
        if first is not None and first > _MISMATCH
        else "It came with training: lower rollout.max_staleness or optimizer.lr, or set loss.correction."
    )
    text = "; ".join(part for part in said if part)
    return Finding(
        name="off-policy",
        level=Level.BAD if is_far else Level.WARNING,
        title="Samples are far off policy" if is_far else "Samples are off policy",
        text=f"In the last third of the steps {text}. {cause}",
        query="mismatch>0.1",
        sort="-mismatch",
        plot="ratio",
    )


def entropy(evidence: Evidence) -> Finding | None:
    windows = evidence.windows("entropy")
    if windows is None or windows.first <= 0.0:
        return None
    moved = f"It went from {figure(windows.first)} to {figure(windows.last)} nats"
    reward = evidence.windows("reward")
    learns = reward is not None and reward.has_risen
    if windows.last < _SMALL_ENTROPY and windows.last < _COLLAPSED * windows.first:
        return Finding(
            name="entropy",
            level=Level.NOTE if learns else Level.WARNING,
            title="The entropy is almost used up" if learns else "The entropy collapsed",
            text=f"{moved}: the policy says nearly the same each time, and then all rewards of a group are equal. "
            + (
                "The reward rose, so this may be the end of what these prompts teach."
                if learns
                else "The reward did not rise. A higher loss.epsilon_high, loss.entropy_bonus or rollout.temperature, "
                "or a lower optimizer.lr keeps it up."
            ),
            query="entropy<0.05",
            sort="-step",
            plot="entropy",
        )
    if windows.last > _EXPLODED * windows.first and windows.change > 0.5 and not learns:
        return Finding(
            name="entropy",
            level=Level.WARNING,
            title="The entropy exploded",
            text=f"{moved}: the policy loses its language. A lower optimizer.lr, no loss.entropy_bonus, or a KL "
            "term (loss.beta) holds it.",
            query="entropy>2",
            sort="-step",
            plot="entropy",
        )
    return None


def clipped(evidence: Evidence) -> Finding | None:
    share = evidence.recent("clip_ratio/region_mean")
    if share is None or share < _MUCH_CLIPPED:
        return None
    return Finding(
        name="clipped",
        level=Level.WARNING,
        title="Many tokens are clipped",
        text=f"The clip took {percent(share)} of the tokens in the last third of the steps, so they do not move the "
        "policy. The steps "
        "are too large (optimizer.lr, training.minibatches), or the samples too old (rollout.max_staleness).",
        query="clipped",
        sort="-clipped_share",
        plot="clip",
    )


def masked(evidence: Evidence) -> Finding | None:
    names = ("masked/correction", "masked/off_policy")
    shares = {name: share for name in names if (share := evidence.recent(name)) is not None}
    if not shares:
        return None
    name, share = max(shares.items(), key=lambda item: item[1])
    if share < _MUCH_MASKED:
        return None
    setting = {"masked/correction": "loss.correction", "masked/off_policy": "loss.off_policy_mask"}[name]
    return Finding(
        name="masked",
        level=Level.BAD if share > 0.9 else Level.WARNING,
        title="Most tokens are left out of the loss",
        text=f"{setting} leaves out {percent(share)} of the tokens in the last third of the steps. Widen it, or "
        "find out why the samples "
        "are so far off policy.",
        query="masked",
        sort="-masked_share",
        plot="masked",
    )


def far_from_reference(evidence: Evidence) -> Finding | None:
    kl = evidence.recent("kl")
    if kl is None or kl < _FAR_FROM_REFERENCE:
        return None
    return Finding(
        name="kl",
        level=Level.WARNING,
        title="The policy is far from the reference",
        text=f"The KL divergence is {figure(kl)} nats a token in the last third of the steps. A higher loss.beta or "
        "a lower optimizer.lr "
        "holds it.",
        query="",
        sort="-step",
        plot="kl",
    )


def hardly_moves(evidence: Evidence) -> Finding | None:
    """An update makes no difference to the probability of any token: seen where samples are a step old, and trainer and sampler
    agree."""
    staleness, reward = evidence.recent("async/staleness_mean"), evidence.windows("reward")
    least = min(evidence.values(f"{_RATIO}/min"), default=None)
    most = max(evidence.values(f"{_RATIO}/max"), default=None)
    if staleness is None or least is None or most is None or evidence.num_steps < _FEW_STEPS:
        return None
    if staleness < _SOME_STALENESS or most - least > _STILL or (reward is not None and reward.has_risen):
        return None
    rate = evidence.last("lr")
    return Finding(
        name="hardly-moves",
        level=Level.BAD,
        title="The policy hardly moves",
        text=f"Of all tokens of all steps the importance ratio stayed between {least:.6g} and {most:.6g}, although the samples "
        f"were {figure(staleness)} steps old in the mean: an update changes next to nothing. optimizer.lr is too small"
        f"{'' if rate is None else f' ({rate:g} in the last step)'}, or gradients are cut to nothing (optimizer.max_grad_norm).",
        query="trained",
        sort="-step",
        plot="ratio",
    )


CHECKS = (no_gradient, hardly_moves, off_policy, entropy, bad_updates, clipped, masked, far_from_reference)
