"""Metrics of a training step, and of the pipeline around it.

    UpdateSums        what an optimizer update computed, summed on the device and brought to the host in one transfer
    PipelineMeter     who waited for whom, and tokens per second, for each step and for the run; computed from counter readings

Names and definitions are TRL's where it has the metric. Weights and clips that belong to whole samples are averaged over samples.

    trainer idle = seconds waiting for samples / wall       generator idle = 1 - seconds generating / wall
    overlap      = max(generation, wall - waiting) / wall   *_fraction: of the trainer's wall time; 1 together with trainer idle
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType

import torch
import torch.distributed as dist

from grpo_async.training.loss import Objective, ObjectiveOutput, kl_k3, sequence_mean, sequence_sum
from grpo_async.training.parameters import num_ranks

_NUM_REWARDS = 3  # kept from the start and the end of the run, so totals do not grow
ACTIVITIES = ("waiting", "training", "pushing", "checkpoint")
"""The activities of the trainer's thread: wait for samples, train, push weights, copy a checkpoint or wait for the previous one.
The rest of its time is "other"."""

_SUMS = (
    "loss", "policy_loss", "tokens", "entropy", "kl", "difference", "sampling_kl",
    "weights", "weights_squared", "num_weights", "clipped_low", "clipped_high", "num_clips",
    "importance_masked", "off_policy", "router_aux",
)  # fmt: skip
_BINS_FROM, _BINS_TO, _NUM_BINS = 1e-6, 1e2, 128  # nats
_MAXIMA = ("weight_max", "minus_weight_min", "difference_max", "minus_low_min", "high_max")


class UpdateSums:
    """Sums and maxima over the micro-batches of one update. Float64, on the device."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._objective = objective
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.full((len(_MAXIMA),), -math.inf, dtype=torch.float64, device=device)
        self._differences = torch.zeros(_NUM_BINS, dtype=torch.float64, device=device)  # tokens by |difference|

    @torch.no_grad()
    def add(self, output: ObjectiveOutput) -> None:
        inputs, token_loss = output.inputs, output.token_loss
        logprobs = inputs.logprobs.detach()
        ones = torch.ones_like(logprobs)
        zeros = torch.zeros_like(logprobs)
        of_sample = 1.0 / sequence_sum(ones, inputs.sample_index)  # adds up to 1 over the tokens of a sample
        per_weight = of_sample if self._objective.has_sequence_weights else ones
        per_clip = of_sample if token_loss.is_per_sequence else ones
        difference = (logprobs - inputs.sampler_logprobs).double().abs()
        # log10, so that every bin has the same relative width; histc leaves out NaN and what is beyond the bins
        ends = math.log10(_BINS_FROM), math.log10(_BINS_TO)
        self._differences += torch.histc(torch.log10(difference).clamp(*ends), _NUM_BINS, *ends)
        weights = output.importance_weights.double()
        low = zeros if token_loss.clipped_low is None else token_loss.clipped_low.to(logprobs.dtype)
        high = zeros if token_loss.clipped_high is None else token_loss.clipped_high.to(logprobs.dtype)
        # in the order of _SUMS
        self._sums += torch.stack(
            [
                output.total.detach().double(),
                output.policy_loss.double(),
                ones.sum().double(),
                inputs.entropy.detach().sum().double(),
                (zeros if output.kl is None else output.kl).sum().double(),
                difference.sum().double(),
                kl_k3(inputs.sampler_logprobs.double(), logprobs.double()).sum(),
                (per_weight * weights).sum(),
                (per_weight * weights**2).sum(),
                per_weight.sum().double(),
                (per_clip * low).sum().double(),
                (per_clip * high).sum().double(),
                per_clip.sum().double(),
                (zeros if output.is_importance_masked is None else output.is_importance_masked).sum().double(),
                (zeros if output.is_off_policy is None else output.is_off_policy).sum().double(),
                (zeros.sum() if output.router_aux is None else output.router_aux).double(),
            ]
        )
        # in the order of _MAXIMA
        new = [
            weights.max(),
            -weights.min(),
            difference.max(),
            -sequence_mean(low, inputs.sample_index).min(),
            sequence_mean(high, inputs.sample_index).max(),
        ]
        torch.maximum(self._maxima, torch.stack([value.double() for value in new]), out=self._maxima)

    def gather(self, square_norm: torch.Tensor, *, before_sync: Callable[[], None] = lambda: None) -> UpdateMetrics:
        """Gather the sums of all ranks on the host: one collective (1.2 KB per rank) and the only transfer of an update.
        `square_norm`: this rank's part (). `before_sync` is called when all of this is launched, before the host waits for the
        device."""
        mine = torch.cat([self._sums, self._maxima, self._differences, square_norm.detach().double().reshape(1)])
        of_ranks = mine[None]  # (world, 150)
        if num_ranks() > 1:
            parts = [torch.empty_like(mine) for _ in range(num_ranks())]
            dist.all_gather(parts, mine)
            of_ranks = torch.stack(parts)
        before_sync()
        columns = list(zip(*of_ranks.tolist(), strict=True))
        maxima, bins = len(_SUMS), len(_SUMS) + len(_MAXIMA)  # where maxima and bins begin
        return UpdateMetrics(
            sums={name: sum(column) for name, column in zip(_SUMS, columns[:maxima], strict=True)},
            maxima={name: max(column) for name, column in zip(_MAXIMA, columns[maxima:bins], strict=True)},
            differences=[sum(column) for column in columns[bins:-1]],
            grad_norm=math.sqrt(sum(columns[-1])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """One update on the host, over all ranks; names as in `_SUMS` and `_MAXIMA`."""

    sums: dict[str, float]
    maxima: dict[str, float]
    differences: list[float]
    """Number of trained tokens by |trainer - sampler| log-probability, in bins: see `_binned_quantile`. [128]"""
    grad_norm: float

    @property
    def loss(self) -> float:
        return self.sums["loss"]

    @property
    def num_tokens(self) -> int:
        return int(self.sums["tokens"])

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def step_metrics(updates: Sequence[UpdateMetrics], objective: Objective) -> dict[str, float]:
    """Metrics of a step from its updates (at least one): means over their tokens; losses and norms are means over updates."""
    total = {name: sum(update.sums[name] for update in updates) for name in _SUMS}
    largest = {name: max(update.maxima[name] for update in updates) for name in _MAXIMA}
    section = objective.section
    num_updates, num_tokens = len(updates), max(total["tokens"], 1.0)
    num_weights, num_clips = max(total["num_weights"], 1.0), max(total["num_clips"], 1.0)
    mean_square = total["weights_squared"] / num_weights
    metrics = {
        "loss": total["loss"] / num_updates,
        "policy_loss": total["policy_loss"] / num_updates,
        "entropy": total["entropy"] / num_tokens,
        "grad_norm": sum(update.grad_norm for update in updates) / num_updates,
        "sampling/sampling_logp_difference/mean": total["difference"] / num_tokens,
        "sampling/sampling_logp_difference/p99": _binned_quantile(
            [sum(column) for column in zip(*(update.differences for update in updates), strict=True)],
            0.99 * total["tokens"],
        ),
        "sampling/sampling_logp_difference/max": largest["difference_max"],
        "sampling/kl": total["sampling_kl"] / num_tokens,
        "sampling/importance_sampling_ratio/mean": total["weights"] / num_weights,
        "sampling/importance_sampling_ratio/min": -largest["minus_weight_min"],
        "sampling/importance_sampling_ratio/max": largest["weight_max"],
        # effective sample size as a fraction of the count: (sum w)^2 / (n sum w^2)
        "sampling/ess": (total["weights"] / num_weights) ** 2 / mean_square if mean_square > 0 else 0.0,
        "sampling/chi_squared": mean_square - 1.0,
    }
    if objective.clips:
        metrics |= {
            "clip_ratio/low_mean": total["clipped_low"] / num_clips,
            "clip_ratio/low_min": -largest["minus_low_min"],
            "clip_ratio/high_mean": total["clipped_high"] / num_clips,
            "clip_ratio/high_max": largest["high_max"],
            "clip_ratio/region_mean": (total["clipped_low"] + total["clipped_high"]) / num_clips,
        }
    if section.router_aux:
        metrics["router_aux"] = total["router_aux"] / num_updates
    if section.needs_reference:
        metrics["kl"] = total["kl"] / num_tokens
    if section.correction is not None and section.correction.action == "mask":
        metrics["masked/correction"] = total["importance_masked"] / num_tokens
    if section.masks_samples:
        metrics["masked/off_policy"] = total["off_policy"] / num_tokens
    return metrics


def _binned_quantile(counts: Sequence[float], wanted: float) -> float:
    """The upper end of the bin in which `wanted` tokens are reached: at most 16% too large. There are 16 bins per decade, from 1e-6
    to 100 nats. 99 tokens in the bin that starts at 1e-2, one in that of 1, 99 wanted -> 1e-2 x 10^(1/16) = 0.0115."""
    seen = 0.0
    for number, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return _BINS_FROM * float((_BINS_TO / _BINS_FROM) ** ((number + 1) / len(counts)))
    return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """Counters at one instant. Times in seconds; `generation_busy_s` and `generated_tokens` are the server's."""

    time_s: float
    generation_busy_s: float
    generated_tokens: int


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the steps so far, of bounded size. A checkpoint keeps them."""

    wall_s: float = 0.0
    generation_busy_s: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    staleness_sum: float = 0.0
    staleness_max: float = 0.0
    first_rewards: list[float] = field(default_factory=list)  # mean rewards of the first three steps that have one
    last_rewards: list[float] = field(default_factory=list)  # mean rewards of the last three
    sources: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # "first" and "last", as above, by source
    spent_s: dict[str, float] = field(default_factory=dict)  # seconds by activity


class PipelineMeter:
    """Turns readings into metrics. Call `begin` when training begins, and `step` once per optimizer step. `totals`: before a
    resume."""

    def __init__(self, totals: Totals | None = None) -> None:
        self._last: CounterSnapshot | None = None
        self.totals = totals or Totals()

    def begin(self, now: CounterSnapshot) -> None:
        """Training begins: what happened before (startup, evaluation) belongs to no step."""
        self._last = now

    def step(
        self,
        now: CounterSnapshot,
        *,
        trained_tokens: int,
        staleness: Mapping[int, int],
        reward: float | None,
        spent: Mapping[str, float],
        source_rewards: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Metrics of the step that ended at `now`. `staleness`: number of trained tokens by their staleness. `spent`: seconds
        since the previous reading, by activity."""
        last = self._last
        assert last is not None, "call `begin` first"
        wall = max(now.time_s - last.time_s, 1e-9)
        busy = min(max(now.generation_busy_s - last.generation_busy_s, 0.0), wall)
        generated = max(now.generated_tokens - last.generated_tokens, 0)
        # tokens of evaluations may be subtracted late, so a reading may fall: nothing may be counted twice
        self._last = replace(now, generated_tokens=max(now.generated_tokens, last.generated_tokens))
        totals = self.totals
        totals.wall_s += wall
        totals.generation_busy_s += busy
        totals.generated_tokens += generated
        totals.trained_tokens += trained_tokens
        staleness_sum = sum(age * count for age, count in staleness.items())
        totals.staleness_sum += staleness_sum
        totals.staleness_max = max([totals.staleness_max, *map(float, staleness)])
        for what, seconds in spent.items():
            totals.spent_s[what] = totals.spent_s.get(what, 0.0) + seconds
        if reward is not None:
            if len(totals.first_rewards) < _NUM_REWARDS:
                totals.first_rewards.append(reward)
            totals.last_rewards = [*totals.last_rewards, reward][-_NUM_REWARDS:]
        for source, value in source_rewards.items():
            seen = totals.sources.setdefault(source, {"first": [], "last": []})
            seen["first"] = [*seen["first"], value][:_NUM_REWARDS]
            seen["last"] = [*seen["last"], value][-_NUM_REWARDS:]
        ratios = _of_wall(wall, busy_s=busy, spent=spent)
        metrics = {
            "step_time": wall,
            "perf/trained_tokens_per_s": trained_tokens / wall,
            "perf/generated_tokens_per_s": generated / wall,
            **{f"pipeline/{name}": value for name, value in ratios.items()},
        }
        num_tokens = sum(staleness.values())
        if num_tokens:
            metrics["async/staleness_mean"] = staleness_sum / num_tokens
            metrics["async/staleness_max"] = float(max(staleness))
            for age in range(int(totals.staleness_max) + 1):  # staleness values of earlier steps are included, as 0
                metrics[f"async/staleness/{age}"] = staleness.get(age, 0) / num_tokens
        return metrics

    def summary(self) -> dict[str, float]:
        totals = self.totals
        wall = max(totals.wall_s, 1e-9)
        summary = {
            "wall_s": totals.wall_s,
            "trained_tokens_per_s": totals.trained_tokens / wall,
            "generated_tokens_per_s": totals.generated_tokens / wall,
            "staleness_mean": totals.staleness_sum / max(totals.trained_tokens, 1),
            "staleness_max": totals.staleness_max,
            **_of_wall(wall, busy_s=totals.generation_busy_s, spent=totals.spent_s),
        }
        if totals.first_rewards:
            summary["reward_first"] = fmean(totals.first_rewards)
            summary["reward_last"] = fmean(totals.last_rewards)
        for source, seen in totals.sources.items():
            summary |= {f"source/{source}/reward_{which}": fmean(values) for which, values in seen.items()}
        return summary


def _of_wall(wall: float, *, busy_s: float, spent: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are fractions of wall time; see the module's docstring. Worked example: {"training": 2.0, "pushing": 1.0} of
    4 s -> training 0.5, pushing 0.25, checkpoint 0.0, other 0.25."""
    # the two are read from the clock one after the other, so the parts may exceed `wall` slightly
    whole = max(wall, sum(spent.get(what, 0.0) for what in ACTIVITIES))
    fractions = {what: spent.get(what, 0.0) / whole for what in ACTIVITIES}
    other = max(0.0, 1.0 - sum(fractions.values()))
    idle = fractions.pop("waiting")
    return {
        "trainer_idle_ratio": idle,
        "generator_idle_ratio": 1.0 - busy_s / wall,
        "overlap_efficiency": max(busy_s / wall, 1.0 - idle),
        **{f"{what}_fraction": part for what, part in fractions.items()},
        "other_fraction": other,
    }
