"""The policy: a Hugging Face causal LM behind one forward that goes from packed ids to log-probabilities, sharded by FSDP2.

    adapters (lora) -> recompute_activations -> compile_layers -> shard_policy -> load_weights (load)

The head is applied inside the forward, so that FSDP's root hooks gather its weight for both passes. Gathered weights, activations
and products are in the compute dtype; gradients are reduced and parameters kept in the master dtype (float32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.base import AttentionName
from grpo_async.errors import ConfigError
from grpo_async.training.attention import SampleLayout, use_attention
from grpo_async.training.context_parallel import ContextGroup, num_likeliest
from grpo_async.training.families import count_attention_layers, one_sample_per_row, shares_prefixes
from grpo_async.training.logprobs import (
    LogitTransform,
    PolicyOutput,
    TokenObjective,
    chunked_logprobs,
    is_plain_linear,
)
from grpo_async.training.lora import adapters_off
from grpo_async.training.parameters import local_of
from grpo_async.training.quantize import layers_in_4_bits

_KEPT_NAMES = (
    ("aten", "mm"),
    ("aten", "addmm"),
    ("aten", "bmm"),
    ("aten", "baddbmm"),
    ("aten", "_grouped_mm"),
    ("aten", "_scaled_dot_product_flash_attention"),
    ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("aten", "_scaled_dot_product_efficient_attention"),
    ("aten", "_scaled_dot_product_cudnn_attention"),
    ("aten", "_flash_attention_forward"),
    ("aten", "_efficient_attention_forward"),
    ("torch_attn", "_varlen_attn"),
)
"""Operators whose results `selective` keeps: matrix products and attention, which take nearly all of a layer's time."""


class Policy(nn.Module):
    """See the module's docstring. `model` is the Hugging Face model; its parameter names are those of its checkpoints.

    Attributes:
        one_sample_per_row, shares_prefixes: how samples may be packed; see `families`.
        router_aux: factor of the load-balancing loss of routers in the objective (`loss.router_aux`).
        context: the ranks that compute each micro-batch together; None: each computes its own."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        chunk_tokens: int,
        attention: AttentionName = "mask",
        head_in_float32: bool = False,
        router_aux: float = 0.0,
        device_type: str = "cpu",
        context: ContextGroup | None = None,
    ) -> None:
        super().__init__()
        if _decoder_of(model) is None:
            raise ConfigError(
                f"model.path: {type(model).__name__} has no submodule that ends before the head; this family cannot be trained"
            )
        if not is_plain_linear(model.get_output_embeddings()):
            raise ConfigError(
                f"model.path: the head of {type(model).__name__} is not one linear layer; this family cannot be trained"
            )
        if router_aux and "router_logits" not in (_decoder_of(model)._can_record_outputs or {}):
            raise ConfigError(f"loss.router_aux: {type(model).__name__} has no router logits to balance; leave it out")
        self.model, self.router_aux, self.context = model, router_aux, context
        self._head_in_float32 = head_in_float32
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        config = model.config.get_text_config()
        self._transform = LogitTransform.from_config(config)
        self._num_attention_layers = count_attention_layers(config)
        described = {**config.to_dict(), "layer_types": getattr(config, "layer_types", None)}
        self.shares_prefixes = shares_prefixes(described)
        self.one_sample_per_row = one_sample_per_row(described, device_type=device_type)
        use_attention(model, attention)

    def forward(
        self,
        batch: MicroBatch,
        *,
        temperature: float | None = None,
        objective: TokenObjective | None = None,
        is_per_token: bool = True,
        loss_scale: float = 1.0,
    ) -> PolicyOutput:
        """Log-probabilities and entropies of the trained tokens. Of ranks that compute them together, each has all of them, and an
        objective with the gradient of its own. `temperature`: None = that of the sample or else of the run; for the others see
        `chunked_logprobs`. Raises ConfigError: the model's layers do not keep packed samples apart."""
        decoded = self._decode(batch, has_routers=objective is not None and self.router_aux > 0.0)
        hidden = decoded.last_hidden_state  # (R, T, H)
        flat = hidden.reshape(-1, hidden.shape[-1])  # (R x T, H)
        context = self.context if batch.num_trained_tokens else None
        own = batch if context is None else context.own_tokens(batch)
        if context is not None and objective is not None:
            objective = context.own_objective(batch, objective, is_per_token=is_per_token)
        settings: dict[str, Any] = {"is_per_token": is_per_token, "loss_scale": loss_scale}
        output = self._of_tokens(flat, own, temperature, objective, **settings)
        if context is not None:
            output = context.gathered(output, batch)
        if output.objective is None or not self.router_aux or not batch.num_trained_tokens:
            return output
        aux = self._balance(batch, decoded.router_logits) * (batch.num_trained_tokens / batch.minibatch_tokens)
        return replace(output, objective=output.objective + self.router_aux * aux, router_aux=aux.detach())

    def _of_tokens(
        self,
        flat: torch.Tensor,  # (R x T, H)
        batch: MicroBatch,
        temperature: float | None,
        objective: TokenObjective | None,
        *,
        is_per_token: bool,
        loss_scale: float,
    ) -> PolicyOutput:
        """What the head gives for the trained tokens of `batch`."""
        states = flat[batch.source_index]  # (N, H)
        head = self.model.get_output_embeddings()
        given: float | torch.Tensor = self._temperature if temperature is None else temperature
        if temperature is None and batch.temperatures is not None:
            given = torch.where(batch.temperatures.isnan(), self._temperature, batch.temperatures)
        if batch.num_trained_tokens == 0:
            # a rank without trained tokens: every parameter, the head's too, still has to get a gradient (of zeros),
            # because FSDP reduces the same parameters on every rank
            nothing = states.detach().sum(-1).float()
            top = None if objective is None else nothing.new_empty(0, num_likeliest(batch))
            total = head(flat[:1]).float().sum() * 0.0
            return PolicyOutput(logprobs=nothing, entropy=nothing, top_logprobs=top, objective=total)
        return chunked_logprobs(
            states,
            batch.target_ids,
            head,
            temperature=given,
            chunk_tokens=self._chunk_tokens,
            transform=self._transform,
            objective=objective,
            top_ids=batch.top_ids,
            is_per_token=is_per_token,
            in_float32=self._head_in_float32,
            loss_scale=loss_scale,
        )

    def _balance(self, batch: MicroBatch, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The load-balancing loss of the routers over all tokens but padding, as transformers computes it. ()"""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.model.config.get_text_config()
        is_token = None
        if len(batch.position_ids) > 1:  # rows of one sample: padding is at position 0, as only their first tokens are
            is_token = batch.position_ids > 0
            is_token[:, 0] = True
        aux: torch.Tensor = load_balancing_loss_func(
            router_logits, router_logits[0].shape[-1], config.num_experts_per_tok, attention_mask=is_token
        )
        return aux

    def _decode(self, batch: MicroBatch, *, has_routers: bool) -> Any:
        """The output of the model before its head."""
        ids, positions = batch.input_ids, batch.position_ids
        if self.context is not None:
            ids, positions = self.context.own_columns(ids), self.context.own_columns(positions)
        layout = SampleLayout(batch.segments, ids.shape, ids.device, context=self.context)
        more: dict[str, Any] = {"output_router_logits": True} if has_routers else {}
        if not (self.shares_prefixes or self.one_sample_per_row) and len(batch.input_ids) == 1:  # else a row for each
            more |= {"cu_seq_lens_q": layout.parts[0].ends[0], "seq_idx": layout.numbers}
        output = _decoder_of(self.model)(
            input_ids=ids,
            attention_mask=layout.no_padding,
            position_ids=positions,
            use_cache=False,
            sample_layout=layout,
            **more,
        )
        if layout.num_uses < self._num_attention_layers:
            raise ConfigError(
                f"model.path: only {layout.num_uses} of {self._num_attention_layers} layers of {type(self.model).__name__} "
                "keep packed samples apart; this family cannot be trained"
            )
        return output


def _decoder_of(model: Any) -> Any:
    """The submodule that ends before the head; None if there is none."""
    return model.base_model if model.base_model is not model else getattr(model, "model", None)  # the latter: Llama 4


def recompute_activations(model: Any, mode: Literal["none", "selective", "full"], *, has_dropout: bool = False) -> None:
    """Make every decoder layer recompute its activations: full: everything from its input; selective: everything except matrix
    products and attention. With dropout, recomputation draws the same numbers. Call it before the layers are compiled and
    sharded."""
    if mode == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": has_dropout}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _save_or_recompute)
    for layer in decoder_layers(model):
        layer.forward = partial(_recomputed, layer.forward, settings)


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The decoder layers of a Hugging Face causal LM: the longest of its outermost ModuleLists."""
    lists: list[nn.ModuleList] = []
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        if isinstance(module, nn.ModuleList):
            lists.append(module)
        else:
            pending.extend(module.children())
    return cast(Sequence[nn.Module], max(lists, key=len)) if lists else []


def _recomputed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **settings, **kwargs)


def _save_or_recompute(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _kept() -> frozenset[Any]:
    found = (getattr(getattr(torch.ops, library), name, None) for library, name in _KEPT_NAMES)
    return frozenset(packet.default for packet in found if packet is not None)


def compiles(wanted: bool | None, policy: Policy, device_type: str) -> bool:
    """Whether `training.compile` has the layers compiled; None: on a GPU, if none carries a state along the row."""
    return wanted if wanted is not None else device_type == "cuda" and policy.shares_prefixes


def compile_layers(model: Any, *, may_fail: bool = False) -> None:
    """Compile the forward of every decoder layer, in place; the first forward pass does the work. Call it after adapters were added
    and before `shard_policy`, whose hooks stay outside. Sizes are dynamic: token counts differ between micro-batches.
    `may_fail`: what cannot be compiled runs uncompiled, with a warning in the log."""
    torch._dynamo.config.suppress_errors = may_fail
    for layer in decoder_layers(model):
        forward = layer.forward
        if isinstance(forward, partial):
            # recompute_activations wraps this layer: compile the function inside. If recomputation were inside the compiled
            # function, together with the attention that is not compiled there, torch would compile nothing
            compiled = torch.compile(forward.args[0], dynamic=True)
            layer.forward = partial(forward.func, compiled, *forward.args[1:], **forward.keywords)
        else:
            layer.forward = torch.compile(forward, dynamic=True)


def make_mesh(
    device_type: str, *, world_size: int, num_nodes: int = 1, sharding: Literal["full", "hybrid"] = "full"
) -> DeviceMesh:
    """The ranks as FSDP divides them: all of them, or (nodes, ranks of a node) if each node holds a full copy (HSDP).

    Worked example: 4 ranks on 2 nodes, hybrid -> [[0, 1], [2, 3]], sharded within a row and replicated over rows.
    """
    if sharding == "full" or num_nodes == 1:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (num_nodes, world_size // num_nodes), mesh_dim_names=("replicate", "shard"))


def shard_policy(
    policy: Policy,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Apply FSDP2 in place: every decoder layer is one unit, the rest (embeddings, norm, head) belongs to the root. Parameters on
    "meta" stay there until `load_weights`. `reshard_after_forward`: free a layer's gathered parameters until the backward pass.

    One rank that trains in float32 has nothing to shard and nothing to cast: FSDP would copy every parameter in each pass, so it
    is left out.
    """
    if cpu_offload and mesh.device_type == "cpu":
        raise ConfigError(
            "training.cpu_offload: the trainer runs on the CPU, so everything is already in the machine's memory; set it to false"
        )
    is_float32 = {compute_dtype, *(parameter.dtype for parameter in policy.parameters())} == {torch.float32}
    if mesh.size() == 1 and is_float32 and not cpu_offload:
        return
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # the root's input is a micro-batch, whose weights, advantages and log-probabilities stay in float32
    of_root = replace(precision, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    whole: set[nn.Parameter] = {layer.weight for _, layer in layers_in_4_bits(policy.model)}
    for layer in decoder_layers(policy.model):
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
            ignored_params=whole,
        )
    fully_shard(policy, mesh=mesh, mp_policy=of_root, offload_policy=offload, ignored_params=whole)


def reshard(policy: nn.Module) -> None:
    """Free every gathered parameter; call it after a forward pass without a backward pass. Parameters that stay gathered would miss
    the next update."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Reference:
    """The policy that the KL term compares with: a second model over the same ranks, frozen here or synced with the policy
    (`loss.sync_ref_model`), or, `without_adapters`, the trained one without its adapters, which costs no memory."""

    def __init__(self, policy: Policy, *, without_adapters: bool = False) -> None:
        self.policy = policy
        self._without_adapters = without_adapters
        if not without_adapters:
            policy.requires_grad_(False)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the trained tokens of a micro-batch: (N,) float32, natural log, at the run's temperature, without
        gradient. A collective: every rank makes the same number of calls, including batches without trained tokens."""
        with torch.no_grad(), adapters_off(self.policy.model) if self._without_adapters else nullcontext():
            logprobs: torch.Tensor = self.policy(batch).logprobs
        reshard(self.policy)
        return logprobs

    @torch.no_grad()
    def sync(self, policy: Policy, *, alpha: float) -> None:
        """reference <- alpha policy + (1 - alpha) reference (TR-DPO, arXiv 2404.09656, equation 4). Both are sharded in the same
        way, so each rank updates its own rows and no rank waits."""
        pairs = zip(self.policy.named_parameters(), policy.named_parameters(), strict=True)
        for (name, reference), (same_name, trained) in pairs:
            assert name == same_name
            rows = local_of(reference)
            rows.lerp_(local_of(trained).to(rows), alpha)
