"""Rules that span sections: combinations that make no sense, each with the reason and what to change.

A rule is one text, `path: what is wrong; what to do`. All are reported together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from grpo_async.config.data_sections import powers_up_to
from grpo_async.config.loss_sections import CispoLoss, CustomLoss, GspoLoss
from grpo_async.utils.network import is_loopback

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig

_SET_BY_US = {
    "--host": "see inference.host",
    "--port": "train chooses a free one, serve-vllm takes --port",
    "--model": "see model.path",
    "--dtype": "see inference.dtype",
    "--max-model-len": "see inference.max_model_len",
    "--tensor-parallel-size": "see inference.vllm.tensor_parallel_size",
    "--pipeline-parallel-size": "see inference.vllm.pipeline_parallel_size",
    "--data-parallel-size": "see inference.vllm.data_parallel_size",
    "--enable-expert-parallel": "see inference.vllm.expert_parallel",
    **dict.fromkeys(
        (
            *(
                "--data-parallel-size-local",
                "--data-parallel-rank",
                "--data-parallel-start-rank",
                "--data-parallel-address",
            ),
            *("--data-parallel-rpc-port", "--data-parallel-hybrid-lb", "--data-parallel-external-lb", "--headless"),
            *("--nnodes", "--node-rank", "--master-addr", "--master-port"),
        ),
        "a server is on one machine; see launch.nodes",
    ),
    "--gpu-memory-utilization": "see inference.vllm.gpu_memory_utilization",
    "--trust-remote-code": "see model.trust_remote_code",
    "--revision": "see model.revision",
    "--tokenizer": "the server reads that of model.path, as the trainer does: stop strings and structured outputs go by it",
    "--tokenizer-revision": "see model.revision",
    "--ssl-certfile": "see inference.tls",
    "--ssl-keyfile": "see inference.tls",
    "--middleware": "it asks for the token",
    "--api-key": "the token of the run guards every path",
    "--worker-extension-cls": "weight updates need it",
    "--weight-transfer-config": "see weights.transport",
    "--api-server-count": "one process keeps the policy version",
    "--logprobs-mode": "the loss needs those of the distribution that was sampled from",
}
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
"""vLLM's short names of these arguments."""


def set_by_us(argument: str) -> str | None:
    """Why an entry of `inference.vllm.extra_args` is not the user's to set; None: it is. vLLM takes short names, underscores for
    dashes, and the beginning of a name that is no whole one.

    Worked example: "-tp=4", "--tensor_parallel_size" and "--tensor-par" are all --tensor-parallel-size.
    """
    name = argument.split("=", 1)[0]
    name = _SHORT.get(name, name.replace("_", "-"))
    if name in _SET_BY_US:
        return _SET_BY_US[name]
    is_beginning = name.startswith("--") and len(name) > 4
    return next((why for ours, why in _SET_BY_US.items() if is_beginning and ours.startswith(name)), None)


def conflicts(config: ExperimentConfig) -> list[str]:
    """What does not go together in this experiment; empty when everything does."""
    parts = (_of_the_pipeline, _of_the_agent, _of_the_loss, _of_evaluation, _of_machines)
    return [problem for part in parts for problem in part(config)]


def _of_the_pipeline(config: ExperimentConfig) -> Iterator[str]:
    """Rollouts, their time limits, batches, servers."""
    rollout, training, inference = config.rollout, config.training, config.inference
    if not config.rewards and not config.environments and rollout.agent is None:
        yield ("rewards: there are none; name at least one, or an environment that has a `get_reward`")
    if config.rollout_function is not None and (config.tools or config.environments):
        yield (
            "rollout_function.function: with one, `tools` and `environments` are not used (it makes the whole rollout); "
            "remove one or the other"
        )
    if config.evaluation is not None and config.evaluation.data is None and config.data.held_out is None:
        yield (
            "evaluation.data: there is no data; name a source, or keep rows of data.train back with data.held_out: 0.05"
        )
    if config.evaluation is None and config.data.held_out is not None:
        yield (
            f"data.held_out: {config.data.held_out:g} keeps rows back from training for an evaluation, and there is none; add "
            "`evaluation: {}`, or leave held_out out"
        )
    if config.evaluation is not None and config.evaluation.data is not None and config.data.held_out is not None:
        yield ("data.held_out: keeps rows back for evaluation, but evaluation.data names others; remove one of the two")
    for name, environment in config.environments.items():
        if environment.max_instances is not None and environment.max_instances < rollout.group_size:
            yield (
                f"environments.{name}.max_instances: {environment.max_instances} is less than rollout.group_size: "
                f"{rollout.group_size}; a group needs an instance for each of its rollouts"
            )
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_completion_tokens:
        yield (
            f"rollout.max_turn_tokens: {rollout.max_turn_tokens} is more than rollout.max_completion_tokens: "
            f"{rollout.max_completion_tokens}, the budget of all turns together"
        )
    limits = {f"tools.{index}.timeout_s": tool.timeout_s for index, tool in enumerate(config.tools)}
    limits |= {f"environments.{name}.timeout_s": section.timeout_s for name, section in config.environments.items()}
    if config.rollout_function is not None:
        limits["rollout_function.timeout_s"] = config.rollout_function.timeout_s
    if rollout.agent is not None:
        limits["rollout.agent.timeout_s"] = rollout.agent.timeout_s
    for path, timeout_s in limits.items():
        if timeout_s >= training.queue_timeout_s:
            yield (
                f"{path}: {timeout_s:g} is not less than training.queue_timeout_s: {training.queue_timeout_s:g}; the trainer "
                "would give up while such a call, during which no token comes, is within its limit"
            )
    if training.weight_sync_steps > rollout.max_staleness + 1:
        yield (
            f"rollout.max_staleness: {rollout.max_staleness} with training.weight_sync_steps: "
            f"{training.weight_sync_steps} would drop every sample as stale; the server is up to "
            f"{training.weight_sync_steps - 1} steps behind, so set max_staleness >= {training.weight_sync_steps - 1}"
        )
    if rollout.max_completion_tokens >= inference.max_model_len:
        yield (
            f"rollout.max_completion_tokens: {rollout.max_completion_tokens} leaves no room for a prompt in "
            f"inference.max_model_len: {inference.max_model_len}; raise the latter or lower the former"
        )
    if training.micro_batch_tokens < inference.max_model_len:
        yield (
            f"training.micro_batch_tokens: {training.micro_batch_tokens} is less than inference.max_model_len: "
            f"{inference.max_model_len}; the longest possible sample would not fit into a micro-batch"
        )
    if config.launch.world_size > rollout.groups_per_step * rollout.group_size:
        yield (
            f"launch.num_trainer_ranks x launch.nodes.train: {config.launch.world_size} is more than the samples of a step "
            f"({rollout.groups_per_step} groups x {rollout.group_size})"
        )
    if training.max_steps is not None and config.optimizer.warmup_steps > training.max_steps:
        yield (
            f"optimizer.warmup_steps: {config.optimizer.warmup_steps} is more than training.max_steps: {training.max_steps}; "
            "set both for a short run"
        )
    optimizer = config.optimizer
    if optimizer.min_lr_ratio and optimizer.schedule in ("cosine_with_restarts", "inverse_sqrt"):
        yield (
            f"optimizer.min_lr_ratio: {optimizer.schedule} has no floor; leave it out, or set another optimizer.schedule"
        )
    if optimizer.schedule_kwargs and optimizer.schedule == "constant":
        yield "optimizer.schedule_kwargs: the schedule constant has none; set optimizer.schedule, or leave them out"
    remote = [url for url in inference.urls if not is_loopback(urlsplit(url).hostname or "")]
    if remote and config.weights.host is not None and is_loopback(config.weights.host):
        yield (
            f"weights.host: {config.weights.host} cannot be reached from {remote[0]} (inference.urls); leave it out, or set "
            "the address of the trainer's machine in the network that it shares with the servers"
        )
    if inference.vllm.sleep_while_training and rollout.max_staleness > 0:
        yield (
            f"inference.vllm.sleep_while_training: with rollout.max_staleness: {rollout.max_staleness} the server generates "
            "while a step trains; set max_staleness: 0, or let the server stay awake"
        )
    for argument in inference.vllm.extra_args:
        if (reason := set_by_us(argument)) is not None:
            yield f"inference.vllm.extra_args: {argument.split('=', 1)[0]} is set by grpo-async; {reason}"
    vllm = inference.vllm
    if vllm.expert_parallel and vllm.tensor_parallel_size * vllm.data_parallel_size == 1:
        yield (
            "inference.vllm.expert_parallel: divides experts among the GPUs of tensor_parallel_size and data_parallel_size, and "
            "both are 1; raise one of them, or leave it out"
        )
    for name, section in (("rollout", rollout), ("evaluation", config.evaluation)):
        if section is not None and section.structured_outputs is not None and config.weights.mode == "abort":
            yield (
                f"{name}.structured_outputs: an interrupted turn starts over, and weights.mode: abort interrupts every turn at "
                "each push; set weights.mode: recompute"
            )


def _of_the_agent(config: ExperimentConfig) -> Iterator[str]:
    """What an agent of the user's cannot be combined with."""
    agent = config.rollout.agent
    if agent is None:
        return
    reasons = {
        "tools": "the agent calls its own tools, and sends the model their schemas with each request",
        "environments": "the agent acts in its own; one of a library is `rollout.agent.environment`",
        "rollout_function": "each of the two makes whole rollouts",
    }
    for name, reason in reasons.items():
        if getattr(config, name):
            yield f"rollout.agent.{agent.kind}: `{name}` would not be used with an agent: {reason}; remove one of the two"


def _of_the_loss(config: ExperimentConfig) -> Iterator[str]:
    """Losses, corrections, minibatches."""
    loss, num_minibatches, groups_per_step = config.loss, config.training.minibatches, config.rollout.groups_per_step
    if num_minibatches > groups_per_step:
        yield (
            f"training.minibatches: {num_minibatches} is more than rollout.groups_per_step: {groups_per_step}; a group is trained "
            "in one update, so there can be at most as many updates as groups"
        )
    yield from _proximal_conflicts(config)
    yield from _sampling_conflicts(config)
    if loss.correction is not None and isinstance(loss, GspoLoss) and loss.correction.level == "token":
        yield (
            "loss.correction.level: token would weigh tokens of one sample differently, and gspo's ratio is the same for all of "
            "them; set level: sequence"
        )
    if loss.beta == 0.0 and loss.reference != "initial":
        yield (
            f"loss.reference: {loss.reference} would not be used, since loss.beta is 0 and there is no KL; set loss.beta, or leave "
            "the reference out"
        )
    if loss.sync_ref_model and loss.beta == 0.0:
        yield "loss.sync_ref_model: there is no reference while loss.beta is 0; set loss.beta, or leave it out"
    if loss.sync_ref_model and config.model.lora is not None:
        yield (
            "loss.sync_ref_model: with model.lora the policy and its reference share the weights that are not trained, so none can "
            "follow the other; train all weights, or leave it out"
        )


def _proximal_conflicts(config: ExperimentConfig) -> Iterator[str]:
    loss = config.loss
    if loss.proximal == "sampler" and loss.correction is not None:
        yield (
            "loss.correction: weighs the difference between sampler and proximal policy, and with loss.proximal: sampler there is "
            "none; set loss.proximal: recomputed, or leave the correction out"
        )
    if loss.proximal == "log_linear" and config.rollout.max_staleness == 0:
        yield (
            "loss.proximal: log_linear goes by the age of tokens, and with rollout.max_staleness: 0 all are new, so it would be "
            "the sampler itself; set sampler or recomputed"
        )
    has_use = loss.correction is not None or config.training.num_updates > 1 or isinstance(loss, CustomLoss)
    if loss.proximal == "recomputed" and not has_use:
        yield (
            "loss.proximal: recomputed makes every ratio 1 while training.minibatches and training.num_iterations are 1, and "
            "without loss.correction nothing else tells sampler and trainer apart: no clip would act, stale tokens would count as "
            "new ones; add a correction, or leave proximal out"
        )


def _sampling_conflicts(config: ExperimentConfig) -> Iterator[str]:
    """Settings that sample from a distribution mu other than the trained policy pi, at the same temperature.

    Where tokens are cut off, mu is pi of those that are left, divided by their probability Z < 1. The sampler's log-probabilities
    are those of mu, the trainer's those of pi: the ratio of an unchanged policy to mu is Z and not 1, so that the clip would act on
    what was cut off. The weight pi / mu of each token corrects for it; that of a sequence is the product of its tokens' and
    vanishes: 0.97 for each of 500 tokens makes 2e-7. (docs/howto/sampling.md)
    """
    loss = config.loss
    values = {name: getattr(config.rollout, name) for name in config.rollout.reshaping}
    if not values or isinstance(loss, CustomLoss):
        return
    what = ", ".join(
        f"rollout.{name}" + (f": {value}" if isinstance(value, int | float | str) else "")
        for name, value in values.items()
    )
    is_corrected = loss.proximal == "recomputed" and loss.correction is not None and loss.correction.level == "token"
    weighs_by_itself = isinstance(loss, CispoLoss) and loss.proximal == "sampler"
    if isinstance(loss, GspoLoss):
        yield (
            f"{what} samples from another distribution than the policy's, which weights of single tokens correct for, and gspo's "
            "ratio is that of a sequence; set another loss.type, or leave the setting to evaluation"
        )
    elif not is_corrected and not weighs_by_itself:
        yield (
            f"{what} samples from another distribution than the policy's, and the ratio of the loss would count that as a change "
            "of the policy; set loss.proximal: recomputed and loss.correction: {level: token}, or leave the setting to evaluation"
        )
    if loss.off_policy_mask is not None:
        yield (
            f"loss.off_policy_mask: {loss.off_policy_mask:g} goes by sampler - policy, to which {what} adds what was cut off; "
            "leave one of them out"
        )


def _metrics(samples: int) -> list[str]:
    """Metrics of an evaluation with so many completions of a prompt in which larger is better (evaluation.metrics)."""
    several = [f"mean@{samples}", "answered"] if samples > 1 else []
    majorities = [f"majority@{k}" for k in powers_up_to(samples) if k > 2]
    return ["reward", *(f"pass@{k}" for k in powers_up_to(samples)), *majorities, *several]


def _of_evaluation(config: ExperimentConfig) -> Iterator[str]:
    """Evaluation, and the checkpoints that are kept by it."""
    evaluation = config.evaluation
    metric, samples = config.checkpoint.best_metric, evaluation.samples_per_prompt if evaluation is not None else 1
    known = _metrics(samples)
    if metric.partition("/")[0] not in (*known, "rewards"):
        yield (
            f"checkpoint.best_metric: an evaluation has no {metric!r} in which larger is better; it has {', '.join(known)} and "
            "rewards/NAME"
        )
    if evaluation is not None and evaluation.samples_per_prompt > 1 and evaluation.temperature == 0:
        yield (
            f"evaluation.samples_per_prompt: {evaluation.samples_per_prompt} greedy completions of a prompt are all the same; set "
            "evaluation.temperature, or samples_per_prompt: 1"
        )
    if evaluation is not None and evaluation.temperature == 0:
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if (value := getattr(evaluation, name)) != neutral:
                yield (
                    f"evaluation.{name}: {value} has no effect on greedy completions; set evaluation.temperature, or leave it out"
                )
    every = None if evaluation is None else evaluation.every_steps
    if every is not None and every % config.training.weight_sync_steps:
        yield (
            f"evaluation.every_steps: {every} is not a multiple of training.weight_sync_steps: "
            f"{config.training.weight_sync_steps}, so the servers would be asked about a step whose weights they do not have; "
            "make it one"
        )
    if every is not None and config.inference.vllm.sleep_while_training:
        yield (
            f"evaluation.every_steps: {every} needs the servers during training, and "
            "inference.vllm.sleep_while_training puts them to sleep then; leave one of them out"
        )
    for name, environment in config.environments.items():
        most = environment.max_instances
        if evaluation is not None and most is not None and most < evaluation.samples_per_prompt:
            yield (
                f"environments.{name}.max_instances: {most} is less than evaluation.samples_per_prompt: "
                f"{evaluation.samples_per_prompt}; a prompt needs an instance for each of its completions"
            )
    if config.checkpoint.keep_best and every is not None and every % config.checkpoint.every_steps:
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} keeps the checkpoints of steps that are evaluated, and not every "
            f"one of them has a checkpoint; make evaluation.every_steps: {every} a multiple of checkpoint.every_steps: "
            f"{config.checkpoint.every_steps}"
        )
    if config.checkpoint.keep_best and (evaluation is None or evaluation.every_steps is None):
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} goes by evaluations during training, and there are none; set "
            "evaluation.every_steps"
        )


def _of_machines(config: ExperimentConfig) -> Iterator[str]:
    """Models, memory and machines."""
    launch, lora = config.launch, config.model.lora
    if launch.sharding == "hybrid" and launch.nodes.train == 1:
        yield "launch.sharding: hybrid replicates over machines, and launch.nodes.train is 1; set full"
    if launch.nodes.infer and config.inference.urls:
        yield (
            f"launch.nodes.infer: {launch.nodes.infer} machines would serve, but inference.urls names servers that run already; "
            "remove one of the two"
        )
    if launch.nodes.infer and launch.colocate:
        yield (
            f"launch.colocate: puts servers on the GPUs of the trainer, and launch.nodes.infer: {launch.nodes.infer} gives them "
            "machines of their own; remove one of the two"
        )
    if lora is not None and lora.push == "adapter" and config.model.revision is not None:
        yield (
            f"model.lora.push: adapter adds to the newest files of model.path, not to model.revision: {config.model.revision}; set "
            "push: merged, or name the folder of that revision as model.path"
        )
    if lora is not None and lora.push == "adapter" and lora.modules_to_save:
        yield (
            "model.lora.push: adapter sends the adapters alone, and servers would keep the old values of "
            f"model.lora.modules_to_save: {lora.modules_to_save}; set push: merged"
        )
    if lora is not None and lora.push == "adapter" and config.weights.transport in ("nccl", "ipc"):
        yield (
            f"model.lora.push: adapter travels over gloo alone, not over weights.transport: {config.weights.transport}: between "
            "GPUs whole weights are there before a server has read its own and merged them; set push: merged"
        )
    if config.training.cpu_offload and launch.device == "cpu":
        yield "training.cpu_offload: with launch.device: cpu everything is in the machine's memory already; set it to false"
