"""Preflight, servers: do they hold the trainer's weights, and do they compute with them what the trainer computes?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from grpo_async.checks.memory import format_bytes
from grpo_async.checks.preflight_context import CheckedServer, PreflightContext
from grpo_async.checks.preflight_http import Completion, ProbeClient
from grpo_async.checks.report import Check, failed, passed, warned
from grpo_async.inference.surface import ServerInfo
from grpo_async.weights.verify import Difference, TrainerScores, compare_logprobs, verify_limit

_MOST_NAMED = 5
_OTHER_WEIGHTS = 0.5  # nats: rounding never differs by so much in the mean
_NUM_TOKENS = 8  # of the completion that is tried
_MIN_CONTEXT = 16


def check_logprobs(context: PreflightContext) -> list[Check]:
    """Trainer and each server give the same log-probabilities to the probes, token by token."""
    if context.trainer_scores is None:
        return []  # said already
    return [_logprobs_of(context, server, context.trainer_scores) for server in context.servers]


def _logprobs_of(context: PreflightContext, server: CheckedServer, trainer: TrainerScores) -> Check:
    name, expected = "logprobs", trainer.logprobs
    answers = [server.control.score(probe) for probe in context.probes]
    versions = sorted({answer.policy_version for answer in answers})
    if versions != [context.policy_version]:
        return failed(
            name,
            f"{server.name} says that it serves version {versions} and not {context.policy_version}, which was pushed; does "
            "another trainer use this server?",
        )
    scores = [answer.logprobs for answer in answers]
    for probe, wanted, got in zip(context.probes, expected, scores, strict=True):
        if len(wanted) != len(got):
            return failed(
                name,
                f"{server.name} gave {len(got)} log-probabilities for a probe of {len(probe)} tokens, not {len(wanted)}",
            )
    difference = compare_logprobs(expected, scores)
    limit = _limit(context)
    figures = (
        f"{server.name}: mean |d| {difference.mean:.2g}, p99 {difference.p99:.2g}, max {difference.max:.2g}, k3 "
        f"{difference.k3:.2g} over {difference.num_tokens} tokens (limit of the mean {limit:.2g}; rounding alone moves the "
        f"trainer's own by {trainer.rounding.mean:.2g})"
    )
    if difference.mean <= limit:
        return passed(name, figures)
    return failed(name, f"{figures}; {_by_probe(expected, scores)}. {_likely_cause(context, server, difference)}")


def _by_probe(expected: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]) -> str:
    parts = [
        f"{compare_logprobs([one], [other]).mean:.2g} in the probe of {len(one) + 1}"
        for one, other in zip(expected, scores, strict=True)
    ]
    return "mean by length: " + ", ".join(parts)


def _likely_cause(context: PreflightContext, server: CheckedServer, difference: Difference) -> str:
    if not difference.mean <= _OTHER_WEIGHTS:
        return (
            "So large a difference means other weights or another model function, not rounding: compare the server's model "
            f"({_served(server).model}) with model.path, and look for quantization or overrides in inference.vllm.extra_args"
        )
    return (
        f"That is more than the rounding of {_dtypes(context)} explains; where the difference is known and accepted, raise "
        "weights.verify_tolerance"
    )


def check_weights(context: PreflightContext) -> Check:
    """Every parameter has its place on the servers, and the first push shows what the transport can do."""
    name = "weights"
    if context.parameter_problems:
        more = len(context.parameter_problems) - _MOST_NAMED
        return failed(
            name,
            f"trainer and servers do not have the same parameters: {'; '.join(context.parameter_problems[:_MOST_NAMED])}"
            f"{f' and {more} more' if more > 0 else ''}. Start the servers with model.path: {context.config.model.path}",
        )
    tensors = f"{len(context.parameter_shapes)} parameters fit by name and shape"
    num_bytes = context.first_push.get("sync/bytes", 0.0)
    speed = context.first_push.get("sync/bytes_per_s", 0.0)
    if not num_bytes or not speed:
        return warned(
            name, f"{tensors}; the first push left no figures, so the transport ({context.transport}) is untested"
        )
    return passed(
        name,
        f"{tensors}; {context.transport} carried {format_bytes(num_bytes)} to {len(context.servers)} server(s) at "
        f"{format_bytes(speed)}/s",
    )


def check_generation(context: PreflightContext) -> list[Check]:
    """A short greedy completion of each server carries the log-probabilities that its own scoring gives these tokens."""
    return [_generation_of(context, server) for server in context.servers]


def _generation_of(context: PreflightContext, server: CheckedServer) -> Check:
    name = "generation"
    info = _served(server)
    prompt = list(context.probes[0])[: max(1, min(_MIN_CONTEXT, info.max_model_len - 2))]
    count = min(_NUM_TOKENS, info.max_model_len - len(prompt) - 1)
    with ProbeClient(
        server.url, token=context.token, timeout_s=context.config.weights.timeout_s, authority=context.authority
    ) as client:
        completion = client.generate_greedy(prompt, max_tokens=count, instance_id=info.instance_id)
    problem = _problem_with(completion, count, context)
    if problem:
        return failed(name, f"{server.name}: {problem}; look into the server's log")
    scored = server.control.score([*prompt, *completion.token_ids]).logprobs[len(prompt) - 1 :]
    difference = compare_logprobs([completion.logprobs], [scored])
    limit = _limit(context)
    figures = f"{server.name}: {count} greedy tokens, mean |d| {difference.mean:.2g} against its own scoring (limit {limit:.2g})"
    if difference.mean <= limit:
        return passed(name, figures)
    return failed(
        name,
        f"{figures}. Its sampler and its scoring disagree: look for sampling options or --logprobs-mode in "
        "inference.vllm.extra_args, and for a generation_config.json with penalties in the model's folder",
    )


def _problem_with(completion: Completion, count: int, context: PreflightContext) -> str:
    if len(completion.token_ids) != count or len(completion.logprobs) != count:
        return (
            f"asked for {count} tokens, got {len(completion.token_ids)} and {len(completion.logprobs)} log-probabilities, "
            f"finish reason {completion.finish_reason}"
        )
    if set(completion.policy_versions) != {context.policy_version}:
        return f"tokens are stamped with version {sorted(set(completion.policy_versions))}, {context.policy_version} was pushed"
    beyond = [token for token in completion.token_ids if not 0 <= token < context.num_embeddings]
    return f"sampled the ids {beyond}, the model has {context.num_embeddings}" if beyond else ""


def check_dtypes(context: PreflightContext) -> Check:
    """Weights are served in the dtype they are sent in, and the trainer computes in the same."""
    name = "dtypes"
    config = context.config
    wire, compute = config.inference.dtype, config.model.compute_dtype or config.model.dtype
    words = _dtypes(context)
    problems = [
        f"{server.name} serves {info.dtype} and gets {wire} (inference.dtype)"
        for server, info in _infos(context)
        if info.dtype != wire
    ]
    if compute != wire:
        problems.append(
            f"the trainer computes in {compute} (model.compute_dtype), servers in {wire}: ratios of new to old policy carry "
            "the rounding between them; set both to the same where you can"
        )
    if problems:
        return warned(name, f"{words}. {'; '.join(problems)}")
    return passed(name, words)


def check_context_length(context: PreflightContext) -> Check:
    """Servers take sequences as long as the run makes them, and the prompts leave room for completions."""
    name = "context length"
    config = context.config
    wanted = config.inference.max_model_len
    short = [
        f"{server.name} takes {info.max_model_len} tokens"
        for server, info in _infos(context)
        if info.max_model_len < wanted
    ]
    if short:
        return failed(name, f"inference.max_model_len is {wanted}, but {'; '.join(short)}; start it with this config")
    lengths = [len(ids) for ids in context.rendered_prompts]
    longest = max(lengths, default=0)
    room = wanted - longest
    if room < 1:
        return failed(
            name,
            f"a prompt of data.train has {longest} tokens, inference.max_model_len is {wanted}: nothing could be generated; "
            "raise it, or drop long prompts with data.train.max_prompt_tokens",
        )
    if room < config.rollout.max_completion_tokens:
        return warned(
            name,
            f"a prompt of {longest} tokens leaves {room} for its completion, rollout.max_completion_tokens is "
            f"{config.rollout.max_completion_tokens}; raise inference.max_model_len (now {wanted}), or drop long prompts with "
            "data.train.max_prompt_tokens",
        )
    return passed(name, f"{wanted} tokens; the longest of the first {len(lengths)} prompts has {longest}")


def check_seeds(context: PreflightContext) -> Check:
    """Whether the same seed gives the same rollouts again. Not by vLLM, which is as it should be: see compat."""
    without = [server.name for server, info in _infos(context) if not info.per_request_seed]
    if without:
        return passed(
            "seeds",
            f"all requests to {', '.join(without)} draw from one stream: two runs with the same run.seed sample differently",
        )
    return passed("seeds", "every request is sampled with a seed of its own")


def _infos(context: PreflightContext) -> Iterator[tuple[CheckedServer, ServerInfo]]:
    return ((server, _served(server)) for server in context.servers)


def _served(server: CheckedServer) -> ServerInfo:
    assert server.info is not None  # what serves has said what it is
    return server.info


def _limit(context: PreflightContext) -> float:
    scores = context.trainer_scores
    return _OTHER_WEIGHTS if scores is None else verify_limit(context.config, scores)


def _dtypes(context: PreflightContext) -> str:
    model = context.config.model
    served: Iterable[str] = sorted({info.dtype for _, info in _infos(context)})
    return (
        f"master weights {model.dtype}, trainer computes in {model.compute_dtype or model.dtype}, sent as "
        f"{context.config.inference.dtype}, served as {', '.join(served)}"
    )
