"""A user's own loss: found and checked at the start, and its results checked at every call.

# in my_losses.py;   loss: {type: custom, function: "my_losses:reinforce", arguments: {scale: 2.0}}
def reinforce(inputs: LossInputs, *, scale: float) -> torch.Tensor:
    ratio = torch.exp(inputs.logprobs.detach() - inputs.old_logprobs)
    return -scale * ratio * inputs.advantages * inputs.logprobs  # (N,), the loss of each token
"""

from __future__ import annotations

import torch

from grpo_async.config.loss_sections import CustomLoss
from grpo_async.errors import RunError
from grpo_async.training.losses.inputs import LossInputs, TokenLoss
from grpo_async.training.losses.ratios import ratio_of
from grpo_async.user_code.references import resolve_plain_function


class UserLoss:
    """f(inputs: LossInputs, **arguments) -> loss of each token, (N,), with gradient. The reduction, and where they are set the
    correction, the masks, the KL and the entropy bonus, are put on top of it as on any other loss.

    Args:
        section: with `type: custom`.

    Raises:
        ConfigError: the function is not there, is a coroutine, or does not take what it would be given.
    """

    def __init__(self, section: CustomLoss) -> None:
        self._name = section.function
        self._arguments = dict(section.arguments)
        self._function = resolve_plain_function(
            section.function,
            "loss.function",
            given={"inputs": None},
            arguments=self._arguments,
            turns="tensors to turn into a tensor",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Its loss of each token. What it raises goes on as it is: the traceback shows the user's own line.

        Raises:
            RunError: it returned something else than a (N,) tensor of floating point numbers with a gradient.
        """
        loss = self._function(inputs, **self._arguments)
        expected = tuple(inputs.logprobs.shape)
        wanted = f"it is to return a floating point tensor of shape {expected}, the loss of each token"
        if not isinstance(loss, torch.Tensor):
            raise RunError(f"loss.function: {self._name} returned a {type(loss).__name__}; {wanted}")
        if tuple(loss.shape) != expected or not loss.is_floating_point():
            raise RunError(
                f"loss.function: {self._name} returned a tensor of shape {tuple(loss.shape)} and {loss.dtype}; {wanted}"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise RunError(
                f"loss.function: {self._name} returned a tensor without gradient, so nothing would be learned; make it depend on "
                "inputs.logprobs (not detached)"
            )
        with torch.no_grad():
            ratio = ratio_of(inputs.logprobs - inputs.old_logprobs)
        return TokenLoss(loss=loss.float(), ratio=ratio)
