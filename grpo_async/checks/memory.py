"""What a run needs of a device's memory, roughly, before anything starts: good to about a third, so it warns and never refuses.

The peak that the first step really took is measured, noted and kept in summary.json, beside this estimate (`describe_peak`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from grpo_async.checks.model_files import text_config
from grpo_async.config.experiment import ExperimentConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NF4_BYTES = 0.5625  # 4 bits, and a float32 magnitude for 64 elements
_MARGIN = 1.15  # of an estimate: fragments of the allocator, and what the formulas leave out
_CONTEXT_BYTES = 2 << 30  # of both processes on a shared GPU: CUDA context, workspaces, kernels
_VLLM_WORK_BYTES = 3 << 29  # 1.5 GiB: vLLM's own activations and captured graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Logits included."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def describe(self) -> str:
        """ "weights 2.2 GiB, optimizer 4.4 GiB ..."."""
        return ", ".join(f"{each.name} {format_bytes(getattr(self, each.name))}" for each in fields(self))


def format_bytes(number: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def estimate_trainer(config: ExperimentConfig, num_parameters: int) -> MemoryEstimate:
    """Memory of one trainer rank at its peak.

    With N parameters sharded over R ranks (hybrid sharding: those of one machine), T of them trained (all, or adapters of about
    N r / hidden), m bytes an element of `model.dtype` (adapters: 4), c of the compute dtype, t tokens of a micro-batch, L layers:

        weights      (N m + reference N c) / R, and two layers and the embedding gathered in c; nf4: 0.5625 in place of m
        gradients    4 T / R
        optimizer    T / R times 3 m (adamw: two moments, and half as much again while it steps), 2.1 (adamw_8bit) or 2 m (muon)
        activations  t x hidden x c x (36 L, 18 L with selective or L + 36 with full checkpointing), and
                     `training.logprob_chunk_tokens` x vocabulary x 5 float32 for the logits

    With `training.cpu_offload` weights and optimizer are not on the device.

    Worked example: N = 600e6 in float32, one rank -> weights 2.4e9 + gathered, gradients 2.4e9, optimizer 7.2e9.
    """
    hidden, layers, vocabulary = _sizes(config.model.path, num_parameters)
    training, lora, launch = config.training, config.model.lora, config.launch
    ranks = launch.num_trainer_ranks * (1 if launch.sharding == "hybrid" else launch.nodes)
    master, compute = ITEM_BYTES[config.model.dtype], ITEM_BYTES[config.model.compute_dtype_in_use]
    trained = num_parameters if lora is None else min(num_parameters, num_parameters * lora.rank // hidden)
    trained_item = master if lora is None else 4
    kept = num_parameters * (_NF4_BYTES if lora is not None and lora.quantization is not None else master)
    if config.loss.beta > 0 and not (lora is not None and config.loss.reference == "initial"):
        kept += num_parameters * compute
    gathered = min(num_parameters, 2 * num_parameters // layers + hidden * vocabulary) * compute
    moments = {"adamw": 3.0 * trained_item, "adamw_8bit": 2.1, "muon": 2.0 * trained_item}[config.optimizer.type]
    saved = {"none": 36 * layers, "selective": 18 * layers, "full": layers + 36}[config.model.activation_checkpointing]
    chunk = min(training.logprob_chunk_tokens, training.micro_batch_tokens)
    on_device = 0 if training.cpu_offload else 1
    return MemoryEstimate(
        weights=on_device * int(kept) // ranks + gathered,
        gradients=4 * trained // ranks,
        optimizer=on_device * int(moments * trained) // ranks,
        activations=training.micro_batch_tokens * hidden * compute * saved + chunk * vocabulary * 4 * 5,
    )


def _sizes(model_path: str, num_parameters: int) -> tuple[int, int, int]:
    """Width, layers and vocabulary from config.json; of a hub name those usual for its size: 12 x width^2 parameters in a layer,
    width 2 x cube root. Worked example: 8e9 -> width 4000, 42 layers (Llama 3 8B: 4096, 32)."""
    config = text_config(Path(model_path))
    width = int(config.get("hidden_size") or max(64, round(2 * num_parameters ** (1 / 3))))
    layers = int(config.get("num_hidden_layers") or max(1, round(num_parameters / (12 * width**2))))
    return width, layers, int(config.get("vocab_size") or min(150_000, max(1024, num_parameters // (4 * width))))


def describe_peak(peaks: Sequence[float], estimated: float, *, on_gpu: bool) -> str:
    """What was measured on each rank: "0.9, 0.8 GiB (GPU memory; 1.0 GiB by estimate)". On a CPU the memory of whole processes is
    measured, which the estimate leaves out."""
    measured = ", ".join(map(format_bytes, peaks))
    if on_gpu:
        return f"{measured} (GPU memory; {format_bytes(estimated)} by estimate)"
    return f"{measured} (resident memory, the interpreter and its libraries included)"


def shared_gpu_fraction(config: ExperimentConfig, num_parameters: int, gpu_bytes: int) -> tuple[float, str | None]:
    """Fraction of a GPU that vLLM may take where a trainer rank needs the same GPU, and what to change where the two do not fit by
    this estimate; None: they do.

        (gpu_bytes - 1.15 x trainer - 2 GiB - staging of the server) / gpu_bytes, rounded down to 0.01, at most 0.9, and at least
        what the served weights, 1.5 GiB of vLLM's own and the keys and values of one sequence take

    The 2 GiB are the CUDA contexts of both processes; an update is received whole, outside of vLLM's own account. With
    `inference.vllm.sleep_while_training` the server gives its memory back before a step, so of the trainer only its weights and the
    moments are counted.

    Worked example: an 80 GiB GPU, a trainer of 20 GiB, 1.2 GiB staged -> (80 - 23 - 2 - 1.2) / 80 = 0.67.
    """
    trainer, inference = estimate_trainer(config, num_parameters), config.inference
    hidden, layers, _ = _sizes(config.model.path, num_parameters)
    parallel, item = inference.vllm.tensor_parallel_size, ITEM_BYTES[inference.dtype_in_use]
    served = num_parameters * item // parallel
    asleep = inference.vllm.sleep_while_training
    beside = trainer.weights + trainer.optimizer if asleep else trainer.total
    left = gpu_bytes - _MARGIN * beside - _CONTEXT_BYTES - served
    needed = served + _VLLM_WORK_BYTES + 2 * layers * hidden * item * inference.max_model_len // parallel
    fraction = min(0.9, math.floor(left / gpu_bytes * 100) / 100)
    if fraction * gpu_bytes >= needed:
        return fraction, None
    advice = (
        f"by estimate too little for both: the trainer needs about {format_bytes(beside)}, vLLM at least "
        f"{format_bytes(needed + served)}. If memory runs out, set model.activation_checkpointing: full, lower "
        "training.micro_batch_tokens, use bfloat16 (inference.dtype, model.compute_dtype), train adapters (model.lora), set "
        "optimizer.type: adamw_8bit or training.cpu_offload: true, or give them a GPU each"
    )
    return min(0.9, math.ceil(needed / gpu_bytes * 100) / 100), advice
