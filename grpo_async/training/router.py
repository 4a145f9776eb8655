"""Load-balancing loss of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo_async.errors import ConfigError


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor], is_real: torch.Tensor, *, experts_per_token: int
) -> torch.Tensor:
    """num_experts x sum_e f_e P_e over real tokens of all layers together (Switch Transformer, arXiv 2101.03961, equations 4 to 6;
    for k experts a token as in Mixtral, arXiv 2401.04088: f sums to k, so that even routing costs k).

    f_e: expert e is among the k chosen for this share of tokens. P_e: mean probability that the router gives it.

    Worked example, 2 experts, k = 1, two tokens with probabilities (0.8, 0.2) and (0.6, 0.4): f = (1, 0), P = (0.7, 0.3),
    loss = 2 x (1 x 0.7 + 0 x 0.3) = 1.4; even routing would cost 1.

    Args:
        router_logits: of each layer, (tokens, num_experts) or (R, T, num_experts).
        is_real: which tokens are not padding. (R, T) bool

    Returns:
        () float32; 0 without real tokens.
    """
    mask = is_real.reshape(-1, 1).float()
    num_experts = router_logits[0].shape[-1]
    chosen = torch.zeros(num_experts, dtype=torch.float32, device=mask.device)
    probability = torch.zeros_like(chosen)
    for logits in router_logits:
        probabilities = torch.softmax(logits.reshape(-1, num_experts).float(), dim=-1)
        experts = probabilities.topk(experts_per_token, dim=-1).indices
        is_chosen = torch.zeros_like(probabilities).scatter_(-1, experts, 1.0)
        chosen = chosen + (is_chosen * mask).sum(0)
        probability = probability + (probabilities * mask).sum(0)
    tokens = (mask.sum() * len(router_logits)).clamp(min=1.0)
    return num_experts * ((chosen / tokens) * (probability / tokens)).sum()


def experts_per_token(model: Any) -> int:
    """How many experts one token goes to.

    Raises:
        ConfigError: the model is no mixture of experts, or one that does not say what its router computed.
    """
    config = model.config.get_text_config()
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    count = getattr(config, "num_experts_per_tok", None)
    if count is None or "router_logits" not in recorded:
        raise ConfigError(
            f"model.router_aux_loss: {type(model).__name__} gives no router logits, so there is no load-balancing loss; "
            "set it to 0"
        )
    return int(count)
