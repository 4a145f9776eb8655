"""Rules that span sections: combinations that make no sense, each with the reason and what to change.

A row of a table says whether something is wrong, and what. In the text `{rollout.group_size}` becomes "rollout.group_size: 8", and
`A >< B: why` becomes "A does not go with B: why; leave one of them out".
"""

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
_SETTING = re.compile(r"\{([a-z_]+(?:\.[a-z_]+)+)\}")
_CLASH = re.compile(r"(.+?) >< (.+)")


def conflicts(config: ExperimentConfig) -> list[str]:
    """What does not go together in this experiment; empty when everything does."""
    parts = (
        _rollout_rules,
        _training_rules,
        _loss_rules,
        _sampling_rules,
        _evaluation_rules,
        _machine_rules,
        _lora_rules,
    )
    return [_filled_in(text, config) for part in parts for is_wrong, text in part(config) if is_wrong]


def _filled_in(text: str, config: ExperimentConfig) -> str:
    def shown(path: re.Match[str]) -> str:
        value = attrgetter(path[1])(config)
        return f"{path[1]}: {value:g}" if isinstance(value, float) else f"{path[1]}: {value}"

    return _CLASH.sub(r"\1 does not go with \2; leave one of them out", _SETTING.sub(shown, text))


def _rollout_rules(config: ExperimentConfig) -> Iterator[Rule]:
    rollout, agent, function = config.rollout, config.rollout.agent, config.rollout_function
    has_reward = bool(config.rewards or config.environments or agent is not None)
    if config.distillation is not None:
        yield from _distillation_rules(config, has_reward=has_reward)
    elif not has_reward:
        yield True, "rewards: there are none; name at least one, or an environment that has a `get_reward`"
    whole = f"rollout.agent.{agent.kind}" if agent else "rollout_function.function" if function else ""
    beside = [name for name in ("tools", "environments") if getattr(config, name)]
    for name in [*beside, *(["rollout_function"] if agent and function else [])]:
        yield whole, f"{whole} >< {name}: it makes whole rollouts"
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
        for name in ("temperature", "group_size"):
            yield (
                function and getattr(source, name),
                f"{key}.{name} >< rollout_function: it may ask for any, for all prompts alike",
            )
        yield agent and source.temperature, f"{key}.temperature >< rollout.agent: it may ask for any"
    samples = max(*config.group_sizes, config.evaluation.samples_per_prompt if config.evaluation is not None else 0)
    limits = {f"tools.{index}": tool.timeout_s for index, tool in enumerate(config.tools)}
    for name, environment in config.environments.items():
        limits[f"environments.{name}"] = environment.timeout_s
        yield (
            environment.max_instances is not None and environment.max_instances < samples,
            f"environments.{name}.max_instances: {environment.max_instances} is less than {samples}, the completions of a prompt "
            "(group_size, evaluation.samples_per_prompt), which need an instance each",
        )
    limits |= {"rollout_function": function.timeout_s} if function else {}
    limits |= {"rollout.agent": agent.timeout_s} if agent else {}
    for path, timeout_s in limits.items():
        yield (
            timeout_s >= config.training.queue_timeout_s,
            f"{path}.timeout_s: {timeout_s:g} is not less than {{training.queue_timeout_s}}; the trainer would give up during "
            "such a call, in which no token comes",
        )
    yield (
        rollout.max_completion_tokens >= config.inference.max_model_len,
        "{rollout.max_completion_tokens} leaves no room for a prompt in {inference.max_model_len}; raise the latter or lower the "
        "former",
    )


def _distillation_rules(config: ExperimentConfig, *, has_reward: bool) -> Iterator[Rule]:
    assert config.distillation is not None
    loss, rollout = config.loss, config.rollout
    for name in ("type", "off_policy_mask", "score_centering"):
        is_whole = loss.has_sequence_ratio if name == "type" else getattr(loss, name) is not None
        yield is_whole, f"{{loss.{name}}} >< distillation: each token has an advantage of its own"
    is_shifted = any(each.temperature not in (None, 1.0) for each in (rollout, *config.data.sources.values()))
    yield (
        is_shifted or rollout.non_neutral_sampling,
        "sampling that differs from rollout.temperature: 1.0 >< distillation: that is what teachers answer for",
    )
    has_column = any(each.prompt_column for each in config.distillation.teachers.values())
    yield (
        config.has_own_rollouts and has_column,
        "distillation.teachers: prompt_column >< an agent or a rollout function: it writes its own prompts",
    )
    compares = config.advantage.rewards != "sum" or config.advantage.type in ("batch", "reinforce_plus_plus_baseline")
    yield not has_reward and compares, "advantage, as it is set, needs rewards to compare; set them, or leave this out"
    yield not has_reward and config.evaluation, "evaluation needs rewards to evaluate by; set them, or leave this out"


def _training_rules(config: ExperimentConfig) -> Iterator[Rule]:
    rollout, training = config.rollout, config.training
    behind, groups, size = training.weight_sync_steps - 1, rollout.groups_per_step, min(config.group_sizes)
    yield (
        behind > rollout.max_staleness,
        f"{{rollout.max_staleness}} with {{training.weight_sync_steps}} would drop every sample as stale; the server is up to "
        f"{count(behind, 'step')} behind, so set max_staleness >= {behind}",
    )
    yield (
        training.epochs is not None and not config.data.sampling.is_fixed,
        "{training.epochs} >< data.sampling: rows are not used equally often, so max_steps has to end the run",
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
    yield (
        training.context_parallel > 1 and config.loss.router_aux > 0.0,
        "{training.context_parallel} >< {loss.router_aux}: the balance of the routers depends on all tokens, and each rank has its "
        "own",
    )
    yield (
        config.launch.world_size // training.context_parallel > groups * size,
        f"launch.num_trainer_ranks x launch.trainer_nodes: {config.launch.world_size} is more than the samples of a step "
        f"({count(groups, 'group')} x {size})",
    )
    yield (
        training.minibatches > groups,
        "{training.minibatches} is more than {rollout.groups_per_step}; a group is trained in one update",
    )


def _loss_rules(config: ExperimentConfig) -> Iterator[Rule]:
    loss, correction, num_updates = config.loss, config.loss.correction, config.training.num_updates
    is_custom, is_recomputed = isinstance(loss, CustomLoss), loss.proximal == "recomputed"
    yield (
        loss.proximal == "sampler" and correction,
        "loss.correction, which weighs the difference between sampler and proximal policy, needs loss.proximal: recomputed or "
        "log_linear; set that, or leave this out",
    )
    yield (
        is_recomputed and not (loss.score_centering or correction or num_updates > 1 or is_custom),
        "loss.proximal: recomputed makes every ratio 1 while training.minibatches and training.num_iterations are 1: nothing would "
        "be clipped, and without loss.correction nothing corrects for stale tokens; set loss.correction, or leave proximal out",
    )
    yield (
        correction and loss.has_sequence_ratio and correction.level == "token",
        f"loss.correction.level: token would weigh tokens of one sample differently, and {loss.type}'s ratio is the same for all "
        "of them; set level: sequence",
    )
    yield (
        loss.type == "vespo" and loss.proximal != "sampler",
        "{loss.proximal} >< loss.type: vespo: its weights are those of policy and sampler, however old the sample is",
    )
    yield (
        loss.proximal == "log_linear" and config.rollout.max_staleness == 0,
        "loss.proximal: log_linear >< rollout.max_staleness: 0: it goes by the age of tokens, and all are new",
    )
    yield not loss.needs_reference and loss.reference != "initial", "{loss.reference} needs loss.beta above 0"
    yield not loss.needs_reference and loss.sync_ref_model, "loss.sync_ref_model needs loss.beta above 0"
    yield (
        loss.sync_ref_model and config.model.lora is not None,
        "loss.sync_ref_model >< model.lora: policy and reference share the weights that are not trained",
    )
    if loss.score_centering is None:
        return
    centered = "loss.score_centering >< "
    yield loss.has_sequence_ratio or is_custom, f"{centered}{{loss.type}}: it needs a loss of single tokens"
    yield (
        correction and correction.level == "sequence",
        f"{centered}{{loss.correction.level}}: the weight of a completion would be another one with any other token",
    )
    yield (
        correction and correction.action == "none" and is_recomputed,
        f"{centered}{{loss.correction.action}}: untruncated weights leave nothing to subtract",
    )
    yield (
        is_recomputed and num_updates > 1,
        f"{centered}loss.proximal: recomputed with several updates a step: its start is known for sampled tokens only",
    )
    yield (
        config.rollout_function,
        f"{centered}rollout_function: it returns the log-probabilities of sampled tokens only",
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
    values = {f"rollout.{name}": getattr(config.rollout, name) for name in config.rollout.non_neutral_sampling}
    if not values or isinstance(loss, CustomLoss) or config.keeps_sampling_mask:
        return
    is_short = {name: isinstance(value, int | float) for name, value in values.items()}
    what = ", ".join(f"{name}: {value}" if is_short[name] else name for name, value in values.items())
    other = "it samples from another distribution than the policy's"
    if loss.score_centering is not None:
        yield (
            True,
            f"loss.score_centering >< {', '.join(values)}: it compares whole distributions; leave the setting to evaluation",
        )
    elif loss.has_sequence_ratio:
        yield True, f"{what} >< loss.type: {loss.type}: {other}, which weights of single tokens correct for"
    elif not loss.corrects_sampling:
        yield (
            True,
            f"{what} samples from another distribution than the policy's, and the ratio of the loss would count that as a change "
            f"of the policy; set rollout.top_k to at most {MAX_TOP_LOGPROBS}, which makes the ratios exact (except with "
            "repetition_penalty), or loss.proximal: recomputed and loss.correction: {level: token}, or leave the setting to "
            "evaluation",
        )
    if loss.score_centering is None:
        for name in ("off_policy_mask", "geometric_mask"):
            yield (
                getattr(loss, name) is not None,
                f"{{loss.{name}}} >< {what}: the sampler's log-probabilities are shifted",
            )


def _evaluation_rules(config: ExperimentConfig) -> Iterator[Rule]:
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
    yield checkpoint.keep_best and every is None, "{checkpoint.keep_best} needs evaluation.every_steps"
    if evaluation is None:
        yield held_out is not None, "{data.held_out} needs the section `evaluation: {}`"
        return
    yield (
        evaluation.data is None and held_out is None,
        "evaluation.data: there is no data; name a source, or keep rows of data.train back with data.held_out: 0.05",
    )
    yield (
        evaluation.data is not None and held_out is not None,
        "data.held_out >< evaluation.data: each names the rows to evaluate on",
    )
    yield (
        evaluation.samples_per_prompt > 1 and evaluation.temperature == 0,
        "{evaluation.samples_per_prompt} greedy completions of a prompt are all the same; set evaluation.temperature, or "
        "samples_per_prompt: 1",
    )
    if every is None:
        return
    yield (
        every % config.training.weight_sync_steps,
        "{evaluation.every_steps} is not a multiple of {training.weight_sync_steps}, so the servers would be asked about a step "
        "whose weights they do not have; make it one",
    )
    yield (
        config.inference.vllm.sleep_while_training,
        "{evaluation.every_steps} >< inference.vllm.sleep_while_training: the servers sleep while it would ask them",
    )
    yield (
        checkpoint.keep_best and every % checkpoint.every_steps,
        "{checkpoint.keep_best} keeps the checkpoints of steps that are evaluated, and not every one of them has a checkpoint; "
        "make {evaluation.every_steps} a multiple of {checkpoint.every_steps}",
    )


def _machine_rules(config: ExperimentConfig) -> Iterator[Rule]:
    launch, inference, has_ray = config.launch, config.inference, config.launch.ray is not None
    remote = [url for url in inference.urls if not is_loopback(urlsplit(url).hostname or "")]
    yield (
        remote and config.weights.host is not None and is_loopback(config.weights.host),
        f"{{weights.host}} cannot be reached from {shortlist(remote, ', ', limit=1)} (inference.urls); leave it out, or set the "
        "address of the trainer's machine in the network that it shares with the servers",
    )
    sleeps = inference.vllm.sleep_while_training and config.rollout.max_staleness > 0
    yield sleeps, "inference.vllm.sleep_while_training needs rollout.max_staleness: 0"
    for argument in inference.vllm.extra_args:
        name = argument.split("=", 1)[0]
        reason = VLLM_ARGUMENTS.get(name if name in VLLM_ARGUMENTS else name.replace("_", "-"))
        yield reason, f"inference.vllm.extra_args: {name} cannot be set here: {reason}"
    forms = [section.structured_outputs for section in (config.rollout, config.evaluation) if section is not None]
    is_interrupted = config.weights.mode == "abort" and any(forms)
    yield is_interrupted, "weights.mode: abort >< structured_outputs: a turn that is interrupted starts over"
    yield inference.engine == "embedded" and any(forms), "structured_outputs needs inference.engine: vllm"
    is_alone = launch.sharding == "hybrid" and launch.trainer_nodes == 1
    yield is_alone, "launch.sharding: hybrid needs more than one machine (launch.trainer_nodes)"
    cluster = "needs launch.ray: auto, and a Ray cluster (`ray start` on each machine)"
    yield not has_ray and launch.trainer_nodes > 1, f"{{launch.trainer_nodes}} {cluster}"
    yield not has_ray and launch.max_restarts, f"{{launch.max_restarts}} {cluster}"
    yield not has_ray and not isinstance(inference.replicas, int), f"inference.replicas: a range {cluster}"
    yield has_ray and launch.colocate, "launch.colocate >< launch.ray: servers have GPUs of their own there"


def _lora_rules(config: ExperimentConfig) -> Iterator[Rule]:
    lora, merged = config.model.lora, "set push: merged"
    if lora is None:
        return
    in_4_bits = lora.load_in_4bit and config.training.cpu_offload
    yield in_4_bits, "model.lora.load_in_4bit >< training.cpu_offload: a base in 4 bits stays on the device"
    if lora.push in ("merged", None):
        return
    yield (
        lora.modules_to_save,
        "{model.lora.push} sends the adapters alone, and servers would keep the old values of "
        f"{{model.lora.modules_to_save}}; {merged}",
    )
    swaps = lora.push == "adapter_swap"
    yield (
        swaps and config.weights.mode != "keep_kv",
        "{weights.mode} >< model.lora.push: adapter_swap: requests in flight end on their version",
    )
    yield (
        lora.load_in_4bit,
        f"{{model.lora.push}} adds to the files of model.path, which model.lora.load_in_4bit rounds; {merged}",
    )
    yield (
        swaps and lora.rank > MAX_SWAPPED_RANK,
        f"model.lora.push: adapter_swap: vLLM takes ranks up to {MAX_SWAPPED_RANK}, not {{model.lora.rank}}; {merged}",
    )
    yield (
        not swaps and config.weights.transport in ("nccl", "ipc"),
        f"model.lora.push: adapter travels over gloo alone, not over {{weights.transport}}; {merged}",
    )
