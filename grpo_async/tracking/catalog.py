"""What every metric is: its unit, how several values of it become one, and a sentence.

The names are those of metrics.jsonl; `{...}` in a pattern stands for one or more parts of a name. The first pattern that fits
holds. A metric that matches no pattern (a reward function's own `log_metric`) is a mean without a unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from statistics import fmean


class Reduction(StrEnum):
    """How the values of several steps become one."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    SUM = "sum"  # a count or an amount of each step
    LAST = "last"  # a running total, or a state

    def __call__(self, values: Sequence[float]) -> float:
        """[1.0, 3.0] -> mean 2.0, min 1.0, max 3.0, sum 4.0, last 3.0."""
        if not values:
            raise ValueError(f"there is no value to take the {self.value} of")
        return _REDUCE[self](values)


_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "min": min,
    "max": max,
    "sum": sum,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric. `unit` is "" for pure numbers, "fraction" for 0 to 1."""

    name: str
    help: str
    unit: str = ""
    reduction: Reduction = Reduction.MEAN
    is_known: bool = True


def describe(name: str) -> MetricInfo:
    """The entry of a metric: describe("rewards/length/mean").help -> "mean of the reward `length`"."""
    for pattern, entry in _compiled():
        match = pattern.fullmatch(name)
        if match:
            return replace(entry, name=name, help=entry.help.format(**match.groupdict()))
    return MetricInfo(name, "logged by the user's code, or unknown to this version", is_known=False)


@cache
def _compiled() -> list[tuple[re.Pattern[str], MetricInfo]]:
    """ "rewards/{name}/mean" fits rewards/a/mean and rewards/a/b/mean."""
    return [(re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(entry.name))), entry) for entry in CATALOG]


_metric = MetricInfo
_MIN, _MAX, _SUM, _LAST = Reduction.MIN, Reduction.MAX, Reduction.SUM, Reduction.LAST

CATALOG: tuple[MetricInfo, ...] = (
    _metric("step", "finished training steps", reduction=_LAST),
    _metric("epoch", "prompts whose group is closed (trained, filtered, stale or failed) / rows of the data", reduction=_LAST),
    # rewards
    _metric("reward", "mean reward of all scored completions of the step: of trained, filtered and stale groups"),
    _metric("reward_std", "standard deviation of these rewards"),
    _metric("reward_min", "lowest reward of the step", reduction=_MIN),
    _metric("reward_max", "highest reward of the step", reduction=_MAX),
    _metric("reward_p{percent}", "the {percent} % quantile of the step's rewards"),
    _metric("frac_reward_zero_std", "fraction of groups with equal rewards: they teach nothing", "fraction"),
    _metric("rewards/{name}/mean", "mean of the reward `{name}`"),
    _metric("rewards/{name}/std", "standard deviation of the reward `{name}`"),
    _metric("advantage/abs_mean", "mean size of the advantages of trained samples"),
    # completions
    _metric("completions/mean_length", "sampled tokens of a completion", "tokens"),
    _metric("completions/min_length", "shortest completion", "tokens", _MIN),
    _metric("completions/max_length", "longest completion", "tokens", _MAX),
    _metric("completions/p{percent}_length", "the {percent} % quantile of the lengths of completions", "tokens"),
    _metric("completions/clipped_ratio", "fraction of completions that a limit ended, empty ones too", "fraction"),
    _metric("completions/mean_terminated_length", "sampled tokens of completions that ended by themselves", "tokens"),
    _metric("completions/min_terminated_length", "shortest of them", "tokens", _MIN),
    _metric("completions/max_terminated_length", "longest of them", "tokens", _MAX),
    # rollouts
    _metric("rollout/duration_s", "wall time of a rollout", "s"),
    _metric("rollout/generation_duration_s", "wall time of one turn's generation", "s"),
    _metric("rollout/num_turns", "turns of a rollout"),
    _metric("rollout/done", "fraction of rollouts whose environment said that the episode is over", "fraction"),
    _metric("scoring/duration_s", "wall time of scoring a group", "s"),
    _metric("tools/call_frequency", "tool calls per completion"),
    _metric("tools/failure_frequency", "fraction of all calls that failed", "fraction"),
    _metric("tools/parse_error_frequency", "fraction of turns that could not be searched for calls", "fraction"),
    _metric("tools/duration_s/mean", "wall time of a tool call", "s"),
    _metric("tools/duration_s/per_rollout", "wall time of all tool calls of a rollout", "s"),
    _metric("tools/{name}/call_frequency", "calls of `{name}` per completion"),
    _metric("tools/{name}/failure_frequency", "fraction of the calls of `{name}` that failed", "fraction"),
    _metric("tools/{name}/duration_s", "wall time of a call of `{name}`", "s"),
    _metric("failures/{kind}", "failures of the kind `{kind}` since the run began", reduction=_LAST),
    # the update
    _metric("loss", "the objective that was minimized"),
    _metric("policy_loss", "policy loss with the KL, without entropy bonus"),
    _metric("kl", "KL divergence from the reference, k3 estimator; weighted by the ratio (loss.use_bias_correction_kl)", "nats"),
    _metric("entropy", "mean entropy of the policy at the trained tokens", "nats"),
    _metric("grad_norm", "norm of the gradient before clipping"),
    _metric("lr", "learning rate", reduction=_LAST),
    _metric("num_tokens", "trained tokens of the step", "tokens", _SUM),
    _metric("training/skipped_updates", "updates that were not finite and were not made", reduction=_SUM),
    _metric("training/loss_scale", "factor on the loss in float16", reduction=_LAST),
    _metric("training/padding_fraction", "fraction of the tokens computed that are padding", "fraction"),
    _metric("clip_ratio/low_mean", "fraction of tokens clipped at the lower bound", "fraction"),
    _metric("clip_ratio/low_min", "smallest such fraction of a sample", "fraction", _MIN),
    _metric("clip_ratio/high_mean", "fraction of tokens clipped at the upper bound", "fraction"),
    _metric("clip_ratio/high_max", "largest such fraction of a sample", "fraction", _MAX),
    _metric("clip_ratio/region_mean", "fraction of tokens clipped at either bound", "fraction"),
    _metric("masked/correction", "fraction of tokens that the off-policy correction left out", "fraction"),
    _metric("masked/off_policy", "fraction of tokens in sequences that were too far off policy", "fraction"),
    # trainer against sampler
    _metric("sampling/sampling_logp_difference/mean", "mean |trainer - sampler| log-probability of a token", "nats"),
    _metric("sampling/sampling_logp_difference/p99", "99th percentile of these differences, within 16%", "nats"),
    _metric("sampling/sampling_logp_difference/max", "largest of these differences", "nats", _MAX),
    _metric("sampling/kl", "KL divergence of the trained policy from the sampler, k3 estimator", "nats"),
    _metric("sampling/importance_sampling_ratio/mean", "mean importance weight; 1 on policy"),
    _metric("sampling/importance_sampling_ratio/min", "smallest importance weight", reduction=_MIN),
    _metric("sampling/importance_sampling_ratio/max", "largest importance weight", reduction=_MAX),
    _metric("sampling/ess", "effective sample size / tokens (or samples); 1 on policy", "fraction"),
    _metric("sampling/chi_squared", "mean squared importance weight - 1; 0 on policy"),
    # the pipeline
    _metric("async/staleness_mean", "finished steps between sampling a token and training it", "steps"),
    _metric("async/staleness_max", "largest staleness of a token", "steps", _MAX),
    _metric("async/staleness/{steps}", "fraction of trained tokens with a staleness of {steps}", "fraction"),
    _metric("async/stale/mean_length", "sampled tokens per completion of the groups that became stale, finished or not", "tokens"),
    _metric("pipeline/trainer_idle_ratio", "fraction of the step that the trainer waited for samples", "fraction"),
    _metric("pipeline/generator_idle_ratio", "fraction of the step that no server generated", "fraction"),
    _metric("pipeline/overlap_efficiency", "longer of generation and training / wall time; 1: no loss", "fraction"),
    _metric("pipeline/{phase}_fraction", "fraction of the step's wall time: {phase}", "fraction"),
    _metric("step_time", "wall time of the step", "s"),
    _metric("perf/trained_tokens_per_s", "trained tokens / wall time", "tokens/s"),
    _metric("perf/generated_tokens_per_s", "sampled tokens / wall time", "tokens/s"),
    _metric("perf/peak_memory_bytes", "most memory that rank 0 has held: of the GPU, else resident", "bytes", _MAX),
    _metric("ledger/groups/{state}", "groups, {state}", "groups", _LAST),
    _metric("ledger/tokens/{state}", "sampled tokens of groups, {state}", "tokens", _LAST),
    # weight pushes
    _metric("sync/push_s", "seconds of the weight push", "s"),
    _metric("sync/stopped_s", "seconds that generation was stopped for the push", "s"),
    _metric("sync/bytes", "bytes of the push", "bytes"),
    _metric("sync/bytes_per_s", "bytes / seconds of the transfer", "bytes/s"),
    _metric("sync/servers", "servers that took the push"),
    _metric("sync/held", "1: an evaluation held the push back", reduction=_SUM),
    _metric("sync/skipped", "1: no server was up to take the push", reduction=_SUM),
    _metric("sync/verify_mean", "mean |server - trainer| log-probability on the probes", "nats"),
    _metric("sync/verify_p99", "99th percentile of these differences", "nats", _MAX),
    _metric("sync/verify_rounding", "the same mean of the trainer against itself, rounded differently", "nats"),
    _metric("sync/verify_max", "largest difference on the probes", "nats", _MAX),
    _metric("sync/verify_k3", "KL divergence of server and trainer on the probes, k3 estimator", "nats"),
    _metric("sync/phase/pause_s", "seconds of the push until every server had paused", "s"),
    _metric("sync/phase/gather_s", "seconds of the transfer spent gathering and packing buckets", "s"),
    _metric("sync/phase/send_s", "seconds of the transfer spent waiting for buckets to be sent", "s"),
    _metric("sync/phase/{phase}_s", "seconds of the push: {phase}", "s"),
    # servers
    _metric("servers/serving", "servers that serve", reduction=_LAST),
    _metric("servers/restarts", "restarts of servers since the run began", reduction=_LAST),
    _metric("servers/failures", "failures of servers since the run began", reduction=_LAST),
    _metric("servers/recovery_s", "seconds of the last recovery of a server", "s", _LAST),
    _metric("servers/running", "requests that servers generate for"),
    _metric("servers/waiting", "requests that wait inside servers"),
    _metric("servers/kv_usage", "fraction of the servers' KV cache in use", "fraction"),
    # checkpoints
    _metric("checkpoint/staged_s", "seconds that training stood still for a checkpoint", "s"),
    _metric("checkpoint/written_s", "seconds until it was written, most of them in parallel with training", "s"),
    _metric("checkpoint/bytes", "bytes of the checkpoint", "bytes", _LAST),
    # evaluation
    _metric("eval/step", "step at whose end the evaluation began", reduction=_LAST),
    _metric("eval/reward", "mean reward on held-out prompts", reduction=_LAST),
    _metric("eval/reward_std", "standard deviation of these rewards", reduction=_LAST),
    _metric("eval/reward_stderr", "standard error of the mean over prompts", reduction=_LAST),
    _metric("eval/majority_baseline", "fraction of the most frequent answer (evaluation.baseline_column)", "fraction", _LAST),
    _metric("eval/rewards/{name}", "mean of the reward `{name}` on held-out prompts", reduction=_LAST),
    _metric("eval/pass@{k}", "chance that one of {k} samples passes", "fraction", _LAST),
    _metric("eval/mean@{k}", "mean reward of {k} completions of a prompt, over prompts", reduction=_LAST),
    _metric("eval/mean_length", "sampled tokens of a held-out completion", "tokens", _LAST),
    _metric("eval/truncated", "fraction of held-out completions that a limit ended", "fraction", _LAST),
    _metric("eval/duration_s", "wall time of the evaluation", "s", _LAST),
    _metric("eval/mixed", "1: more than one policy version answered", reduction=_LAST),
    _metric("eval/{name}", "of the last evaluation: {name}", reduction=_LAST),
)  # fmt: skip
"""Every metric of this version. A test runs a training and fails when one of its metrics is not here."""
