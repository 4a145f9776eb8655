"""Estimates of what a step takes on H100s of 80 GB, to about a factor of two: what the model computes and moves, by fractions of a
card's peaks that others have measured. `python -m benchmarks simulation` adds the real rules of asynchrony."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from grpo_async.checks.memory import ModelSize, trainer_memory
from grpo_async.config import ExperimentConfig
from grpo_async.utils.devices import Peaks, listed_peaks
from grpo_async.utils.text import count

H100 = cast(Peaks, listed_peaks("H100"))
GPU_BYTES = 80e9
TRAINING_MFU = 0.25
"""Of a dense model with full checkpointing: 3/4 of the 0.33 to 0.39 that FSDP2 has with selective checkpointing, Llama 3.1 8B in
bfloat16 on 8 to 128 H100 (github.com/pytorch/torchtitan, docs/performance.md)."""
_DECODE_EFFICIENCY = 0.74
"""Fraction of the memory's bandwidth that a decode step uses: vLLM 0.21, Llama 3.1 8B in float16, one request: 6.48 ms a token
for 16.06 GB of weights (yobitelcomm.github.io/bench/recipes/concurrency-sweep, May 2026)."""
_ROW_EFFICIENCY = 0.7
"""Fraction of the peak FLOP/s at which each row is computed. With it 256 rows of the 8B with 500 tokens each come to 13,000
tokens/s, where 12,500 are reported for one H100 (morphllm.com/vllm-benchmarks, April 2026)."""
_PREFILL_MFU = 0.5  # an assumption: matrix products like those of the forward pass of training, without its traffic
_MAX_SEQS = 1024  # vLLM's own limit of rows on GPUs of 70 GiB and more (engine/arg_utils.py of 0.33)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeed:
    """A decode step of n rows takes `decode_s + n * row_s` seconds; a token of the context `prefill_s`, again after new weights."""

    slots: int
    decode_s: float
    row_s: float
    prefill_s: float


def server_speed(model: ModelSize, *, gpus: int, context: float) -> ServerSpeed:
    """The speed of a server in 16 bits whose rows have `context` tokens on average, without all-reduces of tensor parallelism."""
    kv_bytes = 2 * context * model.kv_elements_per_token  # of a row
    memory, flops = gpus * H100.memory * _DECODE_EFFICIENCY, gpus * H100.flops
    room = gpus * (0.9 * GPU_BYTES - 4e9) - 2 * model.parameters  # for keys and values
    return ServerSpeed(
        slots=max(1, min(_MAX_SEQS, int(room / kv_bytes))),
        decode_s=2 * model.served / memory,  # many rows choose all experts
        row_s=kv_bytes / memory + model.forward_flops(context) / (flops * _ROW_EFFICIENCY),
        prefill_s=model.forward_flops(context / 2) / (flops * _PREFILL_MFU),
    )


def step_seconds(config: ExperimentConfig, model: ModelSize, trainers: int, servers: int) -> tuple[float, float, float]:
    """Seconds of a step, those in which `trainers` GPUs compute it, and those in which `servers` of vLLM generate it.

    Completions have any length up to their limit M, M / 2 on average: a row has M / 3 behind it, and a trained token is in a sample
    of 2 M / 3. Prompts have half of what `max_model_len` leaves. Groups of `max_staleness` steps are generated at a time, since
    those of one more are trained; half of their rollouts wait for the longest: 16 groups of 8, 2, 6 servers -> 21 rows in each."""
    rollout, training, loss = config.rollout, config.training, config.loss
    num_rollouts, longest = rollout.groups_per_step * rollout.group_size, rollout.max_completion_tokens
    prompt = (config.inference.max_model_len - longest) / 2
    prompts, completions = rollout.groups_per_step * prompt, num_rollouts * longest / 2
    speed = server_speed(model, gpus=config.inference.gpus_of_a_server("vllm"), context=prompt + longest / 3)
    in_flight = min(rollout.most_in_flight, max(1, rollout.max_staleness) * num_rollouts / 2)
    rows = max(1.0, min(speed.slots, in_flight / servers))
    generate_s = (prompts * speed.prefill_s + completions * (speed.decode_s / rows + speed.row_s)) / servers
    forwards = loss.needs_reference + (loss.proximal == "recomputed" and training.num_updates > 1)  # without a backward
    flops = model.training_flops(prompt + 2 / 3 * longest) * (training.num_iterations + forwards / 3)
    if config.model.lora is not None:  # frozen weights have no gradients
        flops -= 2 * model.computed * training.num_iterations
    train_s = (prompts + completions) * flops / (trainers * H100.flops * TRAINING_MFU)
    return max(train_s, generate_s) if rollout.max_staleness else train_s + generate_s, train_s, generate_s


def describe_step(config: ExperimentConfig, gpus: int) -> dict[str, str]:
    """Lines of the plan: who waits in a step, and the fastest split of `gpus` whose trainer fits. `config` has its dtypes."""
    training, rollout, launch = config.training, config.rollout, config.launch
    not_estimated = {
        "on a cluster (launch.ray)": launch.ray is not None,
        "on CPUs": launch.device == "cpu",
        "for GPUs that trainer and servers share (launch.colocate)": launch.colocate,
        "with training.cpu_offload": training.cpu_offload,
        "in float32": "float32" in (config.model.resolved_compute_dtype, config.inference.resolved_dtype),
    }
    for why, is_so in not_estimated.items():
        if is_so:
            return {"step": f"not estimated {why}"}
    model = ModelSize.read(config.model.path)
    if model is None:
        return {"step": "not estimated: the size of a hub model is not known; name a folder as model.path"}

    def fits(trainers: int) -> bool:
        other = config.model_copy(update={"launch": launch.model_copy(update={"num_trainer_ranks": trainers})})
        return sum(trainer_memory(other, model).values()) < 0.95 * GPU_BYTES

    step_s, train_s, generate_s = step_seconds(config, model, launch.num_trainer_ranks, config.num_servers)
    waiting = "the trainer waits" if generate_s > train_s else "the servers wait"
    if rollout.max_staleness == 0:
        waiting = "one waits for the other (rollout.max_staleness: 0)"
    together, each = training.context_parallel, config.inference.gpus_of_a_server("vllm")
    splits = [
        (step_seconds(config, model, ranks, servers)[0], f"{ranks} for the trainer and {count(servers, 'server')}")
        for ranks in range(together, gpus, together)
        if (servers := (gpus - ranks) // each) and fits(ranks)
    ]
    fastest_s, split = min(splits, default=(0.0, ""))
    return {
        "step": f"about {step_s:,.0f} s: the trainer computes {train_s:,.0f} s, the servers generate {generate_s:,.0f} s for "
        f"{rollout.groups_per_step * rollout.group_size:,} rollouts; {waiting}",
        **({"split": f"of {gpus} GPUs {split} are the fastest: about {fastest_s:,.0f} s a step"} if split else {}),
        "estimated": "to a factor of two, for H100s: completions of half of rollout.max_completion_tokens on average, an MFU of "
        f"{TRAINING_MFU}, decoding at {_DECODE_EFFICIENCY} of the memory's speed",
    }
