"""The reference policy of a KL term: what the loss may not drift away from.

Two kinds. With LoRA and `loss.reference: initial` it is the policy itself without its adapters, which costs no memory. Otherwise it
is a second model, frozen, sharded over the same ranks, in the compute dtype.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.training.families import other_vocabulary
from grpo_async.training.lora import adapters_off
from grpo_async.training.policy import Policy
from grpo_async.training.shard import reshard


class Reference(Protocol):
    """Answers for the trained tokens of a micro-batch."""

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """(N,) float32, natural log, at the run's temperature, without gradient. A collective: every rank calls it as often, also
        for a batch without trained tokens."""

    @property
    def obstacle_to_shared_prompts(self) -> str | None:
        """As of the policy: its attention may be another one."""


class AdaptersOff:
    """The policy without its adapters."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        with adapters_off(self._policy.model):
            return _forward(self._policy, batch)

    @property
    def obstacle_to_shared_prompts(self) -> str | None:
        return self._policy.obstacle_to_shared_prompts


class FrozenPolicy:
    """A policy of its own.

    Args:
        policy: sharded and loaded; it is frozen here.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        for parameter in policy.parameters():
            parameter.requires_grad_(False)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return _forward(self._policy, batch)

    @property
    def obstacle_to_shared_prompts(self) -> str | None:
        return self._policy.obstacle_to_shared_prompts


def is_policy_without_adapters(config: ExperimentConfig) -> bool:
    """Whether the reference is the policy with its adapters left out."""
    return config.model.lora is not None and config.loss.reference == "initial"


def check_vocabulary(policy: Policy, reference: Policy, path: str) -> None:
    """Raises ConfigError when the reference at `path` has another vocabulary than the policy; token ids would mean other tokens."""
    ours, theirs = (_vocabulary_size(one.model) for one in (policy, reference))
    if ours != theirs:
        raise ConfigError(other_vocabulary(path, ours=ours, theirs=theirs))


def _vocabulary_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _forward(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        logprobs: torch.Tensor = policy(batch).logprobs
    reshard(policy)
    return logprobs.float()
