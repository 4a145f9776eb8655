"""Rules that span sections: combinations that make no sense, each with the reason and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from grpo_async.config.names import VLLM_ARGUMENTS
from grpo_async.config.sections import CustomLoss, GspoLoss, powers_up_to
from grpo_async.utils.network import is_loopback
from grpo_async.utils.text import count, shortlist

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig

Rule: TypeAlias = tuple[object, str]
"""Whether something is wrong, and what. `{rollout.group_size}` in the text becomes "rollout.group_size: 8"."""
_SETTING = re.compile(r"\{([a-z_]+(?:\.[a-z_]+)+)\}")


def conflicts(config: ExperimentConfig) -> list[str]:
    """What does not go together in this experiment; empty when everything does."""
    parts = (_rollout_rules, _training_rules, _loss_rules, _sampling_rules, _evaluation_rules, _machine_rules)
    return [_filled_in(text, config) for part in parts for is_wrong, text in part(config) if is_wrong]


def _filled_in(text: str, config: ExperimentConfig) -> str:
    def shown(path: re.Match[str]) -> str:
        value = attrgetter(path[1])(config)
        return f"{path[1]}: {value:g}" if isinstance(value, float) else f"{path[1]}: {value}"

    return _SETTING.sub(shown, text)


def _rollout_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Rewards, tools, environments, agents, and their time limits."""
    rollout, agent = config.rollout, config.rollout.agent
    has_reward = config.rewards or config.environments or agent is not None
    yield not has_reward, "rewards: there are none; name at least one, or an environment that has a `get_reward`"
    yield (
        config.rollout_function is not None and (config.tools or config.environments),
        "rollout_function.function: `tools` and `environments` are not used beside it (it makes the whole rollout); remove one or "
        "the other",
    )
    if agent is not None:
        reasons = {
            "tools": "the agent calls its own tools, and sends the model their schemas with each request",
            "environments": "the agent acts in its own; one of a library is `rollout.agent.environment`",
            "rollout_function": "each of the two makes whole rollouts",
        }
        for name, reason in reasons.items():
            text = (
                f"rollout.agent.{agent.kind}: `{name}` would not be used with an agent: {reason}; remove one of the two"
            )
            yield getattr(config, name), text
    samples = max(rollout.group_size, config.evaluation.samples_per_prompt if config.evaluation is not None else 0)
    for name, environment in config.environments.items():
        yield (
            environment.max_instances is not None and environment.max_instances < samples,
            f"environments.{name}.max_instances: {environment.max_instances} is less than {samples}, the completions of a prompt "
            "(rollout.group_size, evaluation.samples_per_prompt), which need an instance each",
        )
    yield (
        rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_completion_tokens,
        "{rollout.max_turn_tokens} is more than {rollout.max_completion_tokens}, the budget of all turns together",
    )
    limits = {f"tools.{index}.timeout_s": tool.timeout_s for index, tool in enumerate(config.tools)}
    limits |= {f"environments.{name}.timeout_s": section.timeout_s for name, section in config.environments.items()}
    if config.rollout_function is not None:
        limits["rollout_function.timeout_s"] = config.rollout_function.timeout_s
    if agent is not None:
        limits["rollout.agent.timeout_s"] = agent.timeout_s
    for path, timeout_s in limits.items():
        yield (
            timeout_s >= config.training.queue_timeout_s,
            f"{path}: {timeout_s:g} is not less than {{training.queue_timeout_s}}; the trainer would give up while such a call, "
            "during which no token comes, is within its limit",
        )
    yield (
        rollout.max_completion_tokens >= config.inference.max_model_len,
        "{rollout.max_completion_tokens} leaves no room for a prompt in {inference.max_model_len}; raise the latter or lower the "
        "former",
    )


def _training_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Steps, batches, and who gets them."""
    rollout, training = config.rollout, config.training
    behind = training.weight_sync_steps - 1
    yield (
        behind > rollout.max_staleness,
        f"{{rollout.max_staleness}} with {{training.weight_sync_steps}} would drop every sample as stale; the server is up to "
        f"{count(behind, 'step')} behind, so set max_staleness >= {behind}",
    )
    yield (
        training.micro_batch_tokens < config.inference.max_model_len,
        "{training.micro_batch_tokens} is less than {inference.max_model_len}; the longest possible sample would not fit into a "
        "micro-batch",
    )
    yield (
        config.launch.world_size > rollout.groups_per_step * rollout.group_size,
        f"launch.num_trainer_ranks x launch.trainer_nodes: {config.launch.world_size} is more than the samples of a step "
        f"({count(rollout.groups_per_step, 'group')} x {rollout.group_size})",
    )
    yield (
        training.minibatches > rollout.groups_per_step,
        "{training.minibatches} is more than {rollout.groups_per_step}; a group is trained in one update, so there can be at most "
        "as many updates as groups",
    )


def _loss_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Proximal policy, correction, reference."""
    loss = config.loss
    yield (
        loss.proximal == "sampler" and loss.correction is not None,
        "loss.correction: weighs the difference between sampler and proximal policy, and with loss.proximal: sampler there is "
        "none; set loss.proximal: recomputed, or leave the correction out",
    )
    yield (
        loss.proximal == "log_linear" and config.rollout.max_staleness == 0,
        "loss.proximal: log_linear goes by the age of tokens, and with rollout.max_staleness: 0 all are new, so it would be the "
        "sampler itself; set sampler or recomputed",
    )
    has_use = loss.correction is not None or config.training.num_updates > 1 or isinstance(loss, CustomLoss)
    yield (
        loss.proximal == "recomputed" and not has_use,
        "loss.proximal: recomputed makes every ratio 1 while training.minibatches and training.num_iterations are 1: nothing would "
        "be clipped, and without loss.correction nothing corrects for stale tokens; set loss.correction, or leave proximal out",
    )
    yield (
        loss.correction is not None and isinstance(loss, GspoLoss) and loss.correction.level == "token",
        "loss.correction.level: token would weigh tokens of one sample differently, and gspo's ratio is the same for all of them; "
        "set level: sequence",
    )
    yield (
        not loss.needs_reference and loss.reference != "initial",
        "{loss.reference} would not be used, since loss.beta is 0 and there is no KL; set loss.beta, or leave the reference out",
    )
    yield (
        loss.sync_ref_model and not loss.needs_reference,
        "loss.sync_ref_model: there is no reference while loss.beta is 0; set loss.beta, or leave it out",
    )
    yield (
        loss.sync_ref_model and config.model.lora is not None,
        "loss.sync_ref_model: with model.lora the policy and its reference share the weights that are not trained, so neither can "
        "follow the other; train all weights, or leave it out",
    )


def _sampling_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Settings that sample from a distribution mu other than the trained policy pi, at the same temperature.

    Where tokens are cut off, mu is pi of those that are left, divided by their probability Z < 1. The sampler's log-probabilities
    are those of mu, the trainer's those of pi: the ratio of an unchanged policy to mu is Z and not 1, so that the clip would act on
    what was cut off. The weight pi / mu of each token corrects for it; that of a sequence is the product of its tokens' and
    vanishes: 0.97 for each of 500 tokens makes 2e-7. (docs/howto/sampling.md)
    """
    loss = config.loss
    values = {name: getattr(config.rollout, name) for name in config.rollout.non_neutral_sampling}
    if not values or isinstance(loss, CustomLoss):
        return
    what = ", ".join(
        f"rollout.{name}" + (f": {value}" if isinstance(value, int | float | str) else "")
        for name, value in values.items()
    )
    yield (
        isinstance(loss, GspoLoss),
        f"{what} samples from another distribution than the policy's, which weights of single tokens correct for, and gspo's ratio "
        "is that of a sequence; set another loss.type, or leave the setting to evaluation",
    )
    yield (
        not isinstance(loss, GspoLoss) and not loss.corrects_sampling,
        f"{what} samples from another distribution than the policy's, and the ratio of the loss would count that as a change of "
        "the policy; set loss.proximal: recomputed and loss.correction: {level: token}, or leave the setting to evaluation",
    )
    yield (
        loss.off_policy_mask is not None,
        f"{{loss.off_policy_mask}} compares the log-probabilities of sampler and policy, and {what} shifts the sampler's; leave "
        "one of them out",
    )


def _metrics(samples: int) -> list[str]:
    """Metrics of an evaluation with so many completions of a prompt in which larger is better (evaluation.metrics)."""
    several = [f"mean@{samples}"] if samples > 1 else []
    return ["reward", *(f"pass@{k}" for k in powers_up_to(samples)), *several]


def _evaluation_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Evaluation, and the checkpoints that are kept by it."""
    evaluation, held_out, checkpoint = config.evaluation, config.data.held_out, config.checkpoint
    known = _metrics(evaluation.samples_per_prompt if evaluation is not None else 1)
    yield (
        checkpoint.best_metric not in known and not checkpoint.best_metric.startswith("rewards/"),
        f"checkpoint.best_metric: an evaluation has no {checkpoint.best_metric!r} in which larger is better; it has "
        f"{', '.join(known)} and rewards/NAME",
    )
    every = None if evaluation is None else evaluation.every_steps
    yield (
        checkpoint.keep_best and every is None,
        "{checkpoint.keep_best} goes by evaluations during training, and there are none; set evaluation.every_steps",
    )
    if evaluation is None:
        yield (
            held_out is not None,
            "{data.held_out} keeps rows back from training for an evaluation, and there is none; add `evaluation: {}`, or leave "
            "held_out out",
        )
        return
    yield (
        evaluation.data is None and held_out is None,
        "evaluation.data: there is no data; name a source, or keep rows of data.train back with data.held_out: 0.05",
    )
    yield (
        evaluation.data is not None and held_out is not None,
        "data.held_out: keeps rows back for evaluation, but evaluation.data names others; remove one of the two",
    )
    yield (
        evaluation.samples_per_prompt > 1 and evaluation.temperature == 0,
        "{evaluation.samples_per_prompt} greedy completions of a prompt are all the same; set evaluation.temperature, or "
        "samples_per_prompt: 1",
    )
    if every is not None:
        yield (
            every % config.training.weight_sync_steps,
            "{evaluation.every_steps} is not a multiple of {training.weight_sync_steps}, so the servers would be asked about a "
            "step whose weights they do not have; make it one",
        )
        yield (
            config.inference.vllm.sleep_while_training,
            "{evaluation.every_steps} needs the servers during training, and inference.vllm.sleep_while_training puts them to "
            "sleep then; leave one of them out",
        )
        yield (
            checkpoint.keep_best and every % checkpoint.every_steps,
            "{checkpoint.keep_best} keeps the checkpoints of steps that are evaluated, and not every one of them has a checkpoint; "
            "make {evaluation.every_steps} a multiple of {checkpoint.every_steps}",
        )


def _machine_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Servers, weights, machines."""
    launch, inference, lora = config.launch, config.inference, config.model.lora
    remote = [url for url in inference.urls if not is_loopback(urlsplit(url).hostname or "")]
    yield (
        remote and config.weights.host is not None and is_loopback(config.weights.host),
        f"{{weights.host}} cannot be reached from {shortlist(remote, ', ', limit=1)} (inference.urls); leave it out, or set the "
        "address of the trainer's machine in the network that it shares with the servers",
    )
    yield (
        inference.vllm.sleep_while_training and config.rollout.max_staleness > 0,
        "inference.vllm.sleep_while_training: with {rollout.max_staleness} the server generates while a step trains; set "
        "max_staleness: 0, or let the server stay awake",
    )
    for argument in inference.vllm.extra_args:
        name = argument.split("=", 1)[0]
        reason = VLLM_ARGUMENTS.get(name if name in VLLM_ARGUMENTS else name.replace("_", "-"))
        yield reason, f"inference.vllm.extra_args: {name} is set by grpo-async; {reason}"
    forms = [section.structured_outputs for section in (config.rollout, config.evaluation) if section is not None]
    yield (
        config.weights.mode == "abort" and any(forms),
        "weights.mode: abort interrupts every turn at each push, and one with structured_outputs starts over then; set "
        "weights.mode: recompute",
    )
    yield (
        launch.sharding == "hybrid" and launch.trainer_nodes == 1,
        "launch.sharding: hybrid replicates over machines, and launch.trainer_nodes is 1; set full",
    )
    yield (
        launch.trainer_nodes > 1 and launch.ray is None,
        "{launch.trainer_nodes} machines are a Ray cluster; set launch.ray: auto, and start it with `ray start` on each",
    )
    yield (
        launch.max_restarts and launch.ray is None,
        "{launch.max_restarts} is for a machine that is lost of several; set launch.ray, or leave it out",
    )
    yield (
        not isinstance(inference.replicas, int) and launch.ray is None,
        "inference.replicas: servers come and go with the nodes of a Ray cluster only; set launch.ray, or one number",
    )
    yield (
        launch.ray is not None and launch.colocate,
        "launch.colocate: with launch.ray servers have GPUs of their own; leave it out",
    )
    yield (
        launch.ray is not None and launch.server_port is not None,
        "launch.server_port: with launch.ray each server takes a free port of its node; leave it out",
    )
    if lora is None or lora.push != "adapter":
        return
    yield (
        config.model.revision is not None,
        "model.lora.push: adapter adds to the newest files of model.path, not to {model.revision}; set push: merged, or name the "
        "folder of that revision as model.path",
    )
    yield (
        lora.modules_to_save,
        "model.lora.push: adapter sends the adapters alone, and servers would keep the old values of "
        "{model.lora.modules_to_save}; set push: merged",
    )
    yield (
        config.weights.transport in ("nccl", "ipc"),
        "model.lora.push: adapter travels over gloo alone, not over {weights.transport}: between GPUs whole weights are there "
        "before a server has read its own and merged them; set push: merged",
    )
