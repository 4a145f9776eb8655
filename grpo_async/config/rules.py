"""Rules that span sections: combinations that make no sense, each with the reason and what to change. Most are of two kinds:
a setting needs another (`_needs`), or two exclude each other (`_clash`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from grpo_async.config.base import MAX_TOP_LOGPROBS
from grpo_async.config.names import VLLM_ARGUMENTS
from grpo_async.config.sections import MAX_SWAPPED_RANK, CustomLoss, powers_up_to
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


def _needs(is_missing: object, setting: str, needed: str) -> Rule:
    return is_missing, f"{setting} needs {needed}; set that, or leave this out"


def _clash(are_both: object, setting: str, other: str, why: str) -> Rule:
    return are_both, f"{setting} does not go with {other}: {why}; leave one of them out"


def _rollout_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Rewards, tools, environments, agents, and their time limits."""
    rollout, agent = config.rollout, config.rollout.agent
    has_reward = config.rewards or config.environments or agent is not None
    yield (
        not has_reward and config.distillation is None,
        "rewards: there are none; name at least one, or an environment that has a `get_reward`",
    )
    if config.distillation is not None:
        yield from _distillation_rules(config, has_reward=bool(has_reward))
    for name in ("tools", "environments", "rollout_function"):
        is_set = getattr(config, name)
        if agent is not None:
            yield _clash(is_set, f"rollout.agent.{agent.kind}", name, "an agent makes whole rollouts")
        elif config.rollout_function is not None and name != "rollout_function":
            yield _clash(is_set, "rollout_function.function", name, "it makes whole rollouts")
    for key, source in config.sources.items():
        yield (
            source.environment not in (None, *config.environments),
            f"{key}.environment: {source.environment} is not one of the environments {list(config.environments)}",
        )
        yield (
            key.startswith("evaluation.")
            and (source.weight, source.temperature, source.group_size) != (1.0, None, None),
            f"{key}: weight, temperature and group_size are for training: every prompt is evaluated, at evaluation.temperature and "
            "with evaluation.samples_per_prompt; leave them out",
        )
        own = source.temperature is not None and config.has_own_rollouts
        yield _clash(own, f"{key}.temperature", "rollout.agent or rollout_function", "they may ask for any")
        own = source.group_size is not None and config.rollout_function is not None
        yield _clash(
            own, f"{key}.group_size", "rollout_function", "it is told one number of generations for all prompts"
        )
    samples = max(*config.group_sizes, config.evaluation.samples_per_prompt if config.evaluation is not None else 0)
    for name, environment in config.environments.items():
        yield (
            environment.max_instances is not None and environment.max_instances < samples,
            f"environments.{name}.max_instances: {environment.max_instances} is less than {samples}, the completions of a prompt "
            "(group_size, evaluation.samples_per_prompt), which need an instance each",
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


def _distillation_rules(config: ExperimentConfig, *, has_reward: bool) -> Iterator[Rule]:
    assert config.distillation is not None
    loss = config.loss
    by_token = "each token has an advantage of its own"
    yield _clash(loss.has_sequence_ratio, f"loss.type: {loss.type}", "distillation", by_token)
    yield _clash(loss.off_policy_mask is not None, "{loss.off_policy_mask}", "distillation", by_token)
    yield _clash(loss.score_centering is not None, "{loss.score_centering}", "distillation", by_token)
    yield _clash(
        any(each.temperature not in (None, 1.0) for each in (config.rollout, *config.data.sources.values()))
        or bool(config.rollout.non_neutral_sampling),
        "sampling that differs from rollout.temperature: 1.0",
        "distillation",
        "teachers' log-probabilities are those of temperature 1",
    )
    yield _clash(
        config.has_own_rollouts and any(each.prompt_column for each in config.distillation.teachers.values()),
        "distillation.teachers: prompt_column",
        "an agent or a rollout function",
        "it writes its own prompts",
    )
    compares = config.advantage.rewards != "sum" or config.advantage.type in ("batch", "reinforce_plus_plus_baseline")
    yield _needs(not has_reward and compares, "advantage, as it is set,", "rewards to compare")
    yield _needs(not has_reward and config.evaluation is not None, "evaluation", "rewards to evaluate by")


def _training_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Steps, batches, and who gets them."""
    rollout, training = config.rollout, config.training
    behind = training.weight_sync_steps - 1
    yield (
        behind > rollout.max_staleness,
        f"{{rollout.max_staleness}} with {{training.weight_sync_steps}} would drop every sample as stale; the server is up to "
        f"{count(behind, 'step')} behind, so set max_staleness >= {behind}",
    )
    yield _clash(
        training.epochs is not None and not config.data.sampling.is_fixed,
        "{training.epochs}",
        "data.sampling",
        "rows are not used equally often, so max_steps has to end the run",
    )
    yield (
        training.micro_batch_tokens * training.context_parallel < config.inference.max_model_len,
        "{training.micro_batch_tokens} x {training.context_parallel} is less than {inference.max_model_len}; the longest possible "
        "sample would not fit into a micro-batch",
    )
    yield (
        config.launch.num_trainer_ranks % training.context_parallel != 0,
        "{training.context_parallel} does not divide {launch.num_trainer_ranks}; ranks that compute a sample together are on one "
        "machine",
    )
    yield _clash(
        training.context_parallel > 1 and config.loss.router_aux > 0.0,
        "{training.context_parallel}",
        "{loss.router_aux}",
        "the balance of the routers depends on all tokens, and each rank has its own",
    )
    yield (
        config.launch.world_size // training.context_parallel > rollout.groups_per_step * min(config.group_sizes),
        f"launch.num_trainer_ranks x launch.trainer_nodes: {config.launch.world_size} is more than the samples of a step "
        f"({count(rollout.groups_per_step, 'group')} x {min(config.group_sizes)})",
    )
    yield (
        training.minibatches > rollout.groups_per_step,
        "{training.minibatches} is more than {rollout.groups_per_step}; a group is trained in one update",
    )


def _loss_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Proximal policy, correction, reference."""
    loss = config.loss
    is_sampler = loss.proximal == "sampler"
    yield _needs(
        is_sampler and loss.correction is not None,
        "loss.correction, which weighs the difference between sampler and proximal policy,",
        "loss.proximal: recomputed or log_linear",
    )
    yield _clash(
        loss.proximal == "log_linear" and config.rollout.max_staleness == 0,
        "loss.proximal: log_linear",
        "rollout.max_staleness: 0",
        "it goes by the age of tokens, and all are new",
    )
    is_centered = loss.score_centering is not None
    has_use = (
        is_centered or loss.correction is not None or config.training.num_updates > 1 or isinstance(loss, CustomLoss)
    )
    yield (
        loss.proximal == "recomputed" and not has_use,
        "loss.proximal: recomputed makes every ratio 1 while training.minibatches and training.num_iterations are 1: nothing would "
        "be clipped, and without loss.correction nothing corrects for stale tokens; set loss.correction, or leave proximal out",
    )
    yield (
        loss.correction is not None and loss.has_sequence_ratio and loss.correction.level == "token",
        f"loss.correction.level: token would weigh tokens of one sample differently, and {loss.type}'s ratio is the same for all "
        "of them; set level: sequence",
    )
    yield _clash(
        loss.type == "vespo" and loss.proximal != "sampler",
        "{loss.proximal}",
        "loss.type: vespo",
        "its weights are those of policy and sampler, however old the sample is",
    )
    yield _clash(
        is_centered and (loss.has_sequence_ratio or isinstance(loss, CustomLoss)),
        "loss.score_centering",
        "{loss.type}",
        "it needs the loss that any other token would have had in the place of a sampled one, so a loss of single tokens",
    )
    yield _clash(
        is_centered and loss.correction is not None and loss.correction.level == "sequence",
        "loss.score_centering",
        "{loss.correction.level}",
        "the weight of a completion would be another one with any other token; set level: token",
    )
    yield _clash(
        is_centered
        and loss.correction is not None
        and loss.correction.action == "none"
        and loss.proximal == "recomputed",
        "loss.score_centering",
        "{loss.correction.action}",
        "untruncated weights leave nothing to subtract",
    )
    yield _clash(
        is_centered and loss.proximal == "recomputed" and config.training.num_updates > 1,
        "loss.score_centering",
        "loss.proximal: recomputed with several updates a step (training.minibatches, num_iterations)",
        "the policy at the start of the step is known for sampled tokens only; set proximal: sampler or log_linear",
    )
    yield _clash(
        is_centered and config.rollout_function is not None,
        "loss.score_centering",
        "rollout_function",
        "it returns the log-probabilities of sampled tokens only",
    )
    yield _needs(not loss.needs_reference and loss.reference != "initial", "{loss.reference}", "loss.beta above 0")
    yield _needs(not loss.needs_reference and loss.sync_ref_model, "loss.sync_ref_model", "loss.beta above 0")
    yield _clash(
        loss.sync_ref_model and config.model.lora is not None,
        "loss.sync_ref_model",
        "model.lora",
        "policy and reference share the weights that are not trained, so neither can follow the other",
    )


def _sampling_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Settings that sample from a distribution mu other than the trained policy pi, at the same temperature.

    Where tokens are cut off, mu is pi of those that are left, divided by their probability Z < 1. The sampler's log-probabilities
    are those of mu, the trainer's those of pi: the ratio of an unchanged policy to mu is Z and not 1, so that the clip would act on
    what was cut off. The weight pi / mu of each token corrects for it; that of a sequence is the product of its tokens' and
    vanishes: 0.97 for each of 500 tokens makes 2e-7. With a small top_k the trainer cuts pi off in the same way, so that nothing
    has to be corrected. (docs/howto/sampling.md)
    """
    loss = config.loss
    values = {name: getattr(config.rollout, name) for name in config.rollout.non_neutral_sampling}
    if not values or isinstance(loss, CustomLoss) or config.keeps_sampling_mask:
        return
    if loss.score_centering is not None:
        why = "it compares the policy with the whole distribution that tokens are sampled from; leave the setting to evaluation"
        yield _clash(True, "loss.score_centering", ", ".join(f"rollout.{name}" for name in values), why)
        return
    what = ", ".join(
        f"rollout.{name}" + (f": {value}" if isinstance(value, int | float | str) else "")
        for name, value in values.items()
    )
    yield _clash(
        loss.has_sequence_ratio,
        what,
        f"loss.type: {loss.type}",
        "it samples from another distribution than the policy's, which weights of single tokens correct for",
    )
    yield (
        not loss.has_sequence_ratio and not loss.corrects_sampling,
        f"{what} samples from another distribution than the policy's, and the ratio of the loss would count that as a change of "
        f"the policy; set rollout.top_k to at most {MAX_TOP_LOGPROBS}, which makes the ratios exact (except with "
        "repetition_penalty), or loss.proximal: recomputed and loss.correction: {level: token}, or leave the setting to evaluation",
    )
    for name in ("off_policy_mask", "geometric_mask"):
        yield _clash(
            getattr(loss, name) is not None,
            f"{{loss.{name}}}",
            what,
            "it compares the log-probabilities of sampler and policy, and the sampler's are shifted",
        )


def _evaluation_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Evaluation, and the checkpoints that are kept by it."""
    evaluation, held_out, checkpoint = config.evaluation, config.data.held_out, config.checkpoint
    samples = evaluation.samples_per_prompt if evaluation is not None else 1
    # metrics of an evaluation in which larger is better (evaluation.metrics)
    known = ["reward", *(f"pass@{k}" for k in powers_up_to(samples)), *([f"mean@{samples}"] if samples > 1 else [])]
    yield (
        checkpoint.best_metric not in known and not checkpoint.best_metric.startswith("rewards/"),
        f"checkpoint.best_metric: an evaluation has no {checkpoint.best_metric!r} in which larger is better; it has "
        f"{', '.join(known)} and rewards/NAME",
    )
    every = None if evaluation is None else evaluation.every_steps
    yield _needs(checkpoint.keep_best and every is None, "{checkpoint.keep_best}", "evaluation.every_steps")
    if evaluation is None:
        yield _needs(held_out is not None, "{data.held_out}", "the section `evaluation: {}`")
        return
    yield (
        evaluation.data is None and held_out is None,
        "evaluation.data: there is no data; name a source, or keep rows of data.train back with data.held_out: 0.05",
    )
    yield _clash(
        evaluation.data is not None and held_out is not None,
        "data.held_out",
        "evaluation.data",
        "each names the rows to evaluate on",
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
        yield _clash(
            config.inference.vllm.sleep_while_training,
            "{evaluation.every_steps}",
            "inference.vllm.sleep_while_training",
            "the servers sleep while it would ask them",
        )
        yield (
            checkpoint.keep_best and every % checkpoint.every_steps,
            "{checkpoint.keep_best} keeps the checkpoints of steps that are evaluated, and not every one of them has a checkpoint; "
            "make {evaluation.every_steps} a multiple of {checkpoint.every_steps}",
        )


def _machine_rules(config: ExperimentConfig) -> Iterator[Rule]:
    """Servers, weights, machines."""
    launch, inference, lora, has_ray = config.launch, config.inference, config.model.lora, config.launch.ray is not None
    remote = [url for url in inference.urls if not is_loopback(urlsplit(url).hostname or "")]
    yield (
        remote and config.weights.host is not None and is_loopback(config.weights.host),
        f"{{weights.host}} cannot be reached from {shortlist(remote, ', ', limit=1)} (inference.urls); leave it out, or set the "
        "address of the trainer's machine in the network that it shares with the servers",
    )
    sleeps = inference.vllm.sleep_while_training and config.rollout.max_staleness > 0
    yield _needs(sleeps, "inference.vllm.sleep_while_training", "rollout.max_staleness: 0")
    for argument in inference.vllm.extra_args:
        name = argument.split("=", 1)[0]
        reason = VLLM_ARGUMENTS.get(name if name in VLLM_ARGUMENTS else name.replace("_", "-"))
        yield reason, f"inference.vllm.extra_args: {name} cannot be set here: {reason}"
    forms = [section.structured_outputs for section in (config.rollout, config.evaluation) if section is not None]
    yield _clash(
        config.weights.mode == "abort" and any(forms),
        "weights.mode: abort",
        "structured_outputs",
        "a turn that is interrupted starts over",
    )
    is_alone = launch.sharding == "hybrid" and launch.trainer_nodes == 1
    yield _needs(is_alone, "launch.sharding: hybrid", "more than one machine (launch.trainer_nodes)")
    if not has_ray:
        cluster = "launch.ray: auto, and a Ray cluster (`ray start` on each machine)"
        yield _needs(launch.trainer_nodes > 1, "{launch.trainer_nodes}", cluster)
        yield _needs(launch.max_restarts, "{launch.max_restarts}", cluster)
        yield _needs(not isinstance(inference.replicas, int), "inference.replicas: a range", cluster)
    yield _clash(has_ray and launch.colocate, "launch.colocate", "launch.ray", "servers have GPUs of their own there")
    in_4_bits = lora is not None and lora.load_in_4bit and config.training.cpu_offload
    why = "a base in 4 bits stays on the device"
    yield _clash(in_4_bits, "model.lora.load_in_4bit", "training.cpu_offload", why)
    if lora is None or lora.push == "merged":
        return
    merged = "set push: merged"
    yield (
        lora.modules_to_save,
        "{model.lora.push} sends the adapters alone, and servers would keep the old values of "
        f"{{model.lora.modules_to_save}}; {merged}",
    )
    swaps = lora.push == "adapter_swap" and config.weights.mode != "keep_kv"
    yield _clash(swaps, "{weights.mode}", "model.lora.push: adapter_swap", "requests in flight end on their version")
    yield (
        lora.load_in_4bit,
        f"{{model.lora.push}} adds to the files of model.path, which model.lora.load_in_4bit rounds; {merged}",
    )
    yield (
        lora.push == "adapter_swap" and lora.rank > MAX_SWAPPED_RANK,
        f"model.lora.push: adapter_swap: vLLM takes ranks up to {MAX_SWAPPED_RANK}, not {{model.lora.rank}}; {merged}",
    )
    yield (
        lora.push == "adapter" and config.weights.transport in ("nccl", "ipc"),
        f"model.lora.push: adapter travels over gloo alone, not over {{weights.transport}}; {merged}",
    )
