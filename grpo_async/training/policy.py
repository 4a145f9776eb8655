"""The policy: a Hugging Face causal LM behind one forward that goes from packed ids to log-probabilities, sharded by FSDP2.

The head is applied inside this forward, so that FSDP's root hooks gather its weight for both passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.training.logprobs import chunked_logprobs

# settings that change logits after the head; leaving them out would train another distribution than the server samples
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Policy(nn.Module):
    """See the module's docstring. `model` is the Hugging Face model; its parameter names are those of its checkpoints."""

    def __init__(self, model: Any, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def forward(self, batch: MicroBatch, *, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (with gradient) and entropies (without) of the trained tokens, both (N,) float32.

        Args:
            temperature: of the distribution; None = that of the run.
        """
        hidden = self.model.base_model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask(),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state  # (R, T, H)
        flat = hidden.reshape(-1, hidden.shape[-1])  # (R x T, H)
        states = flat[batch.source_index]  # (N, H)
        head = self.model.get_output_embeddings()
        if batch.num_trained_tokens == 0:
            # a rank without trained tokens: every parameter, the head's too, still has to get a gradient (of zeros),
            # because FSDP reduces the same parameters on every rank
            anchor = head(flat[:1]).float().sum() * 0.0
            return anchor.expand(1)[:0] + anchor, states.sum(-1).float().detach()
        logprobs, entropy = chunked_logprobs(
            states,
            batch.target_ids,
            head,
            temperature=self._temperature if temperature is None else temperature,
            chunk_tokens=self._chunk_tokens,
        )
        return logprobs, entropy


def load_policy(section: ModelSection, *, temperature: float, chunk_tokens: int, max_model_len: int) -> Policy:
    """Load the model in `model.dtype` on the CPU, without dropout: the server that samples has none either.

    Args:
        max_model_len: longest sample, in tokens.

    Raises:
        ConfigError: no model at `model.path`, or one whose log-probabilities the trainer would get wrong.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
        _check_config(config, section.path, max_model_len)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_pretrained(
            # our mask is boolean: sdpa takes it as such, eager attention would add it to the scores
            section.path,
            config=config,
            dtype=getattr(torch, section.dtype),
            attn_implementation="sdpa",
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a causal language model from {section.path!r}: {error}") from error
    if section.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return Policy(model, temperature=temperature, chunk_tokens=chunk_tokens)


def _check_config(config: Any, path: str, max_model_len: int) -> None:
    for name in _LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"model.path: {path!r} sets `{name}`, which the trainer's log-probabilities do not apply; "
                "models of this family cannot be trained yet"
            )
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    has_window = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    if window is not None and has_window and window < max_model_len:
        raise ConfigError(
            f"model.path: {path!r} attends over a sliding window of {window} tokens, which the trainer does not apply; "
            f"set inference.max_model_len (now {max_model_len}) to at most {window}"
        )


def shard_policy(policy: Policy, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
    """Apply FSDP2 in place: every decoder layer is one unit, the rest (embeddings, norm, head) is the root's."""
    policy.to(mesh.device_type)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in _decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def _decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The longest ModuleList of the model: its decoder layers, in every Hugging Face causal LM."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return cast(Sequence[nn.Module], max(lists, key=len)) if lists else []
