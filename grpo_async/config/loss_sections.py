"""The objective: how rewards become advantages, and what the trainer minimizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from grpo_async.config.base import ModelName, Reference, StrictModel, Weight, default_type

Reduction = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
_REDUCTIONS: dict[str, Reduction] = {
    "grpo": "grpo",
    "bnpo": "bnpo",
    "dr_grpo": "dr_grpo",
    "dapo": "dapo",
    "gspo": "grpo",
    "cispo": "dapo",
    "sapo": "grpo",
    "custom": "dapo",
}
"""Type of the loss -> its own reduction."""


class AdvantageSection(StrictModel):
    type: Literal["group", "batch", "none", "rloo", "custom"] = "group"
    """What a reward is compared with. group: (r - mean) / (std + 1e-4) within the group (GRPO, arXiv 2402.03300).
    batch: (r - mean of the group) / (std of the step's rewards + 1e-4). none: r - mean of the group (Dr. GRPO, arXiv 2503.20783).
    rloo: r - mean of the others of the group (arXiv 2402.14740). custom: `function`."""
    rewards: Literal["sum", "normalize_each"] = "sum"
    """Several rewards. sum: added by weight, then compared. normalize_each: each is compared on its own within the group, as with
    `type: group`, then they are added by weight and divided by their std over the step + 1e-4 (GDPO, arXiv 2601.05242)."""
    function: Reference | None = None
    """`module:attribute` of your own, f(rewards: list[float | None], **arguments) -> list[float]: the rewards of one group to its
    advantages. null in, 0 out. A group for which it raises, or returns anything else, fails; the run continues."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""

    @model_validator(mode="after")
    def _function_goes_with_custom(self) -> Self:
        if (self.type == "custom") != (self.function is not None):
            raise ValueError("`function` goes with `type: custom`, and only with it; set both or neither")
        if self.type == "custom" and self.rewards != "sum":
            raise ValueError("rewards: normalize_each is a way to compare, and so is `function`; leave one of them out")
        if self.rewards == "normalize_each" and self.type != "group":
            raise ValueError(
                f"rewards: normalize_each compares each reward as `type: group` does, not {self.type}; set type: group"
            )
        if self.arguments and self.function is None:
            raise ValueError("arguments: there is no `function` to give them to")
        return self


class ImportanceSamplingSection(StrictModel):
    """Importance weights of sampled tokens, for the difference between the policy that sampled them and the proximal policy:
    w = exp(proximal - sampler), per token or (the sum over its tokens) per sequence. Applied to the loss, without gradient."""

    level: Literal["token", "sequence"] = "sequence"
    """Whether each token has its own weight, or all tokens of a completion the same."""
    action: Literal["truncate", "mask", "none"] = "mask"
    """truncate: weights above `cap` become `cap` (TIS). mask: tokens with a weight outside `floor`..`cap` are left out (MIS,
    IcePop). none: the weights as they are (decoupled PPO, arXiv 2505.24298)."""
    cap: float = Field(default=3.0, gt=0.0)
    """Largest weight."""
    floor: float | None = Field(default=None, ge=0.0)
    """Smallest weight; null = 0. With `truncate` smaller ones become `floor`, with `mask` they are left out."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor: {self.floor} is not less than cap: {self.cap}; no weight would lie between them")
        return self


class BaseLoss(StrictModel):
    """What all losses have."""

    type: str
    reduction: Reduction | None = None
    """How tokens are averaged; null = as the type says. grpo: mean over samples of the token mean. bnpo: token mean of each
    micro-batch (depends on how samples are packed). dr_grpo: sum / (samples x max_completion_tokens). dapo: sum / trained tokens of
    the whole optimizer update. Samples that are masked whole (rollout.overlong) count as samples, in groups
    that have others."""
    proximal: Literal["sampler", "recomputed", "log_linear"] = "sampler"
    """The policy that the ratio is taken against. sampler: the one that sampled, by its own logprobs. recomputed: the trainer's, at
    the start of the step; costs a forward pass where a step has several updates (training.minibatches, num_iterations). log_linear:
    between the two by the age of each token's version, without a forward pass (A-3PO)."""
    correction: ImportanceSamplingSection | None = None
    """Importance weights between sampler and proximal policy; needs a `proximal` other than sampler."""
    off_policy_mask: float | None = Field(default=None, gt=0.0)
    """OPSM: completions with a negative advantage are left out when mean(sampler - policy logprob) over their tokens is above
    this."""
    beta: float = Field(default=0.0, ge=0.0, le=1e6)
    """Weight of the KL divergence (k3) from `reference`; 0 = none, and no reference is loaded."""
    use_bias_correction_kl: bool = True
    """Multiply the KL of a token by its ratio (gspo: of its sample), with gradient: unbiased also for tokens of an older policy
    (DeepSeek-V3.2, arXiv 2512.02556). As TRL's setting of this name."""
    reference: ModelName = "initial"
    """Reference policy of the KL: `initial` = the model that the run began with (with LoRA: the model without its adapters, at no
    cost), or the folder of a model."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656): every `ref_model_sync_steps` steps it becomes
    ref_model_mixup_alpha x policy + (1 - ref_model_mixup_alpha) x itself. It is kept in model.dtype then, and in checkpoints. As
    TRL's settings of these names."""
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0.0, le=1.0)
    """See `sync_ref_model`; 1 = the policy itself."""
    ref_model_sync_steps: int = Field(default=512, ge=1)
    """See `sync_ref_model`."""
    entropy_bonus: Weight = 0.0
    """This times the mean entropy is subtracted from the loss; with its exact gradient."""
    top_entropy_quantile: float = Field(default=1.0, ge=0.0, le=1.0)
    """Train only this fraction of the tokens of an optimizer update, those of the highest entropy (arXiv 2506.01939); costs a
    forward pass. 1 = all. As TRL's setting of this name."""

    @property
    def reduction_in_use(self) -> Reduction:
        """`reduction`, or that of the type."""
        return self.reduction or _REDUCTIONS[self.type]


class ClippedLoss(BaseLoss):
    type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """PPO's clipped surrogate on token ratios (GRPO, arXiv 2402.03300); the four differ in `reduction` only."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip: ratio >= 1 - epsilon."""
    epsilon_high: float = Field(default=0.28, gt=0.0)
    """Upper clip: ratio <= 1 + epsilon_high (clip-higher, DAPO, arXiv 2503.14476)."""
    delta: float | None = Field(default=None, gt=1.0)
    """Two-sided clip: the unclipped ratio is capped at this (INTELLECT-2, arXiv 2505.07291); more than 1 + epsilon_high."""

    @model_validator(mode="after")
    def _delta_is_above_the_clip(self) -> Self:
        if self.delta is not None and self.delta <= 1.0 + self.epsilon_high:
            raise ValueError(f"delta: {self.delta} is not more than 1 + epsilon_high = {1.0 + self.epsilon_high:g}")
        return self

    @model_validator(mode="after")
    def _type_and_reduction_agree(self) -> Self:
        if self.reduction not in (None, self.type):
            raise ValueError(
                f"reduction: {self.reduction} is what `type: {self.reduction}` means; set that, without reduction"
            )
        return self


class GspoLoss(BaseLoss):
    type: Literal["gspo"]
    """Clipped surrogate on the ratio of whole sequences, the geometric mean of their tokens' (arXiv 2507.18071); reduction grpo."""
    epsilon: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """Lower clip: ratio >= 1 - epsilon."""
    epsilon_high: float = Field(default=4e-4, gt=0.0)
    """Upper clip: ratio <= 1 + epsilon_high."""


class CispoLoss(BaseLoss):
    type: Literal["cispo"]
    """REINFORCE with capped, detached ratios: every token keeps its gradient (MiniMax-M1, arXiv 2506.13585); reduction dapo."""
    epsilon_high: float = Field(default=5.0, gt=0.0)
    """The cap itself: ratio <= epsilon_high."""


class SapoLoss(BaseLoss):
    type: Literal["sapo"]
    """A soft gate in place of the clip (arXiv 2511.20347); reduction grpo."""
    temperature_positive: float = Field(default=1.0, gt=0.0)
    """Steepness of the gate for advantages above 0."""
    temperature_negative: float = Field(default=1.05, gt=0.0)
    """Steepness of the gate for the others."""


class CustomLoss(BaseLoss):
    type: Literal["custom"]
    """Your own; reduction dapo unless set."""
    function: Reference
    """`module:attribute`, f(inputs: LossInputs, **arguments) -> tensor (N,), the loss of each token; see
    grpo_async.training.loss."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


LossSection = Annotated[
    ClippedLoss | GspoLoss | CispoLoss | SapoLoss | CustomLoss,
    Field(discriminator="type"),
    default_type("dapo"),
]
