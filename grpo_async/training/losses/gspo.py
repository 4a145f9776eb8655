"""Group sequence policy optimization: loss type gspo."""

from __future__ import annotations

from grpo_async.training.losses.clipped import clipped_surrogate
from grpo_async.training.losses.inputs import LossInputs, TokenLoss
from grpo_async.training.losses.ratios import ratio_of, sequence_mean


def gspo_loss(inputs: LossInputs, *, epsilon: float, epsilon_high: float) -> TokenLoss:
    """Clipped surrogate on the ratio of whole samples, the geometric mean of their tokens' ratios (arXiv 2507.18071, equation 7).

        s = exp(mean over the sample of (logprob - old_logprob));   loss = -min(s A, clamp(s, 1 - epsilon, 1 + epsilon_high) A)

    Every token of a sample has that loss, so its mean over the sample (reduction grpo) is the paper's objective, and the gradient
    of a token is s A / (tokens of the sample). As TRL's `importance_sampling_level="sequence"`.
    Worked example: log ratios [0.1, 0.3], A = 2: s = exp(0.2) = 1.2214; epsilon_high = 4e-4: loss = -min(2.4428, 2.0008) = -2.0008.
    """
    ratio = ratio_of(sequence_mean(inputs.logprobs - inputs.old_logprobs, inputs.sample_index))
    return clipped_surrogate(ratio, inputs.advantages, epsilon=epsilon, epsilon_high=epsilon_high, is_per_sequence=True)
