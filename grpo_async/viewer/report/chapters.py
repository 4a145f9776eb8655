"""Which plots the report has, chapter by chapter, and which metrics each shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_RATIO = "sampling/importance_sampling_ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One metric of a plot. `around`: a metric that is drawn as a band of its width around this one (a standard deviation);
    `between`: two metrics that bound the band. `alone`: shown for a single run only, so that several stay readable."""

    metric: str
    label: str
    around: str | None = None
    between: tuple[str, str] | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot. `pattern`: a prefix and a suffix; every metric that has both is a line, too."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...] = ()
    pattern: tuple[str, str] | None = None
    kind: str = "line"  # line | stacked
    format: str = "number"
    include: tuple[float, ...] = ()
    log: bool = False
    leave_out: tuple[str, ...] = ()
    order: tuple[str, ...] = ()  # labels of what the pattern finds, from the first on; others follow by name
    least_found: int = 1  # fewer metrics of the pattern say nothing that another plot does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Plots under one heading."""

    name: str
    title: str
    plots: tuple[Plot, ...]


def _line(metric: str, label: str, **options: Any) -> Line:
    return Line(metric=metric, label=label, **options)


CHAPTERS: tuple[Chapter, ...] = (
    Chapter(
        name="rewards",
        title="Rewards",
        plots=(
            Plot(
                name="reward",
                title="Reward",
                unit="of a step's rollouts: mean, band ± one standard deviation",
                lines=(
                    _line("reward", "mean", around="reward_std"),
                    _line("reward_min", "lowest", alone=True),
                    _line("reward_max", "highest", alone=True),
                ),
            ),
            Plot(
                name="reward-parts",
                title="Parts of the reward",
                unit="mean of each reward function, before its weight",
                pattern=("rewards/", "/mean"),
                least_found=2,
            ),
            Plot(
                name="zero-variance",
                title="Groups without a signal",
                unit="share of groups whose rewards are all equal",
                lines=(_line("frac_reward_zero_std", "all equal"),),
                format="percent",
                include=(0.0, 1.0),
            ),
            Plot(
                name="advantage",
                title="Size of the advantages",
                unit="mean |advantage| of trained samples",
                lines=(_line("advantage/abs_mean", "mean size"),),
                include=(0.0,),
            ),
        ),
    ),
    Chapter(
        name="completions",
        title="Completions",
        plots=(
            Plot(
                name="lengths",
                title="Length",
                unit="sampled tokens of a completion, band: 10 % to 90 %",
                lines=(
                    _line(
                        "completions/mean_length",
                        "mean",
                        between=("completions/p10_length", "completions/p90_length"),
                    ),
                    _line("completions/min_length", "shortest", alone=True),
                    _line("completions/max_length", "longest", alone=True),
                ),
                include=(0.0,),
            ),
            Plot(
                name="truncated",
                title="Cut by a limit",
                unit="share of rollouts",
                lines=(_line("rollout/truncated", "truncated"),),
                format="percent",
                include=(0.0, 1.0),
            ),
            Plot(
                name="turns",
                title="Turns and tool calls",
                unit="of a rollout",
                lines=(_line("rollout/num_turns", "turns"), _line("tools/call_frequency", "tool calls")),
                include=(0.0,),
            ),
            Plot(
                name="tools",
                title="Tools that fail",
                unit="share of calls that failed, share of turns that could not be read",
                lines=(
                    _line("tools/failure_frequency", "calls that failed"),
                    _line("tools/parse_error_frequency", "unreadable turns"),
                ),
                format="percent",
                include=(0.0, 1.0),
            ),
            Plot(
                name="durations",
                title="Time of a rollout",
                unit="seconds",
                lines=(
                    _line("rollout/duration_s", "whole rollout"),
                    _line("rollout/generation_duration_s", "one generation"),
                    _line("tools/duration_s/per_rollout", "tools"),
                ),
                format="seconds",
                include=(0.0,),
            ),
            Plot(
                name="failures",
                title="Failures by kind",
                unit="since the run began",
                pattern=("failures/", ""),
                include=(0.0,),
            ),
        ),
    ),
    Chapter(
        name="update",
        title="The update",
        plots=(
            Plot(
                name="entropy",
                title="Entropy",
                unit="nats, mean over the trained tokens",
                lines=(_line("entropy", "entropy"),),
                include=(0.0,),
            ),
            Plot(name="kl", title="KL from the reference", unit="nats, k3 estimator", lines=(_line("kl", "KL"),), include=(0.0,)),
            Plot(
                name="loss",
                title="Loss",
                unit="the objective that was minimised",
                lines=(_line("loss", "loss"), _line("policy_loss", "policy loss", alone=True), _line("router_loss", "router")),
            ),
            Plot(
                name="grad-norm",
                title="Gradient norm",
                unit="before clipping",
                lines=(_line("grad_norm", "norm"),),
                include=(0.0,),
            ),
            Plot(
                name="lr",
                title="Learning rate",
                unit="of the optimizer step",
                lines=(_line("lr", "learning rate"),),
                include=(0.0,),
            ),
            Plot(
                name="clip",
                title="Clipped tokens",
                unit="share of trained tokens",
                lines=(
                    _line("clip_ratio/region_mean", "either side"),
                    _line("clip_ratio/low_mean", "low side", alone=True),
                    _line("clip_ratio/high_mean", "high side", alone=True),
                ),
                format="percent",
                include=(0.0,),
            ),
            Plot(
                name="masked",
                title="Tokens left out of the loss",
                unit="share, by reason",
                pattern=("masked/", ""),
                format="percent",
                include=(0.0,),
            ),
        ),
    ),
    Chapter(
        name="async",
        title="On and off policy",
        plots=(
            Plot(
                name="ratio",
                title="Importance ratio",
                unit="trainer / sampler probability of a token; 1 is on policy; logarithmic",
                lines=(
                    _line(f"{_RATIO}/mean", "mean"),
                    _line(f"{_RATIO}/min", "smallest", alone=True),
                    _line(f"{_RATIO}/max", "largest", alone=True),
                ),
                log=True,
            ),
            Plot(
                name="mismatch",
                title="Trainer against sampler",
                unit="mean |difference| of a token's log-probability, nats",
                lines=(
                    _line("sampling/sampling_logp_difference/mean", "mean"),
                    _line("sampling/sampling_logp_difference/max", "largest", alone=True),
                ),
                include=(0.0,),
            ),
            Plot(
                name="ess",
                title="Effective sample size",
                unit="share of the samples; 100 % is on policy",
                lines=(_line("sampling/ess", "effective share"),),
                format="percent",
                include=(0.0, 1.0),
            ),
            Plot(
                name="staleness",
                title="Staleness",
                unit="steps between sampling a token and training it",
                lines=(_line("async/staleness_mean", "mean"), _line("async/staleness_max", "most")),
                include=(0.0,),
            ),
        ),
    ),
    Chapter(
        name="pipeline",
        title="The pipeline",
        plots=(
            Plot(
                name="throughput",
                title="Throughput",
                unit="tokens per second",
                lines=(
                    _line("perf/generated_tokens_per_s", "generated"),
                    _line("perf/trained_tokens_per_s", "trained"),
                ),
                include=(0.0,),
            ),
            Plot(
                name="idle",
                title="Waiting",
                unit="share of the step's wall time",
                lines=(
                    _line("pipeline/trainer_idle_ratio", "trainer waits for samples"),
                    _line("pipeline/generator_idle_ratio", "no server generates"),
                ),
                format="percent",
                include=(0.0, 1.0),
            ),
            Plot(
                name="shares",
                title="What the trainer does",
                unit="share of the step's wall time",
                kind="stacked",
                pattern=("pipeline/", "_share"),
                order=("training", "pushing", "checkpoint", "other", "waiting"),
                format="percent",
                include=(0.0, 1.0),
            ),
            Plot(
                name="step-time",
                title="Time of a step",
                unit="seconds",
                lines=(_line("step_time", "step"), _line("sync/push_s", "weight push"), _line("checkpoint/staged_s", "checkpoint")),
                format="seconds",
                include=(0.0,),
            ),
            Plot(
                name="push",
                title="Weight push",
                unit="milliseconds, by phase",
                kind="stacked",
                pattern=("sync/", "_ms"),
                leave_out=("sync/gather_ms", "sync/send_ms"),  # parts of the transfer
                order=("start", "transfer", "pause", "finish", "resume"),
                include=(0.0,),
            ),
            Plot(
                name="queue",
                title="Queue",
                unit="groups at the end of a step",
                lines=(
                    _line("buffer/queued_groups", "scored, waiting for the trainer"),
                    _line("ledger/groups/in_flight", "generating"),
                    _line("servers/waiting", "requests waiting in servers"),
                ),
                include=(0.0,),
            ),
            Plot(
                name="ledger",
                title="Ledger",
                unit="what became of the groups since the run began",
                kind="stacked",
                pattern=("ledger/groups/", ""),
                leave_out=("ledger/groups/started",),
                order=("trained", "filtered", "stale", "failed", "cancelled", "queued", "in flight"),
                include=(0.0,),
            ),
            Plot(
                name="servers",
                title="Servers",
                unit="that serve; restarts and failures since the run began",
                lines=(
                    _line("servers/serving", "serving"),
                    _line("servers/restarts", "restarts"),
                    _line("servers/failures", "failures"),
                ),
                include=(0.0,),
            ),
            Plot(
                name="kv",
                title="Servers' key/value cache",
                unit="share in use",
                lines=(_line("servers/kv_usage", "in use"),),
                format="percent",
                include=(0.0, 1.0),
            ),
        ),
    ),
)  # fmt: skip
