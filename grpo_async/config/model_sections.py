"""The policy and how its parameters move: `model`, `optimizer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_async.config.base import AttentionName, ComputeDtype, Dtype, FilePath, ModelName, StrictModel

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class LoraSection(StrictModel):
    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank r of the adapters (LoRA, arXiv 2106.09685)."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The product B A is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers that get adapters, by the ends of their names; all-linear = every one but the head."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Of what the adapters are given, in the forward pass of an update alone: not in log-probabilities before it, not in scores,
    and not on servers. So policy and sampler differ by it."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Modules that are fully trained in addition to the adapters, by the ends of their names, such as [embed_tokens,
    lm_head]; of tied ones, name both. They are pushed and exported with the rest (peft's setting of this name)."""
    push: Literal["merged", "adapter"] = "merged"
    """What travels to the servers. merged: whole weights. adapter: the adapters alone, over gloo, for networks that are slower than
    a server's disk; each server adds them to the weights that it has loaded itself from `model.path`."""


class ModelSection(StrictModel):
    path: ModelName
    """Folder of a Hugging Face model (config, safetensors, tokenizer), or a hub name where the machine reaches a hub."""
    revision: str | None = Field(default=None, min_length=1)
    """Commit, tag or branch of a hub name, for trainer, tokenizer and servers; null = the newest. Without a network it is taken
    from the hub's cache on each machine (HF_HOME)."""
    dtype: Dtype = "float32"
    """dtype of the trainer's master weights and optimizer state."""
    compute_dtype: ComputeDtype | None = None
    """dtype of forward and backward. null: bfloat16 on a GPU, float32 on a CPU. float16 rounds eight times finer than bfloat16 and
    so brings trainer and servers closer (arXiv 2510.26788), for models whose activations stay below 65504; the loss is scaled, so
    that small gradients do not vanish."""
    head_dtype: Literal["float32"] | None = None
    """float32: trainer and servers compute logits in float32 (of weights and states in their dtypes), which brings their
    log-probabilities closer (arXiv 2506.13585); vLLM can from 0.26 on. null: in the dtype of everything else."""
    attention: Literal["auto", AttentionName] = "auto"
    """How packed samples are kept apart. varlen: kernels that know where samples begin (GPU, 16 bit). mask: a sample at a
    time, on any device. auto: varlen where it can run."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them: less memory, more compute. full: of every layer (about a
    third more compute). selective: all but matrix products and attention."""
    lora: LoraSection | None = None
    """Train adapters instead of all weights."""
    chat_template: FilePath | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `{enable_thinking: false}`."""
    end_of_turn_tokens: list[str] = Field(default_factory=list)
    """Tokens that end the policy's turn, in addition to the tokenizer's EOS and those of the model's generation_config.json."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in trainer and server. Only for models whose code you have read."""

    @property
    def compute_dtype_in_use(self) -> ComputeDtype:
        """`compute_dtype`, and where it is null that of a CPU: `ExperimentConfig.with_dtypes` fills it in where there is a GPU."""
        return self.compute_dtype or "float32"


class OptimizerSection(StrictModel):
    type: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101). muon: orthogonalized momentum for the matrices of the layers, adamw for everything else."""
    lr: float = Field(default=1e-6, gt=0.0, le=10.0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Muon's momentum."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=100.0)
    """Decoupled weight decay, of matrices only."""
    schedule: Literal[
        "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "warmup_stable_decay"
    ] = "constant"
    """Shape after the warmup, as transformers' schedules of these names; all but constant and inverse_sqrt end with the run."""
    schedule_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of transformers' schedule, such as {num_cycles: 3} (cosine_with_restarts), {power: 2} (polynomial),
    {num_decay_steps: 50, decay_type: linear} (warmup_stable_decay), {timescale: 1000} (inverse_sqrt)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup; the first step has lr / warmup_steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """linear, cosine, polynomial and warmup_stable_decay end at this x lr."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this total norm over all ranks."""
