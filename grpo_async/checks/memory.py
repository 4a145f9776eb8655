"""What a run needs of a device's memory, estimated before anything starts. Reads headers and config.json only; imports no torch.

    number = count_parameters(config.model.path)
    estimate_trainer(config, number).total      estimate_server(config, number).total      in bytes, per device
    shared_gpu_fraction(config, number, gpu_bytes)   what vLLM may take of a GPU that the trainer needs too

The formulas stand in the docstrings. They are made for models of the Llama and Qwen kind and were compared with what PyTorch
saves for the backward pass; take the sums as good to about a fifth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_async.checks.model_files import read_shapes, text_config, weight_files
from grpo_async.config.experiment import ExperimentConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LOGIT_COPIES = (
    5  # float32: scaled logits, probabilities, their product, and two gradients of them in the backward pass
)
_MARGIN = 1.15  # of an estimate: fragments of the allocator, and what the formulas leave out
_NF4_BYTES = 0.5625  # 4 bits, and a float32 magnitude for 64 elements
_CONTEXT_BYTES = 1 << 30  # CUDA context, cuBLAS workspaces and kernels of one process
_VLLM_WORK_BYTES = 3 << 29  # 1.5 GiB: vLLM's own activations and captured graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    staging: int = 0
    """Buffers of a weight push."""
    kv_cache: int = 0
    """Servers only."""
    reference: int = 0
    """A second model for the KL term."""

    @property
    def total(self) -> int:
        """weights + reference + optimizer + kv_cache + max(gradients + activations + logits, staging).

        A step and a push do not happen at once, so only the larger of the two counts.
        """
        return (
            self.weights
            + self.reference
            + self.optimizer
            + self.kv_cache
            + max(self.gradients + self.activations + self.logits, self.staging)
        )

    def describe(self) -> str:
        """The parts that are not 0, as text: "weights 2.2 GiB, optimizer 4.4 GiB (6.7 GiB)"."""
        names = ("weights", "reference", "gradients", "optimizer", "activations", "logits", "staging", "kv_cache")
        parts = [
            f"{name.replace('_', ' ')} {format_bytes(getattr(self, name))}" for name in names if getattr(self, name)
        ]
        return f"{', '.join(parts)} ({format_bytes(self.total)} at once)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that memory depends on."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """The head is the embedding."""

    @property
    def largest_parameter(self) -> int:
        """vocab_size x hidden_size: elements of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Elements outside of the layers: embedding, and the head where it is another."""
        return self.largest_parameter * (1 if self.is_tied else 2)

    @property
    def kv_elements(self) -> int:
        """2 x num_layers x num_kv_heads x head_dim: elements of keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def format_bytes(number: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def count_parameters(model_path: str) -> int | None:
    """Parameters of a model folder, from the headers of its safetensors files; None when unknown (a hub name, other formats).

    A head that is tied to the embedding counts once, also where the files hold it twice. Worked example: Qwen3-0.6B
    (tied, 151936 x 1024 embedding) -> 596,049,920.

    Raises:
        ConfigError: a file is named by the index and missing, or is no safetensors file.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return None
    shapes: dict[str, list[int]] = {}
    for file in weight_files(folder):
        shapes |= read_shapes(file)
    if not shapes:
        return None
    heads = [name for name in shapes if name.endswith("lm_head.weight")]
    embeddings = [shapes[name] for name in shapes if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if heads and text_config(folder).get("tie_word_embeddings") is True and shapes[heads[0]] in embeddings:
        del shapes[heads[0]]
    return sum(math.prod(shape) for shape in shapes.values())


def read_shape(model_path: str) -> ModelShape | None:
    """Sizes of a model folder's config.json; None when there is none, or it is of another kind."""
    config = text_config(Path(model_path))
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(config.get("intermediate_size") or 4 * hidden),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings")),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def guess_shape(num_parameters: int) -> ModelShape:
    """Usual sizes of a model of so many parameters: width 2 x cube root, 12 x width^2 parameters in a layer.

    Worked example: 8e9 -> width 4000, 42 layers (Llama 3 8B: 4096, 32).
    """
    width = max(64, round(2 * num_parameters ** (1 / 3)))
    heads = max(1, width // 128)
    return ModelShape(
        num_layers=max(1, round(num_parameters / (12 * width * width))),
        hidden_size=width,
        intermediate_size=4 * width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        vocab_size=max(1024, min(150_000, num_parameters // (4 * width))),
        is_tied=True,
    )


def estimate_trainer(
    config: ExperimentConfig, num_parameters: int, shape: ModelShape | None = None, *, on_gpu: bool = True
) -> MemoryEstimate:
    """Memory of one trainer rank at its peak, in bytes.

    With N parameters sharded over R ranks (hybrid sharding: those of one machine), T of them trained (all, or the adapters), m
    bytes an element of `model.dtype` (adapters: 4), c of the compute dtype, w of the wire, t tokens of a micro-batch:

        weights      N m / R (layers in nf4: N 0.5625 / R) + adapters, and gathered by FSDP: embedding, head and two layers, in c
                     (all layers with reshard_after_forward: false)
        reference    N c / R for a second model
        gradients    4 T / R, reduced and scattered after each micro-batch, and the largest whole one before that, in c (embedding
                     or layer); on a CPU 4 T: there they travel once, after the last micro-batch
        optimizer    per trained element, over R: adamw 3 m (two moments, and half as much again while it steps), adamw_8bit 2.1,
                     muon 2 m
        activations  t x `activation_bytes` per layer; with full checkpointing t x hidden x c per layer and one layer in full
                     (selective: about half of what none takes)
        logits       `training.logprob_chunk_tokens` x vocabulary x 5 float32
        staging      two buckets (`weights.bucket_mb`, or the embedding where that is larger) in w, and the embedding in m

    With `training.cpu_offload` shards of weights and reference, and the optimizer, are not on the device.

    Args:
        num_parameters: see `count_parameters`.
        shape: None reads `model.path`, or guesses from the number of parameters where that is a hub name.

    Worked example: N = 600e6 in float32 on one rank -> weights 2.4e9 + gathered, gradients 2.4e9 + 0.3e9, optimizer 7.2e9.
    """
    shape = shape or read_shape(config.model.path) or guess_shape(num_parameters)
    ranks = shard_ranks(config)
    training, lora = config.training, config.model.lora
    master = _ITEM_BYTES[config.model.dtype]
    compute = _ITEM_BYTES[config.model.compute_dtype or config.model.dtype]
    in_layers = max(0, num_parameters - shape.root_parameters)
    layer = in_layers // shape.num_layers
    largest = min(shape.largest_parameter, num_parameters)
    adapters = adapter_parameters(config, shape)
    trained = num_parameters if lora is None else adapters
    kept = num_parameters * master
    if lora is not None and lora.quantization is not None:
        kept = int(in_layers * _NF4_BYTES) + shape.root_parameters * master
    num_gathered = 2 if training.reshard_after_forward else shape.num_layers
    gathered = min(num_parameters, shape.root_parameters + num_gathered * layer) * compute
    has_reference = config.loss.beta > 0 and not (lora is not None and config.loss.reference == "initial")
    trained_item = 4 if lora is not None else master
    moments = {"adamw": 3.0 * trained_item, "adamw_8bit": 2.1, "muon": 2.0 * trained_item}[config.optimizer.type]
    per_layer = activation_bytes(shape, item_bytes=compute)
    recomputes = config.model.activation_checkpointing != "none"
    of_layers = shape.num_layers * {
        "none": per_layer, "selective": per_layer // 2, "full": shape.hidden_size * compute,
    }[config.model.activation_checkpointing]  # fmt: skip
    on_device = 0 if training.cpu_offload else 1
    return MemoryEstimate(
        weights=on_device * (kept + adapters * 4) // ranks + gathered,
        reference=on_device * num_parameters * compute // ranks if has_reference else 0,
        gradients=4 * trained // ranks + min(max(largest, layer), trained) * compute if on_gpu else 4 * trained,
        optimizer=on_device * int(moments * trained) // ranks,
        activations=training.micro_batch_tokens * (of_layers + (per_layer if recomputes else 0)),
        logits=min(training.logprob_chunk_tokens, training.micro_batch_tokens) * shape.vocab_size * 4 * _LOGIT_COPIES,
        staging=2 * max(config.weights.bucket_mb << 20, largest * _ITEM_BYTES[config.inference.dtype])
        + largest * master,
    )


def describe_peak(peaks: Sequence[float], estimated: float, *, on_gpu: bool) -> str:
    """What was measured on each rank, beside what was expected: "0.9, 0.8 GiB (GPU memory; 1.0 GiB by estimate)"."""
    measured = ", ".join(format_bytes(peak) for peak in peaks)
    kind = "GPU memory" if on_gpu else "resident memory, the interpreter and its libraries included"
    return f"{measured} ({kind}; {format_bytes(estimated)} by estimate)"


def shard_ranks(config: ExperimentConfig) -> int:
    """Ranks that one copy of the model is sharded over: all of them, with hybrid sharding those of one machine."""
    launch = config.launch
    return launch.num_trainer_ranks * (1 if launch.sharding == "hybrid" else launch.nodes)


def adapter_parameters(config: ExperimentConfig, shape: ModelShape) -> int:
    """Elements of the LoRA adapters: rank x (rows + columns) of each matrix; 0 without. Targets with unusual names count as none.

    Worked example: rank 16 at q_proj of Qwen3-0.6B (2048 x 1024, 28 layers) -> 28 x 16 x 3072 = 1,376,256.
    """
    lora = config.model.lora
    if lora is None:
        return 0
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "q_proj": hidden + heads, "k_proj": hidden + kv_heads, "v_proj": hidden + kv_heads, "o_proj": heads + hidden,
        "gate_proj": hidden + inner, "up_proj": hidden + inner, "down_proj": inner + hidden,
    }  # fmt: skip
    targets = sizes if lora.target_modules == "all-linear" else lora.target_modules
    return shape.num_layers * lora.rank * sum(sizes.get(target.rpartition(".")[2], 0) for target in targets)


def activation_bytes(shape: ModelShape, *, item_bytes: int) -> int:
    """What one token leaves in one layer for the backward pass, in bytes.

    item_bytes x (8 hidden + 8 heads x head_dim + 3 kv_heads x head_dim + 4 intermediate)  norms, projections, attention, MLP

    Attention goes sample by sample (training/attention.py) and makes no mask of a row; varlen's leaves one heads x head_dim less.
    """
    heads = shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    elements = 8 * shape.hidden_size + 8 * heads + 3 * kv_heads + 4 * shape.intermediate_size
    return item_bytes * elements


def estimate_server(
    config: ExperimentConfig,
    num_parameters: int,
    shape: ModelShape | None = None,
    *,
    engine: Literal["vllm", "embedded"] = "vllm",
    on_gpu: bool = False,
) -> MemoryEstimate:
    """Memory of one worker of a server, in bytes.

    With N parameters, s bytes an element of `inference.dtype`, P = `inference.vllm.tensor_parallel_size` (embedded: 1):

        weights   N s / P
        staging   N s / P: an update is received whole before it replaces anything
        kv_cache  2 x layers x kv_heads x head_dim x s for a token. embedded: `max_slots` x `max_model_len` tokens;
                  vLLM on CPU: `inference.vllm.kv_cache_mb`; vLLM on GPU: one sequence of `max_model_len` at least (it takes all
                  that `gpu_memory_utilization` leaves)

    Worked example: N = 600e6 in bfloat16, vLLM on a CPU with kv_cache_mb 512 -> 1.2e9 + 1.2e9 + 0.54e9.
    """
    shape = shape or read_shape(config.model.path) or guess_shape(num_parameters)
    inference = config.inference
    item = _ITEM_BYTES[inference.dtype]
    parallel = inference.vllm.tensor_parallel_size if engine == "vllm" else 1
    token = shape.kv_elements * item
    if engine == "embedded":
        kv_cache = token * inference.max_model_len * inference.embedded.max_slots
    elif on_gpu:
        kv_cache = token * inference.max_model_len // parallel
    else:
        kv_cache = inference.vllm.kv_cache_mb << 20
    weights = num_parameters * item // parallel
    return MemoryEstimate(weights=weights, staging=weights, kv_cache=kv_cache)


def shared_gpu_fraction(
    config: ExperimentConfig, num_parameters: int, gpu_bytes: int, shape: ModelShape | None = None
) -> tuple[float, str | None]:
    """Share of a GPU that vLLM may take where a trainer rank needs the same GPU, and what to change where the two do not fit by
    this estimate; None: they do.

        (gpu_bytes - 1.15 x trainer - 2 GiB - staging of the server) / gpu_bytes, rounded down to 0.01, at most 0.9, and at least
        what the served weights and the keys and values of one sequence take: an estimate refuses nothing

    The 2 GiB are the CUDA contexts of both processes; what the server stages is outside of vLLM's own account. With
    `inference.vllm.sleep_while_training` the server gives its memory back before a step, so of the trainer only its weights,
    the moments and the staging are counted.

    Worked example: an 80 GiB GPU, a trainer of 20 GiB, 1.2 GiB staged -> (80 - 23 - 2 - 1.2) / 80 = 0.67.
    """
    trainer = estimate_trainer(config, num_parameters, shape)
    server = estimate_server(config, num_parameters, shape, on_gpu=True)
    beside = trainer.total
    if config.inference.vllm.sleep_while_training:
        beside = trainer.weights + trainer.reference + trainer.optimizer + trainer.staging
    left = gpu_bytes - _MARGIN * beside - 2 * _CONTEXT_BYTES - server.staging
    needed = server.weights + server.kv_cache + _VLLM_WORK_BYTES
    fraction = min(0.9, math.floor(left / gpu_bytes * 100) / 100)
    if fraction * gpu_bytes >= needed:
        return fraction, None
    advice = (
        f"by estimate too little for both: the trainer needs about {format_bytes(beside)}, vLLM at least "
        f"{format_bytes(needed + server.staging)}. If memory runs out, set model.activation_checkpointing: full, lower "
        "training.micro_batch_tokens, use bfloat16 (inference.dtype, model.compute_dtype), train adapters (model.lora), set "
        "optimizer.type: adamw_8bit or training.cpu_offload: true, or give them a GPU each"
    )
    return min(0.9, math.ceil(needed / gpu_bytes * 100) / 100), advice
