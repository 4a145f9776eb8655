"""The loss of a training step. See `Objective` for the whole, the functions above it for its terms.

    policy loss of each token (`loss.type`, or your own)  x  importance weight, 0 where a mask excludes the token
        + what `loss.score_centering` subtracts from it
        + beta x KL                                             weighted by the reduction (batching.minibatch), summed
        - entropy_bonus x mean entropy                          over the minibatch

Every term is a sum over tokens with weights known before the first forward, so it does not depend on how samples are packed,
cut into micro-batches or spread over ranks (bnpo excepted, by definition).
A loss of your own is f(inputs: LossInputs, **arguments) -> tensor (N,), see `UserLoss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from grpo_async.batching.pack import MicroBatch, Rows
from grpo_async.config.sections import (
    BaseLoss,
    CispoLoss,
    ClippedLoss,
    CustomLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    ImportanceSamplingSection,
    SapoLoss,
    VespoLoss,
)
from grpo_async.errors import RunError
from grpo_async.training.logprobs import PolicyOutput, TokenObjective
from grpo_async.user_code.references import resolve_and_check

_MAX_LOG_RATIO = 80.0
_MIN_TAIL = 1e-6  # probability of all tokens but the likeliest, in `centering`
_RARE = -40.0  # logprob of a token so rare that a loss looks at its ratio only


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The N trained tokens of one micro-batch, one after another; N >= 1. A custom loss gets this.

    Two samples of 2 and 1 trained tokens: sample_index = [0, 0, 1]. The loss of the minibatch is the sum of weights x loss over
    all its micro-batches and ranks. A loss is called with gradient, and once more without for the metrics."""

    logprobs: torch.Tensor  # (N,) float32, under the trained policy, with gradient
    proximal_logprobs: torch.Tensor  # (N,) float32, under the proximal policy (`loss.proximal`), no gradient
    sampler_logprobs: torch.Tensor  # (N,) float32, as reported by the server that sampled
    ref_logprobs: torch.Tensor | None  # (N,) float32, under `loss.reference`; None while loss.beta is 0
    entropy: torch.Tensor  # (N,) float32, nats, with gradient
    advantages: torch.Tensor  # (N,) float32, the same for all tokens of a sample but for what `distillation` adds
    weights: torch.Tensor  # (N,) float32, the reduction: see batching.minibatch
    sample_index: torch.Tensor  # (N,) int64, which sample of the micro-batch: 0, 1, ... without gaps
    staleness: torch.Tensor  # (N,) int64, finished steps between sampling and training


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of each token and what the metrics need. All tensors are (N,), and only `loss` has a gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Importance weight as the loss uses it: of cispo after its cap, else before clipping (`clipped_low`, `clipped_high`)."""
    clipped_low: torch.Tensor | None = None  # bool; None for losses that do not clip on this side
    clipped_high: torch.Tensor | None = None
    is_capped: torch.Tensor | None = None  # bool; `delta` removed the gradient; None for losses without `delta`
    is_per_sequence: bool = False  # the ratio is that of the whole sample: metrics count samples, not tokens


def sequence_sum(values: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """At every token, the sum of `values` (N,) over its sample: [1, 2, 5], sample_index [0, 0, 1] -> [3, 3, 5].

    A micro-batch has at most N samples, so the sums get N places, and their number need not be read from the device."""
    sums = torch.zeros_like(values).index_add(0, sample_index, values)
    return sums[sample_index]


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio) (N,), capped at e^80: anything above is beyond every clip, and inf would make the gradient 0 x inf = NaN, even
    where the loss does not depend on it. Every ratio of two policies is computed here."""
    return torch.exp(log_ratio.clamp(max=_MAX_LOG_RATIO))


def sequence_mean(values: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """At every token, the mean of `values` over its sample: [1, 2, 5], sample_index [0, 0, 1] -> [1.5, 1.5, 5]."""
    return sequence_sum(values, sample_index) / sequence_sum(torch.ones_like(values), sample_index)


def clipped_loss(inputs: LossInputs, *, epsilon: float, epsilon_high: float, delta: float | None = None) -> TokenLoss:
    """Clipped surrogate per token (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; two epsilons: DAPO, arXiv 2503.14476).

        rho = exp(logprob - proximal_logprob)
        loss = -min(min(rho, delta) A, clamp(rho, 1 - epsilon, 1 + epsilon_high) A)

    delta bounds the loss of a bad token (A < 0) that became likelier (INTELLECT-2, arXiv 2505.07291), without gradient.
    A = 2, rho = 1.5, epsilon_high = 0.28: loss = -min(3.0, 2.56) = -2.56, clipped high.
    A = -2, rho = 5: loss = -min(-10, -2.56) = 10; with delta = 4: -min(-8, -2.56) = 8, capped."""
    ratio = ratio_of(inputs.logprobs - inputs.proximal_logprobs)
    return clipped_surrogate(ratio, inputs.advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)


def clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    is_per_sequence: bool = False,
) -> TokenLoss:
    """The formula of `clipped_loss`, for ratios of tokens or of sequences, (N,) each."""
    capped = ratio if delta is None else ratio.clamp(max=delta)
    clamped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    loss = -torch.minimum(capped * advantages, clamped * advantages)
    known = ratio.detach()
    return TokenLoss(
        loss=loss,
        ratio=capped.detach(),
        clipped_low=(known < 1.0 - epsilon) & (advantages < 0),
        clipped_high=(known > 1.0 + epsilon_high) & (advantages > 0),
        is_capped=None if delta is None else (known > delta) & (advantages < 0),
        is_per_sequence=is_per_sequence,
    )


def gspo_loss(inputs: LossInputs, *, epsilon: float, epsilon_high: float) -> TokenLoss:
    """Clipped surrogate on the ratio of whole samples, the geometric mean of their tokens' ratios (arXiv 2507.18071, equation
    7; TRL's `importance_sampling_level="sequence"`).

        s = exp(mean over the sample of (logprob - proximal_logprob));   loss = -min(s A, clamp(s, 1 - epsilon, 1 + epsilon_high) A)

    Log ratios [0.1, 0.3], A = 2: s = exp(0.2) = 1.2214; epsilon_high = 4e-4: loss = -min(2.4428, 2.0008) = -2.0008."""
    ratio = ratio_of(sequence_mean(inputs.logprobs - inputs.proximal_logprobs, inputs.sample_index))
    return clipped_surrogate(ratio, inputs.advantages, epsilon=epsilon, epsilon_high=epsilon_high, is_per_sequence=True)


def gmpo_loss(inputs: LossInputs, *, epsilon: float, epsilon_high: float) -> TokenLoss:
    """Geometric mean of a sample's token ratios, clipped by token (GMPO, arXiv 2507.20673, equation 4).

        l = logprob - proximal_logprob;   A > 0: min(l, epsilon_high)   else: max(l, -epsilon)
        loss = -A exp(mean over the sample of these)

    Log ratios [0.1, 0.5], A = 2, epsilon_high = 0.4: exp(0.25) = 1.2840, loss = -2.5681, clipped high at the second token."""
    log_ratio = (inputs.logprobs - inputs.proximal_logprobs).clamp(max=_MAX_LOG_RATIO)
    is_good = inputs.advantages > 0
    clipped = torch.where(is_good, log_ratio.clamp(max=epsilon_high), log_ratio.clamp(min=-epsilon))
    ratio = ratio_of(sequence_mean(clipped, inputs.sample_index))
    return TokenLoss(
        loss=-ratio * inputs.advantages,
        ratio=ratio.detach(),
        clipped_low=(log_ratio < -epsilon) & (inputs.advantages < 0),
        clipped_high=(log_ratio > epsilon_high) & is_good,
    )


def dppo_loss(inputs: LossInputs, *, divergence: str, epsilon: float, epsilon_high: float) -> TokenLoss:
    """REINFORCE with ratios within a trust region of probabilities (DPPO, arXiv 2602.04879, sections 4.2 and 4.3; its binary masks,
    prime-rl's default loss without its KL).

        p = exp(logprob), q = exp(proximal_logprob);   loss = -(p / q) A, 0 where the divergence of p and q is above its limit and
        p > q with A > 0 (epsilon_high), or p < q with A < 0 (epsilon)
        tv: |p - q|     kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    A = 1: q = 0.01, p = 0.05: 0.04 apart, loss = -5. q = 0.5, p = 0.8: 0.3 apart, 0. A = -1 there: loss = 1.6.
    q = 0.5, p = 0.8 by kl: 0.5 log(0.625) + 0.5 log(2.5) = 0.2231."""
    ratio = ratio_of(inputs.logprobs - inputs.proximal_logprobs)
    known, proximal = inputs.logprobs.detach(), inputs.proximal_logprobs
    p, q = known.exp(), proximal.exp()
    distance = (p - q).abs()
    if divergence == "kl":
        rest_p, rest_q = (1.0 - p).clamp(min=1e-8), (1.0 - q).clamp(min=1e-8)
        distance = q * (proximal - known) + rest_q * (rest_q / rest_p).log()
    is_high = (distance > epsilon_high) & (p > q) & (inputs.advantages > 0)
    is_low = (distance > epsilon) & (p < q) & (inputs.advantages < 0)
    return TokenLoss(
        loss=-(ratio * inputs.advantages).masked_fill(is_high | is_low, 0.0),
        ratio=ratio.detach(),
        clipped_low=is_low,
        clipped_high=is_high,
    )


def vespo_loss(inputs: LossInputs, *, positive: tuple[float, float], negative: tuple[float, float]) -> TokenLoss:
    """REINFORCE with a smooth weight for each sample (VESPO, arXiv 2602.10693). `positive`, `negative`: k and lambda for advantages
    of at least 0, and for the others.

        w = exp(sum over the sample of (logprob - proximal_logprob));   phi = w^k exp(lambda (1 - w))
        loss = -phi A logprob, without gradient through phi

    Bounds as in TRL: log ratios +-20, log w from log 1e-8 to 20. k = 2, lambda = 3, A = 1, w = 2: phi = 4 e^-3 = 0.19915;
    logprob = -1: loss = 0.19915, its gradient -0.19915."""
    log_ratio = (inputs.logprobs.detach() - inputs.proximal_logprobs).clamp(-20.0, 20.0)
    log_weight = sequence_sum(log_ratio, inputs.sample_index).clamp(math.log(1e-8), 20.0)
    is_good = inputs.advantages >= 0
    k, decay = (torch.where(is_good, good, bad) for good, bad in zip(positive, negative, strict=True))
    phi = torch.exp(decay + k * log_weight - decay * log_weight.exp())
    return TokenLoss(loss=-phi * inputs.advantages * inputs.logprobs, ratio=phi, is_per_sequence=True)


def cispo_loss(inputs: LossInputs, *, epsilon_high: float) -> TokenLoss:
    """REINFORCE with capped ratios: no token loses its gradient (MiniMax-M1, arXiv 2506.13585, equation 4).

        rho = exp(logprob - proximal_logprob);   loss = -min(rho, epsilon_high) A logprob, without gradient through rho

    epsilon_high is the cap itself, not a distance from 1. `clipped_high` counts capped tokens with A > 0, as TRL does.
    Worked example: A = 2, logprob = -1, rho = 7, epsilon_high = 5: loss = -5 x 2 x -1 = 10, its gradient -5 x 2 = -10.
    """
    ratio = ratio_of(inputs.logprobs.detach() - inputs.proximal_logprobs)
    capped = ratio.clamp(max=epsilon_high)
    return TokenLoss(
        loss=-capped * inputs.advantages * inputs.logprobs,
        ratio=capped,
        clipped_high=(ratio > epsilon_high) & (inputs.advantages > 0),
    )


def sapo_loss(inputs: LossInputs, *, temperature_positive: float, temperature_negative: float) -> TokenLoss:
    """A soft gate instead of the clip (arXiv 2511.20347).

        rho = exp(logprob - proximal_logprob);   loss = -A sigmoid(tau (rho - 1)) 4 / tau;   tau by the sign of A

    At rho = 1 the gradient is -A, as in REINFORCE; away from it the gate closes smoothly.
    Worked example: A = 2, tau = 1, rho = 1: loss = -2 x 0.5 x 4 = -4, gradient -2. rho = 2: sigmoid(1) = 0.73106, loss = -5.8485.
    """
    ratio = ratio_of(inputs.logprobs - inputs.proximal_logprobs)
    positive = torch.full_like(inputs.advantages, temperature_positive)
    steepness = torch.where(inputs.advantages > 0, positive, torch.full_like(positive, temperature_negative))
    gate = torch.sigmoid(steepness * (ratio - 1.0)) * 4.0 / steepness
    return TokenLoss(loss=-gate * inputs.advantages, ratio=ratio.detach())


class UserLoss:
    """f(inputs: LossInputs, **arguments) -> loss of each token, (N,), with gradient. The reduction and, if they are set, importance
    weights, masks, KL and entropy bonus are applied on top, as for any other loss.

        def reinforce(inputs, *, scale):  # loss: {type: custom, function: "my_losses:reinforce", arguments: {scale: 2.0}}
            ratio = torch.exp(inputs.logprobs.detach() - inputs.proximal_logprobs)
            return -scale * ratio * inputs.advantages * inputs.logprobs"""

    def __init__(self, section: CustomLoss) -> None:
        self._name = section.function
        self._arguments = dict(section.arguments)
        self._function = resolve_and_check(
            section.function, "loss.function", given={"inputs": None}, arguments=self._arguments
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss = self._function(inputs, **self._arguments)
        expected = tuple(inputs.logprobs.shape)
        returned, is_usable = f"a {type(loss).__name__}", False
        if isinstance(loss, torch.Tensor):
            has_gradient = loss.requires_grad or not torch.is_grad_enabled()
            returned = (
                f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}{'' if has_gradient else ' without gradient'}"
            )
            is_usable = tuple(loss.shape) == expected and loss.is_floating_point() and has_gradient
        if not is_usable:
            raise RunError(
                f"loss.function: {self._name} returned {returned}; it has to return a floating-point tensor of shape {expected}, "
                "the loss of each token, with gradient by inputs.logprobs (not detached)"
            )
        with torch.no_grad():
            ratio = ratio_of(inputs.logprobs - inputs.proximal_logprobs)
        return TokenLoss(loss=loss.float(), ratio=ratio)


def log_linear_logprobs(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of the policy at the start of the step, estimated without a forward pass (A-3PO, of AReaL). (N,) each

        log prox = log smp + a (log pi - log smp),   a = d / (d + 1) with the staleness d of the token

    Without gradient. A token of the newest version (d = 0) keeps its sampler's value. AReaL's code counts from one version
    earlier, so its a = (d - 1) / d. smp = -2, pi = -1, d = 1: a = 1/2, prox = -1.5; d = 3: a = 3/4, prox = -1.25."""
    age = staleness.clamp(min=0).to(sampler_logprobs.dtype)
    return sampler_logprobs + age / (age + 1.0) * (logprobs.detach() - sampler_logprobs)


def importance_weights(
    inputs: LossInputs, correction: ImportanceSamplingSection
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight of each token, without gradient, pi_prox / pi_smp of decoupled PPO (arXiv 2505.24298), truncated (TIS) or masked
    (MIS); and the mask, bool, with MIS only. (N,) each

        w = exp(proximal - sampler)                 level token
        w = exp(sum of (proximal - sampler))        level sequence, over the trained tokens of the sample
        truncate: clamp(w, floor, cap)      mask: w where floor <= w <= cap, else 0      none: w

    proximal - sampler = [0.5, 1.0 | -0.2] in two samples, cap 3: token: [1.6487, 2.7183, 0.8187], nothing changes;
    sequence: exp(1.5) = 4.4817, so truncate gives [3, 3, 0.8187] and mask [0, 0, 0.8187]."""
    cap, floor = correction.cap, correction.floor
    difference = inputs.proximal_logprobs.detach() - inputs.sampler_logprobs
    if correction.level == "sequence":
        difference = sequence_sum(difference, inputs.sample_index)
    weights = ratio_of(difference)
    if correction.action == "truncate":
        return weights.clamp(min=floor, max=cap), None
    if correction.action == "mask":
        is_masked = (weights > cap) | (weights < (floor or 0.0))
        return weights.masked_fill(is_masked, 0.0), is_masked
    return weights, None


def masked_logprobs(logprobs: torch.Tensor, top: torch.Tensor, sampler_top: torch.Tensor) -> torch.Tensor:
    """The policy cut to the tokens that the sampler kept, under `rollout.top_k`, `top_p` and `min_p` (Keep Sampling Mask,
    DeepSeek-V3.2, arXiv 2512.02556, 3.1). (N,), with gradient by both

        log pi(token) - log sum of pi over the kept tokens

    Kept are those of the sampler's top_k likeliest whose logprob is finite. (N, K) each
    logprob = log 0.3, top = log [0.5, 0.3, 0.1], sampler_top = [-0.5, -1, -inf]: log (0.3 / 0.8) = -0.9808."""
    return logprobs - top.masked_fill(sampler_top.isneginf(), -math.inf).logsumexp(-1)


def centering(
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], logprobs: torch.Tensor, sampler: torch.Tensor
) -> torch.Tensor:
    """Score centering (arXiv 2609.20807, equation 14): what makes the gradient of a loss 0 in expectation over the sampler's tokens
    where the advantage is a constant, so that only differences between tokens teach. (N,), with gradient by `logprobs`.

        p, q = exp(logprobs), exp(sampler), of the K likeliest tokens;   rho = (1 - sum q) / (1 - sum p), as q = rho p elsewhere
        C = -sum_v sg(q_v s(p_v, q_v) - rho s(rare, rho rare) p_v) log p_v

    s, `slope`: the derivative of the loss of a token by its logprob. Of a loss -A w(p / q) log p it is -A w, and this is the
    paper's A sum_v sg(m_v - alpha p_v) log p_v with m = q w(p / q), alpha = rho w(1 / rho).

        w = 1                       m = q                                   alpha = rho
        w = clamp(p / q, low, cap)  m = clamp(p, low q, cap q)              alpha = clamp(1, low rho, cap rho)
        w = p / q within low, cap   m = p where low <= p / q <= cap, or 0   alpha = 1 where low <= 1 / rho <= cap, or 0

    Exact where K is the vocabulary. A = 2, w = 1, K = 1, p = 0.6, q = 0.5: rho = 0.5 / 0.4 = 1.25, the factor of log p is
    2 (0.5 - 1.25 x 0.6) = -0.5. Trained alike, the sampler's tokens would make this one rarer; that is undone."""
    with torch.no_grad():
        p, q = logprobs.detach().exp(), sampler.exp()
        log_rho = (1.0 - q.sum(-1, keepdim=True)).clamp(min=_MIN_TAIL).log()
        log_rho -= (1.0 - p.sum(-1, keepdim=True)).clamp(min=_MIN_TAIL).log()
        rare = torch.full_like(log_rho, _RARE)
        slopes = slope(torch.cat([logprobs.detach(), rare], -1), torch.cat([sampler, rare + log_rho], -1))
        factor = q * slopes[:, :-1] - log_rho.exp() * slopes[:, -1:] * p
    return -(factor * logprobs).sum(-1)


def is_on_policy(
    inputs: LossInputs, *, threshold: float | None, bounds: tuple[float, float] | None = None
) -> torch.Tensor:
    """Masks of whole samples: OPSM (DeepSeek-V3.2) and SkyRL's geometric mask. True for the tokens that are kept. (N,) bool

        d = mean over the sample of (sampler - logprob);   keep = (A >= 0 or d <= threshold) and low <= exp(-d) <= high

    Threshold 0.1: sampler - logprob = [0.3, 0.1 | 0.0, 0.1], A = -1: d = 0.2 and 0.05, so the first sample is excluded. Bounds
    0.9 and 1.1: exp(-d) = 0.8187 and 0.9512, the first is excluded whatever its A."""
    divergence = sequence_mean(inputs.sampler_logprobs - inputs.logprobs.detach(), inputs.sample_index)
    kept = torch.ones_like(divergence, dtype=torch.bool)
    if threshold is not None:
        kept &= (inputs.advantages >= 0) | (divergence <= threshold)
    if bounds is not None:
        low, high = bounds
        kept &= (-divergence >= math.log(low)) & (-divergence <= math.log(high))
    return kept


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(policy || reference) per token: unbiased, never negative (http://joschu.net/blog/kl-approx.html; GRPO,
    arXiv 2402.03300, equation 4). Capped as `ratio_of`.

        exp(ref - logprob) - (ref - logprob) - 1

    Its gradient is biased; `loss.use_bias_correction_kl` multiplies it by the ratio pi / pi_proximal, with gradient, which
    makes both unbiased (DeepSeek-V3.2, arXiv 2512.02556).
    ref - logprob = 0.5: 1.6487 - 0.5 - 1 = 0.1487, gradient 1 - 1.6487 = -0.6487.
    """
    difference = (ref_logprobs - logprobs).clamp(max=_MAX_LOG_RATIO)
    return torch.expm1(difference) - difference  # expm1: exp(d) - 1 loses the digits of a small d


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """What one micro-batch adds to the objective. Only `total` has a gradient; the rest is for metrics, (N,)."""

    total: torch.Tensor  # () contribution of this micro-batch to the loss of the minibatch
    policy_loss: torch.Tensor  # () the part of `total` from policy loss and KL
    inputs: LossInputs
    token_loss: TokenLoss
    importance_weights: torch.Tensor  # those of `loss.correction` if it is set, otherwise the ratios of the loss
    kl: torch.Tensor | None
    is_importance_masked: torch.Tensor | None  # bool, excluded by the mask of `loss.correction`
    is_off_policy: torch.Tensor | None  # bool, excluded by off_policy_mask or geometric_mask
    router_aux: torch.Tensor | None  # () see PolicyOutput; not in `total`


class Objective:
    """See the module's docstring. Pure: its only state is the settings. `num_updates`: updates per step. `keeps_sampling_mask`: see
    `masked_logprobs`."""

    def __init__(self, section: BaseLoss, *, num_updates: int = 1, keeps_sampling_mask: bool = False) -> None:
        self.section = section
        self._keeps_sampling_mask = keeps_sampling_mask
        self._num_updates = num_updates
        self._policy_loss = _policy_loss(section)

    @property
    def needs_old_policy(self) -> bool:
        """Whether a step begins with a forward without gradient over all its micro-batches."""
        return self.section.proximal == "recomputed" and self._num_updates > 1

    @property
    def clips(self) -> bool:
        return not isinstance(self.section, SapoLoss | VespoLoss | CustomLoss)

    @property
    def has_sequence_weights(self) -> bool:
        """Whether the importance weights in use are those of whole samples: metrics then count each sample once."""
        correction = self.section.correction
        return self.section.has_sequence_ratio if correction is None else correction.level == "sequence"

    @property
    def is_per_token(self) -> bool:
        """Whether the contribution of a token depends on no other token of the micro-batch."""
        section = self.section
        has_token_weights = section.correction is None or section.correction.level == "token"
        looks_at_samples = section.has_sequence_ratio or section.masks_samples or isinstance(section, CustomLoss)
        return has_token_weights and not looks_at_samples

    def of_tokens(
        self, batch: MicroBatch, *, ref_logprobs: torch.Tensor | None = None, old: torch.Tensor | None = None
    ) -> TokenObjective:
        """The objective of some of the trained tokens of `batch`; of all of them unless `is_per_token`. For `Policy.forward`."""

        def of(
            logprobs: torch.Tensor, entropy: torch.Tensor, rows: Rows, top: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self(
                PolicyOutput(logprobs=logprobs, entropy=entropy, top_logprobs=top),
                batch.of_tokens(rows),
                ref_logprobs=None if ref_logprobs is None else ref_logprobs[rows],
                old=None if old is None else old[rows],
            ).total

        return of

    def __call__(
        self,
        output: PolicyOutput,
        batch: MicroBatch,
        *,
        ref_logprobs: torch.Tensor | None = None,
        old: torch.Tensor | None = None,
    ) -> ObjectiveOutput:
        """The contribution of a micro-batch with at least one trained token. `ref_logprobs` (N,), if `section.needs_reference`;
        `old` (N,), under the policy at the start of the step, if `needs_old_policy`."""
        section, logprobs = self.section, output.logprobs
        if self._keeps_sampling_mask:
            assert output.top_logprobs is not None
            assert batch.top_logprobs is not None
            logprobs = masked_logprobs(logprobs, output.top_logprobs, batch.top_logprobs)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=self._proximal_logprobs(logprobs, batch, old),
            sampler_logprobs=batch.sampler_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=output.entropy,
            advantages=_advantages(batch, output.logprobs),
            weights=batch.weights,
            sample_index=batch.sample_index,
            staleness=batch.staleness,
        )
        token_loss, loss, weights, is_importance_masked = self._weighted_loss(inputs)
        is_off_policy = None
        if section.score_centering is not None:
            assert output.top_logprobs is not None
            assert batch.top_logprobs is not None
            loss = loss + centering(partial(self._slope, batch), output.top_logprobs, batch.top_logprobs)
        if section.masks_samples:
            is_off_policy = ~is_on_policy(inputs, threshold=section.off_policy_mask, bounds=section.geometric_mask)
            loss = loss.masked_fill(is_off_policy, 0.0)
        kl = None
        if section.needs_reference:
            assert ref_logprobs is not None
            kl = kl_k3(output.logprobs, ref_logprobs)
            if section.use_bias_correction_kl:
                kl = kl * self._ratio(inputs)
            loss = loss + section.beta * kl
        policy_loss = (loss * inputs.weights).sum()
        total = policy_loss
        if section.entropy_bonus != 0.0:
            total = total - section.entropy_bonus * output.entropy.sum() / batch.minibatch_tokens
        return ObjectiveOutput(
            total=total,
            policy_loss=policy_loss.detach(),
            inputs=inputs,
            token_loss=token_loss,
            importance_weights=weights,
            kl=None if kl is None else kl.detach(),
            is_importance_masked=is_importance_masked,
            is_off_policy=is_off_policy,
            router_aux=output.router_aux,
        )

    def _weighted_loss(self, inputs: LossInputs) -> tuple[TokenLoss, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The policy loss, its loss with the correction's weights, the weights, and which tokens their mask leaves out."""
        token_loss = self._policy_loss(inputs)
        if self.section.correction is None:
            return token_loss, token_loss.loss, token_loss.ratio, None
        weights, is_masked = importance_weights(inputs, self.section.correction)
        # an overflowed loss times 0 is NaN
        return token_loss, (token_loss.loss * weights).masked_fill(weights == 0.0, 0.0), weights, is_masked

    def _slope(self, batch: MicroBatch, logprobs: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
        """The derivative of the weighted policy loss by the logprob of tokens in the places of those of `batch`. (N, any number)"""

        def spread(column: torch.Tensor) -> torch.Tensor:
            return column.repeat_interleave(logprobs.shape[-1])

        names = ("advantages", "weights", "sample_index", "staleness")
        columns: dict[str, Any] = {name: spread(getattr(batch, name)) for name in names}
        with torch.enable_grad():
            flat = logprobs.flatten().requires_grad_()
            batch = replace(batch, sampler_logprobs=sampler.flatten(), **columns)
            inputs = LossInputs(
                logprobs=flat,
                proximal_logprobs=self._proximal_logprobs(flat, batch, None),
                sampler_logprobs=batch.sampler_logprobs,
                ref_logprobs=None,
                entropy=torch.zeros_like(flat),
                **columns,
            )
            (slope,) = torch.autograd.grad(self._weighted_loss(inputs)[1].sum(), flat)
        return slope.view_as(logprobs)

    def _ratio(self, inputs: LossInputs) -> torch.Tensor:
        """The ratio of policy and proximal policy, by token or, for gspo, by sample; with gradient. (N,)"""
        log_ratio = inputs.logprobs - inputs.proximal_logprobs
        if isinstance(self.section, GspoLoss):
            log_ratio = sequence_mean(log_ratio, inputs.sample_index)
        return ratio_of(log_ratio)

    def _proximal_logprobs(self, logprobs: torch.Tensor, batch: MicroBatch, old: torch.Tensor | None) -> torch.Tensor:
        """The log-probabilities under the proximal policy. sampler: the sampler's. recomputed: the policy at the start of the step,
        which with one update is the policy of this forward. log_linear: interpolated between them."""
        match self.section.proximal:
            case "sampler":
                return batch.sampler_logprobs
            case "log_linear":
                return log_linear_logprobs(logprobs, batch.sampler_logprobs, batch.staleness)
            case "recomputed":
                if self._num_updates == 1:
                    return logprobs.detach()
                assert old is not None
                return old


def _advantages(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """With distillation, A + sum over the teachers of w (log teacher - log pi), without gradient, since the gradient of
    w KL(pi || teacher) is the mean of -w (log teacher - log pi) grad log pi. A = 0, log pi = -1, a teacher of weight 2 at -3:
    A = -4. (N,)"""
    if batch.teacher_logprobs is None or batch.teacher_weights is None:
        return batch.advantages
    return batch.advantages + batch.teacher_logprobs - batch.teacher_weights * logprobs.detach()


def _policy_loss(section: BaseLoss) -> Callable[[LossInputs], TokenLoss]:
    match section:
        case ClippedLoss(epsilon=low, epsilon_high=high, delta=delta):
            return lambda inputs: clipped_loss(inputs, epsilon=low, epsilon_high=high, delta=delta)
        case GspoLoss(epsilon=low, epsilon_high=high):
            return lambda inputs: gspo_loss(inputs, epsilon=low, epsilon_high=high)
        case GmpoLoss(epsilon=low, epsilon_high=high):
            return lambda inputs: gmpo_loss(inputs, epsilon=low, epsilon_high=high)
        case DppoLoss(divergence=divergence, limits=(low, high)):
            return lambda inputs: dppo_loss(inputs, divergence=divergence, epsilon=low, epsilon_high=high)
        case VespoLoss(k_positive=k, lambda_positive=decay, k_negative=k_bad, lambda_negative=decay_bad):
            return lambda inputs: vespo_loss(inputs, positive=(k, decay), negative=(k_bad, decay_bad))
        case CispoLoss(epsilon_high=cap):
            return lambda inputs: cispo_loss(inputs, epsilon_high=cap)
        case SapoLoss(temperature_positive=positive, temperature_negative=negative):
            return lambda inputs: sapo_loss(inputs, temperature_positive=positive, temperature_negative=negative)
        case CustomLoss():
            return UserLoss(section)
    raise AssertionError(f"no policy loss for {type(section).__name__}")
