"""Estimates of the memory that a process of a run needs on its device, good to about a third. The plan shows them before anything
is started (launch.gpus); they lead to warnings, never to a refusal. The second part is about the disk of the run."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_async.checks.model_files import count_parameters, text_config
from grpo_async.checks.report import Found
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.utils.text import count, format_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ADVICE = (
    "if memory runs out, set model.activation_checkpointing: full, lower training.micro_batch_tokens or "
    "training.logprob_chunk_tokens, use bfloat16 (model.compute_dtype, inference.dtype), optimizer.type: adamw_8bit or adapters "
    "(model.lora), set training.cpu_offload: true, or use more trainer ranks"
)
_MARGIN = 1.15  # of an estimate: fragments of the allocator, and what the formulas leave out
_CONTEXT_BYTES = 2 << 30  # of trainer and server on one GPU: CUDA contexts, workspaces, kernels
_VLLM_WORK_BYTES = 3 << 29  # 1.5 GiB: vLLM's own activations and captured graphs
_TIGHT = 0.9  # of the disk that is free


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    kv_elements_per_token: int
    """KV-cache elements per token: 2 x layers x num_key_value_heads x head_dim."""
    query_width: int
    """Heads of attention x head_dim."""
    is_tied: bool = False
    """Whether the head is the embedding."""
    routed: int = 0
    """Parameters of experts."""
    chosen: float = 1.0
    """Fraction of them that a token takes."""

    @property
    def ends(self) -> int:
        """Parameters of embedding and head."""
        return self.hidden * self.vocabulary * (1 if self.is_tied else 2)

    @property
    def served(self) -> int:
        """Parameters of matrix products. An embedding of its own does not count: a lookup computes nothing."""
        return self.parameters - (0 if self.is_tied else self.hidden * self.vocabulary)

    @property
    def computed(self) -> float:
        """N, those of them that a token takes."""
        return self.served - (1 - self.chosen) * min(self.routed, self.parameters - self.ends)

    def forward_flops(self, context: float) -> float:
        """FLOPs for a token that attends to `context` tokens: 2 N + 4 L A context (two products of A values with each of them)."""
        return 2.0 * self.computed + 4.0 * self.layers * self.query_width * context

    def training_flops(self, length: float) -> float:
        """FLOPs for a token of a sample of `length` tokens, forward and backward: 6 N + 6 L A (length + 1). Attention is causal: a
        token attends to (length + 1) / 2 on average. Backward is twice forward. Recomputation (checkpointing) does not count."""
        return 3.0 * self.forward_flops((length + 1) / 2)

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int) -> ModelSize:
        """`config`: that of the text model. A key that it lacks gets the usual value: 12 hidden^2 parameters in a layer, hidden 2 x
        cube root. Worked example: 8e9 -> hidden 4000, 42 layers (Llama 3 8B: 4096, 32)."""

        def number(key: str, usual: float) -> int:
            value = config.get(key)  # of some models a list, with a number for each layer
            return value if isinstance(value, int) and value > 0 else round(usual)

        hidden = number("hidden_size", max(64, 2 * parameters ** (1 / 3)))
        heads = number("num_attention_heads", 1)
        head_dim = number("head_dim", hidden / heads)
        layers = number("num_hidden_layers", max(1, parameters / (12 * hidden**2)))
        expert = 3 * hidden * number("moe_intermediate_size", number("intermediate_size", 4 * hidden))
        experts = max((number(key, 0) for key in config if key.endswith("experts")), default=0)  # as families name it
        return cls(
            parameters=parameters,
            hidden=hidden,
            layers=layers,
            vocabulary=number("vocab_size", min(150_000, max(1024, parameters / (4 * hidden)))),
            kv_elements_per_token=2 * layers * number("num_key_value_heads", heads) * head_dim,
            query_width=heads * head_dim,
            is_tied=bool(config.get("tie_word_embeddings")),
            routed=layers * experts * expert if experts > 1 else 0,
            chosen=number("num_experts_per_tok", experts) / experts if experts else 1.0,
        )

    @classmethod
    def read(cls, path: str) -> ModelSize | None:
        """Size of the model in a folder; None for a hub name. Raises ConfigError: its files are broken."""
        parameters = count_parameters(path)
        return None if parameters is None else cls.of(text_config(Path(path)), parameters)

    def trained(self, config: ExperimentConfig) -> int:
        """Number of trained parameters: all; with LoRA about N r / hidden, and the embeddings and heads of `modules_to_save`."""
        lora = config.model.lora
        if lora is None:
            return self.parameters
        whole = sum("embed" in name or "head" in name for name in lora.modules_to_save) * self.hidden * self.vocabulary
        return min(self.parameters, self.parameters * lora.rank // self.hidden + whole)


def trainer_memory(config: ExperimentConfig, model: ModelSize) -> dict[str, float]:
    """Bytes of one trainer rank at its peak, by what they are for.

    With N parameters on R ranks that share them (hybrid sharding: those of a machine), T of them trained, m bytes an element of
    `model.dtype` (adapters: 4), c of the compute dtype, t tokens of a micro-batch, L layers, E parameters of embedding and head:

        weights      (N m + reference N c) / R; a synced one: N m; in 4 bits 9/16 of a byte for all but the embedding, on each rank
        gathered     two layers, embedding and head, in c
        gradients    4 T / R (a GPU reduces them after every micro-batch)
        optimizer    T / R times 2 m (two moments; the fused update needs no more); adamw_8bit: T / R times 2 (1 + 4 / 256)
        activations  t x hidden x c x (36 L, 18 L with selective or L + 36 with full checkpointing)
        logits       `training.logprob_chunk_tokens` x vocabulary x (4 + c), and the head's whole gradient in float32
        reduction    what the gradients of embedding and head, E x (4 + c) while they are reduced, take beyond the last three
                     and `gathered`, which are free again by then

    With `training.cpu_offload` weights, gradients and optimizer are not on the device. FSDP2 on fake ranks takes between 0.8 and 1
    of it (tests/checks/test_memory.py).

    Worked example: N = 8e9 in float32 on 8 ranks -> weights 4e9, gradients 4e9, optimizer 8e9.
    """
    training, launch, lora = config.training, config.launch, config.model.lora
    ranks = launch.num_trainer_ranks * (1 if launch.sharding == "hybrid" else launch.trainer_nodes)
    master, compute = ITEM_BYTES[config.model.dtype], ITEM_BYTES[config.model.resolved_compute_dtype]
    weights: float = model.parameters * master
    if lora is not None and lora.load_in_4bit:
        embedding = model.hidden * model.vocabulary
        weights = embedding * master + 9 / 16 * (model.parameters - embedding) * ranks
    if config.loss.needs_reference and not config.reference_is_policy:
        weights += model.parameters * (master if config.loss.sync_ref_model else compute)
    kept = {"none": 36 * model.layers, "selective": 18 * model.layers, "full": model.layers + 36}
    share, trained = 0.0 if training.cpu_offload else 1 / ranks, model.trained(config)
    gathered = min(model.parameters, 2 * max(0, model.parameters - model.ends) / model.layers + model.ends) * compute
    activations = training.micro_batch_tokens * model.hidden * kept[config.model.activation_checkpointing] * compute
    trains_ends = lora is None or bool(lora.modules_to_save)
    logits = min(training.resolved_chunk_tokens, training.micro_batch_tokens) * model.vocabulary * (4 + compute)
    logits += 4 * model.hidden * model.vocabulary * trains_ends
    reduced = (4 + compute) * model.ends * trains_ends
    return {
        "weights": weights * share,
        "gathered": gathered,
        "gradients": 4 * trained * share,
        "optimizer": _moment_bytes(config) * trained * share,
        "activations": activations,
        "logits": logits,
        "reduction": max(0.0, reduced - gathered - activations - logits),
    }


def _moment_bytes(config: ExperimentConfig) -> float:
    if config.optimizer.type == "adamw_8bit":
        return 2 * (1 + 4 / 256)  # a code, and its part of the scale of a block
    return 2 * (4 if config.model.lora is not None else ITEM_BYTES[config.model.dtype])


def server_memory(config: ExperimentConfig, model: ModelSize, num_tokens: float) -> dict[str, float]:
    """Bytes of vLLM on one GPU: weights / parallel, the adapters that it swaps, its own work, in a push a layer's experts (with
    `expert_parallel` its own), and the KV cache of `num_tokens` (an upper bound where layers have windows or share a cache)."""
    vllm = config.inference.vllm
    layer = model.parameters / model.layers * ITEM_BYTES[config.inference.resolved_dtype] * bool(model.routed)
    share = ITEM_BYTES[config.inference.resolved_dtype] / (vllm.tensor_parallel_size * vllm.pipeline_parallel_size)
    return {
        "weights": model.parameters * share,
        "adapters": config.adapter_slots * model.trained(config) * share,
        "activations and graphs": _VLLM_WORK_BYTES,
        "experts of a push": layer
        / (vllm.tensor_parallel_size * vllm.data_parallel_size if vllm.expert_parallel else 1),
        "KV cache": num_tokens * model.kv_elements_per_token * share,
    }


def bytes_beside_vllm(config: ExperimentConfig, model: ModelSize) -> float:
    """What a trainer rank holds while vLLM generates on the same GPU, with the margin and the CUDA contexts.

    vLLM never sleeps: all of `trainer_memory`, and the two buckets into which vLLM receives a push. The trainer's own two need
    nothing more, because no activations are held during a push.
    vLLM sleeps while a step trains: weights and optimizer, since the trainer frees the rest before vLLM wakes up; and the two
    buckets of a push on both sides."""
    trainer, bucket = trainer_memory(config, model), _largest_bucket(config, model)
    if config.inference.vllm.sleep_while_training:
        return _CONTEXT_BYTES + _MARGIN * (trainer["weights"] + trainer["optimizer"]) + 4 * bucket
    return _CONTEXT_BYTES + _MARGIN * sum(trainer.values()) + 2 * bucket


def _largest_bucket(config: ExperimentConfig, model: ModelSize) -> int:
    """Bytes. A parameter is never divided over buckets, so one bucket is at least as large as the embedding. Worked example: 8B
    in bfloat16 -> 128,256 x 4,096 x 2 = 1.05e9, and not 250 MB. Swapped adapters have no large parameters."""
    if config.adapter_slots:
        return config.weights.bucket_bytes(4 * model.trained(config))
    item = ITEM_BYTES[config.inference.resolved_dtype]
    return max(config.weights.bucket_bytes(model.parameters * item), model.vocabulary * model.hidden * item)


def describe(parts: Mapping[str, float]) -> str:
    """ "3.1 GiB: weights 2.2 GiB, optimizer 0.9 GiB"; parts of 0 bytes are left out."""
    named = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"{format_bytes(sum(parts.values()))}: {named}"


def describe_peak(peaks: Sequence[float], *, on_gpu: bool) -> str:
    """The most that a rank was measured to hold. On a CPU whole processes are measured."""
    return f"{format_bytes(max(peaks))} {'of GPU memory' if on_gpu else 'resident, the interpreter and its libraries included'}"


# ---- disk ----


def check_run_dir_writable(run_dir: RunDir) -> None:
    """Raise ConfigError where the run directory, or the nearest folder above it that exists, cannot be written to."""
    try:
        place = _nearest(run_dir)
        fault = "" if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else "is not a folder you can write to"
    except OSError as error:
        place, fault = run_dir.root, str(error.strerror)
    if fault:
        raise ConfigError(
            f"run.dir: {run_dir.root} cannot be created: {place} {fault}; set run.dir to a folder that you own"
        )


def _nearest(run_dir: RunDir) -> Path:
    return next(path for path in (run_dir.root, *run_dir.root.absolute().parents) if path.exists())


def disk_room(config: ExperimentConfig, run_dir: RunDir, size: ModelSize) -> Found:
    """The run directory's disk holds the checkpoints and the exported model.

    A checkpoint holds the T parameters that are trained and AdamW's two moments: 3 T m bytes (in 8 bits T m and about 2 T),
    and N m for a synced reference.
    keep_last + keep_best of them stay at most, and each whose step is a multiple of keep_every (see `checkpoint`); one more is
    there while it is written; what is there already (a resume) counts. The export is N m.
    """
    section = config.checkpoint
    item = ITEM_BYTES[config.model.dtype]
    trained_item = (item if config.model.lora is None else 4) + _moment_bytes(config)
    model, each = size.parameters * item, size.trained(config) * trained_item
    if config.loss.sync_ref_model:
        each += model  # the synced reference
    multiples = config.num_steps // math.lcm(section.every_steps, section.keep_every) if section.keep_every else 0
    kept_longer = section.keep_best + multiples
    if config.num_steps:  # of those that the run makes; 0: the rows that training.epochs goes by are not counted yet
        kept_longer = min(
            kept_longer, max(0, math.ceil(config.num_steps / section.every_steps) - section.keep_last - 1)
        )
    still = max(0, section.keep_last + 1 + kept_longer - len(run_dir.checkpoint_steps()))
    needed, free = still * each + model, shutil.disk_usage(_nearest(run_dir)).free
    parts = f"{count(still, 'checkpoint')} of {format_bytes(each)} and the model of {format_bytes(model)}"
    message = f"{parts} need {format_bytes(needed)}; {run_dir.root} has {format_bytes(free)} free"
    advice = "free space, keep fewer checkpoints (checkpoint.keep_last), or set run.dir to another disk"
    if needed > free:
        return "fail", f"{message}: not enough; {advice}"
    if needed > _TIGHT * free:
        return "warn", f"{message}, and rollouts are written too; {advice}"
    return "pass", message
