"""Which plots the page has, chapter by chapter, and which metrics each shows."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_async.records import LEDGER_STATUSES

_RATIO = "sampling/importance_sampling_ratio"
_WHOLE = (0.0, 1.0)  # an axis that shows all of a fraction


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a plot. `around`: a metric that is drawn as a band of its width around this one (a standard deviation);
    `between`: two metrics that bound the band. `single_run`: shown where there is one run only, so that several
    stay readable."""

    metric: str
    label: str
    around: str | None = None
    between: tuple[str, str] | None = None
    single_run: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot. `pattern`: a prefix and a suffix; every metric that has both is a line, too. `include`: values that the axis
    always shows."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...] = ()
    pattern: tuple[str, str] | None = None
    format: str = "number"
    include: tuple[float, ...] = (0.0,)
    log: bool = False
    leave_out: tuple[str, ...] = ()
    order: tuple[str, ...] = ()  # labels of what the pattern finds, from the first on; others follow by name
    least_found: int = 1  # with fewer metrics of the pattern the plot would only repeat another
    of_evaluations: bool = False  # points of the evaluations instead of the steps
    single_run: bool = False  # as for a line


@dataclass(frozen=True, slots=True)
class Chapter:
    """Plots under one heading."""

    title: str
    plots: tuple[Plot, ...]


CHAPTERS: tuple[Chapter, ...] = (
    Chapter("Rewards", (
        Plot("reward", "Reward", "mean over a step's rollouts, band ± one standard deviation",
             (Line("reward", "mean", around="reward_std"),
              Line("reward_min", "lowest", single_run=True),
              Line("reward_max", "highest", single_run=True)),
             include=()),
        Plot("reward-parts", "Parts of the reward", "mean of each reward function, before its weight",
             pattern=("rewards/", "/mean"), least_found=2, include=()),
        Plot("zero-variance", "Groups without a signal", "fraction of groups whose rewards are all equal",
             (Line("frac_reward_zero_std", "all equal"),),
             format="percent", include=_WHOLE),
        Plot("advantage", "Size of the advantages", "mean |advantage| of trained samples",
             (Line("advantage/abs_mean", "mean size"),)),
    )),
    Chapter("Held-out prompts", (
        Plot("held-out", "Held-out reward", "mean over the prompts, band ± one standard error",
             (Line("eval/reward", "reward", around="eval/reward_stderr"),
              Line("eval/majority_baseline", "always the most frequent answer", single_run=True)),
             of_evaluations=True),
        Plot("pass", "Held-out pass rate", "pass@k: chance that one of k samples passes",
             pattern=("eval/pass@", ""), format="percent", include=_WHOLE, of_evaluations=True),
        Plot("held-out-groups", "Held-out reward by value of evaluation.group_by", "mean over the prompts with this value",
             pattern=("eval/reward/", ""), of_evaluations=True, single_run=True),
        Plot("held-out-length", "Held-out length", "sampled tokens of a completion",
             (Line("eval/mean_length", "mean length"),), of_evaluations=True),
    )),
    Chapter("Completions", (
        Plot("lengths", "Length", "sampled tokens of a completion, band: 10% to 90%",
             (Line("completions/mean_length", "mean", between=("completions/p10_length", "completions/p90_length")),
              Line("completions/min_length", "shortest", single_run=True),
              Line("completions/max_length", "longest", single_run=True))),
        Plot("truncated", "Truncated", "fraction of rollouts",
             (Line("completions/clipped_ratio", "truncated"),),
             format="percent", include=_WHOLE),
        Plot("turns", "Turns and tool calls", "per rollout",
             (Line("rollout/num_turns", "turns"), Line("tools/call_frequency", "tool calls"))),
        Plot("tools", "Tools that fail", "fraction of calls that failed, fraction of turns that could not be parsed",
             (Line("tools/failure_frequency", "calls that failed"),
              Line("tools/parse_error_frequency", "unparsed turns")),
             format="percent", include=_WHOLE),
        Plot("durations", "Time of a rollout", "seconds",
             (Line("rollout/duration_s", "whole rollout"),
              Line("rollout/generation_duration_s", "one generation"),
              Line("tools/duration_s/per_rollout", "tools")),
             format="seconds"),
        Plot("failures", "Failures by kind", "since the run began", pattern=("failures/", "")),
    )),
    Chapter("The update", (
        Plot("entropy", "Entropy", "nats, mean over the trained tokens", (Line("entropy", "entropy"),)),
        Plot("kl", "KL from the reference", "nats, k3 estimator", (Line("kl", "KL"),)),
        Plot("loss", "Loss", "the minimized objective",
             (Line("loss", "loss"), Line("policy_loss", "policy loss", single_run=True)),
             include=()),
        Plot("grad-norm", "Gradient norm", "before clipping", (Line("grad_norm", "norm"),)),
        Plot("lr", "Learning rate", "of the optimizer step", (Line("lr", "learning rate"),)),
        Plot("clip", "Clipped tokens", "fraction of trained tokens",
             (Line("clip_ratio/region_mean", "either side"),
              Line("clip_ratio/low_mean", "low side", single_run=True),
              Line("clip_ratio/high_mean", "high side", single_run=True)),
             format="percent"),
        Plot("masked", "Tokens left out of the loss", "fraction, by reason", pattern=("masked/", ""), format="percent"),
    )),
    Chapter("On and off policy", (
        Plot("ratio", "Importance ratio", "trainer / sampler probability of a token; 1 is on policy; logarithmic",
             (Line(f"{_RATIO}/mean", "mean"),
              Line(f"{_RATIO}/min", "smallest", single_run=True),
              Line(f"{_RATIO}/max", "largest", single_run=True)),
             include=(), log=True),
        Plot("mismatch", "Trainer against sampler", "mean |difference| of a token's log-probability, nats",
             (Line("sampling/sampling_logp_difference/mean", "mean"),
              Line("sampling/sampling_logp_difference/p99", "99th percentile", single_run=True),
              Line("sampling/sampling_logp_difference/max", "largest", single_run=True))),
        Plot("ess", "Effective sample size", "fraction of the samples; 100% is on policy",
             (Line("sampling/ess", "effective fraction"),),
             format="percent", include=_WHOLE),
        Plot("staleness", "Staleness", "steps between sampling a token and training it",
             (Line("async/staleness_mean", "mean"), Line("async/staleness_max", "max"))),
        Plot("staleness-ages", "Trained tokens by their staleness", "fraction of the step's tokens, by steps",
             pattern=("async/staleness/", ""), format="percent", include=_WHOLE),
    )),
    Chapter("The pipeline", (
        Plot("throughput", "Throughput", "tokens per second",
             (Line("perf/generated_tokens_per_s", "generated"), Line("perf/trained_tokens_per_s", "trained"))),
        Plot("idle", "Waiting", "fraction of the step's wall time",
             (Line("pipeline/trainer_idle_ratio", "trainer waits for samples"),
              Line("pipeline/generator_idle_ratio", "servers are idle")),
             format="percent", include=_WHOLE),
        Plot("trainer-time", "What the trainer does", "fraction of the step's wall time",
             (Line("pipeline/trainer_idle_ratio", "waiting"),),
             pattern=("pipeline/", "_fraction"),
             order=("training", "pushing", "checkpoint", "other"), format="percent", include=_WHOLE),
        Plot("step-time", "Time of a step", "seconds",
             (Line("step_time", "step"), Line("sync/push_s", "weight push"), Line("checkpoint/staged_s", "checkpoint")),
             format="seconds"),
        Plot("push", "Weight push", "seconds, by phase",
             pattern=("sync/phase/", "_s"), leave_out=("sync/phase/gather_s", "sync/phase/send_s"),  # parts of the transfer
             order=("pause", "start", "transfer", "finish", "resume"), format="seconds"),
        Plot("queue", "Queue", "groups at the end of a step",
             (Line("ledger/groups/queued", "scored, waiting for the trainer"),
              Line("ledger/groups/in_flight", "generating"),
              Line("servers/waiting", "requests waiting in servers"))),
        Plot("ledger", "Ledger", "what became of the groups since the run began",
             pattern=("ledger/groups/", ""), leave_out=("ledger/groups/started",),
             order=tuple(status.replace("_", " ") for status in LEDGER_STATUSES)),
        Plot("servers", "Servers", "that serve; restarts and failures since the run began",
             (Line("servers/serving", "serving"),
              Line("servers/restarts", "restarts"),
              Line("servers/failures", "failures"))),
        Plot("kv", "KV cache of the servers", "fraction in use",
             (Line("servers/kv_usage", "in use"),),
             format="percent", include=_WHOLE),
    )),
)  # fmt: skip
