"""Rules of the pipeline: rollouts, their time limits, batches, servers."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from grpo_async.utils.loopback import is_loopback

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig

_SET_BY_US = {
    "--host": "see inference.host",
    "--port": "train chooses a free one, serve-vllm takes --port",
    "--model": "see model.path",
    "--dtype": "see inference.dtype",
    "--max-model-len": "see inference.max_model_len",
    "--tensor-parallel-size": "see inference.vllm.tensor_parallel_size",
    "--gpu-memory-utilization": "see inference.vllm.gpu_memory_utilization",
    "--trust-remote-code": "see model.trust_remote_code",
    "--ssl-certfile": "see inference.tls",
    "--ssl-keyfile": "see inference.tls",
    "--middleware": "it asks for the token",
    "--api-key": "the token of the run guards every path",
    "--worker-extension-cls": "weight updates need it",
    "--weight-transfer-config": "see weights.transport",
    "--api-server-count": "one process keeps the policy version",
    "--data-parallel-size": "see inference.replicas",
    "--logprobs-mode": "the loss needs those of the distribution that was sampled from",
}


def conflicts(config: ExperimentConfig) -> list[str]:
    """What does not go together."""
    rollout, training, inference = config.rollout, config.training, config.inference
    found = []
    if not config.rewards and not config.environments:
        found.append("rewards: there are none; name at least one, or an environment that has a `get_reward`")
    if config.rollout_function is not None and (config.tools or config.environments):
        found.append(
            "rollout_function.function: with one, `tools` and `environments` are not used (it makes the whole rollout); "
            "remove one or the other"
        )
    if config.evaluation is not None and config.evaluation.data is None and config.data.held_out is None:
        found.append(
            "evaluation.data: there is none; name a source, or keep rows of data.train back with data.held_out: 0.05"
        )
    if config.evaluation is None and config.data.held_out is not None:
        found.append(
            f"data.held_out: {config.data.held_out:g} keeps rows back from training for an evaluation, and there is none; add "
            "`evaluation: {}`, or leave held_out out"
        )
    if config.evaluation is not None and config.evaluation.data is not None and config.data.held_out is not None:
        found.append(
            "data.held_out: keeps rows back for evaluation, but evaluation.data names others; remove one of the two"
        )
    for name, environment in config.environments.items():
        if environment.max_instances is not None and environment.max_instances < rollout.group_size:
            found.append(
                f"environments.{name}.max_instances: {environment.max_instances} is less than rollout.group_size: "
                f"{rollout.group_size}; a group needs an instance for each of its rollouts"
            )
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_completion_tokens:
        found.append(
            f"rollout.max_turn_tokens: {rollout.max_turn_tokens} is more than rollout.max_completion_tokens: "
            f"{rollout.max_completion_tokens}, the budget of all turns together"
        )
    limits = {f"tools.{index}.timeout_s": tool.timeout_s for index, tool in enumerate(config.tools)}
    limits |= {f"environments.{name}.timeout_s": section.timeout_s for name, section in config.environments.items()}
    if config.rollout_function is not None:
        limits["rollout_function.timeout_s"] = config.rollout_function.timeout_s
    for path, limit_s in limits.items():
        if limit_s >= training.queue_timeout_s:
            found.append(
                f"{path}: {limit_s:g} is not less than training.queue_timeout_s: {training.queue_timeout_s:g}; the trainer "
                "would give up while such a call, during which no token comes, is within its limit"
            )
    if training.weight_sync_steps > rollout.max_staleness + 1:
        found.append(
            f"rollout.max_staleness: {rollout.max_staleness} with training.weight_sync_steps: "
            f"{training.weight_sync_steps} would drop every sample as stale; the server is up to "
            f"{training.weight_sync_steps - 1} steps behind, so set max_staleness >= {training.weight_sync_steps - 1}"
        )
    if rollout.max_completion_tokens >= inference.max_model_len:
        found.append(
            f"rollout.max_completion_tokens: {rollout.max_completion_tokens} leaves no room for a prompt in "
            f"inference.max_model_len: {inference.max_model_len}; raise the latter or lower the former"
        )
    if training.micro_batch_tokens < inference.max_model_len:
        found.append(
            f"training.micro_batch_tokens: {training.micro_batch_tokens} is less than inference.max_model_len: "
            f"{inference.max_model_len}; the longest possible sample would not fit into a micro-batch"
        )
    if config.launch.world_size > rollout.groups_per_step * rollout.group_size:
        found.append(
            f"launch.num_trainer_ranks: {config.launch.world_size} on all machines is more than the samples of a step "
            f"({rollout.groups_per_step} groups x {rollout.group_size})"
        )
    if config.optimizer.warmup_steps > training.max_steps:
        found.append(
            f"optimizer.warmup_steps: {config.optimizer.warmup_steps} is more than training.max_steps: {training.max_steps}; "
            "set both for a short run"
        )
    if inference.urls and inference.replicas > 1:
        found.append(
            f"inference.replicas: {inference.replicas} servers would be spawned, but inference.urls names servers that run "
            "already; remove one of the two"
        )
    remote = [url for url in inference.urls if not is_loopback(urlsplit(url).hostname or "")]
    if remote and config.weights.host is not None and is_loopback(config.weights.host):
        found.append(
            f"weights.host: {config.weights.host} cannot be reached from {remote[0]} (inference.urls); leave it out, or set "
            "the address of the trainer's machine in the network that it shares with the servers"
        )
    if inference.vllm.sleep_while_training and rollout.max_staleness > 0:
        found.append(
            f"inference.vllm.sleep_while_training: with rollout.max_staleness: {rollout.max_staleness} the server generates "
            "while a step trains; set max_staleness: 0, or let the server stay awake"
        )
    for argument in inference.vllm.extra_args:
        name = argument.split("=", 1)[0]
        if name in _SET_BY_US:
            found.append(f"inference.vllm.extra_args: {name} is set by grpo-async; {_SET_BY_US[name]}")
    return found
