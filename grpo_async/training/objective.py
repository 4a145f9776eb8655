"""The objective: which losses make up the number that a step minimises, and what it needs to know for that.

    policy loss of each token (losses.*)  x  correction weight, 0 where a mask leaves the token out
        + beta x KL                                             weighed by the reduction (batching.weights), summed
        - entropy_bonus x mean entropy of the kept tokens       over the minibatch
        + router_aux_loss x load balancing                      by the micro-batch's share of the minibatch's tokens

Every term is a sum over tokens with weights known before the first forward, so it does not depend on how samples are packed,
cut into micro-batches or spread over ranks (bnpo excepted, by definition; and the router's loss, which is not a sum over tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.loss_sections import BaseLoss, CispoLoss, ClippedLoss, CustomLoss, GspoLoss, SapoLoss
from grpo_async.training.logprobs import TokenObjective
from grpo_async.training.losses.cispo import cispo_loss
from grpo_async.training.losses.clipped import clipped_loss
from grpo_async.training.losses.correction import correction_weights
from grpo_async.training.losses.gspo import gspo_loss
from grpo_async.training.losses.inputs import LossInputs, TokenLoss
from grpo_async.training.losses.kl import kl_k3
from grpo_async.training.losses.masks import is_on_policy
from grpo_async.training.losses.proximal import log_linear_logprobs
from grpo_async.training.losses.sapo import sapo_loss
from grpo_async.training.losses.user_loss import UserLoss
from grpo_async.training.policy import PolicyOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepass:
    """What a forward before the first update of the step says of one micro-batch's N tokens."""

    logprobs: torch.Tensor  # (N,) of the policy at the start of the step
    has_high_entropy: torch.Tensor | None  # (N,) bool, the tokens that top_entropy_share keeps; None = all
    num_kept: torch.Tensor | None  # () how many those are in the whole minibatch, on all ranks; None = all

    def of_tokens(self, rows: slice) -> Prepass:
        """What it says of these tokens."""
        mask = self.has_high_entropy
        return replace(self, logprobs=self.logprobs[rows], has_high_entropy=None if mask is None else mask[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """What one micro-batch adds to the objective. `total` has the gradient; the rest is for metrics, (N,) and without."""

    total: torch.Tensor  # () share of this micro-batch in the loss of the minibatch
    policy_loss: torch.Tensor  # () of that, what comes from policy loss and KL
    inputs: LossInputs
    token_loss: TokenLoss
    used_weights: torch.Tensor  # importance weights: the correction's where there is one, else the ratios of the loss
    kl: torch.Tensor | None
    is_corrected_away: torch.Tensor | None  # bool, weight 0 by the correction
    is_off_policy: torch.Tensor | None  # bool, left out by off_policy_mask
    has_low_entropy: torch.Tensor | None  # bool, left out by top_entropy_share
    router_loss: torch.Tensor | None  # ()


class Objective:
    """See the module's docstring. Pure: state is the settings alone.

    Args:
        section: `loss`.
        num_minibatches: updates of a step.
        router_weight: `model.router_aux_loss`.

    Raises:
        ConfigError: the user's own loss cannot be used.
    """

    def __init__(self, section: BaseLoss, *, num_minibatches: int = 1, router_weight: float = 0.0) -> None:
        self.section = section
        self._num_minibatches = num_minibatches
        self._router_weight = router_weight
        self._policy_loss = _policy_loss(section)

    @classmethod
    def from_config(cls, config: ExperimentConfig) -> Objective:
        return cls(config.loss, num_minibatches=config.training.minibatches, router_weight=config.model.router_aux_loss)

    @property
    def needs_reference(self) -> bool:
        return self.section.beta != 0.0

    @property
    def needs_prepass(self) -> bool:
        """Whether a step begins with a forward without gradient over all its micro-batches."""
        recomputes = self.section.proximal == "recomputed" and self._num_minibatches > 1
        return recomputes or self.section.top_entropy_share < 1.0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.section.entropy_bonus != 0.0 or isinstance(self.section, CustomLoss)

    @property
    def needs_router_loss(self) -> bool:
        return self._router_weight != 0.0

    @property
    def clips(self) -> bool:
        """Whether the loss has a clip whose figures mean something."""
        return not isinstance(self.section, SapoLoss | CustomLoss)

    @property
    def weighs_sequences(self) -> bool:
        """Whether the importance weights in use belong to whole samples: figures then count each sample once."""
        correction = self.section.correction
        return isinstance(self.section, GspoLoss) if correction is None else correction.level == "sequence"

    @property
    def is_sum_over_tokens(self) -> bool:
        """Whether what a token adds depends on no other token of the micro-batch; the router's loss apart."""
        section = self.section
        is_by_token = section.correction is None or section.correction.level == "token"
        return is_by_token and section.off_policy_mask is None and not isinstance(section, GspoLoss | CustomLoss)

    def of_tokens(
        self,
        batch: MicroBatch,
        *,
        ref_logprobs: torch.Tensor | None = None,
        prepass: Prepass | None = None,
    ) -> TokenObjective | None:
        """For `Policy.forward`: what some of the trained tokens add, with its slopes; None where it is no sum over tokens.

        Args:
            ref_logprobs, prepass: as those of the call.
        """
        if not self.is_sum_over_tokens:
            return None

        def of(
            logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            with torch.enable_grad():
                logprobs = logprobs.detach().requires_grad_()
                entropy = entropy.detach().requires_grad_(self.needs_entropy_gradient)
                total = self(
                    PolicyOutput(logprobs=logprobs, entropy=entropy),
                    batch.of_tokens(rows),
                    ref_logprobs=None if ref_logprobs is None else ref_logprobs[rows],
                    prepass=None if prepass is None else prepass.of_tokens(rows),
                ).total
                wanted = [logprobs, entropy] if self.needs_entropy_gradient else [logprobs]
                slopes = torch.autograd.grad(total, wanted)
            return total.detach(), slopes[0], slopes[1] if self.needs_entropy_gradient else None

        return of

    def __call__(
        self,
        output: PolicyOutput,
        batch: MicroBatch,
        *,
        ref_logprobs: torch.Tensor | None = None,
        prepass: Prepass | None = None,
    ) -> ObjectiveOutput:
        """What a micro-batch with at least one trained token adds.

        Args:
            ref_logprobs: of the reference. (N,); needed where `needs_reference`
            prepass: needed where `needs_prepass`.
        """
        section = self.section
        inputs = LossInputs(
            logprobs=output.logprobs,
            old_logprobs=self._proximal_logprobs(output.logprobs, batch, prepass),
            sampler_logprobs=batch.sampler_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=output.entropy,
            advantages=batch.advantages,
            weights=batch.weights,
            sample_index=batch.sample_index,
            staleness=batch.staleness,
        )
        token_loss = self._policy_loss(inputs)
        loss, used_weights = token_loss.loss, token_loss.ratio
        is_corrected_away = is_off_policy = has_low_entropy = None
        if section.correction is not None:
            correction = section.correction
            used_weights = correction_weights(
                inputs.old_logprobs,
                inputs.sampler_logprobs,
                inputs.sample_index,
                level=correction.level,
                action=correction.action,
                cap=correction.cap,
                floor=correction.floor,
            )
            loss = loss * used_weights
            if correction.action == "mask":
                is_corrected_away = used_weights == 0.0
                loss = loss.masked_fill(is_corrected_away, 0.0)  # a loss that overflowed, times 0, is not 0
        if section.off_policy_mask is not None:
            is_off_policy = ~is_on_policy(
                inputs.logprobs,
                inputs.sampler_logprobs,
                inputs.advantages,
                inputs.sample_index,
                threshold=section.off_policy_mask,
            )
            loss = loss.masked_fill(is_off_policy, 0.0)
        if prepass is not None and prepass.has_high_entropy is not None:
            has_low_entropy = ~prepass.has_high_entropy
            loss = loss.masked_fill(has_low_entropy, 0.0)
        kl = None
        if section.beta != 0.0:
            assert ref_logprobs is not None
            kl = kl_k3(inputs.logprobs, ref_logprobs)
            loss = loss + section.beta * kl
        policy_loss = (loss * inputs.weights).sum()
        total = policy_loss
        if section.entropy_bonus != 0.0:
            total = total - section.entropy_bonus * _share_of_mean_entropy(output.entropy, batch, prepass)
        if output.objective is not None:
            total = output.objective  # the same number, with the gradient
        router_loss = None
        if output.router_loss is not None and self._router_weight != 0.0:
            router_loss = output.router_loss * (batch.num_trained_tokens / batch.minibatch_tokens)
            total = total + self._router_weight * router_loss
        return ObjectiveOutput(
            total=total,
            policy_loss=policy_loss.detach(),
            inputs=inputs,
            token_loss=token_loss,
            used_weights=used_weights,
            kl=None if kl is None else kl.detach(),
            is_corrected_away=is_corrected_away,
            is_off_policy=is_off_policy,
            has_low_entropy=has_low_entropy,
            router_loss=None if router_loss is None else router_loss.detach(),
        )

    def _proximal_logprobs(self, logprobs: torch.Tensor, batch: MicroBatch, prepass: Prepass | None) -> torch.Tensor:
        """sampler: its own. recomputed: the policy at the start of the step, which with one update is the one of this forward.
        log_linear: between them."""
        match self.section.proximal:
            case "sampler":
                return batch.sampler_logprobs
            case "log_linear":
                return log_linear_logprobs(logprobs, batch.sampler_logprobs, batch.staleness)
            case "recomputed":
                if self._num_minibatches == 1:
                    return logprobs.detach()
                assert prepass is not None
                return prepass.logprobs


def _share_of_mean_entropy(entropy: torch.Tensor, batch: MicroBatch, prepass: Prepass | None) -> torch.Tensor:
    """Sum of this micro-batch's kept entropies / number of kept tokens of the minibatch; as in TRL the mean is over the tokens that
    the entropy mask keeps, whatever the reduction of the policy loss. ()"""
    if prepass is None or prepass.has_high_entropy is None or prepass.num_kept is None:
        return entropy.sum() / batch.minibatch_tokens
    return entropy.masked_fill(~prepass.has_high_entropy, 0.0).sum() / prepass.num_kept


def _policy_loss(section: BaseLoss) -> Callable[[LossInputs], TokenLoss]:
    match section:
        case ClippedLoss(epsilon=low, epsilon_high=high, delta=delta):
            return lambda inputs: clipped_loss(inputs, epsilon=low, epsilon_high=high, delta=delta)
        case GspoLoss(epsilon=low, epsilon_high=high):
            return lambda inputs: gspo_loss(inputs, epsilon=low, epsilon_high=high)
        case CispoLoss(epsilon_high=cap):
            return lambda inputs: cispo_loss(inputs, epsilon_high=cap)
        case SapoLoss(temperature_positive=positive, temperature_negative=negative):
            return lambda inputs: sapo_loss(inputs, temperature_positive=positive, temperature_negative=negative)
        case CustomLoss():
            return UserLoss(section)
    raise AssertionError(f"no policy loss for {type(section).__name__}")
